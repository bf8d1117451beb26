"""Model code paths whose shapes do not depend on the data."""

from functools import partial

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface
from transformers.utils.generic import GeneralInterface

from .static_families import use_static_code


def is_of_user(interface: GeneralInterface, name: str | None) -> bool:
    """Whether code outside transformers and this package has registered a name: what it computes may be something of its own."""
    function = interface.get(name)
    while isinstance(function, partial):
        function = function.func
    return function is not None and function.__module__.partition(".")[0] not in ("transformers", "hf_tpu_ext")


def use_static_kernels(model: nn.Module, attention: str | None = "eager") -> None:
    """
    Make a transformers model use the attention, where one is given, the mixture-of-experts code and the code of single families that
    compile to static shapes. Models inside wrappers such as [`~peft.PeftModel`] are found.

    Eager attention is plain matrix products, which XLA fuses: the scaled dot product operator reads the mask on the
    host to leave it out where it can, and does not take part in autocast. Experts become `"batched_mm"`: the default
    sorts tokens by expert, with sizes that change with the data. Experts that the user has registered are kept.
    """
    use_static_code(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            if attention is not None:
                module.set_attn_implementation(attention)
            if not is_of_user(ExpertsInterface(), module.config._experts_implementation):
                module.set_experts_implementation("batched_mm")
            return
