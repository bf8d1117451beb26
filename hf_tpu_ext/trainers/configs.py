"""Settings that only this package knows. All optional: a plain `SFTConfig` or `TrainingArguments` works as well."""

import os
from dataclasses import dataclass, field, fields
from importlib.util import find_spec

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy
from trl import SFTConfig

from ..backends import BACKENDS, select_backend
from ..callbacks.samples import ShowSamples
from ..distillation.losses import KD_LOSSES
from ..errors import UserError
from ..layers.attention import ATTENTIONS
from ..quantization.fake_quantized import ADAPTERS
from ..quantization.rounding import ACTIVATION_DTYPES, SCALES, WEIGHT_DTYPES
from ..sharding import parse_mesh
from ..temporarily import temporarily


#: What is said of `deepspeed`.
NO_DEEPSPEED = "deepspeed does not run on XLA. Leave it out of the recipe; mesh='fsdp' shards the weights."

# By field: its least value, and what is said of one below.
_LEAST = {
    "max_recompiles": (0, "is negative. Set it to 0 to allow none, or leave it out to allow any number."),
    "generation_max_new_tokens": (
        1,
        "is not positive. Give the number of tokens to write at most, for example generation_max_new_tokens=128.",
    ),
    "image_tokens": (
        1,
        "is not positive. Give the image tokens of a row at most, for example image_tokens=256, or leave it out.",
    ),
    "max_prompt_length": (
        1,
        "is not positive. Set it to the longest prompt in tokens, for example max_prompt_length=256, or leave it out.",
    ),
    "show_samples": (
        0,
        "is negative. Set it to the number of prompts to generate from, for example show_samples=4, or leave it out for none.",
    ),
    "kd_top_k": (
        1,
        "is not at least 1. Set it to 1 or more, for example kd_top_k=128, or leave it out for all tokens.",
    ),
    "qat_group_size": (2, "is not at least 2. 32 and 128 are usual: set qat_group_size=32, for example."),
    "qat_fake_quant_after_n_steps": (
        0,
        "is negative. Set it to the number of steps before the first that rounds, for example qat_fake_quant_after_n_steps=100, or "
        "leave it out to round from the start.",
    ),
}


@dataclass
class ExtensionArguments:
    """What the trainers of this package take on top of upstream's arguments."""

    backend: str = field(
        default="auto",
        metadata={
            "help": "Accelerator to train on. 'auto' takes a TPU, then XLA on the host if PJRT_DEVICE=CPU, then CUDA, "
            "then the CPU. One that is asked for and absent is an error.",
            "choices": list(BACKENDS),
        },
    )
    length_buckets: list[int] | None = field(
        default=None,
        metadata={
            "help": "Lengths that batches are padded to on XLA, each compiled once. Several numbers are the lengths "
            "(128 256 512); a single number up to 32 is how many to choose from the training data. Default: the longest row of the "
            "training data, and max_length."
        },
    )

    num_chips: int | None = field(
        default=None,
        metadata={"help": "How many of the machine's TPU chips to use. Default: TPU_NUM_DEVICES, or all."},
    )
    mesh: str | None = field(
        default=None,
        metadata={
            "help": "Mesh of the TPU chips. 'data' (default): data parallel, weights replicated. 'fsdp': weights, gradients "
            "and optimizer state sharded as well, for models that do not fit one chip. 'data=2,fsdp=4': both. An axis "
            "without a size takes the chips that are left."
        },
    )
    scan_layers: str = field(
        default="auto",
        metadata={
            "help": "Scan over layers that repeat, one by one or in a pattern, on XLA: compilation takes as long for 28 layers as "
            "for 4. Without gradient_checkpointing steps unroll layers, and only stack their parameters. 'auto' is on from 8 "
            "layers on, unless user code may look at layers at every step.",
            "choices": ["auto", "on", "off"],
        },
    )
    rematerialization: str | None = field(
        default=None,
        metadata={
            "help": "Activation checkpointing policy on XLA: what the backward pass recomputes. 'none'; 'full': whole "
            "layers; 'dots': all but the matrix products with weights. Default: full or none, as gradient_checkpointing says.",
            "choices": ["none", "full", "dots"],
        },
    )
    attention: str = field(
        default="auto",
        metadata={
            "help": "Attention on XLA. 'splash': a kernel that keeps no scores and skips what the mask leaves out. 'slices': "
            "the model's own attention, some rows, heads or queries at a time. 'auto' is splash on a TPU where it can serve, "
            "or else slices.",
            "choices": list(ATTENTIONS),
        },
    )
    step_replay: bool | None = field(
        default=None,
        metadata={
            "help": "Replay the compiled graph of an XLA step after two traced steps, without running Python. Default: "
            "unless a subclass, a custom module, a callback or a hook has user code inside a step. True: such code does "
            "the same at every step. False: never."
        },
    )
    compile_step: str = field(
        default="auto",
        metadata={
            "help": "What is compiled with torch_tpu (backend 'tpu'). 'auto': the whole step (forward, backward, clipping and "
            "AdamW) where it is the same at every step, else each layer. 'step', 'layers': that. 'off': single operators.",
            "choices": ["auto", "step", "layers", "off"],
        },
    )
    compile_cache_dir: str = field(
        default="auto",
        metadata={
            "help": "Persistent compilation cache: 'auto', 'off' or a directory. 'auto' is HF_TPU_EXT_COMPILE_CACHE, or on "
            "a TPU ~/.cache/hf_tpu_ext/compile. XLA:CPU cannot load what it stores."
        },
    )
    max_recompiles: int | None = field(
        default=None,
        metadata={
            "help": "Maximum number of recompilations in the life of a trainer (XLA). One more is an error that names the "
            "cause. Default: no limit, each is named in a line."
        },
    )
    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Decay of an exponential moving average (EMA) of the trained weights, updated after every optimizer step "
            "and saved beside the weights as ema.safetensors. 0.999 is usual. Default: no average."
        },
    )
    ema_warmup: bool = field(
        default=False,
        metadata={
            "help": "Lower the decay of early updates to (1 + n) / (10 + n) after n of them, for short runs: the average leaves "
            "the weights of the beginning sooner."
        },
    )
    ema_eval: bool = field(
        default=False,
        metadata={"help": "Evaluate and predict with the average of the weights. Needs ema_decay."},
    )
    step_status: bool = field(
        default=True,
        metadata={
            "help": "Show in logs the time of a step, tokens per second, utilization and memory, and at the end the time by phase."
        },
    )
    run_report: bool = field(
        default=True,
        metadata={
            "help": "Keep a record of the run in its output directory, and make report.html and report.md of it at the end."
        },
    )

    def __post_init__(self):
        # Upstream takes a device while it sets up its own fields, so the choice comes first.
        backend = select_backend(self.backend, self.num_chips, self.use_cpu)
        if self.deepspeed:
            # Upstream asks for the package as soon as it reads this.
            if backend.shards_by_annotation:
                raise UserError(NO_DEEPSPEED)
            if find_spec("deepspeed") is None:
                raise UserError(
                    "deepspeed needs a package that is not installed: pip install deepspeed. Or leave deepspeed out of the "
                    "recipe."
                )
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if isinstance(self.length_buckets, int):
            self.length_buckets = [self.length_buckets]
        for name, (least, says) in _LEAST.items():
            if (value := vars(self).get(name)) is not None and value < least:
                raise UserError(f"{name}={value} {says}")
        self._check_average()
        self._check_best()
        if isinstance(self.compile_cache_dir, bool):
            # YAML reads an unquoted off as false.
            self.compile_cache_dir = "auto" if self.compile_cache_dir else "off"
        self._check_choices()
        # Upstream refuses the one without a GPU, and the other in one process; a recipe for GPUs has both. A line at the start of the run
        # says that they have no effect.
        unused = {}
        if self.tf32 and not backend.runs_gpu_kernels:
            unused["tf32"] = None
        if "WORLD_SIZE" not in os.environ:
            unused["ddp_backend"] = None
        with temporarily(self, **unused):
            super().__post_init__()

    def _check_choices(self) -> None:
        own = [cls for cls in type(self).__mro__ if cls.__module__.startswith("hf_tpu_ext.")]
        for name in dict.fromkeys(name for cls in own for name in vars(cls).get("__annotations__", {})):
            own_field = type(self).__dataclass_fields__[name]
            choices, value = own_field.metadata.get("choices"), vars(self)[name]
            if isinstance(value, bool) and choices and "off" in choices:
                # YAML reads an unquoted off as false.
                value = "on" if value else "off"
                setattr(self, name, value)
            if choices and value not in (*choices, own_field.default):
                left_out = " Or leave it out." if own_field.default is None else ""
                raise UserError(f"Unknown {name}={value!r}. Allowed: {', '.join(choices)}.{left_out}")

    def _check_best(self) -> None:
        by_steps = self.eval_strategy == IntervalStrategy.STEPS and self.save_strategy == SaveStrategy.STEPS
        eval_steps, save_steps = self.eval_steps or self.logging_steps, self.save_steps
        # Upstream looks at shares of a run itself.
        if (
            self.load_best_model_at_end
            and by_steps
            and eval_steps >= 1
            and save_steps >= 1
            and save_steps % eval_steps
        ):
            fits = max(1, round(save_steps / eval_steps)) * eval_steps
            raise UserError(
                f"load_best_model_at_end=True loads a checkpoint that was evaluated, and save_steps={save_steps:g} is no multiple of "
                f"eval_steps={eval_steps:g}. Set save_steps={fits:g}, or another eval_steps."
            )

    def _check_average(self) -> None:
        if self.ema_decay is None:
            self.check_left_out("ema_", "an average of the weights. Set ema_decay, for example ema_decay=0.999")
        elif not 0 < self.ema_decay < 1:
            raise UserError(
                f"ema_decay={self.ema_decay} is not above 0 and below 1. Set it to 0.999 to average over about 1,000 steps, to "
                "0.99 for about 100, or leave it out for no average."
            )

    def check_left_out(self, prefix: str, needs: str) -> None:
        """Refuse (`ValueError`) fields with a prefix that say nothing without what they need, a clause, which was left out."""
        for field_ in fields(self):
            value = vars(self)[field_.name]
            if field_.name.startswith(prefix) and value != field_.default:
                raise UserError(f"{field_.name}={value!r} has no effect without {needs}, or leave {field_.name} out.")


@dataclass
class PredictedTextArguments:
    """What the trainers take that evaluate text which the model writes."""

    predict_with_generate: bool = field(
        default=False,
        metadata={
            "help": "Predict text in place of logits, as Seq2SeqTrainer does: compute_metrics and predict() get the tokens that the "
            "model goes on with after the prompt of each row, which is what comes before its first label."
        },
    )
    generation_max_new_tokens: int = field(
        default=128,
        metadata={"help": "How many tokens predict_with_generate generates at most."},
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.predict_with_generate:
            self.check_left_out("generation_max_new_tokens", "text to predict. Set predict_with_generate=True")


@dataclass
class ImageArguments:
    """What the trainers take that train on images."""

    image_tokens: int | None = field(
        default=None,
        metadata={
            "help": "How many image tokens a row has at most, on XLA: rows with fewer are filled with padding that nothing reads. "
            "Default: what the row with the most images may have, at most max_length."
        },
    )


@dataclass
class TPUSFTConfig(ImageArguments, PredictedTextArguments, ExtensionArguments, SFTConfig):
    """
    [`~trl.SFTConfig`] with the settings of [`ExtensionArguments`], [`PredictedTextArguments`] and [`ImageArguments`], and with those
    below.
    """

    from_scratch: bool = field(
        default=False,
        metadata={
            "help": "Start from random weights: take the architecture and the tokenizer of the model, for pretraining."
        },
    )
    show_samples: int = field(
        default=0,
        metadata={
            "help": "How many prompts of the evaluation set to generate from before and after training, at most "
            f"{ShowSamples.max_new_tokens} tokens each, printed side by side."
        },
    )
    kd_teacher: str | None = field(
        default=None,
        metadata={
            "help": "Teacher for distillation: name or path of a model that runs beside the student, or 'base' for the "
            "student's own base with the adapters switched off (LoRA)."
        },
    )
    kd_cache: str | None = field(
        default=None,
        metadata={
            "help": "Directory of a teacher's precomputed top-k log-probs, made by `hf-tpu cache-teacher`. No teacher is run then; "
            "kd_teacher, if it is given as well, is the one that the cache has to be of."
        },
    )
    kd_alpha: float = field(
        default=0.5,
        metadata={"help": "Weight of the teacher: loss = (1 - kd_alpha) * CE + kd_alpha * kd_temperature**2 * KD."},
    )
    kd_temperature: float = field(
        default=1.0, metadata={"help": "Temperature of teacher and student in the distillation term."}
    )
    kd_top_k: int | None = field(
        default=None,
        metadata={
            "help": "How many of the teacher's most likely tokens to learn from, with one bucket for all others. "
            "Default: the whole vocabulary of a model, or all that a cache holds."
        },
    )
    kd_loss: str = field(
        default="forward_kl",
        metadata={
            "help": "Divergence between teacher and student; 'jsd' is the generalized Jensen-Shannon divergence.",
            "choices": list(KD_LOSSES),
        },
    )
    kd_beta: float = field(default=0.5, metadata={"help": "Weight of the teacher in the mixture of kd_loss='jsd'."})
    kd_preload: bool = field(default=False, metadata={"help": "Read the whole teacher cache into memory at start."})

    qat_weight_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Quantization-aware training: linear layers compute with their weights rounded to this dtype, int2 to int8, "
            "and the weights that are rounded are trained. `hf-tpu export --quantize` writes the rounded ones.",
            "choices": list(WEIGHT_DTYPES),
        },
    )
    qat_group_size: int = field(
        default=32,
        metadata={"help": "How many weights of a row share a scale. It has to divide the inputs of all layers."},
    )
    qat_scale: str = field(
        default="max",
        metadata={
            "help": "How the scale of a group of weights is chosen in each step: 'max', by its largest magnitude, as torchao "
            "does; 'mse', with the least squared error, which loses less and takes more time.",
            "choices": list(SCALES),
        },
    )
    qat_activation_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Also round what linear layers are given: 'int8', with a scale for each token. Default: not.",
            "choices": list(ACTIVATION_DTYPES),
        },
    )
    qat_quantize_embedding: bool = field(
        default=False, metadata={"help": "Also round the embeddings and the output head, tied or not."}
    )
    qat_fake_quant_after_n_steps: int | None = field(
        default=None, metadata={"help": "Train this many steps without rounding first. Default: round from the start."}
    )
    qat_adapters: str = field(
        default="inside",
        metadata={
            "help": "Where LoRA adapters are. 'inside' the rounding, round(W + B A): the exported integers have them. 'beside' "
            "the rounded base, round(W) x + B A x: they stay adapters.",
            "choices": list(ADAPTERS),
        },
    )

    def __post_init__(self):
        self._check_distillation()
        if self.qat_weight_dtype is None:
            self.check_left_out("qat_", "qat_weight_dtype. Set that as well, for example qat_weight_dtype='int4'")
        super().__post_init__()

    def _check_distillation(self) -> None:
        if not 0 <= self.kd_alpha <= 1:
            raise UserError(
                f"kd_alpha={self.kd_alpha} is not from 0 to 1. Set it to the teacher's part of the loss, from 0 (labels only) to 1 "
                "(teacher only), for example kd_alpha=0.5."
            )
        if self.kd_temperature <= 0:
            raise UserError(
                f"kd_temperature={self.kd_temperature} is not above 0. 1 to 2 are usual: set kd_temperature=1.0, for example."
            )
        if not 0 < self.kd_beta < 1:
            raise UserError(
                f"kd_beta={self.kd_beta} is not above 0 and below 1. Set it to a number in between, for example kd_beta=0.5. At the "
                "ends jsd is another loss: leave kd_beta out and set kd_loss='forward_kl' or kd_loss='reverse_kl'."
            )
        if self.kd_teacher is None and self.kd_cache is None:
            self.check_left_out("kd_", "a teacher. Set kd_teacher=MODEL or kd_cache=DIRECTORY")
            return
        if self.kd_loss != "jsd":
            self.check_left_out("kd_beta", "the loss that it is for. Set kd_loss='jsd'")
        if self.kd_cache is None:
            self.check_left_out("kd_preload", "a cache to read. Set kd_cache=DIRECTORY")
        if self.loss_type != "nll" or self.label_smoothing_factor:
            raise UserError(
                "Distillation mixes the teacher's loss with plain cross-entropy. Leave loss_type and "
                "label_smoothing_factor out."
            )


@dataclass
class PaddedArguments(ExtensionArguments):
    """[`ExtensionArguments`] of the trainers that do not truncate rows."""

    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Length that batches are padded to on XLA. Default: that of the longest row of the training data, "
            "rounded up."
        },
    )


@dataclass
class TPUTrainingArguments(PredictedTextArguments, PaddedArguments, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the settings of [`PaddedArguments`] and [`PredictedTextArguments`]."""


@dataclass
class TPUSeq2SeqTrainingArguments(PaddedArguments, Seq2SeqTrainingArguments):
    """[`~transformers.Seq2SeqTrainingArguments`] with the settings of [`PaddedArguments`]."""
