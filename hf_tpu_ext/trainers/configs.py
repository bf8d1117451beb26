"""Settings that only this package knows. All optional: a plain `SFTConfig` or `TrainingArguments` works as well."""

from dataclasses import dataclass, field

from transformers import TrainingArguments
from trl import SFTConfig

from ..backends import select_backend
from ..sharding import parse_mesh


@dataclass
class ExtensionArguments:
    """
    What the trainers of this package take on top of upstream's arguments.

    Args:
        backend (`str`, *optional*, defaults to `"auto"`):
            Accelerator to train on: `"auto"` (TPU, then XLA on the host if `PJRT_DEVICE=CPU`, then CUDA, then CPU),
            `"xla"`, `"cuda"` or `"cpu"`. One that is absent is an error.
        length_buckets (`list[int]`, *optional*):
            Lengths that batches are padded to where programs are compiled per shape (XLA). One number of at most 32 is
            a count: that many buckets are chosen from the lengths of the training data. Several numbers are the lengths
            themselves. By default there is one length: `max_length`. Each length compiles one more program.
        num_chips (`int`, *optional*):
            How many of the machine's TPU chips to use. By default what the environment variable `TPU_NUM_DEVICES` says, or
            all.
        mesh (`str`, *optional*, defaults to `"data"`):
            How the chips share the work: `"data"` (each has all weights and a part of the rows), `"fsdp"` (each has a
            part of the weights, gradients and optimizer state as well), or both, e.g. `"data=2,fsdp=4"`. An axis without
            a size takes the chips that are left.
        show_sharding (`bool`, *optional*, defaults to `False`):
            Whether to print at start which parameter is split over which axis of the mesh.
    """

    backend: str = field(
        default="auto",
        metadata={
            "help": "Accelerator to train on. 'auto' takes a TPU, then XLA on the host if PJRT_DEVICE=CPU, then CUDA, "
            "then the CPU. One that is asked for and absent is an error.",
            "choices": ["auto", "xla", "cuda", "cpu"],
        },
    )
    length_buckets: list[int] | None = field(
        default=None,
        metadata={
            "help": "Lengths that batches are padded to on XLA, each compiled once. Several numbers are the lengths "
            "(128 256 512); a single number up to 32 is how many to choose from the data. Default: only max_length."
        },
    )

    num_chips: int | None = field(
        default=None,
        metadata={"help": "How many of the machine's TPU chips to use. Default: TPU_NUM_DEVICES, or all."},
    )
    mesh: str | None = field(
        default=None,
        metadata={
            "help": "How TPU chips share the work. 'data' (default): each has all weights and a part of the rows. 'fsdp': "
            "weights, gradients and optimizer state are split as well, for models that do not fit one chip. "
            "'data=2,fsdp=4': both. An axis without a size takes the chips that are left."
        },
    )
    show_sharding: bool = field(
        default=False,
        metadata={"help": "Print at start which parameter is split over which axis of the mesh."},
    )

    def __post_init__(self):
        # Upstream takes a device while it sets up its own fields, so the choice comes first.
        select_backend("cpu" if self.use_cpu else self.backend, self.num_chips)
        if self.mesh is not None:
            parse_mesh(self.mesh)
        if isinstance(self.length_buckets, int):
            self.length_buckets = [self.length_buckets]
        super().__post_init__()


@dataclass
class TPUSFTConfig(ExtensionArguments, SFTConfig):
    """
    [`~trl.SFTConfig`] with the settings of [`ExtensionArguments`].

    Args:
        backend (`str`, *optional*, defaults to `"auto"`):
            See [`ExtensionArguments`].
        length_buckets (`list[int]`, *optional*):
            See [`ExtensionArguments`].
        show_samples (`int`, *optional*, defaults to `0`):
            How many prompts of the evaluation set are answered before and after training, and printed side by side.
        **kwargs:
            All fields of [`~trl.SFTConfig`].
    """

    show_samples: int = field(
        default=0,
        metadata={"help": "How many prompts of the evaluation set are answered before and after training."},
    )

    def __post_init__(self):
        if self.show_samples < 0:
            raise ValueError(
                f"show_samples={self.show_samples} is negative. Give the number of prompts to answer, or 0."
            )
        super().__post_init__()


@dataclass
class TPUTrainingArguments(ExtensionArguments, TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the settings of [`ExtensionArguments`].

    Args:
        max_length (`int`, *optional*):
            Length that batches are padded to on XLA. By default that of the longest row of the training data, rounded
            up.
        **kwargs:
            All fields of [`ExtensionArguments`] and [`~transformers.TrainingArguments`].
    """

    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Length that batches are padded to on XLA. Default: that of the longest row of the training data, "
            "rounded up."
        },
    )
