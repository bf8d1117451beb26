"""Settings of upstream that cannot work: refused with the fix at the start of a run, and only if upstream does not take them."""

from types import SimpleNamespace

import pytest
from datasets import Dataset
from fixes import assert_fixes, refusal
from refusals import refused
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from transformers.training_args import ParallelMode
from trl import RewardConfig, SFTConfig, SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer, TPUTrainer, TPUTrainingArguments
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.trainers.checks import adaptations
from hf_tpu_ext.trainers.checks.field_answers import Place, split_by
from hf_tpu_ext.trainers.checks.fields import adapt
from hf_tpu_ext.trainers.checks.settings import check_architecture, check_processes, check_recipe


@pytest.mark.parametrize(
    ("backend", "words"), [("xla", ["Leave it out", "mesh='fsdp'"]), ("cpu", ["pip install deepspeed", "leave"])]
)
def test_deepspeed_in_a_config_of_ours(runs, backend, words):
    refused(["deepspeed", *words], lambda: runs.config(TPUSFTConfig, backend=backend, deepspeed="zero3.json"))


POSITIVE = ["is not positive", "for example"]


@pytest.mark.parametrize("static_shapes", [True, False], ids=["xla", "eager"])
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(per_device_train_batch_size=0), [*POSITIVE, "per_device_train_batch_size=0"]),
        (dict(per_device_train_batch_size=-1), [*POSITIVE, "per_device_train_batch_size=-1"]),
        (dict(per_device_eval_batch_size=0, eval_strategy="epoch"), [*POSITIVE, "per_device_eval_batch_size=0"]),
        (dict(gradient_accumulation_steps=0), [*POSITIVE, "gradient_accumulation_steps=0"]),
        (dict(max_length=0), [*POSITIVE, "max_length=0", "max_length=1024"]),
        (dict(max_length=-5, packing=True), [*POSITIVE, "max_length=-5", "max_length=1024"]),
        (dict(learning_rate=-1e-3), ["learning_rate=-0.001", "optim=adamw_torch_fused", "above 0"]),
        (dict(learning_rate=-1.0, optim="sgd"), ["learning_rate=-1.0", "optim=sgd"]),
        (dict(report_to="wandb"), ["report_to=wandb", "pip install wandb", "report_to=none"]),
        (dict(report_to=["flyte", "tensorboard"]), ["report_to=flyte", "pip install flytekit"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_setting_that_no_device_takes(runs, config, words, static_shapes):
    config = runs.config(**config)
    refused(words, lambda: adapt(config, Place(static_shapes=static_shapes), {"train_dataset": runs.train_dataset}))


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (dict(per_device_eval_batch_size=0), {}),
        (dict(learning_rate=-1e-3, optim="adafactor"), {}),
        (dict(learning_rate=-1e-3), {"optimizers": ("an optimizer", None)}),
        (dict(learning_rate=-1e-3), {"optimizer_cls_and_kwargs": ("a class", {})}),
        (dict(per_device_train_batch_size=0), {"train_dataset": None}),
        (dict(gradient_accumulation_steps=-1), {}),
        (dict(max_length=-5), {}),
        (dict(report_to="tensorboard"), {}),
    ],
    ids=lambda value: "-".join(value),
)
def test_setting_that_upstream_takes(runs, config, given):
    """It may do little: -1 micro-steps are no step."""
    adapt(runs.config(**config), Place(static_shapes=False), {"train_dataset": runs.train_dataset, **given})


@pytest.mark.parametrize("config", [dict(max_length=-5), dict(gradient_accumulation_steps=-1)], ids="-".join)
def test_setting_that_xla_does_not_take(runs, config):
    refused(POSITIVE, lambda: runs.ours(train=False, **config))


def test_length_of_the_general_trainer(runs, tmp_path):
    args = TPUTrainingArguments(str(tmp_path), max_length=-5, use_cpu=True, report_to="none")
    refused([*POSITIVE, "max_length=-5"], lambda: adapt(args, Place(static_shapes=False)))


@pytest.mark.parametrize("name", ["model", "teacher_model"])
def test_model_whose_class_is_not_known(runs, tmp_path, name):
    AutoConfig.from_pretrained(runs.model_dir, architectures=None).save_pretrained(tmp_path)
    words = ["config.json", str(tmp_path), '"architectures": ["Qwen3ForCausalLM"]', f"{name}=AutoModelForCausalLM"]
    refused(words, lambda: check_architecture(runs.config(), {name: str(tmp_path)}))
    check_architecture(runs.config(), {name: str(runs.model_dir)})
    # Its class is always the same.
    check_architecture(RewardConfig(str(tmp_path), report_to="none", use_cpu=True), {name: str(tmp_path)})


# ---- The best model ----


@pytest.mark.parametrize("form", ["one", "several"])
def test_best_metric_that_no_evaluation_has(runs, form):
    """Known before the first step, where no code of the caller's adds metrics."""
    wanted, missing = ("eval_short_loss", "loss") if form == "several" else ("entropy", "accuracy")
    eval_dataset = {"short": runs.eval_dataset} if form == "several" else runs.eval_dataset
    for metric in (missing, wanted):
        trainer = runs.ours(
            config_cls=TPUSFTConfig,
            backend="cpu",
            train=False,
            kwargs={"eval_dataset": eval_dataset},
            eval_strategy="steps",
            metric_for_best_model=metric,
        )
        if metric == missing:
            refused([f"metric_for_best_model={metric!r}", wanted, "compute_metrics"], trainer.train)
            assert trainer.state.global_step == 0
        else:
            trainer._check_best_metric()


class Silent(TrainerCallback):
    """Could add a metric to those of an evaluation."""


def test_best_metric_that_is_missing_after_all(runs):
    def train(metric):
        trainer = runs.ours(
            config_cls=TPUSFTConfig,
            backend="cpu",
            train=False,
            kwargs={"callbacks": [Silent()]},
            eval_strategy="steps",
            eval_steps=1,
            max_steps=1,
            metric_for_best_model=metric,
        )
        if metric == "accuracy":
            refused(["metric_for_best_model='accuracy'", "eval_loss", "eval_entropy"], trainer.train)
        else:
            trainer.train()
        assert trainer.state.global_step == 1

    train("accuracy")
    train("entropy")


def test_all_metrics_of_an_evaluation_are_known(runs, tmp_path):
    """One that is not would be refused."""
    of_dataset, of_class = TPUSFTTrainer.evaluation_metrics
    metrics = runs.trainer(SFTTrainer, runs.config(use_cpu=True)).evaluate()
    assert set(metrics) - {"epoch"} <= {f"eval_{name}" for name in (*of_dataset, *of_class)}
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    rows = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4)
    model = AutoModelForCausalLM.from_pretrained(runs.model_dir)
    metrics = Trainer(model, args, default_data_collator, eval_dataset=rows).evaluate()
    of_dataset, of_class = TPUTrainer.evaluation_metrics
    assert set(metrics) - {"epoch"} <= {f"eval_{name}" for name in (*of_dataset, *of_class)}


# ---- torch.compile ----


@pytest.mark.ci
def test_what_compiles_on_other_devices_has_no_effect(runs, same_logs):
    stock = runs.stock(max_steps=3)
    for config in (dict(torch_compile=True), dict(torch_compile_mode="default")):
        trainer = runs.ours(max_steps=3, **config)
        assert trainer.adapted.changes.count("torch_compile has no effect: the step is compiled by XLA") == 1
        same_logs(trainer, stock)


def test_variable_that_compiles_on_other_devices(runs, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    (change,) = [line for line in adapt(runs.config(), Place()).changes if "ACCELERATE_DYNAMO_BACKEND" in line]
    assert "has no effect" in change
    assert not any("DYNAMO" in line for line in adapt(runs.config(), Place()).changes), "it is off by now"


def test_batches_that_one_process_dispatches(runs, same_logs):
    config = dict(accelerator_config={"dispatch_batches": True}, max_steps=3)
    ours = runs.ours(**config)
    assert "dispatch_batches has no effect: one process reads the batches of all chips" in ours.adapted.changes
    assert ours.accelerator.dispatch_batches
    same_logs(ours, runs.stock(**config))


def test_a_batch_that_processes_share(runs, monkeypatch):
    """By which upstream's number of rows in a step, and that of a checkpoint, would be a multiple of the true one."""
    place = Place("cpu", static_shapes=False, traces_steps=False)
    check = lambda **config: adapt(runs.config(**config), place)  # noqa: E731
    check(accelerator_config={"split_batches": True})
    monkeypatch.setattr(SFTConfig, "world_size", 2)
    settings = dict(accelerator_config={"split_batches": True})
    assert "by 2, for the rows of one process" in refusal(check, settings)
    assert_fixes(check, settings, "Leave it out")


# ---- Weights that accelerate splits over processes ----


@pytest.mark.parametrize(
    ("by", "settings", "words"),
    [
        ("fsdp", dict(ema_decay=0.9), ["ema_decay=0.9", "Leave ema_decay out"]),
        ("launched fsdp", dict(ema_decay=0.9), ["ema_decay=0.9", "train without fsdp"]),
        ("fsdp", dict(qat_weight_dtype="int4"), ["qat_weight_dtype='int4'", "Leave qat_weight_dtype out"]),
        ("fsdp", dict(kd_teacher="base"), ["kd_teacher='base'", "hf-tpu cache-teacher", "kd_cache=DIRECTORY"]),
        ("fsdp", dict(show_samples=2), ["show_samples=2", "Leave show_samples out"]),
        ("zero-3", dict(kd_teacher="base"), ["kd_teacher='base'", "zero_stage: 2"]),
        ("zero-3", dict(kd_cache="cache"), ["kd_cache='cache'", "zero_stage: 2"]),
        ("zero-2", dict(ema_decay=0.9), ["ema_decay=0.9", "deepspeed", "Leave ema_decay out"]),
    ],
    ids=str,
)
def test_what_needs_whole_weights_is_refused_before_anything_is_loaded(runs, monkeypatch, by, settings, words):
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    if by == "launched fsdp":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    config = runs.config(TPUSFTConfig, use_cpu=True, **settings)
    config.fsdp = by == "fsdp"
    if "zero" in by:
        config.deepspeed_plugin = SimpleNamespace(zero_stage=int(by[-1]))
    refused(words, lambda: TPUSFTTrainer("no/such/model", config, train_dataset=runs.train_dataset))
    refused(words, lambda: check_recipe(config))


@pytest.mark.parametrize(
    ("by", "settings"),
    [
        ("fsdp", dict(kd_cache="cache", kd_teacher="teacher")),
        ("zero-2", dict(kd_teacher="base", qat_weight_dtype="int4", show_samples=1)),
        ("zero-3", {}),
        (None, dict(ema_decay=0.9)),
    ],
    ids=str,
)
def test_what_accelerate_may_split(runs, monkeypatch, by, settings):
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    config = runs.config(TPUSFTConfig, use_cpu=True, **settings)
    config.fsdp = by == "fsdp"
    if by is not None and "zero" in by:
        config.deepspeed_plugin = SimpleNamespace(zero_stage=int(by[-1]))
    adapt(config, Place(static_shapes=False, split_by=split_by(config)))


def test_processes_that_would_train_by_themselves(tmp_path, monkeypatch):
    """As with stock on a machine without a GPU and without `use_cpu`, where each trains the whole recipe, without a line."""
    args = TPUSFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    check_processes(args)
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Some schedulers set it for a single process.
    check_processes(args)
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="started 2 processes.*Set use_cpu=True"):
        check_processes(args)


def test_settings_of_our_own_that_do_nothing_on_xla_are_named(runs):
    config = dict(config_cls=TPUSFTConfig, train=False, compile_step="step", length_buckets=[24])
    packed = runs.ours(packing=True, **config).adapted.changes
    assert "length_buckets=[24] has no effect with packing=True: all rows are of max_length" in packed
    assert "compile_step=step has no effect: it applies to torch_tpu" in packed
    assert not any(line.startswith("length_buckets") for line in runs.ours(**config).adapted.changes)


def test_a_length_to_pad_to_does_nothing_on_eager_devices(tmp_path):
    eager = Place(name="cpu", static_shapes=False)
    settings = dict(use_cpu=True, bf16=False, report_to="none")
    expected = "max_length=64 has no effect on cpu: batches are padded to their longest row"
    assert expected in adapt(TPUTrainingArguments(str(tmp_path), max_length=64, **settings), eager).changes
    # TRL cuts rows at it.
    for args in (
        TPUTrainingArguments(str(tmp_path), **settings),
        TPUSFTConfig(str(tmp_path), max_length=64, **settings),
    ):
        assert not any("max_length" in line for line in adapt(args, eager).changes)


@pytest.mark.parametrize(("backend", "on"), [("cpu", " on cpu"), (None, "")])
def test_a_recipe_for_gpus_trains_without_one(runs, xla, same_logs, backend, on):
    config = dict(config_cls=TPUSFTConfig, model=str(runs.model_dir), backend=backend or xla.name, max_steps=2)
    for_gpus = dict(
        tf32=True,
        ddp_backend="nccl",
        use_liger_kernel=True,
        activation_offloading=True,
        model_init_kwargs={"attn_implementation": "kernels-community/flash-attn2"},
    )
    try:
        plain = runs.ours(**config)
        ours = runs.ours(**config, **for_gpus)
    finally:
        select_backend(xla.name)
    same_logs(ours, plain, rel=0)
    told = " ".join(ours.adapted.changes)
    for words in ("tf32 has", "use_liger_kernel has", "activation_offloading has", "ddp_backend=nccl has"):
        assert f"{words} no effect{on}: " in told
    assert "attn_implementation=kernels-community/flash-attn2 is replaced by" in told
    assert ours.args.tf32 is None


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_an_optimizer_of_a_package_that_is_missing(runs, monkeypatch, optim):
    """Before the model and the data are loaded. On XLA another one takes its place, or it is refused."""
    monkeypatch.setattr(adaptations, "find_spec", lambda name: None)
    check = lambda **settings: adapt(runs.config(**settings), Place("cpu", static_shapes=False))  # noqa: E731
    assert f"optim='{optim}' is of bitsandbytes" in refusal(check, dict(optim=optim))
    assert_fixes(check, dict(optim=optim), "Or set optim='adamw_torch'")
    check(optim="adamw_torch_8bit")


def test_an_unknown_compile_step(tmp_path):
    refused(
        ["Unknown compile_step='stepp'", "auto, step, layers, off"],
        lambda: TPUSFTConfig(str(tmp_path), compile_step="stepp"),
    )
    # What YAML makes of an unquoted off.
    assert TPUSFTConfig(str(tmp_path), compile_step=False).compile_step == "off"
