"""Settings of upstream that cannot work on any device, refused before a model is loaded."""

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import parse_flag_from_env
from peft import PeftModel
from transformers import AutoConfig, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import OptimizerNames, ParallelMode
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

from ...backends import select_backend
from ...errors import UserError
from ..configs import ExtensionArguments
from .arguments import ADAMW_NAMES, HOST_SCALAR_NAMES


# Those whose class is of `torch.optim`, which takes no negative rate. Adafactor does.
_REFUSE_NEGATIVE_RATES = ADAMW_NAMES | HOST_SCALAR_NAMES - {OptimizerNames.ADAFACTOR}
# Losses of DPO that sort the pairs, that are one number for all of them, or that PyTorch needs as they were.
_NOT_WEIGHTED = {"aot", "aot_unpaired", "hinge", "sft"}
# Settings that read or run whole weights, outside of the forward pass or in one process only.
_WHOLE_WEIGHTS = ("qat_weight_dtype", "kd_teacher", "show_samples", "predict_with_generate")


def check_recipe(args: ExtensionArguments) -> None:
    """
    Refuse what upstream runs into later, before any data is loaded, with a `ValueError` that says what to set instead.
    It is for runs that train with an optimizer of upstream's.
    """
    backend = select_backend("cpu" if args.use_cpu else args.backend, args.num_chips)
    check_settings(args, backend.static_shapes, {"train_dataset": True})
    if not backend.unknown_upstream:
        check_split_by_upstream(args)


def check_processes(args: TrainingArguments) -> None:
    """
    Refuse (`ValueError`) processes of a launcher that accelerate does not let train together: each would train the whole
    recipe by itself, and write the same files.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1 and "LOCAL_RANK" in os.environ and args.world_size == 1:
        raise UserError(
            f"A launcher has started {started} processes, but without a GPU accelerate has each train by itself. Set "
            "use_cpu=True for processes on the CPU to train together, or start the script by python."
        )


def check_split_by_upstream(args: TrainingArguments) -> None:
    """
    Refuse (`ValueError`) settings of this package that do not work where accelerate splits over processes what is trained (FSDP,
    DeepSpeed).
    """
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        return
    if args.deepspeed_plugin is not None:
        by, splits_weights = "deepspeed", args.deepspeed_plugin.zero_stage == 3
    elif args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        by, splits_weights = "fsdp", True
    else:
        return
    settings = vars(args)
    names = ["ema_decay", *(_WHOLE_WEIGHTS if splits_weights else ())]
    if by == "deepspeed" and splits_weights:
        # Its weights are whole in the forward pass alone, and the gradient of a head is computed later.
        names.append("kd_cache")
    elif settings.get("kd_cache") is not None:
        # It is compared with the name of the teacher that has made the cache, and not loaded.
        names = [name for name in names if name != "kd_teacher"]
    for name in names:
        if not settings.get(name):
            continue
        instead = f"Leave {name} out, or train without {by}."
        if name.startswith("kd_") and by == "deepspeed":
            instead = "Set zero_stage: 2 in accelerate's configuration (stage in DeepSpeed's own), or train without deepspeed."
        elif name == "kd_teacher":
            instead = (
                "Make a cache of the teacher first (hf-tpu cache-teacher --kd_teacher MODEL --kd_cache DIRECTORY), then set "
                "kd_cache=DIRECTORY and leave kd_teacher out."
            )
        raise UserError(
            f"{name}={settings[name]!r} does not work with {by}, which splits what is trained over processes. {instead}"
        )


def check_architecture(args: TrainingArguments, given: Mapping[str, Any]) -> None:
    """
    Refuse (`ValueError`) the name of a model whose config.json does not say of which class it is: TRL makes it of that class,
    except for rewards, where the class is always the same. `given` is as for [`check_settings`].
    """
    if isinstance(args, RewardConfig):
        return
    settings = vars(args)
    trusted = (settings.get("model_init_kwargs") or {}).get("trust_remote_code", settings.get("trust_remote_code"))
    for name in ("model", "teacher_model"):
        model = given.get(name)
        if not isinstance(model, str):
            continue
        config = AutoConfig.from_pretrained(model, trust_remote_code=trusted)
        if not config.architectures:
            example = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "LlamaForCausalLM")
            raise UserError(
                f"config.json of {model} has no `architectures`, by which TRL chooses the class of the model. Add it, for "
                f'example "architectures": ["{example}"], or load the model yourself: '
                f'{name}=AutoModelForCausalLM.from_pretrained("{model}").'
            )


def check_settings(args: TrainingArguments, static_shapes: bool, given: Mapping[str, Any]) -> None:
    """
    Refuse (`ValueError`) what upstream runs into later, with a traceback. What upstream takes is taken.
    `static_shapes` is whether batches keep to declared shapes; `given` has what the trainer was given, by the names of
    [`~transformers.Trainer`].
    """
    if given.get("train_dataset") is not None:
        _check_step(args, static_shapes)
        own_optimizer = given.get("optimizers", (None,))[0] or given.get("optimizer_cls_and_kwargs")
        if not own_optimizer and args.learning_rate < 0 and args.optim in _REFUSE_NEGATIVE_RATES:
            raise UserError(
                f"learning_rate={args.learning_rate} is negative, which optim={OptimizerNames(args.optim).value} does not "
                "take. Set a rate above 0, for example learning_rate=2e-5."
            )
    if args.eval_strategy != IntervalStrategy.NO and args.per_device_eval_batch_size < 1:
        raise UserError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} is not positive, and eval_strategy asks for "
            "evaluations. Set it to 1 or more, for example per_device_eval_batch_size=8."
        )
    _check_max_length(args, static_shapes)
    _check_preference_loss(args, given)
    _check_integrations(args.report_to)


def _check_step(args: TrainingArguments, static_shapes: bool) -> None:
    if args.per_device_train_batch_size < 1:
        raise UserError(
            f"per_device_train_batch_size={args.per_device_train_batch_size} is not positive. Set it to 1 or more, for "
            "example per_device_train_batch_size=8."
        )
    # Upstream takes a negative number for no steps at all.
    if args.gradient_accumulation_steps == 0 or (static_shapes and args.gradient_accumulation_steps < 0):
        raise UserError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} is not positive. Set it to 1 to update the "
            "weights after every batch, or to more, for example gradient_accumulation_steps=4."
        )


def _check_max_length(args: TrainingArguments, static_shapes: bool) -> None:
    max_length = vars(args).get("max_length")
    if max_length is None or max_length > 0:
        return
    # An eager device takes a negative one of TRL for so many tokens to leave out at the end of each row.
    if max_length == 0 or static_shapes or not isinstance(args, SFTConfig) or args.packing:
        raise UserError(
            f"max_length={max_length} is not positive. Set it to the longest sequence that you want to keep, in tokens, for "
            "example max_length=1024."
        )


def _check_preference_loss(args: TrainingArguments, given: Mapping[str, Any]) -> None:
    if isinstance(args, KTOConfig):
        allowed = KTOConfig.__dataclass_fields__["loss_type"].metadata["choices"]
        if args.loss_type not in allowed:
            raise UserError(f"Unknown loss_type={args.loss_type!r} of KTO. Allowed: {', '.join(allowed)}.")
    if isinstance(args, DPOConfig) and args.use_weighting and (found := _NOT_WEIGHTED & set(args.loss_type)):
        raise UserError(
            f"use_weighting=True does not work with loss_type={sorted(found)[0]!r}, whose values for the pairs of a batch it "
            "cannot multiply by their weights. Take that loss out of loss_type, or set use_weighting=False."
        )
    if not vars(args).get("sync_ref_model"):
        return
    if given.get("peft_config") is not None or isinstance(given.get("model"), PeftModel):
        raise UserError(
            "sync_ref_model=True needs a reference model, and with LoRA the reference is the model without the adapter. Set "
            "sync_ref_model=False, or train all weights."
        )
    if args.ref_model_sync_steps < 1:
        raise UserError(
            f"ref_model_sync_steps={args.ref_model_sync_steps} is not positive. Set it to 1 or more, for example "
            "ref_model_sync_steps=512, or set sync_ref_model=False."
        )


def _check_integrations(report_to: list[str] | None) -> None:
    # What is not known at all is named well by upstream.
    asked = [name for name in report_to or () if name in INTEGRATION_TO_CALLBACK]
    absent = set(asked) - set(get_available_reporting_integrations()) if asked else ()
    for name in sorted(absent):
        try:
            # It knows its package.
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"report_to={name}: {error} Or leave it out of report_to; report_to=none trains without any."
            ) from error
