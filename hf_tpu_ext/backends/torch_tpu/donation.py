"""Graphs that change their arguments, as graphs of results: a compiler may then put each where its argument was."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


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
