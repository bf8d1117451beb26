"""Models whose layers compute with rounded weights and train the weights that are rounded, and the file that says so beside these."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..atomic_write import write_atomically
from ..errors import UserError, damage_of
from ..formatting import name_of_any_layer
from ..temporarily import temporarily
from .rounding import Rounding, split


#: Where adapters are: `round(W + B A) x`, or `round(W) x + B A x`.
ADAPTERS = ("inside", "beside")


class _LongProduct(torch.autograd.Function):
    """
    A product of float32 matrices on a TPU, which rounds what it multiplies to bfloat16: as four products of parts that
    bfloat16 holds. Where the update of a weight is rounded, other integers than those of an export come out.
    """

    @staticmethod
    def forward(ctx, up: Tensor, down: Tensor, multiply: Callable = torch.matmul) -> Tensor:
        ctx.save_for_backward(up, down)
        (up, up_rest), (down, down_rest) = split(up), split(down)
        rest = multiply(up, down_rest) + multiply(up_rest, down) + multiply(up_rest, down_rest)
        return multiply(up, down) + rest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        up, down = ctx.saved_tensors
        return gradient @ down.T, up.T @ gradient, None


class FakeQuantizedHead(nn.Linear):
    """An output head that computes with its weight as it is after rounding. Its parameters stay as they are."""

    rounding: Rounding

    def forward(self, input: Tensor) -> Tensor:
        weight = self.rounding.round_weight(self.weight) if self.rounding.on else self.weight
        return F.linear(input, weight.to(input.dtype), self.bias)


class FakeQuantizedLinear(FakeQuantizedHead):
    """A linear layer likewise, of which activations may be rounded, too."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.rounding.round_activation(input) if self.rounding.on else input)


class AdaptersInside(LoraLinear):
    """LoRA within the rounding, `round(W + scaling * B A) x` (https://huggingface.co/papers/2406.06385)."""

    rounding: Rounding

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if not self.rounding.on:
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        weight = base.weight.float()
        if not self.disable_adapters and not self.merged:
            multiply = _LongProduct.apply if x.device.type in ("xla", "tpu") else torch.matmul
            # Under autocast the update would be rounded to bfloat16 first, and the integers be others than in an export.
            with torch.autocast(x.device.type, enabled=False):
                for name in self.active_adapters:
                    if name in self.lora_A:
                        up, down = self.lora_B[name].weight.float(), self.lora_A[name].weight.float()
                        weight = weight + multiply(up, down) * self.scaling[name]
        weight = self.rounding.round_weight(weight)
        return F.linear(self.rounding.round_activation(x), weight.to(x.dtype), base.bias)


class _RoundedRows:
    """Of an embedding: the rows that are looked up are rounded, which gives the numbers of a rounded table."""

    rounding: Rounding

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return self.rounding.round_weight(rows).to(rows.dtype) if self.rounding.on else rows


@cache
def _with_rounded_rows(cls: type[nn.Embedding]) -> type:
    return type(f"FakeQuantized{cls.__name__}", (_RoundedRows, cls), {"__module__": __name__})


class FakeQuantization:
    """
    Fake quantization of a model's linear layers, in place, within the context that `enable` makes.

    Parameters, their names and checkpoints stay as they are. The output head and the embeddings are left out, as
    transformers leaves them out when it loads a model with a `TorchAoConfig`, unless they are asked for.

    Args:
        model ([`~torch.nn.Module`]): The model, with its adapters if it has some.
        rounding ([`Rounding`]): How its layers round.
        adapters (`str`, *optional*, defaults to `"inside"`): One of [`ADAPTERS`].
        embeddings (`bool`, *optional*, defaults to `False`):
            Whether embeddings and the output head are rounded as well.

    Raises:
        `ValueError`: A layer cannot be rounded so; the message says what to set instead.
    """

    def __init__(self, model: nn.Module, rounding: Rounding, adapters: str = "inside", embeddings: bool = False):
        self.rounding = rounding
        base = unwrap_peft_model(model)
        is_known = isinstance(base, PreTrainedModel)
        ends = [base.get_input_embeddings(), base.get_output_embeddings()] if is_known else [None]
        of_ends = {inner for end in ends if end is not None for inner in end.modules()}
        if embeddings and any(isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for module in of_ends):
            raise UserError(
                "qat_quantize_embedding=True does not work with adapters on embeddings or on the output head. Leave them out "
                "of lora_target_modules and lora_modules_to_save, or set qat_quantize_embedding=False."
            )
        left_out = _modules_of_adapters(model) | of_ends
        #: The linear layers that are rounded, by name, without the head, and those of them whose adapters are inside.
        self.linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and module not in left_out
        }
        self.inside = self._find_adapters(model) if adapters == "inside" else {}
        self.embeddings = [module for module in of_ends if embeddings and isinstance(module, nn.Embedding)]
        #: The output head, where it is rounded.
        self.head = ends[1] if embeddings and type(ends[-1]) is nn.Linear else None
        #: Weights of experts, in any layer, which belong to no linear layer.
        self.experts = sorted({name_of_any_layer(name) for name, weight in base.named_parameters() if weight.ndim > 2})
        self._check_group_size()

    def _find_adapters(self, model: nn.Module) -> dict[str, LoraLinear]:
        adapters, rounded_layers = {}, set(self.linears.values())
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer) and module.get_base_layer() in rounded_layers:
                if type(module) is not LoraLinear or module.lora_variant or any(module.lora_bias.values()):
                    raise UserError(
                        f"qat_adapters='inside' rounds W + B A of plain LoRA, and {name_of_any_layer(name)} has another kind "
                        "of adapter, or one with a bias. Set qat_adapters='beside', or train plain LoRA."
                    )
                adapters[name] = module
        return adapters

    def _check_group_size(self) -> None:
        widths = {name: module.in_features for name, module in self.linears.items()}
        if not widths:
            raise UserError(
                "qat_weight_dtype rounds linear layers, and the model has none that is a torch.nn.Linear. Leave it out."
            )
        if self.embeddings:
            widths |= {"the embeddings": self.embeddings[0].embedding_dim}
        common = math.gcd(*widths.values())
        for name, width in widths.items():
            if width % self.rounding.group_size:
                sizes = [str(size) for size in (256, 128, 64, 32, 16, 8, 4, 2) if common % size == 0]
                fix = f"Set it to a size that divides the inputs of all layers, one of {', '.join(sizes)}. Of an export, it is --group_size."
                raise UserError(
                    f"qat_group_size={self.rounding.group_size} does not divide the {width} inputs of "
                    f"{name_of_any_layer(name)}. {fix if sizes else 'No size does in all layers: leave qat_weight_dtype out.'}"
                )

    @contextmanager
    def enable(self) -> Iterator[None]:
        """Within this context, the layers of the model round."""
        inside = {module.get_base_layer() for module in self.inside.values()}
        classes = {module: FakeQuantizedLinear for module in self.linears.values() if module not in inside}
        classes |= dict.fromkeys(self.inside.values(), AdaptersInside)
        classes |= {} if self.head is None else {self.head: FakeQuantizedHead}
        classes |= {module: _with_rounded_rows(type(module)) for module in self.embeddings}
        before = {module: type(module) for module in classes}
        for module, cls in classes.items():
            module.__class__, module.rounding = cls, self.rounding
        try:
            yield
        finally:
            for module, cls in before.items():
                module.__class__ = cls
                del module.rounding

    def rounding_head(self, apply: Callable) -> Callable:
        """`trl.kernels.ChunkedLogProbFunction.apply`, which takes the weight of the head by itself, with a rounded one."""

        def apply_rounded(hidden: Tensor, weight: Tensor, *args) -> tuple:
            if self.rounding.on:
                weight = self.rounding.round_weight(weight).to(weight.dtype)
            return apply(hidden, weight, *args)

        return apply_rounded


def _modules_of_adapters(model: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        for name in module.adapter_layer_names
        if name in module._modules
        for inner in module._modules[name].modules()
    }


def without_rounding(rounding: Rounding | None) -> AbstractContextManager:
    """Within this context, layers compute with their weights as they are."""
    return nullcontext() if rounding is None else temporarily(rounding, on=False)


#: Beside the weights, or the adapter.
QUANTIZATION_FILE = "quantization.json"


@dataclass(frozen=True)
class TrainedFor:
    """
    The settings of quantization-aware training that a rounded model depends on: the fields `qat_...` of
    [`TPUSFTConfig`] of these names.
    """

    weight_dtype: str
    group_size: int = 32
    activation_dtype: str | None = None
    quantize_embedding: bool = False
    adapters: str = "inside"
    scale: str = "max"

    def rounding(self) -> Rounding:
        """How layers round."""
        bits = int(self.weight_dtype.removeprefix("int"))
        return Rounding(bits, self.group_size, self.activation_dtype is not None, scale=self.scale)

    def fake_quantization(self, model: nn.Module) -> FakeQuantization:
        """The fake quantization of a model, which rounds so. Raises `ValueError` where a layer cannot be."""
        return FakeQuantization(model, self.rounding(), self.adapters, self.quantize_embedding)

    def describe(self) -> str:
        """What is rounded how, e.g. `"int4, groups of 32"`."""
        parts = [self.weight_dtype, f"groups of {self.group_size}"]
        if self.scale != "max":
            parts.append(f"scales by {self.scale}")
        if self.activation_dtype is not None:
            parts.append(f"activations in {self.activation_dtype}")
        if self.quantize_embedding:
            parts.append("embeddings too")
        return ", ".join(parts)

    def write(self, directory: str | Path) -> None:
        """Note it beside the weights in a directory, atomically."""
        write_atomically(Path(directory) / QUANTIZATION_FILE, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, directory: str | Path) -> "TrainedFor | None":
        """Read the record in a directory, `None` where there is none. One that cannot be read is a `ValueError`."""
        path = Path(directory) / QUANTIZATION_FILE
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise damage_of(path) from error
