"""Every option of upstream's preference configs: the numbers of upstream on eager CPU, and one program a step."""

import json
import math
import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import cpu_plugin
import forked
import pytest
from preference import ONE_LAYER, STEPS, Case, assert_compiled, assert_same_numbers, rows_for, train, trainer_for
from refusals import refused
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback
from trl import DPOConfig, KTOConfig, RewardConfig
from trl.trainer.base_config import _BaseConfig


# Of rewards as differences, which every f-divergence is for, and of the others.
OF_DIFFERENCES = ["sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"]
OTHERS = ["nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down"]
# Of these, with use_weighting upstream fails.
NOT_WEIGHTED = {"hinge", "sft", "aot", "aot_unpaired"}


def dpo(**settings):
    return Case("dpo", settings)


# One shape, for one program instead of two: of one option alone, the last batch of an epoch is like the others.
FULL = {"dataloader_drop_last": True}
# With the default of 0.05 the gradient changes 20 times as fast as the logits, whose rounding is then 1e-5 of it.
SMOOTH = {"discopop_tau": 0.5}
LOSSES = {
    f"dpo-{loss}": dpo(loss_type=loss, label_smoothing=1e-3 if loss == "exo_pair" else 0.0, **SMOOTH, **FULL)
    for loss in [*OF_DIFFERENCES, *OTHERS]
}
# Their gradient goes by the exponential of the log-ratios, and so does what the rounding of these makes of it: completions
# are short, for little rounding, and steps are, for the loss not to be 0 soon.
DIVERGENCES = {
    f"dpo-{name}": Case("dpo", {"f_divergence_type": name, "learning_rate": 1e-4, **FULL}, data="short")
    for name in ("forward_kl", "js_divergence", "alpha_divergence")
}
EXPERTS = {"model": "qwen3_moe", "evaluates": True}
CASES = {
    # Many options at once, by default or in CI.
    "dpo-many": Case(
        "dpo",
        {
            "loss_type": [loss for loss in OF_DIFFERENCES if loss not in NOT_WEIGHTED],
            "loss_weights": [1.0, 0.5, 0.1, 0.7, 0.2, 0.4],
            "label_smoothing": 0.1,
            **SMOOTH,
            "f_divergence_type": "alpha_divergence",
            "ld_alpha": 0.3,
            "use_weighting": True,
            # As of the divergence alone.
            "learning_rate": 1e-4,
            **FULL,
            "truncation_mode": "keep_end",
            "max_length": 24,
        },
        steps=10,
    ),
    "dpo-many-lora": Case(
        "dpo",
        {"loss_type": OTHERS, "label_smoothing": 0.1, "beta": 0.5, "dataloader_drop_last": True, "max_length": 96},
        lora="given",
        data="conversation-implicit",
        model_config=ONE_LAYER,
        steps=10,
    ),
    "reward-many": Case("reward", {"center_rewards_coefficient": 0.01}, data="margin", evaluates=True, steps=10),
    "kto-many": Case(
        "kto",
        {
            "desirable_weight": 1.5,
            "undesirable_weight": 0.7,
            "gradient_accumulation_steps": 4,
            "router_aux_loss_coef": 0.05,
        },
        model="qwen3_moe",
        model_config=ONE_LAYER,
        data="blocks",
        steps=6,
    ),
    **LOSSES,
    **DIVERGENCES,
    "dpo-robust-smoothed": dpo(loss_type="robust", label_smoothing=0.1, **FULL),
    "dpo-combined": dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], **FULL),
    "dpo-alpha-1": dpo(f_divergence_type="alpha_divergence", f_alpha_divergence_coef=1.0, **FULL),
    "dpo-ld-alpha": dpo(ld_alpha=0.3, **FULL),
    "dpo-weighting": dpo(use_weighting=True, beta=0.5, **FULL),
    "dpo-sync": dpo(sync_ref_model=True, ref_model_sync_steps=3, ref_model_mixup_alpha=0.5),
    "dpo-padding-free": dpo(padding_free=True),
    "dpo-keep-start": dpo(max_length=24),
    "dpo-keep-end": dpo(max_length=24, truncation_mode="keep_end"),
    "dpo-any-length": dpo(max_length=None),
    "dpo-multiple": dpo(pad_to_multiple_of=20),
    "dpo-buckets": dpo(length_buckets=[24, 48]),
    "dpo-no-checkpointing": dpo(gradient_checkpointing=False),
    "dpo-accumulated": Case("dpo", {"gradient_accumulation_steps": 4}, evaluates=True),
    "dpo-own-reference": Case("dpo", reference=False, evaluates=True),
    "dpo-by-name": Case(
        "dpo",
        {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}},
        reference=False,
        by_name=True,
    ),
    "dpo-lora": Case("dpo", lora="new", evaluates=True),
    "dpo-lora-dropout": Case("dpo", {"disable_dropout": True}, lora="new", lora_dropout=0.5),
    "dpo-lora-accumulated": Case("dpo", {"gradient_accumulation_steps": 2}, lora="new", evaluates=True),
    "dpo-lora-given": Case("dpo", lora="given", evaluates=True),
    "dpo-implicit": Case("dpo", data="implicit"),
    "dpo-conversation": Case("dpo", {"max_length": 96}, data="conversation"),
    "dpo-conversation-implicit": Case("dpo", {"max_length": 96}, data="conversation-implicit"),
    "dpo-experts": Case("dpo", **EXPERTS),
    "dpo-experts-off": Case("dpo", {"router_aux_loss_coef": 0.0}, **EXPERTS),
    "dpo-experts-accumulated": Case(
        "dpo", {"router_aux_loss_coef": 0.05, "gradient_accumulation_steps": 4}, **EXPERTS
    ),
    "dpo-experts-say": Case("dpo", model_config={"output_router_logits": True}, **EXPERTS),
    "dpo-experts-lora": Case("dpo", lora="new", **EXPERTS),
    "dpo-mixtral": Case("dpo", {"router_aux_loss_coef": 0.05}, model="mixtral"),
    "reward": Case("reward", evaluates=True),
    "reward-centered": Case("reward", {"center_rewards_coefficient": 0.01, "disable_dropout": False}, evaluates=True),
    "reward-margin": Case("reward", data="margin"),
    "reward-lora-accumulated": Case("reward", {"gradient_accumulation_steps": 4}, lora="new", evaluates=True),
    "reward-lora-dropout": Case("reward", {"disable_dropout": True}, lora="new", lora_dropout=0.5),
    "reward-implicit": Case("reward", {"max_length": 24}, data="implicit"),
    "reward-conversation": Case("reward", {"max_length": 96}, data="conversation"),
    "reward-conversation-implicit": Case("reward", {"max_length": 96}, data="conversation-implicit"),
    "reward-any-length": Case("reward", {"max_length": None, "pad_to_multiple_of": 20}),
    "reward-by-name": Case("reward", {"model_init_kwargs": {"dtype": "float32"}}, by_name=True),
    "reward-experts": Case("reward", **EXPERTS),
    "kto": Case("kto", evaluates=True),
    "kto-apo": Case("kto", {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "random"}, evaluates=True),
    "kto-weights": Case("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 0.3}),
    "kto-blocks": Case("kto", data="blocks", evaluates=True),
    "kto-blocks-apo": Case("kto", {"loss_type": "apo_zero_unpaired"}, data="blocks"),
    "kto-buckets": Case("kto", {"length_buckets": [24, 34, 48]}, evaluates=True),
    "kto-sync": Case("kto", {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.9}),
    "kto-lora-accumulated": Case("kto", {"gradient_accumulation_steps": 4}, lora="new", evaluates=True),
    "kto-lora-dropout": Case("kto", {"disable_dropout": True}, lora="new", lora_dropout=0.5),
    "kto-lora-given": Case("kto", lora="given"),
    "kto-no-checkpointing": Case("kto", {"gradient_checkpointing": False}, lora="new"),
    "kto-own-reference": Case("kto", reference=False),
    "kto-by-name": Case("kto", {"model_init_kwargs": {"dtype": "float32"}}, by_name=True, reference=False),
    "kto-pairs": Case("kto", data="paired"),
    "kto-pairs-implicit": Case("kto", {"max_length": 24}, data="implicit"),
    "kto-conversation": Case("kto", {"max_length": 96}, data="conversation"),
    "kto-any-length": Case("kto", {"max_length": None, "pad_to_multiple_of": 20}),
    "kto-experts": Case("kto", {"router_aux_loss_coef": 0.05}, **EXPERTS),
}
BY_DEFAULT, IN_CI = ["dpo-many-lora"], ["kto-many", "reward-many"]
if cpu_plugin.why_absent() is None:
    # With torch_tpu, which runs no more than these.
    BY_DEFAULT += ["dpo-accumulated", "dpo-lora", "dpo-no-checkpointing", "dpo-sync", "reward", "kto"]
    BY_DEFAULT += ["kto-no-checkpointing", "kto-lora-accumulated"]


def each(names):
    """Runs a test with each name; those that many options are not in at once are slow."""
    marks = {**dict.fromkeys(IN_CI, [pytest.mark.ci]), **dict.fromkeys(BY_DEFAULT, [])}
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=marks.get(name, [pytest.mark.slow])) for name in names]
    )


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("preference")


@each(CASES)
def test_numbers_are_upstreams_and_a_step_is_one_program(xla, models, name):
    case = CASES[name]
    trainer = train(case, models, ours=True)
    assert trainer.model.device.type == xla.name
    assert_compiled(case, trainer)
    assert_same_numbers(case, trainer.state.log_history, train(case, models, ours=False).state.log_history)


def test_every_option_has_a_case():
    """Of the fields that a config adds to those of all TRL configs, one that is not here is new."""
    # Where code comes from and how data is read; what is another test's; and what upstream takes from the tokenizer now.
    elsewhere = {"trust_remote_code", "dataset_num_proc", "activation_offloading", "chat_template_path", "eos_token"}
    elsewhere |= {"precompute_ref_log_probs", "precompute_ref_batch_size", "pad_token"}
    for kind, config_cls in (("dpo", DPOConfig), ("reward", RewardConfig), ("kto", KTOConfig)):
        fields = set(config_cls.__dataclass_fields__) - set(_BaseConfig.__dataclass_fields__) - elsewhere
        covered = {name for case in CASES.values() if case.kind == kind for name in case.settings}
        assert fields <= covered, fields - covered


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_dropout_that_is_left_on(xla, models, kind):
    """Upstream drops by other random numbers than XLA: the loss is not that of a run without, and the steps are the same."""
    off, on = (
        train(Case(kind, {"disable_dropout": disable}, lora="new", lora_dropout=0.5, steps=10), models, ours=True)
        for disable in (True, False)
    )
    assert on.state.log_history[2]["loss"] != pytest.approx(off.state.log_history[2]["loss"], rel=1e-4)
    assert on.watch.recompiles == 0
    assert [step.executions for step in on.counted] == [step.executions for step in off.counted]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_evaluation_of_data_that_is_not_prepared(xla, models, kind):
    case, data = Case(kind), rows_for(kind, count=7, seed=1)
    ours, stock = ([trainer_for(case, models, ours).evaluate(data) | {"step": 0}] for ours in (True, False))
    assert_same_numbers(case, ours, stock)


@pytest.mark.ci
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "reward")), "kto"])
def test_the_loss_beside_metrics_of_predictions_counts_pairs(xla, models, kind):
    """In the last batch are 3 of 4 examples, which in upstream's mean are as many. Predictions have upstream's columns."""
    case, data = Case(kind, model_config=ONE_LAYER), rows_for(kind, count=7, seed=1)
    losses, columns = [], []

    def note_columns(predictions):
        # A reward model predicts several arrays.
        columns.append([array.shape[1:2] for array in tree_leaves([predictions.predictions, predictions.label_ids])])
        return {}

    for ours in (True, False):
        trainer = trainer_for(case, models, ours)
        trainer.args.per_device_eval_batch_size = 4
        trainer.compute_metrics = note_columns
        losses.append(trainer.evaluate(data)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert columns[0] == columns[1]


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.seen.append(dict(logs))


@pytest.mark.ci
@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "kto")), "reward"])
def test_the_line_at_the_start_counts_both_sequences_of_a_pair(xla, models, kind, capsys):
    case = Case(kind, {"gradient_accumulation_steps": 2}, model_config=ONE_LAYER, steps=2)
    trainer, logs = trainer_for(case, models, ours=True), Logs()
    trainer.add_callback(logs)
    trainer.train()
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Training on"))
    (tokens,) = re.findall(r"([\d,]+) tokens per optimizer step", line)
    lengths = [int(length) for length in re.findall(r"4 pairs x (\d+)" if kind != "kto" else r"4 x (\d+)", line)]
    rows = int(tokens.replace(",", "")) // max(lengths)
    assert rows == 2 * 4 * (1 if kind == "kto" else 2)
    computed = logs.seen[0]["padded_tokens_per_second"] * logs.seen[0]["step_time"]
    assert round(computed) in [rows * length for length in lengths]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, "new"], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["dpo", "reward", "kto"])
def test_bfloat16(xla, models, kind, lora):
    case = Case(kind, {"bf16": True}, lora=lora, evaluates=True)
    trainer = train(case, models, ours=True)
    assert_compiled(case, trainer)
    numbers = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    assert len(numbers) > STEPS // 2 and all(map(math.isfinite, numbers))


@pytest.mark.ci
def test_gradients_of_kto_in_bfloat16(xla, models):
    # The policy computes the KL term without a graph, then the loss with one, from the same weights. Activation checkpointing
    # casts them anew in the backward pass.
    settings = {"bf16": True, "gradient_checkpointing": False, "logging_steps": 1, "dataloader_drop_last": True}
    ours, stock = (
        train(Case("kto", settings, model_config=ONE_LAYER, steps=1), models, which).state.log_history[0]
        for which in (True, False)
    )
    assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=0.01)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        *(
            (
                dpo(use_weighting=True, loss_type=["sigmoid", loss]),
                ["use_weighting=True", f"{loss!r}", "use_weighting=False"],
            )
            for loss in sorted(NOT_WEIGHTED)
        ),
        (dpo(loss_type="exo_pair"), ["exo_pair", "greater than 0.0", "1e-3"]),
        (dpo(loss_type="apo_zero", f_divergence_type="forward_kl"), ["f_divergence_type='forward_kl'", "reverse_kl"]),
        (dpo(sync_ref_model=True, ref_model_sync_steps=0), ["ref_model_sync_steps=0", "sync_ref_model=False"]),
        (Case("dpo", {"sync_ref_model": True}, lora="new"), ["sync_ref_model=True", "LoRA", "sync_ref_model=False"]),
        (Case("kto", {"sync_ref_model": True}, lora="given"), ["sync_ref_model=True", "LoRA", "sync_ref_model=False"]),
        (dpo(loss_type="sigmod"), ["loss_type=['sigmod']", "sigmoid, hinge"]),
        (Case("kto", {"loss_type": "sigmoid"}), ["loss_type='sigmoid'", "kto, apo_zero_unpaired"]),
        (Case("kto", {"train_sampling_strategy": "random"}), ["train_sampling_strategy='sequential'", "'random'"]),
        (Case("kto", {"per_device_train_batch_size": 1}), ["batch size must be > 1"]),
        (Case("dpo", {"router_aux_loss_coef": 0.1}), ["router_aux_loss_coef", "not a Mixture-of-Experts"]),
    ],
    ids=lambda value: "",
)
def test_what_cannot_work_is_refused(xla, models, case, words):
    refused(words, lambda: trainer_for(case, models, ours=True))


def test_what_has_no_effect_is_said(xla, models):
    trainer = trainer_for(
        Case(
            "dpo",
            {
                "activation_offloading": True,
                "padding_free": True,
                "model_init_kwargs": {"attn_implementation": "flash_attention_2", "device_map": "auto"},
            },
            by_name=True,
            reference=False,
        ),
        models,
        ours=True,
    )
    lines = "\n".join(trainer.adapted.changes)
    assert "activation_offloading has no effect: gradient_checkpointing saves memory on XLA" in lines
    assert "padding_free is replaced by padding to a static length (same loss); length_buckets pad less" in lines
    assert "attn_implementation=flash_attention_2 is replaced" in lines
    assert "device_map has no effect" in lines


# ---- Eight chips ----


SHARED = {"per_device_train_batch_size": 2}
ON_CHIPS = {
    "dpo-data": Case("dpo", {**SHARED, "ld_alpha": 0.3}, steps=10),
    "dpo-fsdp": Case("dpo", {**SHARED, "fsdp": "full_shard"}, steps=10),
    "dpo-2d": Case("dpo", {**SHARED, "mesh": "data=2,fsdp=4"}, steps=10),
    "dpo-2d-lora": Case(
        "dpo",
        {**SHARED, "mesh": "data=2,fsdp=4", "gradient_accumulation_steps": 2},
        lora="new",
        evaluates=True,
        steps=10,
    ),
    "reward-data": Case("reward", {**SHARED, "center_rewards_coefficient": 0.01}, evaluates=True, steps=10),
    "kto-data": Case("kto", SHARED, steps=10),
    "kto-fsdp-lora": Case("kto", {**SHARED, "mesh": "fsdp"}, lora="new", steps=10),
}


@pytest.fixture(scope="module")
def eight(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("eight")
    spec, results = directory / "spec.json", directory / "results.json"
    spec.write_text(json.dumps({name: asdict(case) for name, case in ON_CHIPS.items()}))
    ran = forked.run(
        [sys.executable, Path(__file__).with_name("preference_driver.py"), models, spec, results],
        env={**os.environ, "CPU_NUM_DEVICES": "8"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CHIPS)
def test_eight_chips_are_one_device_with_the_rows_of_all(xla, models, eight, name):
    result, case = eight[name], ON_CHIPS[name]
    settings = {key: value for key, value in case.settings.items() if key not in ("mesh", "fsdp")}
    settings |= {"per_device_train_batch_size": 16, "per_device_eval_batch_size": 32}
    # Completions of others are those of the rows of a chip, as upstream takes them from those of a process.
    one = replace(case, settings=settings, kl_rows=2 if case.kind == "kto" else None)
    stock = train(one, models, ours=False)
    assert_same_numbers(case, result["log"], stock.state.log_history)
    assert result["recompiles"] == 0
    accumulation = settings.get("gradient_accumulation_steps", 1)
    executions, _, fallbacks, replays = zip(*result["steps"], strict=True)
    assert sum(fallbacks) == 0 and replays[-1] == accumulation
    if not case.evaluates:
        assert set(executions) == {1}
    parts = {"fsdp-lora": 8, "fsdp": 8, "2d": 4, "2d-lora": 4, "data": 1}[name.partition("-")[2]]
    for parameter, (shape, shard) in result["reference"].items():
        assert math.prod(shard) * (parts if len(shape) > 1 else 1) == math.prod(shape), parameter
