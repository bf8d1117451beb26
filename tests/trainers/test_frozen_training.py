"""LoRA beside frozen weights in bfloat16: the numbers of float32 ones, half the bytes, and the model as it was before."""

import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.backends.xla.programs import XLAPrograms
from hf_tpu_ext.examples.tiny import make_model


LOOP = {"num_hidden_layers": 2}
ONE_CHIP = pytest.mark.skipif("CPU_NUM_DEVICES" in os.environ, reason="layers are a loop on one chip")


class InFloat32(TPUSFTTrainer):
    """The trainer without what is tested."""

    def _bfloat16_holds(self, weights):
        return [False] * len(weights)


@pytest.fixture(scope="session")
def exact(tmp_path_factory):
    """Loads tiny models whose weights bfloat16 holds exactly, stored in float32."""
    directories = {}

    def directory(family="qwen3", **sizes):
        key = (family, *sizes.items())
        if key not in directories:
            small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
            sizes = {**small, "tie_word_embeddings": family == "qwen3", **sizes}
            directories[key] = made = make_model(tmp_path_factory.mktemp(family), model_type=family, **sizes)
            AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16).float().save_pretrained(made)
        return directories[key]

    return directory


@pytest.fixture
def train(runs, exact):
    def train(cls=TPUSFTTrainer, model=None, **config):
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(exact(), dtype=torch.float32)
        config = {"max_steps": 4, "bf16": True, "lora": {}, "learning_rate": 1e-2, "warmup_steps": 0, **config}
        return runs.ours(model=model, cls=cls, config_cls=TPUSFTConfig, **config)

    return train


def adapters(trainer):
    parameters = dict(trainer.model.named_parameters())
    return trainer.backend.fetch(
        {name: parameter.detach() for name, parameter in parameters.items() if "lora" in name}
    )


def assert_same(trainer, other, logged):
    """Bit for bit, without the closing summary, which covers only the steps of its own call."""
    first, second = ([entry for entry in logged(run) if "train_loss" not in entry] for run in (trainer, other))
    assert first == second
    expected = adapters(other)
    for name, tensor in adapters(trainer).items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param(dict(), dict(max_steps=6, show_samples=1), marks=pytest.mark.ci),
        pytest.param(
            dict(family="llama"),
            dict(max_steps=10, lora={"target_modules": "all-linear"}, step_replay=False),
            marks=pytest.mark.slow,
        ),
        pytest.param(dict(), dict(lora={"use_dora": True}, gradient_accumulation_steps=2), marks=pytest.mark.slow),
        pytest.param(LOOP, dict(scan_layers="on", rematerialization="dots"), marks=[ONE_CHIP, pytest.mark.slow]),
        pytest.param(dict(), dict(kd_teacher="base"), marks=pytest.mark.slow),
    ],
    ids=["tied", "untied", "dora", "scanned", "anchored"],
)
def test_numbers_are_those_of_float32_weights(train, exact, logged, capsys, model, config):
    trainers = []
    for cls in (TPUSFTTrainer, InFloat32):
        loaded = AutoModelForCausalLM.from_pretrained(exact(**model), dtype=torch.float32)
        trainers.append(train(cls, loaded, **config))
        said = "frozen weights in bfloat16 (exact)" in capsys.readouterr().out
        assert said == (cls is TPUSFTTrainer)
    assert_same(*trainers, logged)
    assert trainers[0].watch.recompiles == 0


@pytest.mark.slow
def test_a_teacher_too(train, exact, logged, capsys):
    teacher = str(exact(hidden_size=48, num_hidden_layers=1))
    runs = []
    for cls in (TPUSFTTrainer, InFloat32):
        runs.append(train(cls, kd_teacher=teacher, lora=None))
        assert ("frozen weights in bfloat16" in capsys.readouterr().out) == (cls is TPUSFTTrainer)
        assert {parameter.dtype for parameter in runs[-1].teacher.model.parameters()} == {torch.float32}
    assert_same(*runs, logged)


def test_the_program_takes_half_the_bytes(train, monkeypatch):
    sizes = {}
    hash_traced = XLAPrograms.hash_traced

    def measure(programs, traced):
        sizes.setdefault(cls, [value.nbytes for value in traced.values if value.ndim == 2])
        return hash_traced(programs, traced)

    monkeypatch.setattr(XLAPrograms, "hash_traced", measure)
    for cls in (TPUSFTTrainer, InFloat32):
        trainer = train(cls, max_steps=1)
    frozen = sum(p.nbytes for p in trainer.model.parameters() if p.ndim == 2 and not p.requires_grad)
    assert len(sizes[TPUSFTTrainer]) == len(sizes[InFloat32])
    assert sum(sizes[InFloat32]) - sum(sizes[TPUSFTTrainer]) == frozen / 2


@pytest.mark.ci
def test_the_model_is_as_it_was_and_trains_on(train, exact):
    before = AutoModelForCausalLM.from_pretrained(exact(), dtype=torch.float32)
    trainers = [train(cls, eval_strategy="steps", eval_steps=4) for cls in (TPUSFTTrainer, InFloat32)]
    trainer = trainers[0]
    compiles = trainer.backend.compiles()
    assert [log for log in trainer.state.log_history if "eval_loss" in log][-1]["eval_loss"] == (
        trainer.evaluate()["eval_loss"]
    )
    assert trainer.backend.compiles() == compiles
    inner = trainer.model.get_base_model()
    assert inner.dtype == torch.float32
    assert {parameter.dtype for parameter in inner.parameters()} == {torch.float32}
    assert inner.lm_head.weight is inner.model.embed_tokens.weight
    weight = trainer.backend.fetch(inner.model.layers[0].mlp.up_proj.weight)
    assert torch.equal(weight, before.model.layers[0].mlp.up_proj.weight)
    assert type(inner.model.layers[0].mlp.up_proj) is torch.nn.Linear
    for other in trainers:
        other.train()
    assert torch.equal(*(torch.stack([p.sum() for p in adapters(other).values()]) for other in trainers))
    merged = [dict(other.model.merge_and_unload().named_parameters()) for other in trainers]
    for name, expected in merged[1].items():
        assert torch.equal(*trainer.backend.fetch((merged[0][name].detach(), expected.detach()))), name


@pytest.mark.ci
@ONE_CHIP
def test_weights_that_were_changed_between_runs_are_not_rounded(train, exact):
    """With the layers as a loop, which keeps its tensors from one run to the next."""
    model = AutoModelForCausalLM.from_pretrained(exact(**LOOP), dtype=torch.float32)
    trainer = train(model=model, scan_layers="on", max_steps=1)
    weight = trainer.model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer").weight
    weight.data *= 1.001
    changed = trainer.backend.fetch(weight)
    assert not torch.equal(changed, changed.bfloat16().float())
    trainer.train()
    weight = trainer.model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer").weight
    assert torch.equal(trainer.backend.fetch(weight), changed)


def test_inexact_weights_and_float32_computation_stay_float32(runs, train):
    for trainer in (runs.ours(lora={}, bf16=True, train=False), train(bf16=False, train=False)):
        with trainer.frozen_in_bfloat16():
            assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
            assert trainer.describe_frozen() == []


@pytest.mark.slow
def test_checkpoints_are_those_of_float32_weights(train, exact, logged, tmp_path):
    """With embeddings, which PEFT saves where there are more of them than the base has."""
    saved, trainers = [], []
    for cls in (TPUSFTTrainer, InFloat32):
        loaded = AutoModelForCausalLM.from_pretrained(exact(), dtype=torch.float32)
        torch.manual_seed(0)
        loaded.resize_token_embeddings(loaded.config.vocab_size + 8)
        with torch.no_grad():
            loaded.lm_head.weight.copy_(loaded.lm_head.weight.bfloat16())
        directory = tmp_path / cls.__name__
        config = dict(
            output_dir=str(directory), save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1
        )
        trainers.append(train(cls, loaded, max_steps=2, load_best_model_at_end=True, **config))
        saved.append(load_file(directory / "checkpoint-1" / "adapter_model.safetensors"))
    found, expected = saved
    assert any("embed_tokens" in name for name in found)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert_same(*trainers, logged)


def test_a_run_is_resumed(train, logged, tmp_path):
    config = dict(output_dir=str(tmp_path / "whole"), save_strategy="steps", save_steps=2)
    whole = train(InFloat32, **config)
    resumed = train(train=False, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(resumed, whole, logged)


def test_code_of_a_callback_computes_in_float32(train):
    class Answers(TrainerCallback):
        def __init__(self):
            self.logits = []

        @torch.no_grad()
        def on_step_end(self, args, state, control, model, **kwargs):
            ids = torch.arange(8, device=model.device).expand(4, -1)
            self.logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.cpu())

    answers = []
    for cls in (TPUSFTTrainer, InFloat32):
        answers.append(Answers())
        train(cls, max_steps=2, kwargs={"callbacks": [answers[-1]]})
    for logits, expected in zip(*(answer.logits for answer in answers), strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_what_ends_a_run_leaves_float32(train):
    class Stops(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise RuntimeError("stopped")

    trainer = train(train=False, kwargs={"callbacks": [Stops()]})
    with pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert trainer.frozen == []
