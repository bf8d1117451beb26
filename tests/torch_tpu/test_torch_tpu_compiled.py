"""Steps that are compiled whole, or their layers one by one: the same numbers, and how many programs are run."""

import math
from functools import partial

import pytest
import torch
from datasets import Dataset
from test_counts import CountPerStep
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
from hf_tpu_ext.trainers.run import eager_steps


WHOLE = dict(config_cls=TPUSFTConfig, compile_step="step")


def train(runs, **config):
    trainer = runs.ours(train=False, **config)
    counter = CountPerStep(trainer.backend)
    trainer.add_callback(counter)
    trainer.train()
    return trainer, counter.steps


@pytest.mark.parametrize(
    ("lora", "config"),
    [
        (None, dict(eval_strategy="steps", eval_steps=10)),
        ({}, {}),
        # It makes a mask on the host, and has the places of the prompt there.
        (dict(peft_type="PROMPT_TUNING", num_virtual_tokens=4), {}),
        (None, dict(gradient_accumulation_steps=4, num_train_epochs=3, max_steps=-1)),
        (None, dict(max_grad_norm=0.0, adam_beta2=0.95, lr_scheduler_type="cosine", max_steps=6)),
        (None, dict(gradient_checkpointing=False, max_steps=6)),
        (None, dict(bf16=True, max_steps=6)),
    ],
    ids=["full", "lora", "prompt", "accumulation", "no-clipping", "no-checkpointing", "bf16"],
)
def test_the_whole_step_gives_the_same_numbers(runs, same_logs, lora, config):
    config = dict(max_steps=20, warmup_steps=5) | config
    ours = runs.ours(lora=lora, **WHOLE, **config)
    # In bfloat16 the eager reference rounds as the instructions of this CPU do.
    same_logs(ours, runs.stock(lora=lora, **config), rel=2**-8 if "bf16" in config else 1e-5)
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
    "changes", [{3: 0.4}, {step: step / 20 for step in range(1, 11)}], ids=["once", "again and again"]
)
def test_what_python_reads_is_followed(runs, caplog, changes):
    """It is no tensor, and was a constant of the program that was compiled first."""
    config = dict(max_steps=12, label_smoothing_factor=0.1, learning_rate=1e-3)
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
    eager_steps.logger.addHandler(caplog.handler)
    try:
        ours = TPUTrainingArguments(str(runs.output_dir), compile_step="step", run_report=False, **common, **config)
        mine, _ = train(TPUTrainer, ours)
    finally:
        eager_steps.logger.removeHandler(caplog.handler)
    theirs, _ = train(Trainer, TrainingArguments(str(runs.output_dir), use_cpu=True, **common, **config))
    assert mine == pytest.approx(theirs, rel=1e-5)
    line = "such changes before"
    assert (line in caplog.text) == (len(changes) > 8)


@pytest.mark.parametrize(
    ("settings", "reason", "most"),
    [
        (dict(compile_step="layers"), "compile_step='layers'", 300),
        # Its update is some operators for each parameter.
        (dict(optim="sgd"), "SGD takes its learning rate as a Python number", 400),
        # Its layers draw a number on the host, by which they go.
        (dict(lora=dict(peft_type="LOHA", target_modules=["q_proj"])), "a device-to-host sync in the step", 800),
    ],
    ids=["asked for", "sgd", "loha"],
)
def test_layers_one_by_one(runs, same_logs, caplog, settings, reason, most):
    # Layers of other models.
    torch.compiler.reset()
    config = dict(max_steps=20, logging_steps=5, optim="adamw_torch_fused") | settings
    eager_steps.logger.addHandler(caplog.handler)
    try:
        trainer, steps = train(runs, config_cls=TPUSFTConfig, **config)
    finally:
        eager_steps.logger.removeHandler(caplog.handler)
    assert f"The 2 layers are compiled one by one, and the rest is run by operators: {reason}" in caplog.text
    config.pop("compile_step", None)
    same_logs(trainer, runs.stock(**config))
    assert [step.compiles for step in steps[1:]] == [0] * 19
    assert steps[2].executions < most


def test_layers_with_dropout_are_compiled_once(runs):
    """Where a step is not compiled whole, and layers are checkpointed."""
    torch.compiler.reset()
    lora = {"lora_dropout": 0.1}
    trainer, steps = train(runs, lora=lora, config_cls=TPUSFTConfig, optim="sgd", max_steps=5, logging_steps=100)
    assert trainer.steps.by_operators
    assert [step.compiles for step in steps[2:]] == [0] * 3


def test_a_step_that_cannot_be_compiled_whole_is_refused_where_that_is_asked_for(runs):
    fix = "Leave it out, or set it to 'layers'"
    with pytest.raises(ValueError, match=f"compile_step='step' is not possible: SGD takes its learning rate.*{fix}"):
        runs.ours(optim="sgd", **WHOLE)


def test_dropout_follows_from_seeds_that_are_data(runs, tmp_path):
    """TRL's default LoRA, checkpointed: each step drops others, a resumed run the same, and what is computed again, too."""
    config = dict(max_steps=6, save_strategy="steps", save_steps=3, learning_rate=0.0, **WHOLE)
    rows = runs.train_dataset.select([0] * 22)

    def train(name, dropout, **more):
        kwargs = {"train_dataset": rows}
        settings = dict(lora={"lora_dropout": dropout, "init_lora_weights": False}, kwargs=kwargs)
        return runs.ours(output_dir=str(tmp_path / name), **settings, **config, **more)

    def losses(trainer):
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    dropped, without = train("dropped", 0.3), train("without", 0.0)
    assert dropped.steps.why_traced is None and dropped.watch.recompiles == 0
    # To the last bit of a float32, which threads of a CPU may round otherwise.
    assert losses(without) == pytest.approx([losses(without)[0]] * 6, rel=2**-23) and len(set(losses(dropped))) == 6
    again = train("again", 0.3, train=False)
    again.train(resume_from_checkpoint=str(tmp_path / "dropped" / "checkpoint-3"))
    assert losses(again)[-3:] == losses(dropped)[-3:]


def test_gradients_through_dropout_that_is_computed_again(runs, same_logs):
    """The same elements are dropped with activation checkpointing as without."""
    config = dict(lora={"lora_dropout": 0.3}, max_steps=4, **WHOLE)
    same_logs(runs.ours(**config), runs.ours(gradient_checkpointing=False, **config))


def test_the_average_of_the_weights_is_in_the_step(runs):
    def average(cls, **config):
        trainer = runs.ours(config_cls=cls, max_steps=5, ema_decay=0.5, learning_rate=1e-2, **config)
        names = {parameter: name for name, parameter in trainer.model.named_parameters()}
        values = trainer.averaging.average.values
        return trainer, {names[key]: value.detach().cpu() for key, value in values.items()}

    ours, mine = average(TPUSFTConfig, compile_step="step")
    assert ours.steps.why_traced is None and ours.watch.recompiles == 0
    _, theirs = average(TPUSFTConfig, backend="cpu", dataloader_pin_memory=False)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6)


def test_own_code_in_a_step_is_run_at_every_step(runs):
    from hf_tpu_ext import TPUSFTTrainer

    seen = []

    class Mine(TPUSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            seen.append(self.state.global_step)
            return super().compute_loss(*args, **kwargs)

    runs.ours(cls=Mine, config_cls=TPUSFTConfig, gradient_checkpointing=False, max_steps=3)
    assert seen == [0, 1, 2]


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
    eager_steps.logger.addHandler(caplog.handler)
    for train in (partial(runs.ours, config_cls=TPUSFTConfig), runs.stock):
        rescale.scale = 1.0
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, attn_implementation="own", dtype=torch.float32)
        settings = dict(gradient_checkpointing=False, max_steps=4, kwargs={"callbacks": [rescale]})
        trainers.append(train(model=model, **settings))
    eager_steps.logger.removeHandler(caplog.handler)
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
