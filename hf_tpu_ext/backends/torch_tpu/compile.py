"""`compile` on torch_tpu: a function is traced with tensors that have no values, and its graph compiled ahead of its first run."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..compiled_function import DRAWS_ON_HOST, REPLACES_STATE, SYNCS, Call, CannotReplay, CompiledFunction, Programs
from ..random_state import read_random_state


# Where a function goes by the values of tensors.
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


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

    def _run_program(self, key: Hashable, state: list[Tensor], call: Call) -> Any:
        if key not in self._programs:
            return call.end(execute=partial(self._run_first, key, call))
        results = self._programs[key](state, call.tensors)
        self.replays = True
        self._backend.replays += 1
        return results

    def _run_first(self, key: Hashable, call: Call) -> Any:
        self._programs[key] = program = self._compile(call)
        return program(self._state(), call.tensors)

    def _compile(self, call: Call) -> Callable:
        state, random_state = self._state(), read_random_state()

        def traceable(of_state: list[Tensor], of_data: list[Tensor]) -> Any:
            arguments = iter(of_data)
            batch = tree_map_only(Tensor, lambda _: next(arguments), dict(call.data))
            with _StateAsArguments(state, of_state), self._fingerprint.trace():
                results = self._function(batch, **call.static_args)
            if self._fingerprint.code is not None:
                raise CannotReplay(self._fingerprint.code)
            if not self._draws_on_host and read_random_state() != random_state:
                raise CannotReplay(DRAWS_ON_HOST)
            if list(map(id, self._state())) != list(map(id, state)):
                raise CannotReplay(REPLACES_STATE)
            return results

        # Layers that are compiled by themselves are a part of the whole here.
        with _keeping_gradients(state), self._backend.as_written():
            try:
                return self._backend.compile_function(traceable, [[tensor.detach() for tensor in state], call.tensors])
            except _NEEDS_VALUES as error:
                raise CannotReplay(SYNCS) from error


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

    compiled_function = TorchTPUCompiledFunction

    def memory_of(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensor.untyped_storage()._cdata for tensor in tensors]


# As torch_tpu has them for graphs of PyTorch's compiler.
_DECOMPOSED = get_decompositions([torch.ops.aten.masked_fill.Tensor, torch.ops.aten.masked_fill_.Tensor])


def changes_as_results(graph: GraphModule, arguments: Sequence[Tensor]) -> tuple[GraphModule, list[int]]:
    """
    Rewrite a graph of `arguments` to one that changes none of them: after its results it returns what the changed ones
    become. Returns it, and the places of these arguments.
    """
    graph = make_fx(functionalize(graph), _DECOMPOSED, tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    places = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    output = graph.graph.output_node()
    changed_places = {}
    # What is written in place is written at the end.
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        argument, changed_places[places[node.args[0]]] = node.args[:2]
        node.replace_all_uses_with(node.args[1])
        graph.graph.erase_node(node)
    output.args = ((*output.args[0], *changed_places.values()),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, list(changed_places)


def compute_on(device: torch.device, graph: GraphModule) -> None:
    """
    Have a graph make on a device what it makes on the host, such as the mask of the prompt that PEFT's prompt tuning learns, and have
    its constants there: torch_tpu ends the process where a graph has tensors of the host.
    """
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            setattr(graph, node.target, getattr(graph, node.target).to(device))
        elif node.op == "call_function" and not node.all_input_nodes and "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
