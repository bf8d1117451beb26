"""Steps that are compiled whole, or their layers one by one: the same numbers, and how many programs are run."""

import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_tpu_ext import TPUSFTConfig, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.step.program_adamw import ProgramAdamW
from hf_tpu_ext.trainers.run import compiled_steps


WHOLE = dict(config_cls=TPUSFTConfig, compile_step="step", gradient_checkpointing=False)


class CountPerStep(TrainerCallback):
    """Programs run and compiled between the beginnings of two steps."""

    def __init__(self, backend):
        self._backend, self._before, self.steps = backend, None, []

    def on_step_begin(self, args, state, control, **kwargs):
        self._backend.wait()
        now = self._backend.counters()
        if self._before is not None:
            self.steps.append(now - self._before)
        self._before = now

    def on_train_end(self, args, state, control, **kwargs):
        self.on_step_begin(args, state, control)


def train(runs, **config):
    trainer = runs.ours(train=False, **config)
    counter = CountPerStep(trainer.backend)
    # Of this module, which is no part of the package: a step with code of the user's is not compiled whole.
    counter.__class__.__module__ = "hf_tpu_ext.tests"
    trainer.add_callback(counter)
    trainer.train()
    return trainer, counter.steps


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (None, dict(eval_strategy="steps", eval_steps=10)),
        ({}, {}),
        (None, dict(gradient_accumulation_steps=4, num_train_epochs=3, max_steps=-1)),
        (None, dict(max_grad_norm=0.0, adam_beta2=0.95, lr_scheduler_type="cosine", max_steps=6)),
        (None, dict(optim="sgd", max_steps=6)),
    ],
    ids=["full", "lora", "accumulation", "no-clipping", "sgd"],
)
def test_the_whole_step_gives_the_same_numbers(runs, same_logs, lora, config):
    config = dict(max_steps=20, warmup_steps=5) | config
    ours = runs.ours(lora=lora, **WHOLE, **config)
    same_logs(ours, runs.stock(lora=lora, **config))
    assert ours.watch.recompiles == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_micro_step_is_one_program(runs, accumulation):
    _, steps = train(runs, max_steps=6, logging_steps=100, gradient_accumulation_steps=accumulation, **WHOLE)
    assert [step.compiles for step in steps[1:]] == [0] * 5
    # The last one is followed by the sums of the log.
    assert [step.executions for step in steps[1:-1]] == [accumulation] * 4
    assert [step.reads for step in steps[1:-1]] == [0] * 4


def test_a_program_for_each_length(runs, same_logs):
    config = dict(max_steps=20, per_device_train_batch_size=2)
    ours = runs.ours(length_buckets=[16, 24, 32, 48], **WHOLE, **config)
    same_logs(ours, runs.stock(**config))
    shapes = [event.shape for event in ours.watch.events if event.kind == "training step"]
    assert len(shapes) == len(set(shapes)) > 1 and ours.watch.recompiles == 0


def token_rows():
    ids = [[3 + (7 * row + 5 * place) % 200 for place in range(12)] for row in range(32)]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])


class Follow(TrainerCallback):
    """Changes what the loss reads in Python after steps: as a user would, but in the package's name, for the step to be compiled."""

    __module__ = "hf_tpu_ext.tests"

    def __init__(self, changes):
        self.changes, self.trainer = changes, None

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.changes:
            self.trainer.label_smoother.epsilon = self.changes[state.global_step]


@pytest.mark.parametrize(
    "changes", [{3: 0.4}, {step: step / 10 for step in range(1, 7)}], ids=["once", "again and again"]
)
def test_what_python_reads_is_followed(runs, caplog, changes):
    """It is no tensor, and was a constant of the program that was compiled first."""
    config = dict(max_steps=8, label_smoothing_factor=0.1, learning_rate=1e-3)
    rows = token_rows()

    def train(cls, args, **more):
        follow = Follow(changes)
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        collator = DataCollatorForSeq2Seq(runs.tokenizer)
        trainer = cls(model, args, collator, train_dataset=rows, callbacks=[follow], **more)
        follow.trainer = trainer
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer

    common = dict(
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1, per_device_train_batch_size=4
    )
    compiled_steps.logger.addHandler(caplog.handler)
    try:
        ours = TPUTrainingArguments(str(runs.output_dir), compile_step="step", run_report=False, **common, **config)
        mine, trainer = train(TPUTrainer, ours)
    finally:
        compiled_steps.logger.removeHandler(caplog.handler)
    theirs, _ = train(Trainer, TrainingArguments(str(runs.output_dir), use_cpu=True, **common, **config))
    assert mine == pytest.approx(theirs, rel=1e-5)
    line = "such changes before"
    assert (line in caplog.text) == (len(changes) > 3)


def test_layers_one_by_one(runs, same_logs, capsys):
    """With gradient checkpointing, TRL's default."""
    # Layers of other models.
    torch.compiler.reset()
    config = dict(max_steps=20, logging_steps=5)
    trainer, steps = train(runs, config_cls=TPUSFTConfig, **config)
    assert (
        "The 2 layers are compiled one by one, and the rest is run by operators: with gradient_checkpointing, the compiler "
        "would find what is computed again to be there already" in capsys.readouterr().out
    )
    same_logs(trainer, runs.stock(**config))
    assert [step.compiles for step in steps[1:]] == [0] * 19
    assert steps[2].executions < 300


@pytest.mark.parametrize(
    ("lora", "config", "reason"),
    [
        (None, dict(gradient_checkpointing=True), "with gradient_checkpointing"),
        ({"lora_dropout": 0.1}, dict(gradient_checkpointing=False), "lora_dropout.*draws random numbers"),
        (
            None,
            dict(gradient_checkpointing=False, neftune_noise_alpha=5.0),
            "neftune_noise_alpha draws random numbers",
        ),
    ],
)
def test_why_a_step_is_not_compiled_whole(runs, lora, config, reason):
    with pytest.raises(ValueError, match=f"compile_step='step' is not possible: .*{reason}"):
        runs.ours(lora=lora, config_cls=TPUSFTConfig, compile_step="step", **config)


def test_own_code_in_a_step_is_run_at_every_step(runs, capsys):
    from hf_tpu_ext import TPUSFTTrainer

    seen = []

    class Mine(TPUSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            seen.append(self.state.global_step)
            return super().compute_loss(*args, **kwargs)

    runs.ours(cls=Mine, config_cls=TPUSFTConfig, gradient_checkpointing=False, max_steps=3)
    assert seen == [0, 1, 2]
    assert "may do something else at each step" in capsys.readouterr().out


class Rescale(TrainerCallback):
    """Changes what code of the user's computes with, after two steps."""

    scale = 1.0

    def on_step_end(self, args, state, control, **kwargs):
        self.scale = 1.5 if state.global_step > 1 else 1.0


def test_an_attention_of_the_users_is_run_at_every_step(runs, same_logs, caplog):
    """Nobody finds it before a step is traced."""
    rescale = Rescale()

    def attend(*args, **kwargs):
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * rescale.scale, weights

    AttentionInterface.register("own", attend)
    trainers = []
    compiled_steps.logger.addHandler(caplog.handler)
    for train in (partial(runs.ours, config_cls=TPUSFTConfig), runs.stock):
        rescale.scale = 1.0
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, attn_implementation="own", dtype=torch.float32)
        settings = dict(gradient_checkpointing=False, max_steps=4, kwargs={"callbacks": [rescale]})
        trainers.append(train(model=model, **settings))
    compiled_steps.logger.removeHandler(caplog.handler)
    same_logs(*trainers)
    assert "<locals>.attend (test_torch_tpu_compiled.py, line" in caplog.text


def test_a_nan_loss_is_reported_with_its_step(runs, caplog):
    """Of weights that an update has made too large."""
    from hf_tpu_ext.trainers.run import status

    config = dict(max_steps=4, learning_rate=1e30, lr_scheduler_type="constant", warmup_steps=0)
    stock = runs.stock(logging_nan_inf_filter=False, gradient_checkpointing=False, **config)
    finite = [math.isfinite(entry["loss"]) for entry in stock.state.log_history if "loss" in entry]
    first = finite.index(False) + 1
    assert 1 < first < 4
    status.logger.addHandler(caplog.handler)
    try:
        runs.ours(logging_steps=4, **WHOLE, **config)
    finally:
        status.logger.removeHandler(caplog.handler)
    assert f"NaN or infinite at step {first} ({5 - first} times in the 4 steps since the last log)" in caplog.text


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_resumes_bit_for_bit(runs, tmp_path, lora):
    config = dict(max_steps=6, save_strategy="steps", save_steps=3, gradient_accumulation_steps=2, **WHOLE)
    whole = runs.ours(lora=lora, output_dir=str(tmp_path / "whole"), **config)
    resumed = runs.ours(lora=lora, train=False, output_dir=str(tmp_path / "resumed"), **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    theirs = whole.backend.fetch(whole.model.state_dict())
    for name, weight in resumed.backend.fetch(resumed.model.state_dict()).items():
        assert torch.equal(weight, theirs[name]), name


def test_checkpoints_move_between_backends(runs, same_logs, tmp_path):
    """From torch_tpu to eager CPU and back, in the middle of a run."""
    config = dict(max_steps=9, save_strategy="steps", save_steps=3, **WHOLE)
    first = runs.ours(output_dir=str(tmp_path / "tpu"), **config)
    cpu = dict(backend="cpu", dataloader_pin_memory=False, config_cls=TPUSFTConfig, gradient_checkpointing=False)
    second = runs.ours(train=False, output_dir=str(tmp_path / "cpu"), **{**config, **cpu, "compile_step": "auto"})
    second.train(resume_from_checkpoint=str(tmp_path / "tpu" / "checkpoint-3"))
    third = runs.ours(train=False, output_dir=str(tmp_path / "back"), **config)
    third.train(resume_from_checkpoint=str(tmp_path / "cpu" / "checkpoint-6"))
    for other in (second, third):
        other.state.log_history = other.state.log_history[:-1]
    first.state.log_history = first.state.log_history[:-1]
    same_logs(second, first)
    same_logs(third, first)


@pytest.mark.parametrize("fused", [True, None])
def test_the_state_of_another_adamw_is_taken_to_the_device(tpu, fused):
    """Of one that counts its steps on the host, as torch_xla's, and is run in another way."""
    parameter = torch.nn.Parameter(torch.ones(2))
    other = torch.optim.AdamW([parameter], lr=0.5, foreach=True)
    parameter.grad = torch.ones(2)
    other.step()
    optimizer = ProgramAdamW([torch.nn.Parameter(torch.ones(2, device="tpu:0"))], fused=fused)
    optimizer.load_state_dict(other.state_dict())
    optimizer.create_state()
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    assert (group["lr"], group["fused"], group["foreach"]) == (0.5, fused, None)
    assert {name: value.device.type for name, value in state.items()} == dict.fromkeys(state, "tpu")
    assert state["step"].item() == 1.0
    with pytest.raises(ValueError, match="different number of parameter groups"):
        ProgramAdamW([{"params": [parameter]}, {"params": []}]).load_state_dict(other.state_dict())


def test_attention_of_what_is_compiled_has_no_flash_kernel(tpu):
    """The plug-in for CPU cannot run the kernel at all, so it is off in other tests."""
    found = []

    class Layer(torch.nn.Module):
        def forward(self, hidden):
            found.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()))
            return hidden + 1

    given, layer = tpu.send(torch.zeros(3)), Layer()
    torch.backends.cuda.enable_flash_sdp(True)
    try:
        compiled = tpu.compile_function(layer, [given])
        undo = tpu.compile_module(layer)
        results = [compiled(given), layer(given)]
        undo()
        results.append(layer(given))
    finally:
        torch.backends.cuda.enable_flash_sdp(False)
    assert [result.tolist() for result in results] == [[1.0, 1.0, 1.0]] * 3
    assert found == [(False, False), (False, False), (True, False)]
