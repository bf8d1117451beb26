"""Settings that a message refuses are accepted once they are changed as the message says."""

from types import SimpleNamespace

import pytest
from accelerate.parallelism_config import ParallelismConfig
from fixes import assert_fixes
from transformers import TrainingArguments
from transformers.training_args import ParallelMode
from trl import DPOConfig, KTOConfig

from hf_tpu_ext import TPUGRPOConfig, TPUSFTConfig, TPUTrainingArguments, trainers
from hf_tpu_ext.data.buckets import percentile_buckets, validate_buckets
from hf_tpu_ext.sharding.mesh import resolve_mesh
from hf_tpu_ext.trainers.checks.field_answers import Place, split_by
from hf_tpu_ext.trainers.checks.fields import LOSSES, adapt
from hf_tpu_ext.trainers.checks.settings import check_processes
from hf_tpu_ext.trainers.checks.upstream import overrides_loss
from hf_tpu_ext.trainers.online.arguments import count_rows_of_chips
from hf_tpu_ext.trainers.run.lengths import declare_lengths, lengths_for


LEAVE_OUT = "eave it out"


# ---- Configs: what is refused when they are made ----


@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (dict(backend="xla", use_cpu=True), ["Set backend='cpu'", "or use_cpu=False"]),
        (dict(deepspeed="zero3.json"), [LEAVE_OUT, "Leave it out of the recipe; mesh='fsdp'"]),
        (dict(deepspeed="zero3.json", backend="cpu"), ["leave deepspeed out"]),
        (dict(mesh="model"), ["Set mesh='data' (weights replicated), mesh='fsdp'"]),
        (dict(mesh="data=2,data=4"), ["mesh='data=2,fsdp=4' (both)"]),
        (dict(mesh="fsdp=0"), ["Set mesh='data' (weights replicated), mesh='fsdp'"]),
        (dict(mesh="data,fsdp"), ["mesh='data=2,fsdp=4' (both)"]),
        (dict(max_recompiles=-1), ["Set it to 0", LEAVE_OUT]),
        (dict(image_tokens=0), ["for example image_tokens=256", "leave it out"]),
        (dict(scan_layers="yes"), ["Allowed: auto, on, off"]),
        (dict(compile_step="all"), ["Allowed: auto, step, layers, off"]),
        (dict(attention="flash"), ["Allowed: auto, splash, slices"]),
        (dict(ema_eval=True), ["Set ema_decay, for example ema_decay=0.999", "leave ema_eval out"]),
        (dict(ema_warmup=True), ["ema_decay=0.999", "leave ema_warmup out"]),
        (dict(ema_decay=1.0), ["Set it to 0.999", LEAVE_OUT]),
        (dict(show_samples=-1), ["for example show_samples=4", LEAVE_OUT]),
        (dict(kd_alpha=1.5, kd_cache="cache"), ["for example kd_alpha=0.5"]),
        (dict(kd_temperature=0.0, kd_cache="cache"), ["set kd_temperature=1.0"]),
        (dict(kd_top_k=0, kd_teacher="teacher"), ["Set it to 1", "for example kd_top_k=128", LEAVE_OUT]),
        (dict(kd_loss="kl", kd_teacher="teacher"), ["Allowed: forward_kl, reverse_kl, jsd"]),
        (
            dict(kd_beta=0.0, kd_loss="jsd", kd_teacher="teacher"),
            ["for example kd_beta=0.5", "leave kd_beta out and set kd_loss='forward_kl' or kd_loss='reverse_kl'"],
        ),
        (
            dict(
                load_best_model_at_end=True, eval_strategy="steps", eval_steps=20, save_strategy="steps", save_steps=25
            ),
            ["Set save_steps=20"],
        ),
        (dict(kd_beta=0.3, kd_teacher="teacher"), ["Set kd_loss='jsd'", "leave kd_beta out"]),
        (dict(kd_preload=True, kd_teacher="teacher"), ["Set kd_cache=DIRECTORY", "leave kd_preload out"]),
        (dict(kd_teacher="teacher", loss_type="dft"), ["Leave loss_type and label_smoothing_factor out"]),
        (dict(kd_teacher="teacher", label_smoothing_factor=0.1), ["Leave loss_type and label_smoothing_factor out"]),
        (dict(qat_weight_dtype="int9"), ["Allowed: int2, int3, int4, int5, int6, int7, int8"]),
        (dict(qat_weight_dtype="int4", qat_activation_dtype="int4"), ["Allowed: int8", LEAVE_OUT]),
        (dict(qat_weight_dtype="int4", qat_adapters="within"), ["Allowed: inside, beside"]),
        (dict(qat_weight_dtype="int4", qat_scale="mean"), ["Allowed: max, mse"]),
        (dict(qat_weight_dtype="int4", qat_group_size=1), ["set qat_group_size=32"]),
        (
            dict(qat_weight_dtype="int4", qat_fake_quant_after_n_steps=-1),
            ["for example qat_fake_quant_after_n_steps=100", LEAVE_OUT],
        ),
        (dict(generation_max_new_tokens=0), ["for example generation_max_new_tokens=128"]),
        (
            dict(generation_max_new_tokens=64),
            ["Set predict_with_generate=True", "leave generation_max_new_tokens out"],
        ),
        (dict(backend="gpu"), ["Allowed: auto"]),
    ],
    ids=str,
)
def test_config(runs, settings, fixes):
    assert_fixes(lambda **config: runs.config(TPUSFTConfig, **config), settings, *fixes)


OF_A_TEACHER = {
    **dict(kd_alpha=0.7, kd_temperature=2.0, kd_top_k=8, kd_loss="jsd", kd_preload=True),
}
OF_ROUNDING = dict(
    qat_group_size=64,
    qat_scale="mse",
    qat_activation_dtype="int8",
    qat_quantize_embedding=True,
    qat_fake_quant_after_n_steps=2,
    qat_adapters="beside",
)


@pytest.mark.parametrize("name", [*OF_A_TEACHER, *OF_ROUNDING])
def test_setting_without_the_one_that_it_belongs_to(runs, name):
    needs = (
        "for example qat_weight_dtype='int4'" if name in OF_ROUNDING else "Set kd_teacher=MODEL or kd_cache=DIRECTORY"
    )
    settings = {name: {**OF_A_TEACHER, **OF_ROUNDING}[name]}
    assert_fixes(lambda **config: runs.config(TPUSFTConfig, **config), settings, needs, f"leave {name} out")


def test_length_of_prompts(runs):
    assert_fixes(
        lambda **config: TPUGRPOConfig(str(runs.output_dir), bf16=False, **config),
        dict(max_prompt_length=0),
        "for example max_prompt_length=256",
        LEAVE_OUT,
    )
    assert_fixes(
        lambda **config: TPUGRPOConfig(str(runs.output_dir), bf16=False, **config),
        dict(share_prompts="yes"),
        "Allowed: auto, on, off",
    )


# ---- What XLA, or torch_tpu, has no equivalent of ----


@pytest.mark.parametrize("traced", [True, False], ids=["torch_xla", "torch_tpu"])
@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (dict(fp16=True), ["Set bf16=True and fp16=False"]),
        (dict(parallelism_config=ParallelismConfig()), [LEAVE_OUT]),
        (dict(XLA_USE_BF16="1"), ["Unset it and use bf16=True"]),
        (dict(XLA_DOWNCAST_BF16="1"), ["Unset it and use bf16=True"]),
        (dict(optim="ademamix_8bit"), ["Allowed: adafactor, adagrad, adamw_torch, adamw_torch_fused"]),
        (dict(fsdp="full_shard", mesh="data"), ["Leave fsdp out", "leave mesh out"]),
        (dict(fsdp="full_shard", limit_all_gathers=True), ["Leave limit_all_gathers out"]),
        (
            dict(fsdp="full_shard", activation_checkpointing=True),
            ["Leave activation_checkpointing out, and set gradient_checkpointing=True"],
        ),
        (
            dict(fsdp="shard_grad_op"),
            [
                "Leave reshard_after_forward out, and set fsdp='full_shard'",
                "set fsdp='full_shard'; for weights that are sharded within groups of chips, also set mesh='data=2,fsdp=4'",
            ],
        ),
        (dict(fsdp="offload"), ["Leave cpu_offload out, and set fsdp='full_shard'"]),
        (dict(fsdp="full_shard", state_dict_type="SHARDED_STATE_DICT"), ["Leave state_dict_type out"]),
        (dict(max_length=None), ["for example max_length=1024"]),
    ],
    ids=str,
)
def test_arguments_of_a_device_that_compiles(runs, monkeypatch, settings, fixes, traced):
    if "fsdp" in settings and not traced:
        pytest.skip("torch_tpu refuses it in any case: test_torch_tpu_fixes.py")

    def check(**config):
        for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
            monkeypatch.setenv(name, config.pop(name, "0"))
        of_fsdp = {
            name: config.pop(name)
            for name in set(config) - (TPUSFTConfig.__dataclass_fields__.keys() - {"activation_checkpointing"})
        }
        if of_fsdp:
            config["fsdp_config"] = of_fsdp
        adapt(runs.config(TPUSFTConfig, **config), Place(traces_steps=traced, chips=8))

    assert_fixes(check, settings, *fixes)


@pytest.mark.parametrize(
    ("settings", "traced", "fixes"),
    [
        (dict(gradient_checkpointing_kwargs={"selective": True}), True, [LEAVE_OUT]),
        (dict(rematerialization="dots"), False, ["Set rematerialization='full' or rematerialization='none'"]),
        (dict(attention="splash"), False, [LEAVE_OUT]),
    ],
    ids=str,
)
def test_arguments_of_one_of_both(runs, settings, traced, fixes):
    def check(**config):
        adapt(runs.config(TPUSFTConfig, **config), Place(traces_steps=traced, chips=8))

    assert_fixes(check, settings, *fixes)


# ---- What no device takes ----


@pytest.mark.parametrize(
    ("cls", "settings", "fixes"),
    [
        (TPUSFTConfig, dict(per_device_train_batch_size=0), ["Set it to 1", "example per_device_train_batch_size=8"]),
        (
            TPUSFTConfig,
            dict(per_device_eval_batch_size=0, eval_strategy="epoch"),
            ["Set it to 1", "example per_device_eval_batch_size=8"],
        ),
        (
            TPUSFTConfig,
            dict(gradient_accumulation_steps=0),
            ["Set it to 1", "example gradient_accumulation_steps=4"],
        ),
        (TPUSFTConfig, dict(max_length=-5), ["example max_length=1024"]),
        (TPUSFTConfig, dict(learning_rate=-1e-3), ["for example learning_rate=2e-5"]),
        (TPUSFTConfig, dict(output_dir="gs://bucket/runs"), ["example output_dir=/mnt/bucket/runs"]),
        (TPUSFTConfig, dict(report_to="wandb"), ["leave it out of report_to", "report_to=none"]),
        (KTOConfig, dict(loss_type="sigmoid"), ["Allowed: kto, apo_zero_unpaired"]),
        (DPOConfig, dict(loss_type="sigmod"), ["Allowed: sigmoid, hinge, ipo"]),
        (DPOConfig, dict(loss_type=["sigmoid", "sigmod"]), ["Allowed: sigmoid, hinge, ipo"]),
        (DPOConfig, dict(use_weighting=True, loss_type="hinge"), ["set use_weighting=False"]),
        (DPOConfig, dict(use_weighting=True, loss_type=["sft", "sigmoid"]), ["set use_weighting=False"]),
        (DPOConfig, dict(sync_ref_model=True, peft_config="lora"), ["Set sync_ref_model=False"]),
        (
            DPOConfig,
            dict(sync_ref_model=True, ref_model_sync_steps=0),
            ["Set it to 1", "for example ref_model_sync_steps=512", "set sync_ref_model=False"],
        ),
    ],
    ids=str,
)
def test_setting_of_upstream(runs, cls, settings, fixes):
    def check(peft_config=None, **config):
        given = {"train_dataset": runs.train_dataset, "peft_config": peft_config}
        adapt(runs.config(cls, **config), Place(), given)

    assert_fixes(check, settings, *fixes)


@pytest.mark.parametrize("config", LOSSES)
def test_names_of_losses(runs, config):
    """A trainer with code of its own for the loss may know other names."""
    ours = vars(trainers)[f"TPU{config.__name__.removesuffix('Config')}Trainer"]

    class Theirs(ours):
        def _compute_loss(self, model, inputs): ...

    def check(loss_type, cls=ours):
        adapt(
            config(str(runs.output_dir), bf16=False, loss_type=loss_type), Place(), overrides_loss=overrides_loss(cls)
        )

    assert_fixes(check, dict(loss_type="sigmod"), f"Allowed: {', '.join(LOSSES[config])}")
    check("sigmod", Theirs)


@pytest.mark.parametrize(
    ("by", "settings", "fixes"),
    [
        ("fsdp", dict(ema_decay=0.9), ["Leave ema_decay out", "train without fsdp"]),
        ("fsdp", dict(show_samples=2), ["Leave show_samples out"]),
        ("fsdp", dict(predict_with_generate=True), ["Leave predict_with_generate out"]),
        ("fsdp", dict(qat_weight_dtype="int4"), ["Leave qat_weight_dtype out"]),
        ("fsdp", dict(kd_teacher="teacher"), ["set kd_cache=DIRECTORY and leave kd_teacher out"]),
        ("zero-3", dict(kd_teacher="teacher"), ["Set zero_stage: 2", "train without deepspeed"]),
        ("zero-2", dict(ema_decay=0.9), ["Leave ema_decay out", "train without deepspeed"]),
    ],
    ids=str,
)
def test_weights_that_accelerate_splits(runs, monkeypatch, by, settings, fixes):
    """Without FSDP or DeepSpeed nothing of it is looked at."""
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)

    def check(zero_stage=None, fsdp=None, **config):
        config = runs.config(TPUSFTConfig, use_cpu=True, **config)
        config.fsdp = fsdp
        config.deepspeed_plugin = zero_stage and SimpleNamespace(zero_stage=zero_stage)
        adapt(config, Place(static_shapes=False, split_by=split_by(config)))

    split = {"fsdp": True} if by == "fsdp" else {"zero_stage": int(by[-1])}
    without = [fix for fix in fixes if fix.startswith("train without")]
    assert_fixes(check, {**split, **settings}, *(fix for fix in fixes if fix not in without))
    check(**settings)


def test_processes_without_a_gpu(runs, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")

    def check(use_cpu=False):
        # What accelerate makes of it.
        args = SimpleNamespace(world_size=2 if use_cpu else 1)
        check_processes(args)

    assert_fixes(check, {}, "Set use_cpu=True")


# ---- Lengths and meshes ----


@pytest.mark.parametrize(
    ("check", "settings", "fixes"),
    [
        (
            lambda length_buckets=4: percentile_buckets([3, 9, 20], length_buckets, 48),
            dict(length_buckets=0),
            ["Set `length_buckets` to 1", "leave it out"],
        ),
        (
            lambda length_buckets=(48,), max_length=48: validate_buckets(length_buckets, max_length),
            dict(length_buckets=[]),
            ["for example `length_buckets=[12, 24, 48]"],
        ),
        (
            lambda length_buckets=(48,), max_length=48: validate_buckets(length_buckets, max_length),
            dict(length_buckets=[8.5, 24]),
            ["for example `length_buckets=[12, 24, 48]"],
        ),
        (
            lambda length_buckets=(48,), max_length=48: validate_buckets(length_buckets, max_length),
            dict(length_buckets=[24, 64]),
            ["set `max_length=64"],
        ),
        (
            lambda length_buckets: declare_lengths(length_buckets, 48, None, 4, "random"),
            dict(length_buckets=[4]),
            ["for example length_buckets=[12, 24, 48]"],
        ),
        (
            # A stream, whose rows no setting truncates.
            lambda length_buckets: lengths_for(
                TPUTrainingArguments(length_buckets=length_buckets), None, iter(()), None, 4
            ),
            dict(length_buckets=[4]),
            ["for example length_buckets=[256, 512, 1024]"],
        ),
        (
            lambda mesh, num_chips=8: resolve_mesh(mesh, num_chips),
            dict(mesh="data=4"),
            [
                "Set mesh to one of 'data=8,fsdp=1', 'data=4,fsdp=2', 'data=2,fsdp=4', 'data=1,fsdp=8'",
                "set num_chips=4",
            ],
        ),
        (
            lambda mesh, num_chips=8: resolve_mesh(mesh, num_chips),
            dict(mesh="data=4,fsdp=4"),
            ["Set mesh to one of 'data=8,fsdp=1'"],
        ),
        (
            # No host can be cut to three.
            lambda mesh, num_chips=8: resolve_mesh(mesh, num_chips),
            dict(mesh="fsdp=3"),
            ["Set mesh to one of 'data=8,fsdp=1', 'data=4,fsdp=2', 'data=2,fsdp=4', 'data=1,fsdp=8'."],
        ),
    ],
)
def test_lengths_and_meshes(check, settings, fixes):
    assert_fixes(check, settings, *fixes)


def test_lengths_of_a_stream_are_the_buckets():
    args = TPUTrainingArguments(length_buckets=[16, 32])
    assert lengths_for(args, None, iter(()), None, batch_size=4) == [16, 32]


@pytest.mark.parametrize(
    ("settings", "fixes"),
    [
        (
            dict(generation_batch_size=6),
            ["for example generation_batch_size=4", "leave it out and set steps_per_generation"],
        ),
        (dict(num_generations=3), ["Set steps_per_generation=3"]),
        (dict(per_device_eval_batch_size=6, eval_strategy="epoch"), ["Set per_device_eval_batch_size=4"]),
    ],
    ids=str,
)
def test_rows_of_a_generation(runs, settings, fixes):
    def check(**config):
        config = {"per_device_train_batch_size": 4, "num_generations": 4, "bf16": False, **config}
        count_rows_of_chips(TPUGRPOConfig(str(runs.output_dir), **config), 1)

    assert_fixes(check, settings, *fixes)
