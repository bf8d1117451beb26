"""Fields of this package where they have no effect or no equivalent, and what needs whole weights."""

from typing import Any

from ..configs import PaddedArguments
from .adaptations import ADAMW_NAMES
from .field_answers import Row, Run, at, refusal, without_effect


def is_set(value: Any, run: Run) -> bool:
    """Whether a value is neither empty, 0 nor `False`."""
    return bool(value)


def _is_on(value: Any, run: Run) -> bool:
    return value in ("on", True)


def _packs(run: Run) -> bool:
    return bool(run["packing"] if run["eval_packing"] is None else run["eval_packing"]) or bool(run["padding_free"])


def _is_for_padding(max_length: int | None, run: Run) -> bool:
    return max_length is not None and isinstance(run.args, PaddedArguments)


OWN = (
    *at(
        lambda place: True,
        refusal(
            "predict_with_generate",
            "writes on after the prompt of each row, and packed rows have several. Set eval_packing=False and padding_free=False.",
            when=lambda value, run: value and _packs(run),
        ),
        refusal(
            "packing eval_packing",
            "joins sequences to rows, and a teacher's cache (kd_cache) is looked up by the sequence. Set packing=False and "
            "eval_packing=False; length_buckets keeps the padding low.",
            when=lambda value, run: value and run["kd_cache"] is not None,
        ),
    ),
    *at(
        lambda place: not place.static_shapes,
        refusal(
            "padding_free",
            "joins the rows of a batch to one, and a teacher's cache (kd_cache) is looked up by the row. Set padding_free=False.",
            when=lambda value, run: value and run["kd_cache"] is not None,
        ),
    ),
    *at(
        lambda place: place.traces_steps or not place.static_shapes,
        without_effect("compile_step", "it applies to torch_tpu", when=lambda value, run: value in ("step", "layers")),
    ),
    *at(lambda place: not place.traces_steps, without_effect("share_prompts", "it is for torch_xla", when=_is_on)),
    *at(
        lambda place: place.static_shapes and not place.traces_steps,
        refusal(
            "rematerialization",
            "does not work with torch_tpu, where layers are checkpointed as a whole. Set rematerialization='full' or "
            "rematerialization='none'.",
            when=lambda value, run: value == "dots",
        ),
        refusal(
            "attention",
            "does not work with torch_tpu. Leave it out: attn_implementation chooses the attention there, and 'sdpa', the default, is "
            "torch_tpu's flash kernel.",
            when=lambda value, run: value == "splash",
        ),
        without_effect("attention", "steps are not traced by torch_tpu"),
        without_effect("scan_layers", "layers are not run as a loop by torch_tpu", when=_is_on),
        Row(
            "no effect",
            "step_replay",
            "has no effect on training steps: compile_step={args.compile_step!r} compiles none as a whole",
            when=lambda value, run: value and run["compile_step"] in ("layers", "off"),
        ),
    ),
    *at(
        lambda place: not place.static_shapes,
        without_effect("num_chips mesh", "it applies to TPU chips"),
        without_effect("scan_layers", "it applies to XLA", when=_is_on),
        without_effect("attention", "attn_implementation chooses here"),
        without_effect("rematerialization", "it applies to XLA; gradient_checkpointing=True works here"),
        without_effect("step_replay", "steps run eagerly", when=is_set),
        without_effect("max_recompiles", "nothing is compiled"),
        without_effect("length_buckets", "batches are padded to their longest row"),
        without_effect("max_length", "batches are padded to their longest row", when=_is_for_padding),
        without_effect(
            "max_prompt_length", "prompts of any length are taken, and padded to the longest of their batch"
        ),
        without_effect("image_tokens", "images are taken as they are"),
    ),
)

_IN_PARTS = "does not work with mesh={args.mesh!r}, of which each chip holds parts of the weights. "
_SPLIT = "does not work with {by}, which splits what is trained over processes. "
_TRAIN_WITHOUT = _SPLIT + "Leave {name} out, or train without {by}."
WEIGHTS_IN_PARTS = (
    *at(
        lambda place: place.splits_weights,
        refusal(
            "optim",
            _IN_PARTS + "Set optim='adamw_torch_fused', or set mesh='data'.",
            when=lambda value, run: value not in ADAMW_NAMES,
        ),
        refusal(
            "ema_decay show_samples predict_with_generate sync_ref_model kd_teacher kd_cache qat_weight_dtype "
            "optimizer_cls_and_kwargs save_on_each_node",
            _IN_PARTS + "Leave it out, or set mesh='data'.",
            when=is_set,
        ),
        without_effect("step_replay", "weights in parts are put together between programs", when=_is_on),
        refusal(
            "optimizers",
            _IN_PARTS + "Leave it out, or set mesh='data'.",
            when=lambda value, run: value is not None and value[0] is not None,
        ),
    ),
    *at(lambda place: place.split_by is not None, refusal("ema_decay", _TRAIN_WITHOUT)),
    *at(
        lambda place: place.split_by in ("fsdp", "deepspeed stage 3"),
        refusal("qat_weight_dtype show_samples predict_with_generate", _TRAIN_WITHOUT),
    ),
    *at(
        lambda place: place.split_by == "fsdp",
        refusal(
            "kd_teacher",
            _SPLIT
            + "Make a cache of the teacher first (hf-tpu cache-teacher --kd_teacher MODEL --kd_cache DIRECTORY), then set "
            "kd_cache=DIRECTORY and leave kd_teacher out.",
            # It is compared with the name of the teacher that has made the cache, and not loaded.
            when=lambda value, run: value is not None and run["kd_cache"] is None,
        ),
    ),
    # Its weights are whole in the forward pass alone, and the gradient of a head is computed later.
    *at(
        lambda place: place.split_by == "deepspeed stage 3",
        refusal(
            "kd_teacher kd_cache",
            _SPLIT
            + "Set zero_stage: 2 in accelerate's configuration (stage in DeepSpeed's own), or train without deepspeed.",
        ),
    ),
)
