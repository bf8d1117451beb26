"""Upstream's own code of some families, and what takes its place: the same numbers, on eager CPU."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_tpu_ext.layers.static_families import use_static_code


sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from tiny_configs import VOCABULARY, tiny_config  # noqa: E402


@pytest.mark.parametrize(
    "model_type",
    [
        *("dbrx", "jetmoe", "longcat_flash", "qwen4_exp_text", "recurrent_gemma", "xlm", "flaubert"),
        *("kimi_k25", "switch_transformers"),
    ],
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_numbers_and_gradients_are_upstreams(xla, model_type, padding):
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config(model_type), attn_implementation="eager").double()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ids = torch.randint(3, VOCABULARY, (3, 17))
    mask = torch.ones_like(ids)
    for row, absent in zip(mask, (0, 4, 9), strict=True):
        row[17 - absent :] = 0
    if padding == "left":
        mask = mask.flip(1)
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids

    def outputs():
        model.zero_grad()
        hidden = model(**inputs).last_hidden_state
        (hidden * mask[..., None]).pow(2).mean().backward()
        # That of an expert without tokens is 0 in the one and absent in the other.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        # Padding on the left sees nothing: its numbers are NaN in some families, and with them all gradients.
        return [hidden[mask.bool()].detach(), *(gradients if padding == "right" else ())]

    expected = outputs()
    use_static_code(model)
    torch.testing.assert_close(outputs(), expected, rtol=1e-9, atol=1e-9, equal_nan=padding == "left")


@pytest.mark.parametrize("model_type", ["bart", "t5", "deberta-v2"])
def test_classifiers(xla, model_type):
    """Rows end at several places; DeBERTa leaves out one that has no label."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    config.num_labels = 3
    model = AutoModelForSequenceClassification.from_config(config).double()
    ids = torch.randint(3, VOCABULARY, (3, 9))
    ids[0, 8] = ids[1, 5] = ids[2, 2] = config.eos_token_id
    inputs = {"input_ids": ids, "labels": torch.tensor([2, 0, -100 if model_type == "deberta-v2" else 1])}

    def outputs():
        model.zero_grad()
        found = model(**inputs)
        found.loss.backward()
        return [found.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, parameters = outputs(), inspect.signature(model.forward).parameters
    use_static_code(model)
    # DeBERTa's loss is in float32.
    torch.testing.assert_close(outputs(), expected, rtol=1e-6, atol=1e-7)
    assert inspect.signature(model.forward).parameters == parameters
