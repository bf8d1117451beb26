"""Collectives of `torch.distributed` that a tracer sees, and a compiled function that is cut at them."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module


# Operators of their own, for a tracer to see them. Where the device has no collectives, tensors go by the host.


@torch.library.custom_op("hf_tpu_ext::gather_over_ranks", mutates_args=())
def gather(tensor: Tensor, count: int, by_host: bool) -> Tensor:
    """The tensors of all processes of the default group, one after the other along their first dimension."""
    # The names of `torch.distributed` for a gather into one tensor change with its versions.
    parts = tensor.new_zeros((count, *tensor.shape), device="cpu" if by_host else tensor.device)
    parts[dist.get_rank()] = tensor
    dist.all_reduce(parts)
    return parts.flatten(0, 1).to(tensor.device)


@gather.register_fake
def _(tensor: Tensor, count: int, by_host: bool) -> Tensor:
    return tensor.new_empty((count * tensor.shape[0], *tensor.shape[1:]))


@torch.library.custom_op("hf_tpu_ext::sum_over_ranks", mutates_args=())
def sum_of_all(tensor: Tensor, by_host: bool) -> Tensor:
    """The sum of the tensors of all processes of the default group."""
    own = tensor.cpu() if by_host else tensor.clone()
    dist.all_reduce(own)
    return own.to(tensor.device)


@sum_of_all.register_fake
def _(tensor: Tensor, by_host: bool) -> Tensor:
    return torch.empty_like(tensor)


_COLLECTIVES = (torch.ops.hf_tpu_ext.gather_over_ranks.default, torch.ops.hf_tpu_ext.sum_over_ranks.default)


def cut_at_collectives(
    graph: GraphModule, arguments: Sequence[Tensor], compile_graph: Callable[[GraphModule, Sequence[Any]], Callable]
) -> Callable:
    """
    Compile a graph for `arguments` by `compile_graph`, which takes both: whole, or where processes exchange tensors in
    it, as programs that run before and after each exchange. These are compiled when they are first run.
    """
    if not any(node.target in _COLLECTIVES for node in graph.graph.nodes):
        return compile_graph(graph, arguments)
    # Nothing is written in place but arguments, at the end: what is read would not be seen to depend on what is written to a view.
    graph = make_fx(functionalize(graph), tracing_mode="fake", _allow_non_fake_inputs=True)(*arguments)
    # What nothing uses would be after the exchanges, and what it is made of be handed over.
    graph.graph.eliminate_dead_code()
    parts = _parts_of(graph)
    cut = split_module(graph, graph, parts.__getitem__)
    for name, part in list(cut.named_children()):
        if not any(node.target in _COLLECTIVES for node in part.graph.nodes):
            cut.add_submodule(name, _Compiled(part, compile_graph))
    return cut


def _parts_of(graph: GraphModule) -> dict[Node, int]:
    """
    Number the parts that the nodes of a graph belong to. What an exchange needs is before it, in an even part; exchanges are in
    odd ones. All else is after the last: optimizer state, for one, which is read and written there.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    depth: dict[Node, int] = {}
    for node in nodes:
        depth[node] = max((depth.get(source, 0) for source in node.all_input_nodes), default=0)
        depth[node] += node.target in _COLLECTIVES
    last = 2 * max(depth.values(), default=0)
    parts: dict[Node, int] = {}
    for node in reversed(nodes):
        if node.target in _COLLECTIVES:
            parts[node] = 2 * depth[node] - 1
        else:
            parts_of_users = [parts[user] for user in node.users if user in parts]
            earliest = min(parts_of_users, default=last)
            parts[node] = earliest - 1 if earliest % 2 else earliest
    for node in nodes:
        if node.target is operator.getitem:
            # Several results of an operator stay together.
            parts[node] = parts[node.args[0]]
    return parts


class _Compiled(nn.Module):
    """A graph that is compiled when it is run for the first time."""

    def __init__(self, graph: GraphModule, compile_graph: Callable[[GraphModule, Sequence[Any]], Callable]):
        super().__init__()
        output = graph.graph.output_node()
        self._is_one = isinstance(output.args[0], Node)
        if self._is_one:
            # Compilers take graphs of tuples.
            output.args = ((output.args[0],),)
            graph.recompile()
        # Not as a child: it is no part of the module that runs.
        self._make, self._run = (lambda arguments: compile_graph(graph, arguments)), None

    def forward(self, *arguments: Any) -> Any:
        if self._run is None:
            self._run = self._make(arguments)
        results = self._run(*arguments)
        return results[0] if self._is_one else results
