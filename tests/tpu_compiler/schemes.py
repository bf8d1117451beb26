"""Ways to spread a run over eight chips, and what their compiled programs exchange."""

from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny import make_arithmetic, make_model
from hf_tpu_ext.plan.hlo import Collective, find_collectives, parse_module
from hf_tpu_ext.sharding.plan import PlannedParameter


CHIPS = 8
# TRL's fused head goes through tokens in slices of 4,096, and through the vocabulary in slices of 32,768: both have to be
# more than one, since a slice of a split tensor is what makes a partitioner move it. The batch has more tokens than a
# matrix of a layer has rows, as usual; otherwise activations are smaller than weights, and are exchanged instead.
ROWS_PER_CHIP, LENGTH = 16, 64


@dataclass(frozen=True)
class Scheme:
    """
    One way to spread a run over the chips.

    Args:
        title (`str`):
            Name for people.
        mesh (`str`):
            As in [`TPUSFTConfig`].
        gradient_accumulation_steps (`int`, *optional*, defaults to `1`):
            Micro-steps of an optimizer step.
        lora (`bool`, *optional*, defaults to `False`):
            Whether adapters are trained instead of the weights.
        saving (`bool`, *optional*, defaults to `False`):
            Whether to compute in bfloat16 and with gradient checkpointing, as TRL does if nothing else is said.
        scan_layers (`str`, *optional*, defaults to `"auto"`):
            As in [`TPUSFTConfig`].
    """

    title: str
    mesh: str
    gradient_accumulation_steps: int = 1
    lora: bool = False
    saving: bool = False
    scan_layers: str = "auto"


SCHEMES = {
    "data": Scheme("data parallel", "data"),
    "data_accumulated": Scheme("data parallel, 2 accumulated", "data", 2),
    "data_accumulated_lora": Scheme("data parallel, 2 accumulated, LoRA", "data", 2, lora=True),
    "fsdp": Scheme("fully sharded", "fsdp"),
    "fsdp_accumulated": Scheme("fully sharded, 2 accumulated", "fsdp", 2),
    "fsdp_saving": Scheme("fully sharded, bfloat16, gradient checkpointing", "fsdp", saving=True),
    "data_fsdp": Scheme("data=2 x fsdp=4", "data=2,fsdp=4"),
}


@dataclass(frozen=True)
class Program:
    """
    A compiled program of one device.

    Args:
        text (`str`):
            Its optimized HLO.
        weights (`frozenset[tuple[int, ...]]`):
            Shapes of the weights, whole and in parts, each with its sizes in ascending order: compilers transpose.
    """

    text: str
    weights: frozenset[tuple[int, ...]]

    @property
    def collectives(self) -> list[Collective]:
        """All that devices exchange."""
        return list(find_collectives(parse_module(self.text)))

    @property
    def numbers(self) -> list[Collective]:
        """Collectives of single numbers: sums for metrics and for the gradient norm."""
        return [item for item in self.collectives if not any(tensor.dims for tensor in item.tensors)]

    @property
    def gathers(self) -> list[Collective]:
        """All-gathers of weights."""
        return self._of_weights("all-gather")

    @property
    def scatters(self) -> list[Collective]:
        """Reduce-scatters of gradients."""
        return self._of_weights("reduce-scatter")

    @property
    def reductions(self) -> list[Collective]:
        """All-reduces of gradients."""
        return self._of_weights("all-reduce")

    @property
    def others(self) -> list[Collective]:
        """All other collectives."""
        known = [*self.numbers, *self.gathers, *self.scatters, *self.reductions]
        return [item for item in self.collectives if item not in known]

    def _of_weights(self, kind: str) -> list[Collective]:
        return [
            item
            for item in self.collectives
            if item.kind == kind and any(tuple(sorted(tensor.dims)) in self.weights for tensor in item.tensors)
        ]


@dataclass(frozen=True)
class Run:
    """
    Where the parameters of one scheme are.

    Args:
        mesh (`dict[str, int]`):
            Size of each axis.
        parameters (`list[PlannedParameter]`):
            The model's parameters and where they are.
    """

    mesh: dict[str, int]
    parameters: list[PlannedParameter]

    @property
    def trainable(self) -> list[PlannedParameter]:
        """Parameters that have a gradient."""
        return [parameter for parameter in self.parameters if parameter.trainable]

    @property
    def split(self) -> list[PlannedParameter]:
        """Parameters of which each chip holds a part."""
        return [parameter for parameter in self.parameters if parameter.shards > 1]

    @property
    def weight_shapes(self) -> frozenset[tuple[int, ...]]:
        """Shapes of the parameters, as [`Program`] takes them."""
        shapes = [parameter.shape for parameter in self.parameters]
        for parameter in self.split:
            parts = (parameter.shards if axis else 1 for axis in parameter.spec)
            shapes.append([size // part for size, part in zip(parameter.shape, parts, strict=True)])
        return frozenset(tuple(sorted(shape)) for shape in shapes)


def make_inputs(directory: Path, **sizes) -> None:
    """
    Make the model and the rows that all schemes train.

    Args:
        directory (`Path`):
            Where to write them.
        **sizes:
            Fields of the model's configuration.
    """
    make_model(directory / "model", **sizes)
    make_arithmetic(directory / "data")


def make_trainer(trainer_class: type[TPUSFTTrainer], scheme: Scheme, directory: Path) -> TPUSFTTrainer:
    """
    Make the trainer of a scheme.

    Args:
        trainer_class (`type`):
            Its class.
        scheme ([`Scheme`]):
            How to train.
        directory (`Path`):
            Directory of [`make_inputs`].

    Returns:
        [`TPUSFTTrainer`]: The trainer.
    """
    return trainer_class(
        model=str(directory / "model"),
        args=TPUSFTConfig(
            str(directory / "output"),
            mesh=scheme.mesh,
            scan_layers=scheme.scan_layers,
            gradient_accumulation_steps=scheme.gradient_accumulation_steps,
            per_device_train_batch_size=ROWS_PER_CHIP,
            max_length=LENGTH,
            max_steps=1,
            bf16=scheme.saving,
            gradient_checkpointing=scheme.saving,
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=load_dataset("json", data_files=str(directory / "data" / "train.jsonl"), split="train"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0) if scheme.lora else None,
    )
