"""Model code paths whose shapes do not depend on the data."""

from torch import nn
from transformers import PreTrainedModel


def use_static_kernels(model: nn.Module, attention: str | None = "eager") -> None:
    """
    Make a transformers model use the attention, where one is given, and the mixture-of-experts code that compile to static
    shapes. Models inside wrappers such as [`~peft.PeftModel`] are found.

    Eager attention is plain matrix products, which XLA fuses: the scaled dot product operator reads the mask on the
    host to leave it out where it can, and does not take part in autocast. Experts become `"batched_mm"`: the default
    sorts tokens by expert, with sizes that change with the data.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            if attention is not None:
                module.set_attn_implementation(attention)
            module.set_experts_implementation("batched_mm")
            return
