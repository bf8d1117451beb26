"""XLA whose programs are traced and not run: tensors of any size, of which there is the shape alone."""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import UserError
from ...hardware.topologies import Chip
from ..processes import Processes
from .backend import XLABackend
from .compile import Executable, Trace, Traced
from .insight import XLAInsight
from .program_parts import XLAKernels
from .programs import XLAPrograms
from .sharding import rows_spec
from .tensors import live_tensors


_XLAC = torch_xla._XLAC

# Bytes of a tensor that is sent with its values: batches are, gradients of every chip are not.
_SMALL = 2**26


@dataclass(frozen=True)
class TracedModule:
    """A program that was traced and is not run."""

    #: Serialized `HloModuleProto`.
    module: bytes
    #: What was placed, sent or computed before, for each of its arguments.
    arguments: list[torch.Tensor]
    #: For each argument, whether a result takes its place.
    is_donated: list[bool]
    #: For each argument, how it is split over the chips, as HLO writes it, where the module does not say.
    shardings: list[str | None]


class _NotRun(Executable):
    """A program that is there in name only. What it returns has shapes and dtypes."""

    #: Those of what it returns.
    outputs: list[tuple[torch.Size, torch.dtype]]

    def run(self, tensors: Sequence[torch.Tensor], aliases: Collection[int]) -> Any:
        new = (xb.create_placeholder_tensor(tuple(shape), dtype) for shape, dtype in self.outputs)
        return self.fill(next(new) if place is None else tensors[place] for place in self.output_places)

    def difference(self, other: Executable) -> str | None:
        return None


class _Programs(XLAPrograms):
    def begin_trace(self, state: Sequence[torch.Tensor], data: Sequence[torch.Tensor]) -> Trace:
        self._backend.take_pending_as_run()
        return super().begin_trace(state, data)

    def hash_traced(self, graph: Traced) -> Executable:
        executable = _NotRun(b"", graph.inputs, graph.written_places, graph.output_places, graph.structure, 0)
        executable.outputs = [(tensor.shape, tensor.dtype) for tensor in graph.results[len(graph.written_places) :]]
        return executable

    def run_first(self, executable: Executable, graph: Traced, tensors, aliases) -> TracedModule:
        return self._backend.take_module(graph.results, graph.values, graph.is_donated)

    def find_aliases(self, state: Sequence[torch.Tensor]) -> set[int]:
        return set()

    def separate_copies(self, state: Sequence[torch.Tensor]) -> None:
        # Without values, nothing can be shared.
        pass


class _Insight(XLAInsight):
    def note_lines(self, on: bool) -> None:
        # Names of operations are written together with lines.
        super().note_lines(True)


class TracingBackend(XLABackend):
    """
    XLA on the host, by which programs are traced as for the chips of a TPU, and not run.

    What is placed, sent or computed has a shape and a dtype only. So a model needs no memory, and its parameters may
    be on the meta device. Numbers that are read are 0. The XLA runtime of this process is started with `num_chips`
    devices. `hosts` are the chips of each host, where there are several, and `chip` is their kind.
    """

    def __init__(self, num_chips: int, hosts: Sequence[Sequence[int]] = (), chip: Chip | None = None):
        super().__init__(f"programs are traced for {num_chips} TPU chips", "CPU")
        super().use_chips(num_chips, "num_chips")
        # Autograd starts a thread for each device, and counts them with 8 bits: of 128 to 256 it finds none. A backward pass
        # that is only traced may as well run in the thread that asks for it.
        torch.autograd.set_multithreading_enabled(False)
        self.programs = _Programs(self)
        self.kernels = XLAKernels("tpu")
        self.insight = _Insight()
        self.insight.note_lines(True)
        # One that traces for all of them.
        self._slice = Processes()
        self._slice.chips = hosts
        self._chip = chip
        self._shardings = WeakIdKeyDictionary()
        self._spec_texts: dict[tuple, str] = {}
        # By the identity of a buffer, the tensor that it was made for. Buffers are kept, for identities to stay theirs.
        self._owners: dict[int, weakref.ref[torch.Tensor]] = {}
        self._buffers: list[torch.Tensor] = []

    def use_chips(self, num_chips: int | None, setting: str) -> None:
        if num_chips not in (None, self._host_chips):
            raise UserError(
                f"{setting}={num_chips}, but programs are traced for {self._host_chips} chips. Leave it out, or name a "
                f"topology of {num_chips}."
            )

    @property
    def processes(self) -> Processes:
        return self._slice

    @property
    def chip(self) -> Chip | None:
        return self._chip

    def _check_autograd(self, device: torch.device) -> None:
        # It has no need of the device's thread.
        pass

    # ---- Tensors ----

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        return xb.create_placeholder_tensor(tuple(like.shape), like.dtype)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not the tensor, which would be computed anew together with what shares its data.
        self._buffers += _XLAC._get_tensors_xla_device_data_node([tensor])[1]
        (identity,) = _XLAC._get_tensors_handle([tensor])
        self._owners[identity] = weakref.ref(tensor)
        return tensor

    def place(self, model: nn.Module) -> nn.Module:
        @cache
        def placeholder(parameter: nn.Parameter) -> torch.Tensor:
            return self._own(nn.Parameter(self._new(parameter), parameter.requires_grad))

        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device != self.device:
                    module._parameters[name] = placeholder(parameter)
        return super().place(model)

    def send(self, data: Any, num_rows: int | None = None) -> Any:
        def send_one(value: torch.Tensor) -> torch.Tensor:
            if value.nbytes < _SMALL:
                # With a value, a tensor can be marked as split, which what is computed from it then tells on.
                device_data = super(TracingBackend, self).send(value, num_rows)
            else:
                device_data = self._new(value).detach()
            if self._mesh is not None:
                self.shard(device_data, rows_spec(self._mesh, device_data.ndim, device_data.shape[:1] == (num_rows,)))
            return self._own(device_data)

        return tree_map_only(torch.Tensor, send_one, data)

    def fetch(self, data: Any, on_finished: Callable[[], None] | None = None) -> Any:
        return tree_map_only(torch.Tensor, lambda value: torch.zeros(value.shape, dtype=value.dtype), data)

    def shard(self, tensor: torch.Tensor, spec: tuple) -> None:
        if self._mesh is not None:
            sharding = self._mesh.get_op_sharding(spec)
            if (self._mesh, spec) not in self._spec_texts:
                # Placeholders cannot be marked. A small tensor tells how HLO writes the same.
                example = torch.zeros([1 if axis is None else self.num_chips for axis in spec]).to(self.device)
                _XLAC._xla_mark_sharding(example, sharding)
                self._spec_texts[self._mesh, spec] = _XLAC._get_xla_sharding_spec(example)
            self._shardings[tensor] = sharding, self._spec_texts[self._mesh, spec]

    # ---- Programs ----

    def _pending(self) -> list[torch.Tensor]:
        """Tensors that were computed and not run. torch_xla counts them, and does not list them."""
        tensors = live_tensors()
        return list(compress(tensors, _XLAC._check_tensor_need_materialization(tensors)))

    def _sync(self, wait: bool = False) -> None:
        # What was computed so far is taken as run when the next program begins.
        pass

    def _take_as_run(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.data = self._new(tensor)
            self._own(tensor)

    def take_pending_as_run(self) -> None:
        """Go on as if what was traced so far had been run."""
        self._take_as_run(self._pending())

    def _kept_in_place(self, result: torch.Tensor) -> torch.Tensor:
        """A result that is split as the tensor is that it was computed for."""
        if result not in self._shardings or _XLAC._get_xla_sharding_spec(result):
            return result
        # As torch_xla does it where the tensor is marked, which has a value then.
        zeros = torch.zeros_like(result)
        _XLAC._xla_mark_sharding(zeros, self._shardings[result][0])
        return zeros.copy_(result)

    def end_module(self) -> TracedModule:
        """End the program traced so far, whose arguments stay as they are."""
        results = self._pending()
        _, values = _XLAC._get_tensors_xla_device_data_node(results)
        return self.take_module(results, values, [False] * len(values))

    def take_module(
        self, results: list[torch.Tensor], values: list[torch.Tensor], is_donated: list[bool]
    ) -> TracedModule:
        """Take what was traced, and go on as if it had been run. The arguments are as in [`~hf_tpu_ext.backends.xla.compile.Traced`]."""
        arguments = []
        for identity, value in zip(_XLAC._get_tensors_handle(values), values, strict=True):
            owner = self._owners[identity]() if identity in self._owners else None
            arguments.append(value if owner is None else owner)
        module = TracedModule(
            _XLAC._get_xla_tensors_hlo_proto([self._kept_in_place(result) for result in results]),
            arguments,
            is_donated,
            [self._shardings[argument][1] if argument in self._shardings else None for argument in arguments],
        )
        self._take_as_run(results)
        return module
