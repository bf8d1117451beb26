"""Upstream's arguments, changed where the compiled path needs something else. The caller's object is not touched."""

import copy
import os
from dataclasses import dataclass, field

import torch
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames
from trl import SFTConfig

from ...backends.base import Backend
from ...errors import UserError
from ...quantization.bitsandbytes import check_method
from ...sharding import parse_mesh
from ...step.attention import attention_to_load_with
from ..configs import NO_DEEPSPEED, ExtensionArguments


#: AdamW in its several implementations: all become [`LazyAdamW`].
ADAMW_NAMES = {OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED, OptimizerNames.ADAMW_TORCH_XLA}
# Options of `fsdp_config`, and the values, in lower case, that say what is done anyway.
_FSDP_AS_IS = {
    "version": ("1", "2"),
    "xla": ("true", "false"),
    "xla_fsdp_v2": ("true", "false"),
    "xla_fsdp_grad_ckpt": ("false",),
    "reshard_after_forward": ("true", "full_shard"),
    "activation_checkpointing": ("false",),
    "cpu_offload": ("false",),
    "cpu_ram_efficient_loading": ("false",),
    "min_num_params": ("0",),
    "state_dict_type": ("full_state_dict",),
    "sync_module_states": ("true",),
    "use_orig_params": ("true",),
}
_FSDP_INSTEAD = {
    "activation_checkpointing": ", and set gradient_checkpointing=True",
    "xla_fsdp_grad_ckpt": ", and set gradient_checkpointing=True",
    "cpu_offload": ", and set fsdp='full_shard'",
    "reshard_after_forward": ", and set fsdp='full_shard'; for weights that are sharded within groups of chips, also set "
    "mesh='data=2,fsdp=4'",
    "state_dict_type": ": checkpoints hold full tensors, in the plain Hugging Face form",
}
#: Optimizers that take their learning rate as a Python number.
HOST_SCALAR_NAMES = {OptimizerNames.SGD, OptimizerNames.ADAGRAD, OptimizerNames.RMSPROP, OptimizerNames.ADAFACTOR}


def copy_arguments(args: TrainingArguments) -> TrainingArguments:
    """Copy arguments, and those of their values that upstream's trainers change in place."""
    args = copy.copy(args)
    args.accelerator_config = copy.copy(args.accelerator_config)
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "model_init_kwargs"):
        if isinstance(vars(args).get(name), dict):
            setattr(args, name, dict(vars(args)[name]))
    return args


@dataclass
class CompiledArguments:
    """
    Arguments for the compiled path: a changed copy of the caller's, with one line in `changes` for each setting that
    was replaced or has no effect.

    A `compute_dtype` of `None` is that of the weights. The others are as in [`ExtensionArguments`].
    """

    args: TrainingArguments
    compute_dtype: torch.dtype | None = None
    changes: list[str] = field(default_factory=list)
    mesh: str | None = None
    show_sharding: bool = False
    step_replay: bool | None = None
    rematerialization: str = "none"
    scan_layers: str = "auto"
    attention: str = "auto"


def bind_device(args: TrainingArguments, backend: Backend) -> None:
    """
    Point arguments, and the accelerate state that goes with them, to the backend's device.

    Upstream fixes the device when the arguments are made, which may have been before the backend was chosen, and has
    no name for an XLA device other than its own XLA branches, which are switched off.
    """
    if backend.unknown_upstream:
        AcceleratorState._reset_state(reset_partial_state=True)
        # Before, for accelerate to find those that have met. It exchanges on the host what the trainers do not.
        several = backend.ranks.count > 1
        args.distributed_state = PartialState(cpu=True)
        args.distributed_state.device = backend.device
        if several:
            # Accelerate names the device by the process's number on its machine, and each of these has but the first.
            vars(args.distributed_state)["wait_for_everyone"] = torch.distributed.barrier
        else:
            # Of hosts one logs and saves. There are not several to divide batches between: each has the batch of all chips.
            args.distributed_state.process_index = args.distributed_state.local_process_index = backend.hosts.index
        args._n_gpu = 0
        # `TrainingArguments.device` is a cached property of this name.
        vars(args)["_setup_devices"] = backend.device
    elif args.device.type != backend.device.type:
        args.use_cpu = backend.device.type == "cpu"
        del vars(args)["_setup_devices"]
        assert args.device.type == backend.device.type


def compile_arguments(
    args: TrainingArguments, loads_model: bool, num_chips: int, traced: bool = True
) -> CompiledArguments:
    """
    Adapt arguments to a device that compiles. A setting that has no equivalent there is a `ValueError`. `loads_model` is
    whether the trainer loads the model by its name, or a reference, with `model_init_kwargs`; `traced` is whether a step is
    one traced program.
    """
    adapted = CompiledArguments(copy_arguments(args))
    if args.save_on_each_node:
        adapted.args.save_on_each_node = False
        adapted.changes.append("save_on_each_node has no effect: the first host writes for all")
    _precision(adapted)
    _optimizer(adapted, traced)
    if traced:
        _activation_checkpointing(adapted)
        if isinstance(args, ExtensionArguments) and args.compile_step in ("step", "layers"):
            adapted.changes.append(f"compile_step={args.compile_step} has no effect: it applies to torch_tpu")
    _kernels(adapted)
    _distribution(adapted, num_chips)
    if not traced:
        _untraced_settings(adapted)
    _memory_savings(adapted)
    if isinstance(args, SFTConfig):
        _supervised(adapted)
    if loads_model and "model_init_kwargs" in vars(args):
        _model_loading(adapted, traced)
    # Pinned host memory is for CUDA transfers.
    adapted.args.dataloader_pin_memory = False
    # Upstream's loop would read the loss of every micro-step; [`LossLog`] filters on the device.
    adapted.args.logging_nan_inf_filter = False
    return adapted


def _precision(adapted: CompiledArguments) -> None:
    args = adapted.args
    if args.fp16:
        raise UserError("fp16=True does not work on XLA: TPUs compute in bfloat16. Set bf16=True and fp16=False.")
    if args.fp16_full_eval:
        raise UserError(
            "fp16_full_eval=True does not work on XLA. Leave it out: evaluation computes as training does."
        )
    if args.bf16_full_eval:
        args.bf16_full_eval = False
        adapted.changes.append("bf16_full_eval has no effect: with bf16=True, evaluation already computes in bfloat16")
    if args.bf16:
        adapted.compute_dtype = torch.bfloat16
        # Left on, accelerate would set XLA_USE_BF16=1 on a TPU, which turns every float32 tensor into bfloat16: weights,
        # Adam moments, loss sums. It reads the derived `mixed_precision`, so both are switched off.
        args.bf16 = False
        args.mixed_precision = "no"
    for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(variable, "0") == "1":
            raise UserError(
                f"{variable}=1 turns weights and optimizer state into bfloat16. Unset it and use bf16=True, which keeps "
                "float32 weights and computes in bfloat16."
            )
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
        adapted.changes.append("ACCELERATE_MIXED_PRECISION has no effect: the recipe's bf16 decides")


def _optimizer(adapted: CompiledArguments, traced: bool) -> None:
    args = adapted.args
    if not traced and args.optim in (ADAMW_NAMES - {OptimizerNames.ADAMW_TORCH_XLA}) | HOST_SCALAR_NAMES:
        return
    if args.optim in ADAMW_NAMES:
        if args.optim != OptimizerNames.ADAMW_TORCH:
            adapted.changes.append(
                f"optim={OptimizerNames(args.optim).value} is replaced by AdamW with the same update inside the "
                "step's graph"
            )
            args.optim = OptimizerNames.ADAMW_TORCH
    elif args.optim in HOST_SCALAR_NAMES:
        adapted.changes.append(
            f"optim={OptimizerNames(args.optim).value} passes its learning rate as a Python number: a rate of exactly 0 "
            "or 1 recompiles; optim=adamw_torch never does"
        )
    else:
        allowed = sorted(name.value for name in ADAMW_NAMES | HOST_SCALAR_NAMES)
        raise UserError(
            f"optim={OptimizerNames(args.optim).value} does not run on XLA (it needs custom kernels or "
            f"device-to-host syncs). Allowed: {', '.join(allowed)}."
        )


def _activation_checkpointing(adapted: CompiledArguments) -> None:
    args = adapted.args
    kwargs = dict(args.gradient_checkpointing_kwargs or {})
    unsupported = [key for key in ("selective", "offload", "context_fn") if kwargs.get(key)]
    if args.gradient_checkpointing and unsupported:
        raise UserError(
            f"gradient_checkpointing_kwargs={kwargs} has {', '.join(unsupported)}, which has no equivalent on XLA. Leave it out: "
            "whole layers are checkpointed ('every_n_layers' is supported), or what rematerialization names."
        )
    if isinstance(args, ExtensionArguments):
        adapted.scan_layers, adapted.attention = args.scan_layers, args.attention
    asked = args.rematerialization if isinstance(args, ExtensionArguments) else None
    adapted.rematerialization = asked or ("full" if args.gradient_checkpointing else "none")
    set_gradient_checkpointing(args, adapted.rematerialization in ("full", "dots"))


def _untraced_settings(adapted: CompiledArguments) -> None:
    """Refuse, or name, what only traced programs have. Gradient checkpointing is PyTorch's own."""
    args = adapted.args
    # Steps are run as they are.
    adapted.step_replay = False
    adapted.rematerialization = "full" if args.gradient_checkpointing else "none"
    if not isinstance(args, ExtensionArguments):
        return
    if args.rematerialization == "dots":
        raise UserError(
            "rematerialization='dots' does not work with torch_tpu, where layers are checkpointed as a whole. Set "
            "rematerialization='full' or rematerialization='none'."
        )
    if args.rematerialization is not None:
        adapted.rematerialization = args.rematerialization
        set_gradient_checkpointing(args, args.rematerialization == "full")
    if args.attention == "splash":
        raise UserError(
            "attention='splash' does not work with torch_tpu. Leave it out: attn_implementation chooses the attention there, and "
            "'sdpa', the default, is torch_tpu's flash kernel."
        )
    named = {
        "attention": None if args.attention == "auto" else args.attention,
        "scan_layers": "on" if args.scan_layers == "on" else None,
        "step_replay": args.step_replay or None,
    }
    reason = "steps are not traced by torch_tpu"
    adapted.changes += [
        f"{name}={value} has no effect: {reason}" for name, value in named.items() if value is not None
    ]


def set_gradient_checkpointing(args: TrainingArguments, value: bool) -> None:
    """Say whether layers are checkpointed, under both of upstream's names."""
    # The second is the name of the first from transformers 5.23 on.
    for name in {"gradient_checkpointing", "activation_checkpointing"} & set(vars(args)):
        setattr(args, name, value)


def _kernels(adapted: CompiledArguments) -> None:
    args = adapted.args
    for name, why in (
        ("torch_compile", "the step is compiled by XLA"),
        ("use_liger_kernel", "its kernels are for GPUs"),
    ):
        if vars(args)[name]:
            setattr(args, name, False)
            adapted.changes.append(f"{name} has no effect: {why}")
    # Upstream compiles by these two, whatever `torch_compile` says.
    args.torch_compile_backend = args.torch_compile_mode = None
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = "no"
        adapted.changes.append("ACCELERATE_DYNAMO_BACKEND has no effect: the step is compiled by XLA")
    if args.torch_empty_cache_steps is not None:
        args.torch_empty_cache_steps = None
        adapted.changes.append("torch_empty_cache_steps has no effect on XLA")


def _distribution(adapted: CompiledArguments, num_chips: int) -> None:
    args = adapted.args
    if args.deepspeed:
        raise UserError(NO_DEEPSPEED)
    if isinstance(args, ExtensionArguments):
        adapted.mesh, adapted.show_sharding = args.mesh, args.show_sharding
        adapted.step_replay = args.step_replay
    if not args.fsdp:
        return
    for name, value in (args.fsdp_config or {}).items():
        if str(value).lower() not in _FSDP_AS_IS.get(name, ()):
            raise UserError(
                f"fsdp_config has {name}={value!r}, which has no equivalent on XLA: the compiler gathers a layer's sharded weights where "
                f"it needs them. Leave {name} out{_FSDP_INSTEAD.get(name, '')}."
            )
    if adapted.mesh is not None and parse_mesh(adapted.mesh).get("fsdp", 1) == 1:
        raise UserError(
            f"fsdp shards the weights, and mesh={adapted.mesh!r} replicates them. Leave fsdp out, or leave mesh out."
        )
    adapted.mesh = adapted.mesh or "fsdp"
    if num_chips == 1:
        adapted.changes.append("fsdp has no effect on one chip")
    # Upstream would wrap the model for torch.distributed, or for torch_xla in a way that makes no optimizer.
    args.fsdp = None
    args.fsdp_plugin_args = None
    args.fsdp_config = {**(args.fsdp_config or {}), "xla": False, "xla_fsdp_v2": False}


def _memory_savings(adapted: CompiledArguments) -> None:
    # Of TRL's configs, and not of all of them.
    args = adapted.args
    if vars(args).get("activation_offloading"):
        args.activation_offloading = False
        adapted.changes.append("activation_offloading has no effect on XLA; gradient_checkpointing saves memory there")
    if vars(args).get("padding_free"):
        args.padding_free = False
        adapted.changes.append(
            "padding_free is replaced by padding to a static length (same loss); "
            + ("packing=True avoids padding" if "packing" in vars(args) else "length_buckets pad less")
        )


def _supervised(adapted: CompiledArguments) -> None:
    if adapted.args.max_length is None:
        raise UserError(
            "max_length=None does not work on XLA, where every new length recompiles the step. Set max_length to the longest "
            "sequence that you want to keep, in tokens, for example max_length=1024."
        )


def _model_loading(adapted: CompiledArguments, traced: bool) -> None:
    args = adapted.args
    model_init_kwargs = dict(args.model_init_kwargs or {})
    attention, replaced = attention_to_load_with(model_init_kwargs.get("attn_implementation"), traced)
    adapted.changes += replaced
    if isinstance(model_init_kwargs.get("device_map"), (str, dict)):
        adapted.changes.append("device_map has no effect: mesh decides placement")
    if model_init_kwargs.get("quantization_config") is not None:
        check_method(model_init_kwargs["quantization_config"])
    # "auto" placement would hand the model to accelerate's dispatcher.
    args.model_init_kwargs = {**model_init_kwargs, "attn_implementation": attention, "device_map": None}
