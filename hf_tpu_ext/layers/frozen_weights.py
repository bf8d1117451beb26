"""Frozen weights in half the memory, with the same numbers: kept in bfloat16 where that holds them exactly."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from peft import PeftModel, PeftType
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.trainer_utils import unwrap_peft_model

from ..backends.base import Backend
from ..formatting import name_of_any_layer


#: Families whose code was found to use the weights of linear layers and of embeddings in ways that give the same numbers.
#: Others may, for instance, round their activations to the dtype of a weight.
VERIFIED = (
    "cohere",
    "cohere2",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "granite",
    "llama",
    "ministral",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "stablelm",
    "starcoder2",
)


class ShortLinear(nn.Linear):
    """A linear layer whose weight is bfloat16, and that computes as if it were float32."""

    def forward(self, input: Tensor) -> Tensor:
        # Autocast makes the weight bfloat16 anyway.
        is_autocast = torch.is_autocast_enabled(input.device.type)
        return F.linear(input, self.weight if is_autocast else self.weight.to(input.dtype), self.bias)


class _ShortEmbedding(nn.Embedding):
    """An embedding whose weight is bfloat16, and that yields float32, as one whose weight is float32 does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


# By exact type: a subclass may compute otherwise.
_SHORT = {nn.Linear: ShortLinear, nn.Embedding: _ShortEmbedding}


def bfloat16_holds(weights: Sequence[Tensor], backend: Backend) -> list[bool]:
    """Whether bfloat16 holds each of some float32 weights exactly, as where they were published in bfloat16."""
    if not weights:
        return []
    is_longer = []
    for weight in weights:
        # Bits that bfloat16 lacks. Not a comparison with the rounded weight: XLA leaves out what rounds and widens again.
        is_longer.append((weight.detach().view(torch.int32) & 0xFFFF).any())
        # A program of its own, which weights of one shape share.
        backend.flush()
    return (~backend.fetch(torch.stack(is_longer))).tolist()


def _is_verified(model: nn.Module) -> bool:
    base = unwrap_peft_model(model)
    return isinstance(base, PreTrainedModel) and base.config.get_text_config().model_type in VERIFIED


def _find_opaque(model: nn.Module) -> set[nn.Module]:
    """Modules in variants of LoRA (DoRA) and copies of modules (modules_to_save), which look at the weights of what they wrap."""
    return {
        inner
        for module in model.modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        and (type(module) is not LoraLinear or module.lora_variant)
        for inner in module.modules()
    }


def find_plain_linear(model: nn.Module) -> set[nn.Linear]:
    """Linear layers of [`VERIFIED`] families whose weight may as well have the dtype that autocast makes it."""
    if not _is_verified(model):
        return set()
    plain = {module for module in model.modules() if type(module) in (nn.Linear, ShortLinear)}
    return plain - _find_opaque(model)


def _find_modules(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Frozen weights by name, each with the modules that have it (several where it is tied)."""
    if not _is_verified(model):
        return {}
    if isinstance(model, PeftModel):
        is_understood = all(config.peft_type == PeftType.LORA for config in model.peft_config.values())
    else:
        # What was frozen by hand may be unfrozen in the middle of a run.
        is_understood = not any(parameter.requires_grad for parameter in model.parameters())
    if not is_understood:
        return {}
    opaque = _find_opaque(model)
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, attribute))
    return {
        name: [module for module, _ in owners[parameter]]
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
        and parameter.dtype == torch.float32
        and all(
            attribute == "weight" and type(module) in _SHORT and module not in opaque
            for module, attribute in owners[parameter]
        )
    }


class FrozenWeights:
    """
    The matrices that a model does not train, which are bfloat16 from `shorten` to `restore`.

    They are weights under LoRA adapters, or those of a model that is frozen as a whole, in linear layers and embeddings of
    [`VERIFIED`] families. Under autocast to bfloat16 every number stays the same: a linear layer would round its weight, to
    what it is already, and what an embedding yields is widened again. Parameters stay the same objects, so tied ones stay tied.

    Args:
        model ([`~torch.nn.Module`]): Model on the device.
        backend ([`Backend`]): The backend in use.
        specs (`dict[str, tuple]`): What each parameter is split by, as [`Backend.shard`] takes it.
    """

    def __init__(self, model: nn.Module, backend: Backend, specs: dict[str, tuple]):
        self._model, self._backend, self._specs = model, backend, specs
        self._modules: dict[str, list[nn.Module]] = {}
        #: Names of the weights that are bfloat16, all of a tied one.
        self.names: set[str] = set()
        #: Bytes that they take.
        self.num_bytes = 0

    def shorten(self, holds: Callable[[Sequence[Tensor]], list[bool]]) -> None:
        """Turn the weights that bfloat16 holds exactly, which `holds` says as [`bfloat16_holds`], into bfloat16."""
        modules_by_name = _find_modules(self._model)
        fits_bfloat16 = holds([modules[0].weight for modules in modules_by_name.values()])
        # All layers get the same dtypes: they may run as one loop.
        too_precise = {
            name_of_any_layer(name) for name, fits in zip(modules_by_name, fits_bfloat16, strict=True) if not fits
        }
        self._modules = {
            name: modules for name, modules in modules_by_name.items() if name_of_any_layer(name) not in too_precise
        }
        short_ids = {id(modules[0].weight) for modules in self._modules.values()}
        self.names = {
            name
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if id(parameter) in short_ids
        }
        for modules in self._modules.values():
            for module in modules:
                module.__class__ = _SHORT[type(module)]
        self._turn_into(torch.bfloat16)
        self.num_bytes = sum(modules[0].weight.nbytes for modules in self._modules.values())

    def restore(self) -> None:
        """Turn the weights back into float32. The parameters of the model may be others by now."""
        for modules in self._modules.values():
            for module in modules:
                (module.__class__,) = (cls for cls, short in _SHORT.items() if short is type(module))
        self._turn_into(torch.float32)

    def _turn_into(self, dtype: torch.dtype) -> None:
        for name, modules in self._modules.items():
            weight = modules[0].weight
            weight.data = weight.data.to(dtype)
            self._backend.shard(weight, self._specs[name])
            # One at a time: there is never more than one of them twice.
            self._backend.flush()

    def in_float32(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give a state dict on the host the float32 that it has without this. Tied weights stay one tensor."""
        widen = cache(Tensor.float)
        return {name: widen(tensor) if name in self.names else tensor for name, tensor in state_dict.items()}
