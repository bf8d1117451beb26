"""Packed rows: static shapes, and documents that do not see each other."""

import pytest
import torch
from fixes import assert_fixes
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer

from hf_tpu_ext import TPUSFTTrainer
from hf_tpu_ext.examples.tiny import make_model


def document_losses(trainer, labels, log_probs):
    """Summed loss of each document, by its tokens."""
    losses = {}
    for row in range(labels["input_ids"].shape[0]):
        for segment in range(1, int(labels["segment_ids"][row].max()) + 1):
            of_segment = labels["segment_ids"][row] == segment
            tokens = tuple(labels["input_ids"][row][of_segment].tolist())
            # `log_probs[i]` is that of token i + 1, and 0 where it is not trained on.
            losses[tokens] = -log_probs[row][of_segment[1:]].sum().item()
    return losses


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_losses_of_documents_are_those_of_unpacked_ones(runs, tmp_path, strategy, family):
    """gemma2 has layers with a sliding window, of 16 here."""
    overrides = {"sliding_window": 16} if family == "gemma2" else {}
    model_dir = make_model(tmp_path / family, model_type=family, **overrides)
    load = lambda: AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)  # noqa: E731
    packed = runs.ours(
        model=load(), train=False, packing=True, packing_strategy=strategy, max_length=64, completion_only_loss=False
    )
    unpacked = runs.trainer(SFTTrainer, runs.config(use_cpu=True, max_length=64, completion_only_loss=False), load())
    unpacked.model.eval()
    packed.model.eval()

    checked = 0
    reference = {tuple(row["input_ids"]): row for row in unpacked.train_dataset}
    for batch in packed.get_train_dataloader():
        assert all(tensor.shape[1] == 64 for tensor in batch.values())
        inputs = packed._prepare_inputs(batch)
        from hf_tpu_ext.layers.attention import static_masks

        with torch.no_grad(), static_masks(packed.segment_ids):
            log_probs = packed.model(**inputs, use_cache=False, fused_lm_head=True).log_probs
        losses = document_losses(packed, batch, packed.backend.fetch(log_probs))
        for tokens, loss in losses.items():
            input_ids = torch.tensor([reference[tokens]["input_ids"]])
            with torch.no_grad():
                alone = unpacked.model(input_ids=input_ids, labels=input_ids, fused_lm_head=True).log_probs
            assert loss == pytest.approx(-alone.sum().item(), rel=1e-5)
            checked += 1
    assert checked == len(reference)


class CallsTheModel(TPUSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.ci
def test_documents_do_not_see_each_other_in_a_loss_of_ones_own(runs):
    """One that calls the model, and not upstream's `compute_loss`."""
    settings = {"packing": True, "max_length": 64, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    own, upstreams = (runs.ours(cls=cls, **settings).state.log_history for cls in (CallsTheModel, None))
    for name in ("loss", "grad_norm", "eval_loss"):
        mine, theirs = ([entry[name] for entry in logs if name in entry] for logs in (own, upstreams))
        assert len(mine) in (1, 4) and mine == pytest.approx(theirs, rel=1e-5)


class PreparesInputs(TPUSFTTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, self._prepare_inputs(inputs), num_items_in_batch)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return super().prediction_step(model, self._prepare_inputs(inputs), prediction_loss_only, ignore_keys)


@pytest.mark.ci
@pytest.mark.parametrize("loss_only", [True, False])
def test_documents_do_not_see_each_other_where_an_override_prepares_its_inputs(runs, loss_only):
    """Upstream's methods prepare them again, and what was taken out of a batch is in it no more."""
    settings = {"packing": True, "max_length": 64, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings["prediction_loss_only"] = loss_only
    own, upstreams = (runs.ours(cls=cls, **settings).state.log_history for cls in (PreparesInputs, None))
    for name in ("loss", "grad_norm", "eval_loss"):
        mine, theirs = ([entry[name] for entry in logs if name in entry] for logs in (own, upstreams))
        assert len(mine) in (1, 2) and mine == pytest.approx(theirs, rel=1e-5)


def test_packed_training_has_one_program_and_counts_every_token(runs):
    packed = runs.ours(packing=True, max_length=64, num_train_epochs=2, max_steps=-1)
    tokens = sum(len(row["input_ids"]) for row in packed.train_dataset)
    logged = [entry["num_tokens"] for entry in packed.state.log_history if "num_tokens" in entry]
    assert logged[-1] == 2 * tokens
    assert packed.watch.programs == [("training step", (4, 64))]
    assert packed.watch.recompiles == 0


def test_wrapped_rows_are_one_stream(runs):
    """As TRL defines `wrapped`: it ignores the boundaries of documents."""
    packed = runs.ours(packing=True, packing_strategy="wrapped", max_steps=2, max_length=32)
    assert packed.watch.programs == [("training step", (4, 32))]
    assert "seq_lengths" not in packed.train_dataset.column_names


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        # No mask keeps a state from going from document to document.
        (
            "lfm2",
            dict(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, layer_types=["conv"]
            ),
        ),
        # A mask of its own.
        ("openai-gpt", dict(n_embd=16, n_head=2, n_layer=1)),
    ],
)
def test_models_that_mix_documents_are_not_packed(runs, model_type, sizes):
    config = AutoConfig.for_model(model_type, vocab_size=259, **sizes)

    def check(**settings):
        model = AutoModelForCausalLM.from_config(config)
        runs.ours(model=model, train=False, max_length=32, gradient_checkpointing=False, **settings)

    assert_fixes(check, {"packing": True}, "Set packing=False")
    assert_fixes(check, {"packing": True, "eval_packing": True}, "Set packing=False and eval_packing=False")
    check(packing=True, packing_strategy="wrapped")


def test_padding_free_is_replaced_by_rows_of_a_fixed_length(runs):
    trainer = runs.ours(train=False, padding_free=True)
    assert not trainer.padding_free
    assert any("padding_free" in change for change in trainer.adapted.changes)
