"""Layers as one loop: the same training, checkpoints of the plain form, and a program that does not grow with depth."""

import re

import pytest
import torch
from safetensors.torch import load_file
from test_counts import CountPerStep
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers import activation_checkpointing, adapters
from hf_tpu_ext.layers.layer_loop import RowBlocks
from hf_tpu_ext.step.optimizer import LazyAdamW
from hf_tpu_ext.trainers.run.layers import VERIFIED


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    directories = {}

    def load(family="qwen3", **sizes):
        key = (family, *sizes.items())
        if key not in directories:
            directory = tmp_path_factory.mktemp(family)
            sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, **sizes}
            directories[key] = make_model(directory, model_type=family, **sizes)
        return AutoModelForCausalLM.from_pretrained(directories[key], dtype=torch.float32)

    return load


@pytest.fixture
def scanned(runs):
    def train(model, **config):
        trainer = runs.ours(model=model, config_cls=TPUSFTConfig, **{"scan_layers": "on", **config})
        if config.get("train", True):
            assert (trainer.layers.stack is None) == (config.get("scan_layers") == "off")
        return trainer

    return train


@pytest.fixture
def same_steps(same_logs):
    def check(*trainers):
        for trainer in trainers:
            # Left out: the closing summary, which covers only the steps of its own call.
            trainer.state.log_history = [entry for entry in trainer.state.log_history if "train_loss" not in entry]
        same_logs(*trainers)

    return check


# By default one family with a weight for each projection, and the one that has them in one.
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=[] if family == "qwen3" else [pytest.mark.slow]) for family in VERIFIED],
)
def test_family_trains_as_upstreams(runs, scanned, same_logs, make, family):
    config = dict(max_steps=4, warmup_steps=1, eval_strategy="steps", eval_steps=2)
    same_logs(scanned(make(family), **config), runs.stock(model=make(family), **config))


@pytest.mark.ci
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(dict(lora={}), marks=pytest.mark.slow),
        dict(
            lora={},
            rematerialization="dots",
            learning_rate=1e-2,
            packing=True,
            packing_strategy="wrapped",
            max_steps=3,
        ),
        pytest.param(dict(rematerialization="dots", max_grad_norm=0.5), marks=pytest.mark.slow),
        # Not a loop: stacked parameters of unrolled layers.
        pytest.param(
            dict(rematerialization="none", gradient_accumulation_steps=2, max_steps=3), marks=pytest.mark.slow
        ),
        pytest.param(dict(rematerialization="none", lora={}, learning_rate=1e-2), marks=pytest.mark.slow),
        pytest.param(dict(gradient_accumulation_steps=2, max_steps=3), marks=pytest.mark.ci),
        pytest.param(dict(packing=True, packing_strategy="wrapped", max_steps=3), marks=pytest.mark.slow),
        pytest.param(dict(step_replay=False, max_steps=3), marks=pytest.mark.slow),
    ],
    ids=lambda config: "-".join(f"{key}={value}" for key, value in config.items()),
)
def test_setting_is_upstreams(runs, scanned, same_logs, make, config):
    config = {"max_steps": 4, **config}
    ours = scanned(make(), **config)
    stock = {key: value for key, value in config.items() if key not in ("rematerialization", "step_replay")}
    same_logs(ours, runs.stock(model=make(), **stock))


@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", ["on", "off"])
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_adapters_in_the_layers_own_products_are_upstreams(runs, make, same_logs, monkeypatch, policy, scan_layers):
    traced = []
    upstream = adapters.instead_of_product
    monkeypatch.setattr(adapters, "instead_of_product", lambda *args: traced.append(args[2]) or upstream(*args))
    monkeypatch.setattr(activation_checkpointing, "_LEAST_SUMMED", 100)
    wide, config = (
        dict(hidden_size=128, intermediate_size=160, num_hidden_layers=2),
        dict(lora={"target_modules": "all-linear"}, max_steps=3),
    )
    settings = dict(config_cls=TPUSFTConfig, scan_layers=scan_layers, rematerialization=policy)
    ours = runs.ours(model=make(**wide), **settings, **config)
    assert set(traced) == {128}
    same_logs(ours, runs.stock(model=make(**wide), **config))


@pytest.fixture
def in_blocks(monkeypatch):
    """Cuts batches into blocks of so many tokens from now on. Returns the list of how many blocks there were in each layer's turn."""

    def cut(tokens):
        counts = []

        class Counted(RowBlocks):
            def __init__(self, *args):
                super().__init__(*args)
                counts.append(self.count)

        monkeypatch.setattr("hf_tpu_ext.layers.layer_loop._BLOCK_TOKENS", tokens)
        monkeypatch.setattr("hf_tpu_ext.layers.pattern_loop.RowBlocks", Counted)
        return counts

    return cut


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            dict(lora={"lora_dropout": 0.2}, packing=True, packing_strategy="wrapped", rematerialization="dots"),
            marks=pytest.mark.ci,
        ),
        pytest.param(dict(gradient_accumulation_steps=2), marks=pytest.mark.slow),
    ],
    ids=["packed-lora-dropout-dots", "full-accumulated"],
)
def test_blocks_of_rows_train_the_same(scanned, same_logs, make, in_blocks, capsys, config):
    config = {
        "max_steps": 4,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **config,
    }
    whole = scanned(make(), **config)
    executions = re.findall(r"(\d+) executions", capsys.readouterr().out)
    counts = in_blocks(100)
    blocks = scanned(make(), **config)
    assert set(counts) == {2}
    same_logs(blocks, whole)
    assert re.findall(r"(\d+) executions", capsys.readouterr().out) == executions
    assert blocks.watch.recompiles == 0


@pytest.mark.ci
def test_layers_that_may_look_at_other_rows_get_them_all(scanned, make, in_blocks):
    counts = in_blocks(100)
    scanned(make("gpt_neox"), max_steps=1)
    assert set(counts) == {1}


@pytest.mark.parametrize(
    "policy", [pytest.param("full", marks=pytest.mark.ci), pytest.param("none", marks=pytest.mark.slow)]
)
def test_checkpoints_are_those_of_the_layers(scanned, same_logs, same_steps, make, tmp_path, policy):
    """Written by a run of either kind, resumed by a run of either kind."""
    config = dict(max_steps=4, save_strategy="steps", save_steps=2, lora=None, rematerialization=policy)
    one = scanned(make(num_hidden_layers=2), output_dir=str(tmp_path / "on"), **config)
    other = scanned(make(num_hidden_layers=2), output_dir=str(tmp_path / "off"), scan_layers="off", **config)
    same_logs(one, other)
    for step in (2, 4):
        weights, expected = (
            load_file(tmp_path / kind / f"checkpoint-{step}" / "model.safetensors") for kind in ("on", "off")
        )
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
        state, expected = (
            torch.load(tmp_path / kind / f"checkpoint-{step}" / "optimizer.pt") for kind in ("on", "off")
        )
        assert state["param_groups"] == expected["param_groups"]
        assert state["state"].keys() == expected["state"].keys()
        for number, moments in expected["state"].items():
            assert moments.keys() == state["state"][number].keys()
            for name, tensor in moments.items():
                torch.testing.assert_close(state["state"][number][name], tensor, rtol=1e-4, atol=1e-6)
    for written, scan_layers in (("on", "off"), ("off", "on")):
        resumed = scanned(
            make(num_hidden_layers=2),
            output_dir=str(tmp_path / "resumed"),
            scan_layers=scan_layers,
            train=False,
            **{**config, "save_strategy": "no"},
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / written / "checkpoint-2"))
        same_steps(resumed, other)


@pytest.mark.ci
def test_adapters_are_saved_and_resumed(scanned, same_steps, make, tmp_path):
    config = dict(max_steps=4, save_strategy="steps", save_steps=2, lora={})
    whole = scanned(make(), output_dir=str(tmp_path / "whole"), **config)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    names = {name.replace(".default", "") for name, _ in whole.model.named_parameters() if "lora_" in name}
    assert load_file(checkpoint / "adapter_model.safetensors").keys() == names
    resumed = scanned(make(), output_dir=str(tmp_path / "resumed"), train=False, **{**config, "save_strategy": "no"})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    same_steps(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_the_best_model_is_loaded(runs, scanned, make, lora):
    every_step = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    # The best is the first, then.
    trainer = scanned(
        make(),
        lora=lora,
        max_steps=3,
        warmup_steps=0,
        load_best_model_at_end=True,
        greater_is_better=True,
        **every_step,
    )
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert losses[-1] < losses[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_the_model_has_its_layers_back_and_trains_on(runs, scanned, same_logs, make):
    model = make()
    expected = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    layers = model.model.layers
    trainer = scanned(model, max_steps=2)
    assert trainer.model.model.layers is layers
    assert [(name, parameter.shape) for name, parameter in trainer.model.named_parameters()] == expected
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.ci
def test_auto_is_on_for_deep_models(runs, scanned, make, monkeypatch, caplog):
    deep = dict(num_hidden_layers=8, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)

    def is_loop(model, **config):
        trainer = runs.ours(model, train=False, **config)
        trainer.create_optimizer()
        return trainer.layers.stack is not None

    auto = dict(config_cls=TPUSFTConfig, scan_layers="auto")
    assert is_loop(make(**deep), **auto)
    assert not is_loop(make(), **auto)
    # What a plain SFTConfig gets.
    assert is_loop(make(**deep), gradient_checkpointing=True)
    assert is_loop(make(**deep), gradient_checkpointing=False)
    monkeypatch.setattr("hf_tpu_ext.trainers.run.layers._MOST_UNROLLED", 1000)
    assert is_loop(make(**deep), gradient_checkpointing=True)
    assert not is_loop(make(**deep), gradient_checkpointing=False)
    assert "layers are unrolled" not in caplog.text
    assert not is_loop(make(**deep), gradient_checkpointing=True, optim="sgd")
    assert "scan_layers is off, layers are unrolled: SGD may look at parameters as a whole" in caplog.text


def test_the_steps_are_one_program(xla, scanned, make):
    counted = CountPerStep(xla)
    scanned(make(), max_steps=6, logging_steps=3, kwargs={"callbacks": [counted]})
    assert [step.compiles for step in counted.steps[1:]] == [0] * 5


@pytest.mark.ci
def test_steps_with_dropout_in_the_loop_are_replayed(xla, scanned, make, same_logs):
    steps = dict(max_steps=6, logging_steps=1)
    trainers = []
    for step_replay in (False, None):
        before = xla.counters()
        trainers.append(scanned(make(attention_dropout=0.2), step_replay=step_replay, **steps))
        assert (xla.counters() - before).replays == (0 if step_replay is False else 4)
    same_logs(*trainers)
    # It is drawn anew at each step, whatever the learning rate does.
    without = scanned(make(), **steps)
    losses = [
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] for trainer in (*trainers, without)
    ]
    assert all(with_dropout != plain for with_dropout, plain in zip(losses[0], losses[2], strict=True))


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("qwen3", dict(optim="sgd"), "SGD may look at parameters as a whole"),
        ("qwen3", dict(lora={"layers_to_transform": [1]}), "layer 1 has other modules than layer 0"),
        ("gemma2", {}, "self_attn of layer 1 differs from that of layer 0"),
        ("gpt_neox", dict(gradient_checkpointing_kwargs={"every_n_layers": 2}), "every_n_layers asks for some"),
    ],
)
def test_what_cannot_be_a_loop_is_refused_with_the_reason(runs, make, family, config, message):
    with pytest.raises(ValueError, match=f"scan_layers='on' is not possible: .*{message}.*'auto'"):
        runs.ours(model=make(family), config_cls=TPUSFTConfig, scan_layers="on", **config)


def test_yaml_reads_on_and_off_as_booleans():
    assert [TPUSFTConfig("x", scan_layers=value).scan_layers for value in (True, False)] == ["on", "off"]
    with pytest.raises(ValueError, match="scan_layers='yes'"):
        TPUSFTConfig("x", scan_layers="yes")


@pytest.mark.slow
def test_the_base_as_a_teacher(scanned, same_logs, make):
    """The same stack, with its adapters switched off."""
    config = dict(lora={}, kd_teacher="base", max_steps=3, learning_rate=1e-2, warmup_steps=0)
    same_logs(scanned(make(), **config), scanned(make(), scan_layers="off", **config))


# ---- Code of the user's that looks at layers ----


class LooksAtLayers(TrainerCallback):
    """What people do with a model in the middle of a run."""

    def __init__(self):
        self.seen = []

    def on_save(self, args, state, control, model, **kwargs):
        prompt = torch.arange(3, 9, device=model.device)[None]
        self.seen.append(
            {
                "parameters": {name: value.detach().cpu().clone() for name, value in model.named_parameters()},
                "state dict": {name: value.cpu().clone() for name, value in model.state_dict().items()},
                "layer": type(model.get_submodule("model.layers.5.mlp")).__name__,
                "layers": len(list(model.model.layers)),
                "hidden states": len(model(prompt, output_hidden_states=True).hidden_states),
                "answer": model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False).tolist(),
            }
        )


@pytest.mark.slow
def test_callbacks_see_the_layers_as_they_are(runs, make, same_logs):
    # With the usual epsilon, gradients of 0 but for rounding move weights as much as others do.
    config = dict(max_steps=4, save_strategy="steps", save_steps=2, adam_epsilon=1e-2)
    looks = [LooksAtLayers(), LooksAtLayers()]
    ours = runs.ours(make(num_hidden_layers=8), config_cls=TPUSFTConfig, kwargs={"callbacks": looks[:1]}, **config)
    # The loop was chosen by default, and taken up again after each event.
    assert ours.layers.stack is not None
    same_logs(ours, runs.stock(make(num_hidden_layers=8), kwargs={"callbacks": looks[1:]}, **config))
    for mine, theirs in zip(looks[0].seen, looks[1].seen, strict=True):
        for what in ("parameters", "state dict"):
            assert mine[what].keys() == theirs[what].keys()
            for name, value in theirs[what].items():
                torch.testing.assert_close(mine[what][name], value, rtol=1e-4, atol=1e-5)
        for what in ("layer", "layers", "hidden states", "answer"):
            assert mine[what] == theirs[what]


class Freezes(TrainerCallback):
    def on_epoch_end(self, args, state, control, model, **kwargs):
        model.get_submodule("model.layers.1").requires_grad_(False)


@pytest.mark.parametrize(
    "accumulation", [pytest.param(1, marks=pytest.mark.ci), pytest.param(2, marks=pytest.mark.slow)]
)
def test_layers_that_are_no_longer_alike_leave_the_loop(runs, same_logs, make, caplog, accumulation):
    config = dict(max_steps=9, gradient_accumulation_steps=accumulation, kwargs={"callbacks": [Freezes()]})
    model = make(num_hidden_layers=2)
    ours = runs.ours(model, config_cls=TPUSFTConfig, scan_layers="on", **config)
    assert ours.layers.stack is None
    assert "scan_layers is off from here on, layers are unrolled: self_attn.q_proj of layer 1 differs" in caplog.text
    same_logs(ours, runs.stock(make(num_hidden_layers=2), **config))
    assert not any(parameter.requires_grad for parameter in model.get_submodule("model.layers.1").parameters())


class LooksAtEveryStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        pass


class OwnLog(TPUSFTTrainer):
    def log(self, *args, **kwargs):
        super().log(*args, **kwargs)


@pytest.mark.parametrize(
    "config, says",
    [
        (dict(kwargs={"callbacks": [LooksAtEveryStep()]}), "LooksAtEveryStep has code in on_step_end"),
        (dict(cls=OwnLog), "OwnLog overrides log"),
        (
            dict(kwargs={"compute_loss_func": lambda outputs, labels, **kwargs: 0}),
            "compute_loss_func is user code",
        ),
    ],
)
def test_auto_leaves_layers_alone_where_code_may_look_at_them(runs, make, caplog, config, says):
    model = make(num_hidden_layers=8)
    trainer = runs.ours(model, train=False, config_cls=TPUSFTConfig, **config)
    trainer.create_optimizer()
    assert trainer.layers.stack is None
    assert f"layers are unrolled: {says}" in caplog.text


def test_a_layer_in_two_parameter_groups_and_hidden_states_are_no_loop(runs, make):
    def by_layer(model):
        first = [value for name, value in model.named_parameters() if ".layers.1." in name]
        others = [value for name, value in model.named_parameters() if ".layers.1." not in name]
        return [{"params": first, "lr": 1e-4}, {"params": others}]

    trainer = runs.ours(make(), train=False, config_cls=TPUSFTConfig, scan_layers="on")
    optimizer = LazyAdamW(by_layer(trainer.model), trainer.backend, lr=1e-3)
    assert "in several parameter groups" in trainer.layers._find_patterns(trainer.model, optimizer)
    trainer.model.config.output_hidden_states = True
    assert "output_hidden_states=True" in trainer.layers._find_patterns(trainer.model, optimizer)
