"""Tiny models of all families on a row of two documents: the second is what it is alone, or `packing=True` is refused."""

import pytest
import torch
from families import read_results
from tiny_configs import VOCABULARY, tiny_config
from transformers import AutoModelForCausalLM

from hf_tpu_ext.layers.attention import static_masks
from hf_tpu_ext.layers.static_kernels import use_static_code
from hf_tpu_ext.trainers.checks.families import why_not_packed


_FIRST, _SECOND = 7, 9


def documents_are_apart(model_type):
    torch.manual_seed(0)
    config = tiny_config(model_type, decoder=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    use_static_code(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        row = torch.randint(3, VOCABULARY - 1, (1, _FIRST + _SECOND))
        position_ids = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
        segment_ids = torch.tensor([[1] * _FIRST + [2] * _SECOND])
        inputs = {"attention_mask": torch.ones_like(row), "position_ids": position_ids}
        with static_masks(segment_ids):
            packed = model(input_ids=row, **inputs, use_cache=False).logits[:, _FIRST:]
        with static_masks():
            inputs = {"attention_mask": torch.ones(1, _SECOND, dtype=torch.int64)}
            alone = model(input_ids=row[:, _FIRST:], **inputs, use_cache=False).logits
    return why_not_packed(model) is not None or bool((packed - alone).abs().max() < 1e-4 * alone.abs().max())


@pytest.mark.slow
def test_documents_are_apart_or_refused(xla):
    results = read_results()
    names = {key.split("/")[1] for key, run in results.items() if key.startswith("causal/") and "ours" in run}
    # BLT's code does not run on such a row.
    assert [name for name in sorted(names - {"blt"}) if not documents_are_apart(name)] == []
