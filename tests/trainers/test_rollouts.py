"""GRPO and RLOO with the test's completions: every number is upstream's on eager CPU, and a step is one replayed program."""

from dataclasses import replace

import cpu_plugin
import pytest
import torch
from datasets import Dataset
from preference import ONE_LAYER
from rollouts import (
    LONGEST,
    OURS,
    Case,
    FixedCompletions,
    assert_same_numbers,
    asynchronous,
    of_length,
    of_letters,
    train,
    trainer_for,
)
from test_counts import counted_alone, on_torch_tpu
from transformers import AutoModelForSequenceClassification
from trl import GRPOConfig

from hf_tpu_ext.trainers.online.rewarded import _only_completions


# Completions are trained on twice, and each step takes other rows of them.
REUSED = {"num_iterations": 2, "steps_per_generation": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2}
REFERENCE = {"beta": 0.04}
# All completions of two prompts in a step: layers read these once.
SHARED = {"per_device_train_batch_size": 8}
SMALL = {"model_config": ONE_LAYER, "evaluates": True}
SYNCED = {**REFERENCE, "sync_ref_model": True, "ref_model_sync_steps": 3}


def grpo(lora=None, rewards=(of_length, of_letters), **settings):
    return Case("grpo", settings, lora=lora, rewards=rewards)


LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {"scale_rewards": "none"},
    "dapo": {"epsilon_high": 0.28, "mask_truncated_completions": True},
    "cispo": {"epsilon_high": 1.02},
    "sapo": {"sapo_temperature_neg": 1.5, "sapo_temperature_pos": 0.7},
    "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.5, "vespo_lambda_neg": 1.5},
    "luspo": {"importance_sampling_level": "sequence"},
}
CASES = {
    # Many options at once.
    "grpo-many": Case(
        "grpo",
        {
            **REUSED,
            **ACCUMULATED,
            **SYNCED,
            "loss_type": "bnpo",
            "importance_sampling_level": "sequence",
            "delta": 1.05,
            "epsilon": 1e-3,
            "top_entropy_quantile": 0.4,
            "entropy_coef": 0.01,
            "off_policy_mask_threshold": 1e-4,
            "mask_truncated_completions": True,
            "scale_rewards": "batch",
            "reward_weights": [0.3, 1.0, 0.1],
            "temperature": 0.7,
        },
        rewards=(of_length, of_letters, asynchronous),
        **SMALL,
    ),
    "grpo-shared": Case("grpo", {**SHARED, **REFERENCE, "loss_type": "grpo", "num_iterations": 2}, **SMALL),
    "grpo-reward-model": Case("grpo", {"steps_per_generation": 2}, rewards=("model", of_length), **SMALL),
    # With the seed by default, the rounding of a sequence's log-probs, 7e-6 of a gradient, is nearly what is allowed.
    "rloo": Case("rloo", {**REUSED, **REFERENCE, "seed": 2}, **SMALL),
}
MORE = {
    "grpo": grpo(loss_type="grpo", **REUSED, **REFERENCE),
    # Of `trl.experimental`, with `TPUGRPOTrainer` before it.
    "gmpo": Case("gmpo", {**REUSED, **REFERENCE}, evaluates=True),
    "grpo-lora": Case("grpo", {**ACCUMULATED, **REFERENCE, "num_iterations": 2}, lora="new", conversation=True),
    "rloo-many": Case(
        "rloo",
        {
            **REUSED,
            **ACCUMULATED,
            "beta": 0.1,
            "normalize_advantages": True,
            "reward_clip_range": (-0.5, 0.5),
            "mask_truncated_completions": True,
            "epsilon": 1e-3,
            "temperature": 0.7,
        },
        lora="given",
        conversation=True,
    ),
    **{f"grpo-loss-{name}": grpo(loss_type=name, **REUSED, **more) for name, more in LOSSES.items()},
    **{f"grpo-loss-{name}-accumulated": grpo(loss_type=name, **ACCUMULATED, **more) for name, more in LOSSES.items()},
    **{
        f"grpo-loss-{name}-shared": grpo(loss_type=name, **SHARED, **REFERENCE, **more)
        for name, more in LOSSES.items()
    },
    "grpo-shared-loop": Case("grpo", {**SHARED, **REFERENCE, "scan_layers": "on"}, lora="given"),
    "grpo-shared-accumulated": grpo(**SHARED, **ACCUMULATED, steps_per_generation=1),
    "grpo-shared-buckets": Case("grpo", {**SHARED, "max_prompt_length": 64, "length_buckets": [8, 64]}, steps=16),
    "grpo-shared-many": grpo(
        **SHARED,
        **SYNCED,
        top_entropy_quantile=0.4,
        entropy_coef=0.01,
        mask_truncated_completions=True,
        temperature=0.7,
    ),
    "grpo-shared-evaluated": Case("grpo", {**SHARED, **REFERENCE, "num_generations_eval": 2}, evaluates=True),
    "grpo-shared-evaluated-alone": Case(
        "grpo", {**REFERENCE, "num_generations_eval": 1, "per_device_eval_batch_size": 3}, evaluates=True
    ),
    "grpo-shared-evaluated-alike": Case(
        "grpo", {**REFERENCE, "num_generations_eval": 2, "per_device_eval_batch_size": 4}, evaluates=True
    ),
    "gmpo-shared": Case("gmpo", {**SHARED, **REFERENCE}, evaluates=True),
    "rloo-shared": Case("rloo", {**SHARED, **REFERENCE, "num_iterations": 2}, lora="given", evaluates=True),
    **{
        f"grpo-sequence-{name}": grpo(loss_type=name, importance_sampling_level="sequence", **REUSED)
        for name in LOSSES
        if name not in ("luspo", "vespo")
    },
    "grpo-defaults": grpo(),
    "grpo-luspo-token": grpo(loss_type="luspo", **REUSED, **REFERENCE),
    "grpo-delta": grpo(delta=1.01, epsilon=1e-3, **REUSED),
    "grpo-bias": grpo(use_bias_correction_kl=False, **REUSED, **REFERENCE),
    "grpo-off-policy": grpo(off_policy_mask_threshold=1e-5, **REUSED),
    "grpo-quantile": grpo(top_entropy_quantile=0.2, **REUSED),
    "grpo-quantile-masked": grpo(top_entropy_quantile=0.5, mask_truncated_completions=True, **REUSED),
    "grpo-entropy": grpo(entropy_coef=0.05, **ACCUMULATED),
    # Below the target at first, and above it later.
    "grpo-adaptive": Case(
        "grpo",
        {
            "use_adaptive_entropy": True,
            "entropy_target": 5.4,
            "entropy_coef_delta": 0.01,
            "entropy_coef": 0.02,
            **ACCUMULATED,
        },
        evaluates=True,
    ),
    "grpo-adaptive-quantile": Case(
        "grpo",
        {
            "use_adaptive_entropy": True,
            "entropy_target": 10.0,
            "entropy_coef_min": 0.005,
            "entropy_coef_max": 0.02,
            "top_entropy_quantile": 0.5,
            **REUSED,
        },
    ),
    "grpo-masked": grpo(mask_truncated_completions=True),
    "grpo-batch-scale": grpo(scale_rewards="batch"),
    "grpo-no-scale": grpo(scale_rewards="none"),
    "grpo-normalized-first": grpo(multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.2]),
    "grpo-synced": grpo(**SYNCED),
    "grpo-lora-given": grpo(lora="given", **REUSED, **REFERENCE),
    "grpo-lora-plain": grpo(lora="new"),
    "grpo-misaligned": grpo(gradient_accumulation_steps=3, steps_per_generation=2, max_steps=6),
    "grpo-fp32-head": grpo(cast_lm_head_to_fp32=True, **REFERENCE),
    "grpo-no-checkpointing": grpo(gradient_checkpointing=False, **REUSED),
    "grpo-multiple": grpo(pad_to_multiple_of=16, **REUSED),
    "grpo-buckets": Case("grpo", {"max_prompt_length": 64, "length_buckets": [8, 64], **REFERENCE}, steps=16),
    "grpo-async": grpo(rewards=(asynchronous, of_length)),
    "grpo-model-conversation": Case("grpo", {}, rewards=("model",), conversation=True),
    "grpo-logs": Case("grpo", {"log_completions": True, "num_completions_to_print": 1}, evaluates=True),
    "grpo-experts": Case("grpo", {**REUSED, "router_aux_loss_coef": 0.05}, model="qwen3_moe"),
    "grpo-traced": Case(
        "grpo", {**REUSED, **ACCUMULATED, **REFERENCE, "step_replay": False}, lora="new", evaluates=True
    ),
    "grpo-loop": Case("grpo", {**REUSED, **REFERENCE, "scan_layers": "on"}, lora="given"),
    "rloo-loop": Case("rloo", {**REUSED, "scan_layers": "on"}, evaluates=True),
    "grpo-evaluated": Case("grpo", {"num_generations_eval": 2}, evaluates=True),
    "rloo-accumulated": Case("rloo", {**ACCUMULATED}),
    # At a rate of 1e-3, what rounding makes of eight updates is as much as is allowed.
    "rloo-defaults": Case("rloo", {"learning_rate": 1e-4}),
    "rloo-synced": Case("rloo", {**SYNCED}),
    "rloo-reward-model": Case("rloo", {"steps_per_generation": 2}, rewards=("model",), lora="given"),
}
BY_DEFAULT = {*CASES}
IN_CI = {"grpo-many", "grpo-shared", "grpo-reward-model"}
if cpu_plugin.why_absent() is None:
    # With torch_tpu, which runs no more than these.
    CASES["grpo-operators"] = grpo(loss_type="bnpo", entropy_coef=0.01, compile_step="off")
    BY_DEFAULT |= {"grpo-operators", "grpo-lora", "grpo-adaptive", "grpo-delta", "grpo-quantile", "rloo-reward-model"}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("rollouts")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=[pytest.mark.ci] * (name in IN_CI)) for name in CASES),
        *(pytest.param(name, marks=[pytest.mark.slow] * (name not in BY_DEFAULT)) for name in MORE),
    ],
)
def test_every_number_is_upstreams(xla, models, name):
    case = {**CASES, **MORE}[name]
    reference = train(case, models, ours=False)
    trainer = train(case, models, ours=True)
    assert trainer.model.device.type == xla.name
    shares = xla.traces_steps and trainer.args.steps_per_generation == 1 and case.model == "qwen3"
    assert trainer.shares_prompts == shares
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert_compiled(case, trainer)


@pytest.mark.ci
def test_upstreams_config_and_its_devices(xla, models, monkeypatch):
    """A plain config, on XLA and on the eager CPU, where every method is upstream's."""
    case = Case("grpo", {"num_iterations": 2}, model_config=ONE_LAYER, steps=4)
    reference = train(case, models, ours=False)
    for settings in ({}, {"use_cpu": True}):
        monkeypatch.setitem(OURS, "grpo", (OURS["grpo"][0], GRPOConfig))
        trainer = trainer_for(replace(case, settings={**case.settings, **settings}), models, ours=True)
        trainer.train()
        assert trainer.backend.name == ("cpu" if settings else xla.name)
        assert_same_numbers(trainer.state.log_history, reference.state.log_history)


@pytest.mark.parametrize(
    ("texts", "settings", "length"),
    [
        (["abcde", "fghij"], {}, 5),
        (["abcde", "fghi"], {}, 8),
        (["abcde", "fghij"], {"pad_to_multiple_of": 16}, 16),
        (["abcde", "fghij"], {"max_prompt_length": 24}, 5),
    ],
)
def test_prompts_of_one_length_are_not_padded(xla, models, texts, settings, length):
    rows = Dataset.from_dict({"prompt": texts * 4})
    assert trainer_for(Case("grpo", settings), models, ours=True, train_dataset=rows).lengths == [length]


def assert_compiled(case, trainer):
    """
    A micro-step is one execution and is replayed; so is a pass over the rows of one, for log-probabilities and rewards. Only
    logs read, and a generation, once for each kind of pass. Nothing is compiled twice, or after the second step but for a first
    evaluation.
    """
    assert trainer.watch.recompiles == 0
    if trainer.compile_step == "off":
        return
    args, counted = trainer.args, trainer.counted
    batches = len(trainer.get_train_dataloader())
    of_epoch = [
        min(args.gradient_accumulation_steps, batches - first)
        for first in range(0, batches, args.gradient_accumulation_steps)
    ]
    generated_every = args.steps_per_generation * trainer.num_iterations
    passes = (case.kind == "rloo" or args.gradient_accumulation_steps % generated_every != 0) + (trainer.beta != 0)
    passes += sum(reward == "model" for reward in case.rewards)
    synced, operators = case.settings.get("ref_model_sync_steps"), on_torch_tpu(trainer.backend)
    places = counted_alone(trainer.backend, counted)
    done, generations = 0, 0
    for index, step in enumerate(counted):
        micro_steps = range(done, done + of_epoch[index % len(of_epoch)])
        done = micro_steps.stop
        generates = sum(micro_step % generated_every == 0 for micro_step in micro_steps)
        generations += generates
        evaluates = case.evaluates and ((index + 1) % 3 == 0 or index + 1 == case.steps)
        evaluated = -(-3 * trainer.num_generations_eval // 4) if evaluates else 0
        syncs = bool(synced) and (index + 1) % synced == 0
        if index + 1 == case.steps and trainer.args.scan_layers == "on":
            # Layers get their parameters back.
            break
        if index > 1 and generations > 2 and not evaluates and not syncs and len(trainer.lengths) == 1:
            assert step.compiles == 0, f"compiles of step {index + 1}"
        # With torch_tpu the reference is moved by operators.
        if index not in places or (operators and syncs):
            continue
        assert step.executions == (
            len(micro_steps) + generates * passes * args.steps_per_generation + evaluated * (1 + passes) + syncs
        ), f"executions of step {index + 1}"
        if (index + 1) % args.logging_steps and not evaluates:
            assert step.reads == generates * passes + bool(case.settings.get("use_adaptive_entropy")), (
                f"reads of step {index + 1}"
            )
    # What is replayed of a model with other adapters, or with none, is apart.
    kinds = {kind for kind, _ in trainer.watch.programs}
    assert ("reference pass" in kinds) == (trainer.beta != 0)
    assert [event.cause for event in trainer.watch.events if event.cause] == []
    assert sum(step.fallbacks for step in counted) == 0
    if trainer.args.scan_layers != "on" and not operators:
        assert sum(step.compiles for step in counted) <= len(trainer.watch.programs) + bool(synced)
    if not case.evaluates:
        # The last step has been replayed, whatever it consists of.
        assert counted[-1].replays >= len(micro_steps)


@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_nothing_that_counts(xla, models, monkeypatch, kind):
    """All completions are cut off, and masked: extremes of nothing are `None`, as upstream has them."""

    def cut_off(trainer, prompts):
        return [[70] * LONGEST for _ in prompts]

    monkeypatch.setattr(FixedCompletions, "_completions", cut_off)
    case = Case(kind, {"mask_truncated_completions": True}, model_config=ONE_LAYER, steps=4)
    reference = train(case, models, ours=False)
    trainer = train(case, models, ours=True)
    assert_same_numbers(trainer.state.log_history, reference.state.log_history)
    assert (reference.state.log_history[0]["clip_ratio/low_min"] is None) == (kind == "grpo")


def test_only_completions_are_scored():
    """The head is given the last tokens of each row, and what it finds is where upstream looks for it."""
    rows, length, kept = 2, 5, 3
    hidden, targets = torch.arange(rows * (length - 1)).view(-1, 1), torch.arange(rows * (length - 1))
    given = []

    def score(hidden, weight, bias, targets):
        given.append((hidden.flatten().tolist(), targets.tolist()))
        return targets + 100, None

    found, nothing = _only_completions(kept, torch.Size([rows, length]), None, score)(hidden, None, None, targets)
    assert given == [([1, 2, 3, 5, 6, 7], [1, 2, 3, 5, 6, 7])] and nothing is None
    assert found.tolist() == [0, 101, 102, 103, 0, 105, 106, 107]


def test_a_reward_model_takes_longer_texts(xla, models):
    """Its length doubles, and rewards are those of the same model on eager CPU, in however many batches."""
    trainer = trainer_for(Case("grpo", rewards=("model",)), models, ours=True)
    (rewards,) = trainer.reward_funcs
    model = AutoModelForSequenceClassification.from_pretrained(
        trainer.model.config.name_or_path, num_labels=1, dtype=torch.float32
    )
    model.load_state_dict(trainer.backend.fetch(dict(rewards._unregistered_model[0].state_dict())))
    model.config.pad_token_id = trainer._tokenizer.pad_token_id
    for length in (20, 70):
        ids = torch.randint(5, 200, (7, length))
        mask = torch.ones_like(ids)
        ids[0, 4:], mask[0, 4:] = trainer._tokenizer.pad_token_id, 0
        with torch.inference_mode():
            found = rewards(input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(found, model(input_ids=ids, attention_mask=mask).logits, rtol=1e-5, atol=1e-5)
    assert rewards._length == 96
