"""`compile` on torch_tpu: a function is traced with tensors that have no values, and its graph compiled ahead of its first run."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..base import Backend
from ..program import CannotReplay, CompiledFunction, Programs, describe_batch
from ..random_state import read_random_state


class _StateAsArguments(TorchDispatchMode):
    """
    Context of a trace, in which operators that are given a tensor of the state get the argument that stands for it.

    The function reads and writes its state where it lives, in parameters and optimizers. PyTorch's tracers follow their arguments.
    """

    def __init__(self, state: Sequence[Tensor], arguments: Sequence[Tensor]):
        super().__init__()
        self._argument_of = {id(tensor): argument for tensor, argument in zip(state, arguments, strict=True)}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Tensor, self._find_argument, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _find_argument(self, tensor: Tensor) -> Tensor:
        return self._argument_of.get(id(tensor), tensor)


class TorchTPUCompiledFunction(CompiledFunction):
    """A function on torch_tpu. Where it cannot be traced, operators are run one by one."""

    def __call__(self, data: Mapping[Hashable, Any], run: Callable[..., Any], **fixed: Hashable) -> Any:
        self.replays = False
        if self.traced is None:
            self._follow()
        if self.traced is None:
            tensors = [value for value in data.values() if isinstance(value, Tensor)]
            key = (*fixed.items(), *describe_batch(data).items())
            try:
                if key not in self._known:
                    return run(run=partial(self._run_first, key, data, tensors, fixed))
                results = self._known[key](self._state(), tensors)
            except CannotReplay as error:
                self.refuse(str(error))
            else:
                self.replays = True
                return results
        results = self._function(data, **fixed)
        run()
        return results

    def _run_first(
        self, key: Hashable, data: Mapping[Hashable, Any], tensors: list[Tensor], fixed: Mapping[str, Any]
    ) -> Any:
        self._known[key] = program = self._compile(data, tensors, fixed)
        return program(self._state(), tensors)

    def _compile(self, data: Mapping[Hashable, Any], tensors: list[Tensor], fixed: Mapping[str, Any]) -> Callable:
        state = self._state()

        def traced(of_state: list[Tensor], of_data: list[Tensor]) -> Any:
            arguments = iter(of_data)
            batch = {key: next(arguments) if isinstance(value, Tensor) else value for key, value in data.items()}
            with _StateAsArguments(state, of_state), self._fingerprint.trace():
                made = self._function(batch, **fixed)
            after = self._state()
            if len(after) != len(state) or any(map(lambda one, other: one is not other, state, after)):
                raise CannotReplay("a tensor of the training state is replaced in the middle of a step")
            return made

        before = read_random_state()
        # Layers that are compiled by themselves are a part of the whole here.
        with _keeping_gradients(state), self._backend.as_written():
            try:
                program = self._backend.compile_function(traced, [[tensor.detach() for tensor in state], tensors])
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CannotReplay(
                    "a device-to-host sync in the step, whose value may decide what runs next"
                ) from error
        if self._fingerprint.code is not None:
            raise CannotReplay(self._fingerprint.code)
        if not self._draws_on_host and read_random_state() != before:
            raise CannotReplay(
                "a step draws random numbers on the host (random, numpy.random or torch); step_replay=True if they do not matter"
            )
        return program


@contextmanager
def _keeping_gradients(state: Sequence[Tensor]) -> Iterator[None]:
    """Within this context, which a trace may leave by an exception, gradients may become tensors without values."""
    leaves = {tensor: tensor.grad for tensor in state if tensor.is_leaf}
    try:
        yield
    finally:
        for tensor, gradient in leaves.items():
            tensor.grad = gradient


class TorchTPUPrograms(Programs):
    """Programs of torch_tpu."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def compile(self, *args: Any, **kwargs: Any) -> TorchTPUCompiledFunction:
        return TorchTPUCompiledFunction(self._backend, *args, **kwargs)

    def memory_of(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensor.untyped_storage()._cdata for tensor in tensors]
