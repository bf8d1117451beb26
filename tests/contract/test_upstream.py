"""
What the package relies on in transformers and TRL: the hooks it overrides, the attributes it reads and writes, the
defaults it replaces. A release that moves one of them fails here, with its name and the file that has to follow.
"""

import ast
import inspect
import json
from pathlib import Path

import pytest
import torch
from transformers import Trainer
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from hf_tpu_ext import trainers
from hf_tpu_ext.trainers import TPUSFTTrainer, TPUTrainer


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


OURS = {
    cls
    for trainer in (TPUSFTTrainer, TPUTrainer)
    for cls in trainer.__mro__
    if cls.__module__.startswith("hf_tpu_ext.")
}
NAMES = {name for cls in OURS for name in vars(cls) if not name.startswith("__")}
SOURCES = [ast.parse(inspect.getsource(cls)) for cls in OURS]
# With those of the objects that the trainer hands its work to.
PACKAGE = [ast.parse(file.read_text(encoding="utf-8")) for file in Path(trainers.__file__).parent.rglob("*.py")]


# ---- Hooks ----

# What is overridden, with the parameters that the override takes or passes on.
HOOKS = {
    "_move_model_to_device": ["model", "device"],
    "compute_loss_context_manager": [],
    "create_optimizer": ["model"],
    "_hp_search_setup": ["trial"],
    "_prepare_inputs": ["inputs"],
    "_get_num_items_in_batch": ["batch_samples", "device"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "_track_num_input_tokens": ["inputs"],
    "floating_point_ops": ["inputs"],
    "_clip_grad_norm": ["model"],
    "_get_grad_norm": ["model", "grad_norm"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "_maybe_log_save_evaluate": [
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ],
    "_finalize_training": ["trial", "num_train_samples", "start_time"],
    "set_initial_training_values": ["args", "dataloader"],
    "store_flos": [],
    "log": ["logs", "start_time"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "predict": ["test_dataset", "ignore_keys", "metric_key_prefix"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_inner_training_loop": ["batch_size", "args", "resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_load_best_model": [],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_init_training_state": [
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ],
    "_run_epoch": [
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ],
    "_get_output_dir": ["trial"],
    "_save_checkpoint": ["model", "trial"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_save": ["output_dir", "state_dict"],
    "save_model": ["output_dir", "_internal_call"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_save_rng_state": ["output_dir"],
    "_load_rng_state": ["checkpoint"],
    "_determine_best_metric": ["metrics", "trial"],
}
# Of `SFTTrainer` alone, by the class that is made of it.
OF_SFT = {
    "_prepare_dataset": ["dataset", "processing_class", "args", "packing", "formatting_func", "dataset_name"],
}
# Overridden by methods that hand on whatever they are called with.
PASSED_ON = {"create_model_card"}
# What is called besides.
CALLED = {
    "get_optimizer_cls_and_kwargs": ["args", "model"],
    "_get_learning_rate": [],
    "_evaluate": ["trial", "ignore_keys_for_eval", "skip_scheduler"],
    "is_world_process_zero": [],
    "_wrap_model": ["model", "training", "dataloader"],
    "add_callback": ["callback"],
    "pop_callback": ["callback"],
    "remove_callback": ["callback"],
}


@pytest.mark.parametrize("name", HOOKS | CALLED)
def test_hook_takes_the_same_parameters(name):
    expected = (HOOKS | CALLED)[name]
    users = {cls.__module__ for cls in OURS if name in inspect.getsource(cls)}
    assert hasattr(Trainer, name), f"transformers.Trainer has no {name} any more, which {users} overrides or calls"
    for cls in (Trainer, SFTTrainer):
        actual = parameters(getattr(cls, name))
        passes_on = actual == ["args", "kwargs"]
        assert actual == expected or passes_on, (
            f"{cls.__name__}.{name} takes {actual}, no longer {expected}: adapt {users}"
        )


@pytest.mark.parametrize("name", OF_SFT)
def test_hook_of_sft_takes_the_same_parameters(name):
    assert parameters(getattr(SFTTrainer, name)) == parameters(getattr(TPUSFTTrainer, name)) == OF_SFT[name]


def test_every_override_is_a_hook_and_every_other_name_is_free():
    assert set(HOOKS) <= NAMES, f"no longer overridden, drop them from HOOKS: {set(HOOKS) - NAMES}"
    for name in NAMES - set(HOOKS) - set(OF_SFT) - PASSED_ON:
        for cls in (Trainer, SFTTrainer):
            assert not hasattr(cls, name), (
                f"{cls.__name__} has a {name} of its own: add it to HOOKS if overriding it is meant, or rename ours"
            )


# Upstream's own, set on purpose.
SET = {
    "compute_loss_func",
    "_total_train_tokens",
    "current_flos",
    "current_gradient_accumulation_steps",
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "_train_batch_size",
    "_tr_loss",
    "control",
    "data_collator",
    "gather_function",
    "model",
    "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
}
READ = {
    "_metrics",
    "_tokenizer",
    "accelerator",
    "args",
    "callback_handler",
    "current_flos",
    "current_gradient_accumulation_steps",
    "eval_dataset",
    "label_smoother",
    "model",
    "model_accepts_loss_kwargs",
    "optimizer",
    "padding_free",
    "processing_class",
    "state",
    "train_dataset",
}


def test_attributes(stock):
    trained = stock.trainer(eval_strategy="steps", eval_steps=2)
    trained.train()
    there = set(vars(trained))
    assert SET | READ <= there, f"gone from SFTTrainer: {(SET | READ) - there}; search for it in trainers/"
    attributes = [node for source in PACKAGE for node in ast.walk(source) if isinstance(node, ast.Attribute)]
    of_trainer = {"self", "trainer", "self._trainer"}
    stored = {
        node.attr for node in attributes if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in of_trainer
    }
    calls = [node for source in PACKAGE for node in ast.walk(source) if isinstance(node, ast.Call)]
    for call in calls:
        if ast.unparse(call.func) == "temporarily" and ast.unparse(call.args[0]) in of_trainer:
            stored |= {keyword.arg for keyword in call.keywords}
    assert SET <= stored, f"no longer set, drop them from SET: {SET - stored}"
    used = {node.attr for node in attributes}
    assert READ <= used, f"no longer used, drop them from READ: {READ - used}"
    ours = {
        node.attr
        for source in SOURCES
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    taken = (ours - SET) & (there | set(dir(SFTTrainer)))
    assert not taken, f"SFTTrainer has attributes of the same name as ours now: {taken}"


def test_a_log_shows_the_mean_of_what_was_collected_and_empties_it(stock):
    """trainers/run/metrics.py, MetricsMixin.take_metrics."""
    trainer = stock.trainer()
    assert set(trainer._metrics) == {"train", "eval"} and trainer._total_train_tokens == 0
    for mode, prefix in (("train", ""), ("eval", "eval_")):
        trainer._metrics[mode].update({"entropy": [1.0, 4.0]})
        trainer.model.train(mode == "train")
        logs = {"loss": 1.0}
        trainer.log(logs)
        assert logs[f"{prefix}entropy"] == 2.5
        assert not trainer._metrics[mode]


# ---- The order of things ----

MICRO_STEP = ["_prepare_inputs", "compute_loss_context_manager", "compute_loss"]
OPTIMIZER_STEP = [
    "_get_num_items_in_batch of 2 on cpu",
    "training_step, not closing, one of 2",
    *MICRO_STEP,
    "on_substep_end",
    "training_step, closing, one of 2",
    *MICRO_STEP,
    "_clip_grad_norm",
    "model.zero_grad",
    "on_step_end",
    "_maybe_log_save_evaluate",
    "log",
]


def test_order_of_a_run(record):
    """trainers/run/training_steps.py ends programs, and trainers/run/status.py counts and logs, where these calls are."""
    trainer, events = record(
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        per_device_eval_batch_size=2,
    )
    trainer.train()
    assert events == [
        "_move_model_to_device",
        "create_optimizer",
        "get_optimizer_cls_and_kwargs",
        "on_train_begin AdamW",
        *OPTIMIZER_STEP,
        *OPTIMIZER_STEP,
        "evaluation_loop",
        *["prediction_step", *MICRO_STEP, "on_prediction_step"] * 2,
        "log",
        "_save_checkpoint",
        "_save, no state dict",
        "_save_rng_state",
        "_maybe_log_save_evaluate",
        "_finalize_training",
        "log",
        "on_train_end",
    ]
    # Upstream writes the state last: trainers/checkpoint/verification.py takes a checkpoint without it for an incomplete one.
    checkpoint = Path(trainer.args.output_dir) / "checkpoint-2"
    state = checkpoint / "trainer_state.json"
    assert json.loads(state.read_text())["global_step"] == 2
    others = [path.stat().st_mtime_ns for path in checkpoint.iterdir() if path != state]
    assert state.stat().st_mtime_ns >= max(others)

    resumed, events = record(max_steps=3, gradient_accumulation_steps=2)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    begin = events.index("on_train_begin AdamW")
    assert events[begin + 1 : begin + 3] == ["_load_rng_state", "_get_num_items_in_batch of 2 on cpu"]


def test_loss_that_upstream_keeps_is_the_attribute(stock):
    """trainers/run/training_steps.py puts a sum of its own in its place."""

    class Losses(SFTTrainer):
        def training_step(self, *args, **kwargs):
            super().training_step(*args, **kwargs)
            if self.state.global_step == 1:
                self._tr_loss = torch.tensor(10.0)
            return torch.tensor(float(self.state.global_step))

    trainer = stock.trainer(Losses, logging_steps=100, max_steps=3)
    # Steps 2 and 3 give 1 and 2; what was there before is replaced by 10.
    assert trainer.train().training_loss == pytest.approx((10 + 1 + 2) / 3)


def test_norm_that_is_returned_is_the_one_that_is_logged(stock):
    """trainers/run/steps.py clips by itself and returns the norm, which `_maybe_log_save_evaluate` is given."""

    class Norms(SFTTrainer):
        def _clip_grad_norm(self, model):
            return torch.tensor(12.5)

    trainer = stock.trainer(Norms, max_steps=1, max_grad_norm=0.7)
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] == 12.5


def test_a_log_that_is_noted_as_the_last_is_not_repeated(stock):
    logged = []

    class Logs(SFTTrainer):
        def _maybe_log_save_evaluate(self, *args, **kwargs):
            self._total_loss_scalar += 6.0
            self._tr_loss = torch.zeros(())
            self._globalstep_last_logged = self.state.global_step
            super()._maybe_log_save_evaluate(*args, **kwargs)

        def log(self, logs, start_time=None):
            logged.append(logs)

    result = stock.trainer(Logs, max_steps=2).train()
    assert [set(logs) & {"loss", "train_loss"} for logs in logged] == [{"train_loss"}], (
        "trainers/run/status.py logs by itself"
    )
    # Three calls, the last at the end of the epoch; and nothing is left over.
    assert result.training_loss == pytest.approx(3 * 6.0 / 2)


# ---- TRL ----


def test_fused_head(stock):
    """layers/chunked_head.py computes what the loss and the metrics are made from, without the logits."""
    model = stock.trainer().model
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    labels = torch.where(ids == 7, -100, ids)
    outputs = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    assert isinstance(outputs, FusedCausalLMOutput)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1]
    log_probs = logits.log_softmax(-1)
    mask = labels[:, 1:] != -100
    picked = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(outputs.log_probs, picked * mask)
    torch.testing.assert_close(outputs.entropy, -(log_probs.exp() * log_probs).sum(-1) * mask)
    assert torch.equal(outputs.label_mask, mask)
    assert torch.equal(outputs.is_top1.bool(), (logits.argmax(-1) == ids[:, 1:]) & mask)
    assert outputs.aux_loss is None and outputs.log_probs.requires_grad


def test_columns_of_a_prepared_dataset(stock):
    trainer = stock.trainer()
    assert set(trainer.train_dataset.column_names) >= {"input_ids"}, "trainers/run/lengths.py, row_lengths"
    trainer._set_signature_columns_if_needed()
    assert {"input_ids", "labels", "seq_lengths"} <= set(trainer._signature_columns), "data/packing.py"
    packed = stock.trainer(packing=True)
    assert packed.padding_free and "seq_lengths" in packed.train_dataset.column_names, "data/packing.py"
    assert not stock.trainer(packing=True, packing_strategy="wrapped").padding_free, "trainers/sft/trainer.py"
