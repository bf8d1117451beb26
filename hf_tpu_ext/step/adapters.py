"""LoRA that scales what is narrow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft.import_utils import is_bnb_4bit_available, is_bnb_available
from peft.tuners import lora
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor, nn


# Those around linear layers of bitsandbytes are defined where it is installed.
_LINEAR = (
    Linear,
    *([lora.Linear8bitLt] if is_bnb_available() else []),
    *([lora.Linear4bit] if is_bnb_4bit_available() else []),
)


class _ScaledInside(LoraVariant):
    """
    Plain LoRA, `result + B(A(dropout(x)) * scaling)`: PEFT scales the sum's second term, as wide as the layer, and so the
    gradient of every adapter is in memory a second time.
    """

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: Tensor, result: Tensor, **kwargs) -> Tensor:
        narrow = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        return result + module.lora_B[active_adapter](narrow * module.scaling[active_adapter])

    # What PEFT does without a variant.
    @staticmethod
    def merge_safe(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight + module.get_delta_weight(active_adapter).to(orig_weight.dtype)

    @staticmethod
    def merge_unsafe(module: Linear, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data += module.get_delta_weight(active_adapter)

    @staticmethod
    def unmerge(module: Linear, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data - module.get_delta_weight(active_adapter).to(orig_weight.dtype)


@contextmanager
def adapters_scaled_inside(models: Sequence[nn.Module]) -> Iterator[None]:
    """
    Within this context, plain LoRA of linear layers scales between its factors. With a scaling that is a power of two no bit
    changes.
    """
    variant = _ScaledInside()
    scaled = [
        (module, name)
        for model in models
        for module in model.modules()
        if type(module) in _LINEAR
        for name in module.lora_A
        if name not in module.lora_variant and not module.lora_bias[name]
    ]
    for module, name in scaled:
        module.lora_variant[name] = variant
    try:
        yield
    finally:
        for module, name in scaled:
            # An adapter may have been deleted meanwhile.
            if module.lora_variant.get(name) is variant:
                del module.lora_variant[name]
