"""Processes that speak by `torch.distributed`, and a compiled function that is cut where they exchange tensors."""

import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

from .hosts import Hosts
from .ranks import Ranks


# Operators of their own, for a tracer to see them. Where the device has no collectives, tensors go by the host.


@torch.library.custom_op("hf_tpu_ext::gather_over_ranks", mutates_args=())
def _gather(tensor: Tensor, count: int, by_host: bool) -> Tensor:
    # The names of `torch.distributed` for a gather into one tensor change with its versions.
    gathered = tensor.new_zeros((count, *tensor.shape), device="cpu" if by_host else tensor.device)
    gathered[dist.get_rank()] = tensor
    dist.all_reduce(gathered)
    return gathered.flatten(0, 1).to(tensor.device)


@_gather.register_fake
def _(tensor: Tensor, count: int, by_host: bool) -> Tensor:
    return tensor.new_empty((count * tensor.shape[0], *tensor.shape[1:]))


@torch.library.custom_op("hf_tpu_ext::sum_over_ranks", mutates_args=())
def _sum(tensor: Tensor, by_host: bool) -> Tensor:
    own = tensor.cpu() if by_host else tensor.clone()
    dist.all_reduce(own)
    return own.to(tensor.device)


@_sum.register_fake
def _(tensor: Tensor, by_host: bool) -> Tensor:
    return torch.empty_like(tensor)


_COLLECTIVES = (torch.ops.hf_tpu_ext.gather_over_ranks.default, torch.ops.hf_tpu_ext.sum_over_ranks.default)


class ProcessRanks(Ranks):
    """
    The processes of the default group of `torch.distributed`.

    Args:
        by_host (`bool`):
            Whether that group has no collectives for the device, so that tensors on the device go by the host.
        host_group (`torch.distributed.ProcessGroup`, *optional*):
            The same processes with collectives for the host. By default the group itself, whose backend for the CPU is gloo.
    """

    def __init__(self, by_host: bool, host_group: dist.ProcessGroup | None = None):
        self.count, self.index = dist.get_world_size(), dist.get_rank()
        self.stops = _Stops(self)
        self._by_host, self._host_group = by_host, host_group

    def gather(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return _gather(tensor.unsqueeze(0) if tensor.ndim == 0 else tensor, self.count, self._by_host)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # One collective for all of a dtype: by themselves, hundreds of small ones.
        means: list[Tensor] = [tensor.detach() for tensor in tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([means[place].reshape(-1) for place in places])
            parts = (_sum(flat, self._by_host) / self.count).split([tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                means[place] = part.reshape(tensors[place].shape)
        return means

    def most(self, numbers: Sequence[int]) -> list[int]:
        return self._reduced(torch.tensor(numbers, dtype=torch.int64), dist.ReduceOp.MAX)

    def total(self, numbers: Sequence[float]) -> list[float]:
        return self._reduced(torch.tensor(numbers, dtype=torch.float64), dist.ReduceOp.SUM)

    def _reduced(self, numbers: Tensor, how: dist.ReduceOp) -> list:
        dist.all_reduce(numbers, how, group=self._host_group)
        return numbers.tolist()

    def of_each(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def by_first(self, function: Callable[[], Any]) -> Any:
        found = error = None
        if self.index == 0:
            try:
                found = function()
            except (ValueError, OSError) as raised:
                error = raised
        found, error = self.of_each((found, error))[0]
        if error is not None:
            raise error
        return found

    def take_from_first(self, model: nn.Module) -> None:
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        # Nearly all were read from the same files, and need not be sent.
        sums = [zlib.crc32(_bytes_of(tensor)) if tensor.device.type == "cpu" else 0 for tensor in tensors.values()]
        same = zip(self.most(sums), self.most([-number for number in sums]), strict=True)
        with torch.no_grad():
            for tensor, (most, least) in zip(tensors.values(), same, strict=True):
                if most != -least:
                    dist.broadcast(tensor, 0)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


class _Stops(Hosts):
    """All stop after the step in which one of them was told to."""

    agree_on_stops = True

    def __init__(self, ranks: Ranks):
        self._ranks, self._asked = ranks, None

    def begin_listening(self) -> None:
        self._asked = None

    def request_stop(self, reason: str) -> None:
        self._asked = self._asked or reason

    def reached(self) -> str | None:
        asked = self._asked
        if not self._ranks.most([asked is not None])[0]:
            return None
        return next(reason for reason in self._ranks.of_each(asked) if reason is not None)


# ---- Compiled functions ----


def cut_at_collectives(
    graph: GraphModule, given: Sequence[Tensor], compile_graph: Callable[[GraphModule, Sequence[Any]], Callable]
) -> Callable:
    """
    Compile a graph for the arguments `given` by `compile_graph`, which takes both: whole, or where processes exchange tensors in
    it, as programs that run before and after each exchange. These are compiled when they are first run.
    """
    if not any(node.target in _COLLECTIVES for node in graph.graph.nodes):
        return compile_graph(graph, given)
    # Nothing is written in place but arguments, at the end: what is read would not be seen to depend on what is written to a view.
    graph = make_fx(functionalize(graph), tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
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
        depth[node] = max((depth.get(given, 0) for given in node.all_input_nodes), default=0)
        depth[node] += node.target in _COLLECTIVES
    last = 2 * max(depth.values(), default=0)
    parts: dict[Node, int] = {}
    for node in reversed(nodes):
        if node.target in _COLLECTIVES:
            parts[node] = 2 * depth[node] - 1
        else:
            needed = [parts[user] for user in node.users if user in parts]
            earliest = min(needed, default=last)
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
        self._make, self._run = (lambda given: compile_graph(graph, given)), None

    def forward(self, *given: Any) -> Any:
        if self._run is None:
            self._run = self._make(given)
        results = self._run(*given)
        return results[0] if self._is_one else results
