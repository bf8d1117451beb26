"""The average of the weights: part of the step's own program, used by evaluations, saved and resumed."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from preference import Case, trainer_for
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_counts import CountPerStep
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUTrainingArguments
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.trainers.checkpoint.saved_model import EMA_FILE, load_average


SAVES = dict(save_strategy="steps", save_steps=4)
# With the usual epsilon, gradients of 0 but for rounding move weights as much as others do.
SETTINGS = dict(ema_decay=0.9, max_steps=8, adam_epsilon=1e-4)


class InFloat64(TrainerCallback):
    """What PyTorch makes of the weights after each step, in float64."""

    def __init__(self, warmup: bool):
        self._warmup, self._updates = warmup, 0

    def _average(self, averages, weights, _):
        decay = min(0.9, (1 + self._updates) / (10 + self._updates)) if self._warmup else 0.9
        get_ema_multi_avg_fn(decay)(averages, [weight.double() for weight in weights], None)
        self._updates += 1

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._averaged = AveragedModel(model, multi_avg_fn=self._average).double()
        # The first call copies.
        self._averaged.update_parameters(model)

    def on_step_end(self, args, state, control, model, **kwargs):
        self._averaged.update_parameters(model)

    @property
    def averages(self):
        return {
            name: average
            for name, average in self._averaged.module.named_parameters()
            if average.requires_grad or "lora_" in name
        }


def averages_in(directory):
    return load_file(Path(directory) / EMA_FILE)


def saved(trainer):
    """The averages of a run by name, as they are saved beside its model."""
    trainer.save_model()
    return averages_in(trainer.args.output_dir)


def on_cpu(runs, **config):
    try:
        return runs.ours(config_cls=TPUSFTConfig, backend="cpu", **config)
    finally:
        select_backend("xla")


def assert_close(averages, expected, atol=1e-6):
    assert averages.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(averages[name].double(), value.double(), rtol=1e-5, atol=atol, msg=name)


def assert_equal(averages, expected):
    assert averages.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in averages.items())


# ---- The step ----


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(dict(), marks=pytest.mark.slow),
        dict(lora={}, gradient_accumulation_steps=4, ema_warmup=True),
        pytest.param(dict(scan_layers="on", gradient_accumulation_steps=2), marks=pytest.mark.ci),
    ],
    ids=["full", "lora-accumulated-warm-up", "layers-in-a-loop"],
)
def test_it_is_pytorchs_in_float64_and_costs_no_execution(runs, two_layer_model, config):
    """Also the same as on an eager device, up to rounding."""
    if "scan_layers" in config:
        runs.model_dir = two_layer_model
    ours = runs.ours(config_cls=TPUSFTConfig, train=False, logging_steps=100, **SETTINGS, **config)
    counter = CountPerStep(ours.backend)
    ours.add_callback(counter)
    ours.train()
    accumulation = config.get("gradient_accumulation_steps", 1)
    steps = counter.steps[:-1]
    assert all(step.executions in (accumulation, 2) and step.reads == step.fallbacks == 0 for step in steps)
    assert [step.compiles for step in steps[1:]] == [0] * 6
    assert all(step.replays == step.executions for step in steps[4:])
    assert (ours.layers.stack is not None) == ("scan_layers" in config)
    mine = saved(ours)

    config.pop("scan_layers", None)
    reference = InFloat64(config.get("ema_warmup", False))
    eager = on_cpu(runs, kwargs={"callbacks": [reference]}, **SETTINGS, **config)
    assert_close(mine, reference.averages)
    assert_close(saved(eager), reference.averages, atol=1e-7)
    weights = dict(eager.model.named_parameters())
    assert max((weights[name] - average).abs().max() for name, average in mine.items()) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("own", ["sgd", "adamw"])
def test_another_optimizer_updates_it_in_the_same_program(runs, own):
    config = dict(SETTINGS, learning_rate=0.1, logging_steps=100, warmup_steps=0, max_steps=6)
    kwargs = {} if own == "sgd" else {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 1e-3, "foreach": False})}
    config |= {"optim": "sgd"} if own == "sgd" else {}
    ours = runs.ours(config_cls=TPUSFTConfig, train=False, kwargs=kwargs, **config)
    counter = CountPerStep(ours.backend)
    ours.add_callback(counter)
    ours.train()
    if own == "sgd":
        assert [step.executions for step in counter.steps[:-1]] == [1] * 5
        assert [step.compiles for step in counter.steps[1:-1]] == [0] * 4
    assert_close(saved(ours), saved(on_cpu(runs, kwargs=kwargs, **config)))


class ReplacesTheOptimizer(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            trainer = self.trainer
            trainer.optimizer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)


@pytest.mark.slow
def test_an_optimizer_that_a_callback_puts_in_goes_on_with_it(runs):
    found = []
    for backend in ("xla", "cpu"):
        replaces = ReplacesTheOptimizer()
        config = dict(SETTINGS, config_cls=TPUSFTConfig, backend=backend, kwargs={"callbacks": [replaces]})
        replaces.trainer = trainer = runs.ours(train=False, **config)
        trainer.train()
        assert trainer.averaging.average.updates == 8
        found.append(saved(trainer))
    select_backend("xla")
    assert_close(*found)


class Freezes(TrainerCallback):
    def on_epoch_end(self, args, state, control, model, **kwargs):
        model.get_submodule("model.layers.1").requires_grad_(False)


@pytest.mark.slow
@pytest.mark.usefixtures("two_layers")
def test_layers_that_leave_the_loop_take_theirs_along(runs):
    config = dict(SETTINGS, max_steps=9, gradient_checkpointing=True)
    ours = runs.ours(config_cls=TPUSFTConfig, scan_layers="on", kwargs={"callbacks": [Freezes()]}, **config)
    assert ours.layers.stack is None
    assert_close(saved(ours), saved(on_cpu(runs, kwargs={"callbacks": [Freezes()]}, **config)), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward"])
def test_preference_trainers(xla, tmp_path, kind):
    case = Case(
        kind,
        {"ema_decay": 0.9, "ema_eval": True, "gradient_accumulation_steps": 2, "output_dir": str(tmp_path / "run")},
        lora="new",
        steps=3,
    )
    trainer = trainer_for(case, tmp_path, ours=True)
    weights = dict(trainer.model.named_parameters())
    before = {name: xla.fetch(weight.detach()) for name, weight in weights.items()}
    trainer.train()
    averages, weights = saved(trainer), dict(trainer.model.named_parameters())
    assert all((average - before[name]).abs().max() > 1e-5 for name, average in averages.items())
    assert averages.keys() == {name for name, parameter in weights.items() if parameter.requires_grad}
    assert any((xla.fetch(weights[name]) - average).abs().max() > 1e-5 for name, average in averages.items())


# ---- Evaluation ----


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize(
    "scan_layers", [pytest.param("on", marks=pytest.mark.ci), pytest.param("off", marks=pytest.mark.slow)]
)
def test_evaluation_of_the_average(runs, same_logs, scan_layers):
    config = dict(SETTINGS, ema_eval=True, eval_strategy="steps", eval_steps=3, max_steps=7)
    ours = runs.ours(config_cls=TPUSFTConfig, scan_layers=scan_layers, **config)
    same_logs(ours, on_cpu(runs, **config))
    assert ours.watch.recompiles == 0
    # Training went on from the weights: as without any evaluation.
    other = runs.ours(config_cls=TPUSFTConfig, scan_layers=scan_layers, **{**SETTINGS, "max_steps": 7})
    assert_equal(*(trainer.backend.fetch(dict(trainer.model.named_parameters())) for trainer in (ours, other)))
    of_weights = other.evaluate()["eval_loss"]
    of_average = ours.evaluate()["eval_loss"]
    # What upstream makes of the average, in place of the weights.
    stock = runs.stock(max_steps=1)
    load_average_of(ours, stock)
    assert of_average == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-5)
    assert abs(of_average - of_weights) > 1e-3
    assert ours.predict(ours.eval_dataset).metrics["test_loss"] == pytest.approx(of_average, rel=1e-5)


def load_average_of(trainer, other):
    trainer.save_model()
    load_average(other.model, Path(trainer.args.output_dir))


@pytest.mark.ci
@pytest.mark.usefixtures("two_layers")
def test_the_best_model_has_its_own_average(runs):
    config = dict(SETTINGS, max_steps=3, warmup_steps=0, ema_eval=True, load_best_model_at_end=True)
    every_step = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    # The best is the first, then.
    trainer = runs.ours(config_cls=TPUSFTConfig, greater_is_better=True, scan_layers="on", **config, **every_step)
    best = Path(trainer.state.best_model_checkpoint)
    assert best.name == "checkpoint-1"
    assert_equal(saved(trainer), averages_in(best))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


# ---- Checkpoints ----


@pytest.fixture
def resume(runs, tmp_path):
    """Resumes from the checkpoint after step 4 of a run, in another directory."""

    def train(checkpoint, backend="xla", **config):
        config = {**SETTINGS, "output_dir": str(tmp_path / "resumed"), "train": False, **config}
        if backend == "cpu":
            trainer = on_cpu(runs, **config)
        else:
            trainer = runs.ours(config_cls=TPUSFTConfig, **config)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        return trainer

    return train


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(dict(ema_warmup=True, scan_layers="on"), marks=pytest.mark.slow),
        pytest.param(dict(lora={}, ema_warmup=True), marks=pytest.mark.ci),
        dict(backend="cpu", ema_warmup=True),
    ],
    ids=["layers-in-a-loop", "lora", "cpu"],
)
def test_resumed_it_is_equal_bit_for_bit(runs, resume, two_layer_model, config):
    if "scan_layers" in config:
        runs.model_dir = two_layer_model
    backend = config.pop("backend", "xla")
    train = on_cpu if backend == "cpu" else lambda runs, **config: runs.ours(config_cls=TPUSFTConfig, **config)
    whole = train(runs, **SETTINGS, **SAVES, **config)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-4"
    assert EMA_FILE in json.loads((checkpoint / "manifest.json").read_text())["files"]
    with safe_open(checkpoint / EMA_FILE, "pt") as file:
        assert file.metadata()["updates"] == "4"
    # The optimizer's file stays that of AdamW.
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    assert {name for values in state.values() for name in values} == {"step", "exp_avg", "exp_avg_sq"}
    resumed = resume(checkpoint, backend, **config)
    assert_equal(saved(resumed), averages_in(Path(whole.args.output_dir) / "checkpoint-8"))


@pytest.mark.ci
@pytest.mark.usefixtures("two_layers")
def test_it_moves_between_devices_and_ways_to_run_layers(runs, resume):
    whole = runs.ours(config_cls=TPUSFTConfig, scan_layers="on", **SETTINGS, **SAVES)
    checkpoint, expected = Path(whole.args.output_dir) / "checkpoint-4", saved(whole)
    assert_close(saved(resume(checkpoint, scan_layers="off")), expected)
    assert_close(saved(resume(checkpoint, "cpu")), expected)


@pytest.mark.ci
def test_a_checkpoint_without_one_begins_it(runs, resume, caplog):
    plain = runs.ours(config_cls=TPUSFTConfig, max_steps=4, adam_epsilon=1e-4, **SAVES)
    assert not list(Path(plain.args.output_dir).rglob(EMA_FILE))
    checkpoint = Path(plain.args.output_dir) / "checkpoint-4"
    resumed = resume(checkpoint)
    assert "checkpoint-4 is resumed without an average" in caplog.text and "from here on" in caplog.text
    assert resumed.averaging.average.updates == 4
    # What the run is now in the place of the plain one is not that one's average.
    save_file({}, checkpoint / EMA_FILE, {"updates": "4"})
    plain.save_model(str(checkpoint))
    assert not (checkpoint / EMA_FILE).exists()


def test_other_parameters_than_before(runs, resume):
    whole = runs.ours(config_cls=TPUSFTConfig, **{**SETTINGS, "max_steps": 4}, **SAVES)
    checkpoint = Path(whole.args.output_dir) / "checkpoint-4"
    averages = averages_in(checkpoint)
    averages.pop("model.norm.weight")
    save_file(averages, checkpoint / EMA_FILE, {"updates": "4"})
    (checkpoint / "manifest.json").unlink()
    refused(["no average of model.norm.weight", "leave ema_decay out"], lambda: resume(checkpoint))


@pytest.mark.ci
@pytest.mark.usefixtures("two_layers")
def test_a_second_training_goes_on_with_it(runs):
    trainer = runs.ours(config_cls=TPUSFTConfig, scan_layers="on", **{**SETTINGS, "max_steps": 2})
    first = saved(trainer)
    trainer.train()
    assert trainer.averaging.average.updates == 4
    assert any(not torch.equal(first[name], average) for name, average in saved(trainer).items())


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.ci), "cpu"])
def test_short_weights_have_a_long_average(runs, backend):
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.bfloat16)
    config = dict(SETTINGS, ema_eval=True, model=model, max_steps=3, eval_strategy="steps", eval_steps=2)
    trainer = on_cpu(runs, **config) if backend == "cpu" else runs.ours(config_cls=TPUSFTConfig, **config)
    averages = saved(trainer)
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    # Which bfloat16 does not hold.
    assert any(not torch.equal(value, value.bfloat16().float()) for value in averages.values())
    assert math.isfinite(trainer.evaluate()["eval_loss"])


# ---- Several chips ----


CHIPS = {
    "fsdp": dict(mesh="fsdp", scan_layers="on", gradient_accumulation_steps=2),
    "data": dict(gradient_accumulation_steps=2),
    "lora": dict(mesh="data=2,fsdp=4", lora={}),
}


@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.slow
def test_eight_chips(runs, rows, on_devices, as_trainer, same_logs, tmp_path, name):
    """A run, and one that goes on from its checkpoint, in which averages come from a file."""
    config = dict(SETTINGS, **CHIPS[name], ema_warmup=True, ema_eval=True, max_steps=4, per_device_train_batch_size=2)
    config |= dict(per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=4, logging_steps=4)
    spec = {
        which: {**config, "output_dir": str(tmp_path / which), "save_strategy": "steps", "save_steps": 2}
        for which in ("first", "again")
    }
    spec["again"]["resume"] = str(tmp_path / "first" / "checkpoint-2")
    results, _ = on_devices(8, runs.model_dir, spec, tmp_path)
    for result in results.values():
        executions, _, compiles, fallbacks = zip(*result["steps"], strict=True)
        # The others save, and read the optimizer's state a tensor at a time.
        assert set(executions[::2]) == {config.get("gradient_accumulation_steps", 1)}
        assert result["recompiles"] == sum(compiles[2::2]) == sum(fallbacks) == 0
        # Split as the weights are.
        for parameter, shape in result["average_shards"].items():
            assert shape == result["weight_shards"][parameter]
        split = {
            parameter for parameter, shape in result["average_shards"].items() if shape != result["shapes"][parameter]
        }
        assert bool(split) == ("mesh" in config)
    # Each weight, two moments and its average come from files, each chip's part of them at once. Weights come before layers are
    # stacked to run as a loop.
    if name == "fsdp":
        assert set(Counter(weight for weight, *_ in results["again"]["placed"]).values()) == {1, 3, 4}
    assert all(of_weight == shape for _, of_weight, shape in results["again"]["placed"])
    first, again = (averages_in(tmp_path / which / "checkpoint-4") for which in ("first", "again"))
    assert_equal(again, first)

    of_one = {key: value for key, value in config.items() if key not in ("mesh", "scan_layers")}
    of_one |= {key: 8 * value for key, value in of_one.items() if key.startswith("per_device")}
    one = on_cpu(runs, kwargs={"train_dataset": rows(120)}, **of_one)
    assert_close(first, saved(one), atol=1e-5)
    same_logs(as_trainer(results["first"]["log"]), one)


# ---- Settings ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(ema_decay=1.0), ["ema_decay=1.0", "above 0 and below 1", "0.999"]),
        (dict(ema_decay=0), ["ema_decay=0 ", "leave it out"]),
        (dict(ema_decay=-0.5), ["ema_decay=-0.5"]),
        (dict(ema_eval=True), ["ema_eval=True has no effect", "ema_decay=0.999", "leave ema_eval out"]),
        (dict(ema_warmup=True), ["ema_warmup=True has no effect", "ema_decay=0.999"]),
    ],
)
@pytest.mark.parametrize("config_cls", [TPUSFTConfig, TPUTrainingArguments])
def test_settings_that_cannot_be(config_cls, settings, words, tmp_path):
    refused(words, lambda: config_cls(str(tmp_path), **settings))


def test_the_start_says_how_much_of_the_beginning_is_left(runs, capsys):
    on_cpu(runs, **{**SETTINGS, "max_steps": 2})
    output = capsys.readouterr().out
    assert "EMA of the trained weights: decay 0.9\n" in output
    assert (
        "ema_decay=0.9 over 2 steps leaves the weights of the beginning 81% of the average; ema_warmup=True" in output
    )
    on_cpu(runs, **{**SETTINGS, "max_steps": 2, "ema_warmup": True})
    output = capsys.readouterr().out
    assert "decay 0.9, with warm-up\n" in output and "of the beginning" not in output
