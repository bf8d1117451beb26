"""Distillation on-policy: every number is upstream's on eager CPU, and a step is one replayed program, with the teacher in it."""

from dataclasses import replace

import pytest
import torch
from preference import ONE_LAYER
from rollouts import OURS, STOCK, WRITING, Case, assert_same_numbers, assert_written, train, trainer_for
from test_counts import counted_alone, on_torch_tpu
from test_preference_resume import logged_after, weights_and_moments
from test_rollout_chips import train_on_eight
from trl import DistillationConfig, DistillationTrainer, GRPOTrainer
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from hf_tpu_ext.trainers import TPUTrainerMixin


ACCUMULATED = {"gradient_accumulation_steps": 2}


def case(lora=None, **settings):
    options = {
        key: settings.pop(key)
        for key in ("conversation", "evaluates", "model", "model_config", "steps")
        if key in settings
    }
    return Case("distillation", settings, lora=lora, rewards=(), **options)


CASES = {
    "many": case(
        "new",
        **ACCUMULATED,
        beta=0.3,
        temperature=0.7,
        conversation=True,
        evaluates=True,
        log_completions=True,
        num_completions_to_print=1,
        model_config=ONE_LAYER,
    ),
    "loop": case(beta=0.0, scan_layers="on"),
}
MORE = {
    "defaults": case(),
    "forward": case(beta=0.0, evaluates=True),
    "jsd": case(beta=0.5, temperature=1.7, **ACCUMULATED),
    "lora-given": case("given", **ACCUMULATED),
    "caps": case(model="gemma2", beta=0.4),
    "experts": case(model="qwen3_moe"),
    "buckets": case(max_prompt_length=64, length_buckets=[8, 64], steps=16),
    "multiple": case(pad_to_multiple_of=16),
    "no-checkpointing": case(gradient_checkpointing=False, disable_dropout=True),
    "traced": case("new", step_replay=False, **ACCUMULATED, evaluates=True),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("on-policy")


@pytest.fixture
def writes(monkeypatch):
    """The models write their completions themselves."""
    monkeypatch.setitem(OURS, "distillation", WRITING["distillation"])
    monkeypatch.setitem(STOCK, "distillation", (DistillationTrainer, DistillationConfig))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[pytest.mark.ci] * (name == "many")) for name in CASES),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE),
    ],
)
def test_every_number_is_upstreams(xla, models, name):
    case = {**CASES, **MORE}[name]
    reference = train(case, models, ours=False)
    trainer = train(case, models, ours=True)
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    args, counted = trainer.args, trainer.counted
    if args.scan_layers != "on":
        if not on_torch_tpu(xla):
            assert sum(step.compiles for step in counted) <= len(trainer.watch.programs)
        if not case.evaluates:
            # A micro-step is one execution, and only logs read.
            places = counted_alone(xla, counted)
            assert len(places) >= case.steps - 3
            assert [counted[place].executions for place in places] == [args.gradient_accumulation_steps] * len(places)
            assert not any(counted[place].reads for place in places if place % 2 == 0)
    if case.settings.get("step_replay") is not False:
        assert counted[-1].replays >= args.gradient_accumulation_steps
    assert sum(step.fallbacks for step in counted) == 0 and trainer.watch.recompiles == 0


@pytest.mark.ci
def test_what_the_student_writes(xla, models, writes, tmp_path):
    """Greedily the student writes what upstream's does, so all numbers are the same, in three programs; a resumed run goes on."""
    greedy = case(top_k=1, steps=10, max_completion_length=6, learning_rate=1e-2, model_config=ONE_LAYER)
    reference = train(greedy, models, ours=False)
    saves = {"save_strategy": "steps", "save_steps": 4, "output_dir": str(tmp_path / "run")}
    trainer = train(replace(greedy, settings={**greedy.settings, **saves}), models, ours=True)
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    counted = trainer.counted
    assert_written(trainer, 1, longest=6)
    assert sum(step.compiles for step in counted[2:]) == 0
    # In the third epoch, whose order is its own.
    resumed = trainer_for(greedy, models, ours=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    torch.testing.assert_close(weights_and_moments(resumed), weights_and_moments(trainer), rtol=0, atol=0)
    assert logged_after(resumed, 4) == logged_after(trainer, 4) != []


@pytest.mark.slow
def test_upstreams_config_and_its_devices(xla, models, monkeypatch):
    """A plain config, on XLA and on the eager CPU, where every method is upstream's."""
    plain = case(steps=4)
    reference = train(plain, models, ours=False)
    monkeypatch.setitem(OURS, "distillation", (OURS["distillation"][0], DistillationConfig))
    for settings in ({}, {"use_cpu": True}):
        trainer = trainer_for(replace(plain, settings=settings), models, ours=True)
        trainer.train()
        assert trainer.backend.name == ("cpu" if settings else xla.name)
        assert_same_numbers(trainer.state.log_history, reference.state.log_history)


@pytest.mark.slow
def test_eight_devices(xla, tmp_path):
    settings = {"beta": 0.5, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    spec = {
        name: {"kind": "distillation", "settings": {**settings, **more}, "evaluates": True}
        for name, more in (("data", {}), ("fsdp", {"mesh": "fsdp"}))
    }
    one = case(**{**settings, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}, evaluates=True)
    reference = train(one, tmp_path, ours=False)
    for found in train_on_eight(spec, tmp_path, rows=[8, 8]).values():
        assert_same_numbers(found["log"], reference.state.log_history)
        assert len(found["steps"]) == one.steps


@pytest.mark.parametrize(
    ("beta", "trains_head"),
    [(0.3, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.0, True), (1.0, True), (0.3, False)))],
)
def test_divergence_in_float64(xla, models, beta, trains_head):
    """The loop over tokens, of another width than the teacher's, beside the formula in float64."""
    trainer = trainer_for(case(model_config=ONE_LAYER), models, ours=True)
    generator = torch.Generator().manual_seed(0)
    # In chunks of 1024.
    shapes = [(2100, 16), (500, 16), (500,), (2100, 24), (500, 24), (500,)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    settings = (beta, 0.7, 0.5, 2.0, 1.5, 3.0)
    weights = torch.rand(2100, generator=generator, dtype=torch.float64)

    def differentiate(function, tensors, weights):
        leaves = [
            tensor.detach().requires_grad_(trains_head or place == 0) for place, tensor in enumerate(tensors[:3])
        ]
        divergence, entropy = function(*leaves, *tensors[3:], *settings)
        (divergence * weights).sum().backward()
        return divergence.detach(), entropy.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)

    on_device = [tensor.float().to(trainer.backend.device) for tensor in given]
    found = trainer.backend.fetch(
        differentiate(trainer._diverge, on_device, weights.float().to(trainer.backend.device))
    )
    for mine, exact in zip(found, differentiate(_exact, given, weights), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=2e-5)
    # Upstream's own, in float32.
    stock = differentiate(ChunkedDivergenceFunction.apply, [tensor.float() for tensor in given], weights.float())
    for mine, other in zip(found, stock, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


def _exact(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, beta, temperature, *caps):
    def log_probs(hidden, weight, bias, scale, cap):
        return (cap * torch.tanh((hidden @ weight.T + bias) * scale / cap) / temperature).log_softmax(-1)

    q = log_probs(hidden, weight, bias, *caps[:2])
    p = log_probs(teacher_hidden, teacher_weight, teacher_bias, *caps[2:])
    m = torch.log(beta * p.exp() + (1 - beta) * q.exp())
    if beta == 0:
        divergence = (p.exp() * (p - q)).sum(-1)
    elif beta == 1:
        divergence = (q.exp() * (q - p)).sum(-1)
    else:
        divergence = beta * (p.exp() * (p - m)).sum(-1) + (1 - beta) * (q.exp() * (q - m)).sum(-1)
    return divergence, -(q.exp() * q).sum(-1)


def test_what_does_not_work_is_refused(xla, models, tmp_path):
    with pytest.raises(ValueError, match="use_vllm=True does not work on XLA"):
        trainer_for(case(use_vllm=True), models, ours=True)
    with pytest.raises(ValueError, match="train_dataset has 9 rows, and a generation takes 12"):
        train(case(gradient_accumulation_steps=3), models, ours=True)

    class Mixed(TPUTrainerMixin, DistillationTrainer): ...

    class MixedGRPO(TPUTrainerMixin, GRPOTrainer): ...

    for cls, name in ((Mixed, "TPUDistillationTrainer"), (MixedGRPO, "TPUGRPOTrainer")):
        with pytest.raises(ValueError, match=f"Use hf_tpu_ext.{name}"):
            cls("no-such-model", args=DistillationConfig(output_dir=str(tmp_path), bf16=False))
