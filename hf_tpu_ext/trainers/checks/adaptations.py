"""Fields whose equivalent on XLA is more than another value: what becomes of them."""

import os
from importlib.util import find_spec

import torch
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames
from transformers.utils.generic import is_flash_attention_requested

from ...errors import UserError
from ...layers.attention import attention_to_load_with
from ...quantization.bitsandbytes import check_method
from ...sharding import parse_mesh
from ..configs import ExtensionArguments
from .field_answers import Run


#: What trains in the place of optimizers whose state has few bits, or is kept on the host, and whose update is that of PyTorch's.
FULL_STATE_NAMES = {
    OptimizerNames.ADAMW_BNB: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_8BIT: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.PAGED_ADAMW: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.PAGED_ADAMW_8BIT: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_4BIT: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.ADAMW_TORCH_8BIT: OptimizerNames.ADAMW_TORCH,
    OptimizerNames.RMSPROP_BNB: OptimizerNames.RMSPROP,
    OptimizerNames.RMSPROP_8BIT: OptimizerNames.RMSPROP,
    OptimizerNames.RMSPROP_32BIT: OptimizerNames.RMSPROP,
}
# How the names begin of what upstream takes from bitsandbytes.
_OF_BITSANDBYTES = ("adamw_bnb", "adamw_8bit", "paged_", "lion_", "ademamix", "rmsprop_bnb")
_NAMES_OF_CLASSES = {OptimizerNames.ADAMW_TORCH: "AdamW", OptimizerNames.RMSPROP: "RMSprop"}
#: AdamW in its several implementations: all become [`LazyAdamW`].
ADAMW_NAMES = {OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED, OptimizerNames.ADAMW_TORCH_XLA}
#: Optimizers that take their learning rate as a Python number.
HOST_SCALAR_NAMES = {OptimizerNames.SGD, OptimizerNames.ADAGRAD, OptimizerNames.RMSPROP, OptimizerNames.ADAFACTOR}
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


def compute_in_bfloat16(run: Run) -> None:
    """Autocast of XLA in place of accelerate's, with weights in float32."""
    if run.args.bf16:
        run.adapted.compute_dtype = torch.bfloat16
        # Left on, accelerate would set XLA_USE_BF16=1 on a TPU, which turns every float32 tensor into bfloat16: weights,
        # Adam moments, loss sums. It reads the derived `mixed_precision`, so both are switched off.
        run.args.bf16 = False
        run.args.mixed_precision = "no"
    for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(variable, "0") == "1":
            raise UserError(
                f"{variable}=1 turns weights and optimizer state into bfloat16. Unset it and use bf16=True, which keeps "
                "float32 weights and computes in bfloat16."
            )
    for variable, instead in (
        ("ACCELERATE_MIXED_PRECISION", "the recipe's bf16 decides"),
        ("ACCELERATE_DYNAMO_BACKEND", "the step is compiled by XLA"),
    ):
        if os.environ.get(variable, "no").lower() != "no":
            os.environ[variable] = "no"
            run.adapted.changes.append(f"{variable} has no effect: {instead}")


def choose_optimizer(run: Run) -> None:
    """AdamW inside the step's program, or PyTorch's own optimizer."""
    args, changes = run.args, run.adapted.changes
    if (
        not run.place.traces_steps
        and args.optim in {OptimizerNames.ADAMW_TORCH, OptimizerNames.ADAMW_TORCH_FUSED} | HOST_SCALAR_NAMES
    ):
        return
    if args.optim in FULL_STATE_NAMES:
        # The name stays: the trainer asks for the class of another one.
        changes.append(
            f"optim={OptimizerNames(args.optim).value} is replaced by {_NAMES_OF_CLASSES[FULL_STATE_NAMES[args.optim]]}, "
            "whose state has the dtype of the weights and stays on the chips"
        )
    elif args.optim in ADAMW_NAMES:
        if args.optim != OptimizerNames.ADAMW_TORCH:
            changes.append(
                f"optim={OptimizerNames(args.optim).value} is replaced by AdamW with the same update inside the "
                "step's graph"
            )
            args.optim = OptimizerNames.ADAMW_TORCH
    elif args.optim in HOST_SCALAR_NAMES:
        changes.append(
            f"optim={OptimizerNames(args.optim).value} passes its learning rate as a Python number: a rate of exactly 0 "
            "or 1 recompiles; optim=adamw_torch never does"
        )
    else:
        names = sorted(name.value for name in ADAMW_NAMES | HOST_SCALAR_NAMES)
        raise UserError(
            f"optim={OptimizerNames(args.optim).value} does not run on XLA (it needs custom kernels or "
            f"device-to-host syncs). Allowed: {', '.join(names)}."
        )


def checkpoint_activations(run: Run) -> None:
    """Rematerialization in the step's program. With torch_tpu it is PyTorch's own, of whole layers."""
    args, adapted = run.args, run.adapted
    rematerialization = run["rematerialization"]
    adapted.rematerialization = rematerialization or ("full" if args.gradient_checkpointing else "none")
    # Weights in parts are put together by collectives, which are between programs.
    adapted.step_replay = False if run.place.splits_weights else run["step_replay"]
    if not run.place.traces_steps:
        if rematerialization is not None:
            set_gradient_checkpointing(args, rematerialization == "full")
        return
    kwargs = dict(args.gradient_checkpointing_kwargs or {})
    unsupported_keys = [key for key in ("selective", "offload", "context_fn") if kwargs.get(key)]
    if args.gradient_checkpointing and unsupported_keys:
        raise UserError(
            f"gradient_checkpointing_kwargs={kwargs} has {', '.join(unsupported_keys)}, which has no equivalent on XLA. Leave it out: "
            "whole layers are checkpointed ('every_n_layers' is supported)."
        )
    if isinstance(args, ExtensionArguments):
        adapted.scan_layers, adapted.attention = args.scan_layers, args.attention
    set_gradient_checkpointing(args, adapted.rematerialization != "none")


def set_gradient_checkpointing(args, value: bool) -> None:
    """Say whether layers are checkpointed, under both of upstream's names."""
    # The second is the name of the first from transformers 5.23 on.
    for name in {"gradient_checkpointing", "activation_checkpointing"} & set(vars(args)):
        setattr(args, name, value)


def shard_over_chips(run: Run) -> None:
    """A mesh of the chips in place of PyTorch's FSDP, of which nothing is left to upstream."""
    args, adapted = run.args, run.adapted
    adapted.mesh = run["mesh"]
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
    if run.place.chips == 1:
        adapted.changes.append("fsdp has no effect on one chip")
    # Upstream would wrap the model for torch.distributed, or for torch_xla in a way that makes no optimizer.
    args.fsdp = None
    args.fsdp_plugin_args = None
    args.fsdp_config = {**(args.fsdp_config or {}), "xla": False, "xla_fsdp_v2": False}


def load_model(run: Run) -> None:
    """What a model is loaded with: on the CPU what upstream can load there, on XLA what the trainer places and whose attention it replaces."""
    if not run.loads_model:
        return
    model_init_kwargs = dict(run.args.model_init_kwargs or {})
    asked_for = model_init_kwargs.get("attn_implementation")
    if not run.place.static_shapes:
        if is_flash_attention_requested(requested_attention_implementation=asked_for):
            run.adapted.changes.append(
                f"attn_implementation={asked_for} is replaced by sdpa: its kernels are for GPUs"
            )
            run.args.model_init_kwargs = {**model_init_kwargs, "attn_implementation": "sdpa"}
        return
    attention, changes = attention_to_load_with(asked_for, run.place.traces_steps)
    run.adapted.changes += changes
    if isinstance(model_init_kwargs.get("device_map"), (str, dict)):
        run.adapted.changes.append("device_map has no effect: mesh decides placement")
    if model_init_kwargs.get("quantization_config") is not None:
        check_method(model_init_kwargs["quantization_config"])
    # "auto" placement would hand the model to accelerate's dispatcher.
    run.args.model_init_kwargs = {**model_init_kwargs, "attn_implementation": attention, "device_map": None}


def share_rows(run: Run) -> None:
    """How processes share rows: with torch_xla there is one, and with torch_tpu all take as many batches."""
    config = run.args.accelerator_config
    if run.place.traces_steps and config.dispatch_batches:
        run.adapted.changes.append("dispatch_batches has no effect: one process reads the batches of all chips")
    if run.place.processes == 1:
        return
    for name, value in {"even_batches": False, "dispatch_batches": True, "split_batches": True}.items():
        if vars(config)[name] is value:
            raise UserError(
                f"accelerator_config has {name}={value}, which does not work with torch_tpu in several processes, where each process "
                "reads its own batches, as many as the others. Leave it out."
            )


def check_split_batches(run: Run) -> None:
    """Refuse (`ValueError`) batches that processes share. Upstream counts the rows of a step as if each process had all of them."""
    args = run.args
    if args.accelerator_config.split_batches and args.world_size > 1:
        raise UserError(
            f"accelerator_config turns split_batches on, by which {args.world_size} processes share per_device_train_batch_size="
            f"{args.per_device_train_batch_size} rows. Leave it out, and divide per_device_train_batch_size and "
            f"per_device_eval_batch_size by {args.world_size}, for the rows of one process."
        )


def lacks_bitsandbytes(optim: str, run: Run) -> bool:
    """Whether upstream takes an optimizer from bitsandbytes, and would miss it only when the model and the data are loaded."""
    is_of_it = OptimizerNames(optim).value.startswith(_OF_BITSANDBYTES)
    return is_of_it and not run.place.static_shapes and find_spec("bitsandbytes") is None


def check_integrations(run: Run) -> None:
    """Refuse (`ValueError`) a place to log to whose package is not installed."""
    # Upstream's own message lists the names where one is unknown.
    integrations = [name for name in run.args.report_to or () if name in INTEGRATION_TO_CALLBACK]
    absent = set(integrations) - set(get_available_reporting_integrations()) if integrations else ()
    for name in sorted(absent):
        try:
            # Its message names the package.
            INTEGRATION_TO_CALLBACK[name]()
        except (ImportError, RuntimeError) as error:
            raise UserError(
                f"report_to={name}: {error} Or leave it out of report_to; report_to=none trains without any."
            ) from error
