"""Activation checkpointing: what of a layer the forward pass keeps for the backward pass, and what is computed again."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..backends.base import Backend
from .autocast import current_autocast


#: Policies with a name of their own; any other is a list of modules.
POLICIES = ("none", "full", "dots")
# Products with weights. Those of attention, `bmm`, are as large as the square of the length, and computed again.
_DOTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Sums of fewer products are computed again sooner than written and read: a TPU v5e computes 240 products while it moves a
# byte, and what a loop keeps is written once and read twice, by the compiler's clock at a fraction of the bandwidth.
_LEAST_SUMMED = 2048


def use_checkpoint_function(model: nn.Module, function: Callable) -> int:
    """
    Make the layers that checkpoint their activations call `function(layer, *inputs)`, and count them.

    transformers keeps the function in `_gradient_checkpointing_func` of each such layer
    (`transformers/modeling_layers.py`), set when checkpointing is enabled.
    """
    layers = [module for module in model.modules() if "_gradient_checkpointing_func" in vars(module)]
    for layer in layers:
        layer._gradient_checkpointing_func = function
    return len(layers)


class Dots(TorchDispatchMode):
    """
    Context that records in `results` the matrix products with weights and the results of kernels, or gives those `recorded`
    by an earlier context instead of computing them.
    """

    _entered: ClassVar[list["Dots"]] = []

    def __init__(self, recorded: list[Tensor] | None = None):
        super().__init__()
        self.results: list[Tensor] = []
        self._recorded = None if recorded is None else iter(recorded)
        self._is_paused = False

    def __enter__(self) -> "Dots":
        Dots._entered.append(self)
        return super().__enter__()

    def __exit__(self, *args) -> None:
        Dots._entered.pop()
        super().__exit__(*args)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if self._is_paused or function not in _DOTS or args[-1].shape[0] < _LEAST_SUMMED:
            return function(*args, **(kwargs or {}))
        if self._recorded is None:
            result = function(*args, **(kwargs or {}))
        else:
            result = next(self._recorded)
            # Operators come here without the wrapper that tensors of lazy devices have for mutations.
            if torch._is_functional_tensor(result):
                result = torch._from_functional_tensor(result)
        self.results.append(result)
        return result


def instead_of_product(product: Tensor, place: int, num_summed: int, compute: Callable[[], Tensor]) -> Tensor:
    """
    What is computed in place of a linear layer's `product`, a sum of so many, which is dropped. Where [`Dots`] keep the
    product, as their result number `place`, they keep this instead: given again, it is what the layer seems to have computed.
    """
    if not Dots._entered:
        return compute()
    dots = Dots._entered[-1]
    is_kept = num_summed >= _LEAST_SUMMED
    if is_kept and dots._recorded is not None:
        return product.view_as(product)
    dots._is_paused = True
    try:
        result = compute()
    finally:
        dots._is_paused = False
    if is_kept:
        dots.results[place] = result.reshape(dots.results[place].shape)
    return result


def num_kept() -> int:
    """How many results [`Dots`] have kept so far."""
    return len(Dots._entered[-1].results) if Dots._entered else 0


def keep_results(
    compute: Callable[[], tuple[Tensor, Tensor]], otherwise: Callable[[], tuple[Tensor, ...]] | None = None
) -> tuple[Tensor, ...]:
    """
    The two results of a kernel, kept and given again where [`Dots`] are; `otherwise` says what to compute where they are not.
    """
    if not Dots._entered:
        return compute() if otherwise is None else otherwise()
    dots = Dots._entered[-1]
    results = compute() if dots._recorded is None else (next(dots._recorded), next(dots._recorded))
    dots.results += results
    return results


class _KeepDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: Callable, backend: Backend, *inputs: Any) -> Any:
        ctx.function, ctx.backend, ctx.rng_state = function, backend, backend.rng_state()
        ctx.autocast = current_autocast(backend.device.type)
        with torch.no_grad(), Dots() as dots:
            outputs = function(*inputs)
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.places = [index for index, value in enumerate(inputs) if isinstance(value, Tensor)]
        ctx.save_for_backward(*(inputs[index] for index in ctx.places), *dots.results)
        return outputs

    @staticmethod
    def backward(ctx, *gradients: Tensor | None) -> tuple:
        backend, count = ctx.backend, len(ctx.places)
        # What is computed again depends on the gradient, so it is not what was computed before.
        backend.separate([*ctx.saved_tensors, *(gradient for gradient in gradients if gradient is not None)])
        inputs = list(ctx.others)
        for index, value in zip(ctx.places, ctx.saved_tensors[:count], strict=True):
            inputs[index] = value.detach().requires_grad_(ctx.needs_input_grad[2 + index])
        now = backend.rng_state()
        backend.set_rng_state(ctx.rng_state)
        with torch.enable_grad(), ctx.autocast(), Dots(list(ctx.saved_tensors[count:])):
            outputs = ctx.function(*inputs)
        backend.set_rng_state(now)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, Tensor) and output.requires_grad and gradient is not None
        ]
        torch.autograd.backward(*zip(*pairs, strict=True))
        return None, None, *(value.grad if isinstance(value, Tensor) else None for value in inputs)


def keep_dots(backend: Backend, function: Callable, *inputs: Any) -> Any:
    """
    Run a layer, and keep its matrix products with weights: in the backward pass only the rest is computed again, which
    is attention and what works element by element. At least one of `inputs` requires a gradient.

    A policy of PyTorch's own (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) would save nothing on
    XLA: the program would hold the same operators twice, and the compiler keep one of them.
    """
    return _KeepDots.apply(function, backend, *inputs)


def _checkpointed(module: nn.Module, function: Callable, *args: Any, **kwargs: Any) -> Any:
    forward = type(module).forward
    if not (module.training and torch.is_grad_enabled()):
        return forward(module, *args, **kwargs)
    # Gradients reach what is passed by position only.
    names, values = tuple(kwargs), (*args, *kwargs.values())

    def run(*values: Any) -> Any:
        return forward(module, *values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

    return function(run, *values)


def checkpoint_modules(model: nn.Module, names: str, function: Callable) -> list[nn.Module]:
    """
    Checkpoint the modules whose names end as `names` say, e.g. `"mlp"` or `"self_attn,mlp"`, instead of whole layers,
    by `function(run, *inputs)`. Deleting `forward` of each undoes it. A name of no module is a `ValueError`.
    """
    found: list[nn.Module] = []
    for name in names.split(","):
        chosen = [module for path, module in model.named_modules() if f".{path}".endswith(f".{name.strip()}")]
        if not chosen:
            known = {
                re.split(r"\.\d+\.", path)[-1] for path, _ in model.named_modules() if re.search(r"\.\d+\.", path)
            }
            raise ValueError(
                f"rematerialization={names!r}: the model has no module {name.strip()!r}. Allowed: "
                f"{', '.join(POLICIES)}, or names of its modules, separated by commas: {', '.join(sorted(known))}."
            )
        found.extend(chosen)
    for module in found:
        module.forward = partial(_checkpointed, module, function)
    return found


def rematerialize(model: nn.Module, policy: str, backend: Backend) -> list[nn.Module]:
    """
    Make a model compute again in the backward pass what a policy says: one of [`POLICIES`], or names of modules as
    [`checkpoint_modules`] takes them. `"full"` and `"dots"` need activation checkpointing enabled. Returned are the
    modules whose `forward` was replaced; deleting it undoes that.
    """
    if policy == "none":
        return []
    # The functions need inputs that require gradients, which frozen embeddings do not give.
    model.enable_input_require_grads()
    if policy not in POLICIES:
        return checkpoint_modules(model, policy, backend.checkpoint_function)
    use_checkpoint_function(model, backend.checkpoint_function if policy == "full" else partial(keep_dots, backend))
    return []
