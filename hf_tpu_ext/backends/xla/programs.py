"""Programs of torch_xla, and the buffers that they are given."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch_xla

from ..compiled_function import Programs
from . import graphs
from .compile import Executable, Trace, Traced, XLACompiledFunction
from .tensors import XLARealCopies, give_own_buffers, live_tensors, memory_shared, select_computed


class XLAPrograms(Programs):
    """Programs of torch_xla."""

    compiled_function = XLACompiledFunction

    # ---- Traces ----

    def begin_trace(self, state: Sequence[torch.Tensor], data: Sequence[torch.Tensor]) -> Trace:
        """Begin a trace. Raises `CannotReplay` if the state does not allow it."""
        return Trace(self._backend, state, data)

    def hash_traced(self, graph: Traced) -> Executable:
        """The program of what was traced."""
        handle = graphs.hash_graph(graph.results, graph.given_away)
        return Executable(handle, graph.inputs, graph.written_places, graph.output_places, graph.structure, 0)

    def run_first(
        self, executable: Executable, graph: Traced, tensors: Sequence[torch.Tensor], aliases: Collection[int]
    ) -> Any:
        """Compile what was traced, unless it is compiled already, and run it."""
        graphs.compile_graph(graph.results)
        results = iter(graphs.run_graph(executable.handle, graph.values))
        executable.take(results, tensors, aliases)
        for tensor, result in zip(graph.results[len(graph.written_places) :], results, strict=True):
            tensor.data = result

    def memory_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
        return [
            *torch_xla._XLAC._get_tensors_handle(on_device),
            *(tensor.data_ptr() for tensor in tensors if tensor.device.type != "xla"),
        ]

    def find_aliases(self, state: Sequence[torch.Tensor]) -> set[int]:
        # Detached ones of a `state_dict()`, or `parameter.data`.
        counts = [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in state]
        return {place for place, count in enumerate(counts) if count > 1}

    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:
        # To torch_xla a copy is the same value, so it shares the buffer of what it was made of, until one of them is changed
        # by a program that knows both. On several chips, a buffer that is still to be filled has no handle to ask for.
        self._backend.wait()
        state = list({memory_shared(tensor): tensor for tensor in select_computed(state)}.values())
        own_memory = {memory_shared(tensor) for tensor in state}
        others = [tensor for tensor in select_computed(live_tensors()) if memory_shared(tensor) not in own_memory]
        buffers = torch_xla._XLAC._get_tensors_handle(state)
        # What is equal is sent once: two tensors of the state may have one buffer, as the scales of two embeddings.
        first = {buffer: place for place, buffer in reversed(list(enumerate(buffers)))}
        shared = [tensor for place, tensor in enumerate(state) if first[buffers[place]] != place]
        shared += [tensor for tensor in others if graphs.buffer_of(tensor) in first]
        give_own_buffers(shared)
        self._backend.flush()
        if self._backend.num_chips == 1:
            self._forget_types(state)

    def _forget_types(self, state: Sequence[torch.Tensor]) -> None:
        """
        Make the state what results of programs are. Tensors that were sent know the type that they had on the host, and some
        operators, such as a mean, convert what they compute to it: the second step would be compiled again.
        """
        self._backend.wait()
        aliases = self.find_aliases(state)
        single = [tensor for place, tensor in enumerate(state) if place not in aliases]
        buffers = graphs.hold_buffers(single)
        same = dict(zip(torch_xla._XLAC._get_tensors_handle(buffers), buffers, strict=True))
        for tensor, buffer in zip(single, torch_xla._XLAC._get_tensors_handle(single), strict=True):
            if same[buffer].dtype == tensor.dtype:
                tensor.data = same[buffer]

    def real_copies(self) -> XLARealCopies:
        return XLARealCopies()
