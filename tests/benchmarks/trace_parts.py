"""
`hf-tpu` whose graphs name the part of the model that each operation belongs to, forward and backward, for [`cycles_by_part`]:

    python tests/benchmarks/trace_parts.py plan --config recipe.yaml --hlo DIRECTORY ...
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import parts
import torch
from parts import ADAPTERS, ATTENTION, HEAD, LAYER, OPTIMIZER, ROPE_AND_NORMS, VISION
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel


class Parts:
    """
    Names, while programs are traced, the operations of each part of a model, and those of their gradients. The programs
    are the same but for these names.
    """

    def __init__(self):
        import torch_xla

        self._name_operations = torch_xla._XLAC.profiler.scope_pusher
        # What is being run: a part, the module if it is one, autograd's number at its start, and what ends the naming.
        self._open: list[tuple[str, Any, int, Any]] = []
        # Modules that compute the features of images, which run again in the backward pass.
        self._of_images: set[nn.Module] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within this context, modules and attention functions are noted."""
        with ExitStack() as stack:
            handles = (
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            )
            for handle in handles:
                stack.callback(handle.remove)
            upstream = AttentionInterface.get_interface
            stack.callback(setattr, AttentionInterface, "get_interface", upstream)
            AttentionInterface.get_interface = lambda *args, **named: self.part(ATTENTION, upstream(*args, **named))
            yield

    def part(self, name: str, function: Callable) -> Callable:
        """Make what a function computes a part."""

        @wraps(function)
        def run(*args, **kwargs):
            self._begin(name)
            made = None
            try:
                made = function(*args, **kwargs)
            finally:
                self._end(made)
            return made

        return run

    def _begin(self, part: str, module: nn.Module | None = None) -> None:
        if self._open and self._open[-1][0] == VISION:
            part = VISION
        number = torch.autograd._get_sequence_nr()
        self._open.append((part, module, number, self._name_operations(parts.scope_of(part))))

    def _end(self, made: Any) -> None:
        part, _, first, _ = self._open.pop()
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                self._note_gradients(tensor.grad_fn, part, first)

    def _enter_module(self, module: nn.Module, args: tuple) -> None:
        self._begin(self._part_of(module), module)

    def _leave_module(self, module: nn.Module, args: tuple, made: Any) -> None:
        self._end(made)

    def _part_of(self, module: nn.Module) -> str:
        if module in self._of_images:
            return VISION
        above, around = (self._open[-1][0], self._open[-1][1]) if self._open else (HEAD, None)
        kind = type(module).__name__
        if isinstance(module, BaseTunerLayer):
            return ADAPTERS
        if isinstance(around, BaseTunerLayer) and module is around.base_layer:
            return LAYER
        if above == ADAPTERS:
            return ADAPTERS
        if kind.endswith(("Norm", "RotaryEmbedding", "Attention")):
            # Of attention, what is neither in its own modules nor in its function.
            return ROPE_AND_NORMS
        if isinstance(module, PreTrainedModel):
            if module.base_model is module and module.get_decoder() is not module:
                text = set(module.get_decoder().modules())
                self._of_images |= set(module.modules()) - text - {module}
            # What is around the layers, and they.
            return LAYER if module.base_model is module else HEAD
        return LAYER if above == ROPE_AND_NORMS else above

    def _note_gradients(self, node: Any, part: str, first: int) -> None:
        """Note the gradients of what was recorded from a number on and is of no part yet."""
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            # Parameters have the largest of all numbers.
            if node is None or node in seen or node._sequence_nr() < first or not node.next_functions:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if "part" not in node.metadata:
                node.metadata["part"] = part
                node.register_prehook(partial(self._begin_gradient, part))
                node.register_hook(self._end_gradient)

    def _begin_gradient(self, part: str, gradients: tuple) -> None:
        self._begin(part)

    def _end_gradient(self, *gradients: tuple) -> None:
        self._end(None)


def main() -> int:
    """Run `hf-tpu` with the arguments of this process; what it traces is named."""
    from hf_tpu_ext.cli.main import main as run
    from hf_tpu_ext.plan import trace
    from hf_tpu_ext.step.optimizer import LazyAdamW
    from hf_tpu_ext.trainers.run.user_code import find_own_code

    class NamedTracing(trace.TracingMixin):
        def train(self, *args, **kwargs) -> None:
            self.parts = Parts()
            with self.parts.noted():
                # With a user's code, layers would be unrolled: another program than that of a run.
                assert (own_code := find_own_code(self, [self.model])) is None, own_code
                super().train(*args, **kwargs)

        def create_optimizer(self, model=None):
            created = self.optimizer is None
            optimizer = super().create_optimizer(model)
            if created and isinstance(optimizer, LazyAdamW):
                optimizer.update = self.parts.part(OPTIMIZER, optimizer.update)
            return optimizer

        def _clip_grad_norm(self, model):
            return self.parts.part(OPTIMIZER, super()._clip_grad_norm)(model)

    trace.TracingMixin = NamedTracing
    return run(sys.argv[1:])


if __name__ == "__main__":
    # As a part of the package: with code of others in a step it is not replayed, and so not planned.
    spec = spec_from_file_location("hf_tpu_ext.plan.trace_parts", __file__)
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.exit(module.main())
