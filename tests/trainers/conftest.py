"""A tiny model and tiny data, and one call each to train them with upstream's trainer and with this package's."""

import inspect
import json
import os
import random
import re
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext.examples.tiny import make_model


#: With CPU_NUM_DEVICES, `ours` shares the rows of each batch between as many chips, and is still what `stock` is on one.
CHIPS = int(os.environ.get("CPU_NUM_DEVICES", "1"))
#: And with this variable the weights as well.
FULLY_SHARDED = "TEST_FULLY_SHARDED" in os.environ
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Directory of a tiny Qwen3 with its tokenizer. It has one layer: with two, a step compiles nearly twice as long."""
    return make_model(tmp_path_factory.mktemp("tiny"), hidden_size=32, intermediate_size=48, num_hidden_layers=1)


@pytest.fixture(scope="session")
def two_layer_model(tmp_path_factory):
    """Directory of the same with two layers, for tests of what is between layers."""
    return make_model(tmp_path_factory.mktemp("two"), hidden_size=32, intermediate_size=48, num_hidden_layers=2)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory):
    """Directory of a tiny model whose linear layers have blocks of bitsandbytes along their rows."""
    return make_model(tmp_path_factory.mktemp("wide"), hidden_size=64, intermediate_size=128, num_hidden_layers=3)


@cache
def make_rows(count, seed=0, longest=40):
    rng = random.Random(seed)
    words = ["".join(rng.choice("abcdefgh ") for _ in range(rng.randint(2, longest // 2))) for _ in range(2 * count)]
    return Dataset.from_list([{"prompt": p, "completion": c} for p, c in zip(words[::2], words[1::2], strict=True)])


@cache
def _load_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


_prepare = SFTTrainer._prepare_dataset
_ARGUMENTS_READ = sorted(set(re.findall(r"\bargs\.(\w+)", inspect.getsource(_prepare))))
_prepared = {}


def prepare_once(trainer, dataset, processing_class, args, packing, formatting_func, dataset_name):
    """Upstream's preparation of a data set, a fifth of a small run: made once for equal rows and settings."""
    settings = (processing_class, args, packing, formatting_func, dataset_name)
    if formatting_func is not None or not isinstance(dataset, Dataset):
        return _prepare(trainer, dataset, *settings)
    own = trainer.chat_template, trainer.completion_only_loss, processing_class, packing, dataset_name
    key = repr((dataset._fingerprint, *own, [getattr(args, name) for name in _ARGUMENTS_READ]))
    if key not in _prepared:
        _prepared[key] = _prepare(trainer, dataset, *settings)
    return _prepared[key]


def _make_adapter(peft_type="LORA", **settings):
    defaults = LORA if peft_type == "LORA" else {}
    return PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](task_type="CAUSAL_LM", **{**defaults, **settings})


class Runs:
    """
    Trains the tiny model in many ways.

    `stock` is [`~trl.SFTTrainer`] on eager CPU, `ours` is [`TPUSFTTrainer`] on XLA, by either library, both from the same weights, data and
    arguments.
    """

    def __init__(self, model_dir, output_dir):
        self.model_dir = model_dir
        self.output_dir = output_dir
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.train_dataset = make_rows(22)
        self.eval_dataset = make_rows(10, seed=1)

    def config(self, cls=SFTConfig, **config):
        defaults = dict(
            output_dir=str(self.output_dir),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_steps=8,
            logging_steps=1,
            learning_rate=1e-3,
            warmup_steps=3,
            weight_decay=0.01,
            bf16=False,
            max_length=48,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        if "run_report" in cls.__dataclass_fields__:
            # It takes longer than the run.
            defaults["run_report"] = False
        return cls(**{**defaults, **config})

    def trainer(self, cls, config, model=None, lora=None, **kwargs):
        if model is None:
            model = deepcopy(_load_model(self.model_dir))
        kwargs = {"train_dataset": self.train_dataset, "eval_dataset": self.eval_dataset, **kwargs}
        peft_config = None if lora is None else _make_adapter(**lora)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SFTTrainer, "_prepare_dataset", prepare_once)
            return cls(model, config, processing_class=self.tokenizer, peft_config=peft_config, **kwargs)

    def stock(self, model=None, lora=None, kwargs=None, **config):
        trainer = self.trainer(SFTTrainer, self.config(use_cpu=True, **config), model, lora, **(kwargs or {}))
        trainer.train()
        return trainer

    def ours(self, model=None, lora=None, kwargs=None, config_cls=SFTConfig, train=True, cls=None, **config):
        from hf_tpu_ext import TPUSFTTrainer

        for name, rows in {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}.items():
            config[name], left = divmod(config.get(name, rows), CHIPS)
            if left:
                pytest.skip(f"{config[name] * CHIPS + left} rows cannot be split over {CHIPS} chips")
        if FULLY_SHARDED:
            config["fsdp"] = "full_shard"
        trainer = self.trainer(cls or TPUSFTTrainer, self.config(config_cls, **config), model, lora, **(kwargs or {}))
        if train:
            trainer.train()
        return trainer


@pytest.fixture(scope="session")
def runs_class():
    return Runs


@pytest.fixture(autouse=True)
def no_reports_with_upstreams_configs(monkeypatch):
    """A report takes longer than the run."""
    from hf_tpu_ext.trainers import ExtensionArguments

    monkeypatch.setattr(ExtensionArguments, "run_report", False)


@pytest.fixture
def runs(xla, tiny_model, tmp_path, monkeypatch):
    from hf_tpu_ext.trainers import ExtensionArguments

    if xla.name == "tpu":
        # Compiling takes longer than the run.
        monkeypatch.setattr(ExtensionArguments, "compile_step", "off")
    return Runs(tiny_model, tmp_path / "run")


@pytest.fixture
def two_layers(runs, two_layer_model):
    """Has `runs` train the model of two layers."""
    runs.model_dir = two_layer_model


def logged(trainer):
    """The log history without what is measured in seconds or estimated."""
    timed = ("runtime", "per_second", "flos", "preparation_time", "step_time", "phase/", "mfu", "memory")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in trainer.state.log_history
    ]


@pytest.fixture(name="logged")
def logged_fixture():
    return logged


def assert_same_logs(trainer, reference, rel=1e-5):
    """Every logged number of `trainer` is that of `reference`, to `rel` of it."""
    ours, theirs = logged(trainer), logged(reference)
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=rel, abs=1e-7 if key.endswith("kd_loss") else 1e-12), (
                f"{key} at step {other['step']}"
            )


@pytest.fixture
def same_logs():
    return assert_same_logs


@pytest.fixture
def rows():
    return make_rows


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """Directory of a teacher of another size than the tiny model, with its tokenizer."""
    directory = tmp_path_factory.mktemp("teacher")
    return str(make_model(directory, hidden_size=48, intermediate_size=64, num_hidden_layers=1, seed=5))


@pytest.fixture
def distil(runs, xla):
    """Trains with a teacher, on XLA or on the eager CPU."""

    def train(backend=None, **config):
        from hf_tpu_ext import TPUSFTConfig
        from hf_tpu_ext.backends import select_backend

        config = {"backend": backend or xla.name, "max_steps": 4, "warmup_steps": 0, **config}
        if config["backend"] == "cpu" and xla.name == "tpu":
            # The plug-in has none.
            config.setdefault("dataloader_pin_memory", False)
        try:
            return runs.ours(config_cls=TPUSFTConfig, **config)
        finally:
            select_backend(xla.name)

    return train


def train_on_devices(count, model_dir, spec, directory):
    """Run `chips_driver.py` on `count` devices; what it noted of each run, and what it printed."""
    # Drivers import this file, and not what starts them.
    import forked

    spec_file, output_file = directory / f"{count}.spec.json", directory / f"{count}.json"
    spec_file.write_text(json.dumps(spec))
    result = forked.run(
        [sys.executable, Path(__file__).with_name("chips_driver.py"), model_dir, spec_file, output_file],
        env={**os.environ, "CPU_NUM_DEVICES": str(count)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(output_file.read_text()), result.stdout + result.stderr


def trainer_with(log):
    """Something with the log of a run in another process."""
    return SimpleNamespace(state=SimpleNamespace(log_history=log))


@pytest.fixture(scope="session")
def on_devices():
    return train_on_devices


@pytest.fixture(scope="session")
def as_trainer():
    return trainer_with


@pytest.fixture
def same_on_eight_chips(runs, rows, distil, same_logs, tmp_path):
    """Checks that eight chips distil as the eager CPU does with the rows of all."""

    def check(specs, **common):
        common = {"max_steps": 3, "warmup_steps": 0, "per_device_train_batch_size": 2, **common}
        spec = {name: {**common, **config} for name, config in specs.items()}
        results, _ = train_on_devices(8, runs.model_dir, spec, tmp_path)
        for name, theirs in results.items():
            config = {key: value for key, value in {**common, **specs[name]}.items() if key != "mesh"}
            config["per_device_train_batch_size"] = 16
            one = distil("cpu", **config, kwargs={"train_dataset": rows(120)})
            same_logs(trainer_with(theirs["log"]), one)
            assert theirs["recompiles"] == 0

    return check
