"""Models that only run forward, whose layers run as loops: their numbers, their programs, and what sees their layers."""

import re

import datasets
import pytest
import torch
import torch_xla
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_tpu_ext import TPUDPOConfig, TPUDPOTrainer, TPUSFTConfig
from hf_tpu_ext.backends.xla.programs import XLAPrograms
from hf_tpu_ext.examples.tiny import make_model
from hf_tpu_ext.layers.layer_scan import LayerStack


PAIRS = Dataset.from_dict({"prompt": ["ab", "cde"] * 2, "chosen": ["fgh", "b"] * 2, "rejected": ["cd", "hh"] * 2})


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """By their number of layers: models that are small enough to be compiled at once."""
    sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    paths = {layers: tmp_path_factory.mktemp(f"of-{layers}") for layers in (5, 6)}
    for layers, path in paths.items():
        make_model(path, num_hidden_layers=layers, **sizes)
    return paths


@pytest.fixture
def instructions(monkeypatch):
    """Of each program that a trainer traces, how many instructions it has."""
    counts, hash_traced = [], XLAPrograms.hash_traced

    def count(programs, traced):
        text = torch_xla._XLAC._get_xla_tensors_hlo(traced.results)
        counts.append(len(re.findall(r"^ *(?:ROOT )?%", text, re.MULTILINE)))
        return hash_traced(programs, traced)

    monkeypatch.setattr(XLAPrograms, "hash_traced", count)
    return counts


@pytest.fixture
def make(runs, directories, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_tpu_ext.trainers.run.layers._LEAST_LAYERS", 5)

    def load(layers):
        return AutoModelForCausalLM.from_pretrained(directories[layers], dtype=torch.float32)

    def make(kind="sft", layers=5, callbacks=(), **config):
        settings = {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-2, **config}
        if kind == "dpo":
            monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / f"cache of {layers} {config}")
            model, reference = load(layers), load(layers)
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.mul_(1.1)
            return TPUDPOTrainer(
                model=model,
                ref_model=reference,
                args=runs.config(TPUDPOConfig, **settings),
                train_dataset=PAIRS,
                processing_class=runs.tokenizer,
                callbacks=[*callbacks],
            )
        if kind == "teacher":
            # One of the other size: a model is not its own teacher.
            settings |= {"kd_teacher": str(directories[11 - layers])}
        return runs.ours(
            load(layers), config_cls=TPUSFTConfig, train=False, kwargs={"callbacks": [*callbacks]}, **settings
        )

    return make


def evaluated(trainer):
    return trainer.evaluate()["eval_loss"]


def predicted(trainer):
    return trainer.predict(trainer.eval_dataset).predictions


def trained(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def precomputed(trainer):
    return trainer.train_dataset["ref_chosen_logps"][:]


@pytest.mark.parametrize(
    "kind, run, config",
    [
        pytest.param("sft", evaluated, {}, marks=pytest.mark.ci),
        pytest.param("sft", evaluated, {"rematerialization": "none"}, marks=pytest.mark.slow),
        pytest.param("sft", predicted, {}, marks=pytest.mark.slow),
        pytest.param("teacher", trained, {}, marks=pytest.mark.ci),
        pytest.param("dpo", trained, {}, marks=pytest.mark.ci),
        ("dpo", precomputed, {"precompute_ref_log_probs": True}),
    ],
    ids=["evaluation", "evaluation-unrolled-steps", "prediction", "teacher", "reference", "precomputed"],
)
def test_programs_do_not_grow_with_layers_and_numbers_are_the_same(make, instructions, kind, run, config):
    found, sizes = [], []
    for layers, scan_layers in ((5, "off"), (5, "auto"), (6, "auto")):
        instructions.clear()
        found.append(run(make(kind, layers, scan_layers=scan_layers, **config)))
        sizes.append(instructions[-1])
    assert sizes[2] == sizes[1] < 0.8 * sizes[0]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.ci
def test_evaluations_share_a_program_with_each_other_and_with_training(xla, make):
    trainer = make(eval_strategy="steps", eval_steps=2)
    state = {name: value.cpu().clone() for name, value in trainer.model.named_parameters()}
    layers = trainer.model.model.layers
    before = trainer.evaluate()["eval_loss"]
    compiles = xla.compiles()
    assert trainer.evaluate()["eval_loss"] == before and xla.compiles() == compiles
    # The layers have their parameters back.
    assert trainer.model.model.layers is layers
    for name, value in trainer.model.named_parameters():
        assert torch.equal(value.cpu(), state.pop(name)), name
    assert not state
    trainer.train()
    last = trainer.state.log_history[-2]["eval_loss"]
    compiles = xla.compiles()
    assert trainer.evaluate()["eval_loss"] == last < before and xla.compiles() == compiles
    assert trainer.watch.recompiles == 0


@pytest.mark.ci
def test_an_average_is_evaluated_by_the_loop(make, instructions, caplog):
    losses, sizes = [], []
    for scan_layers in ("off", "auto"):
        trainer = make(ema_decay=0.5, ema_eval=True, scan_layers=scan_layers)
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        sizes.append(instructions[-1])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and sizes[1] < 0.8 * sizes[0]
    assert "unrolled" not in caplog.text


class LooksAtTheReference(TrainerCallback):
    """What a callback of the user's sees of a reference between two steps."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, **kwargs):
        self.seen.append([name for name, _ in self.reference.named_parameters()])
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.mul_(0.9)
        if state.global_step == 2:
            self.reference.model.layers[3].register_forward_hook(lambda *args: None)


@pytest.mark.ci
def test_a_callback_sees_and_changes_the_layers_of_a_reference(make, caplog):
    losses, looks = [], []
    for scan_layers in ("off", "auto"):
        look = LooksAtTheReference()
        trainer = make("dpo", callbacks=[look], scan_layers=scan_layers, max_steps=3, logging_steps=1)
        look.reference = trainer.ref_model
        losses.append(trained(trainer))
        looks.append(look.seen)
    assert looks[0] == looks[1] and len(looks[0]) > 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    reason = "a hook is registered on the whole of layer 3"
    assert f"scan_layers is off from here on, layers of {trainer.ref_model.name_or_path} are unrolled: {reason}" in (
        caplog.text
    )


class LooksAtEveryBatch(TrainerCallback):
    def on_prediction_step(self, args, state, control, **kwargs):
        pass


@pytest.mark.ci
@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda trainer: trainer.add_callback(LooksAtEveryBatch()),
            "LooksAtEveryBatch has code in on_prediction_step",
        ),
        (
            lambda trainer: trainer.model.model.layers[2].register_forward_hook(lambda *args: None),
            "a hook is registered on the whole of layer 2",
        ),
    ],
)
def test_an_evaluation_leaves_layers_alone_where_code_may_look_at_them(make, monkeypatch, caplog, change, says):
    trainer = make()
    loop = evaluated(trainer)
    change(trainer)
    monkeypatch.setattr(LayerStack, "stack", None)
    assert evaluated(trainer) == pytest.approx(loop, rel=1e-5)
    evaluated(trainer)
    assert caplog.text.count(f"scan_layers is off, layers are unrolled: {says}") == 1
