"""The backend of torch_tpu, PyTorch's device `tpu`: one process for each chip."""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...errors import UserError
from ...hardware.topologies import Chip, find_chip
from ...temporarily import temporarily
from ..base import Backend, map_tensors
from ..collectives import cut_at_collectives
from ..compile_cache import CacheUse, CompileCache, cache_root
from ..detect import tpu_chips, tpu_kind
from ..device_processes import DeviceProcesses
from ..host import enable_hugepages, peak_of_process
from ..insight import Counters
from ..processes import ALONE, Processes
from ..program_parts import Loops
from ..streamed import stream_tensor
from .compile import TorchTPUPrograms, changes_as_results, compute_on
from .fully_sharded import FSDPModule, is_split, split_as, split_model, whole


_CACHE_VARIABLE = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
# Not the flash kernel, whose gradients others have found to be NaN in compiled steps. torch_tpu's own compiled steps
# (`SingleTraceTrainer`) leave it out, too.
_COMPILED_ATTENTION = [SDPBackend.OVERRIDEABLE, SDPBackend.MATH]


class TorchTPULoops(Loops):
    """What is put at a place that is on the device, is one program for all places."""

    def put_block(self, tensor: torch.Tensor, block: torch.Tensor, start: torch.Tensor, dim: int) -> torch.Tensor:
        # Not in place: of what is changed in place, a compiled function makes another tensor, and copies it.
        places = start + torch.arange(block.shape[dim], device=tensor.device)
        return tensor.detach().index_copy(dim, places, block)


class TorchTPUBackend(Backend):
    """
    Eager PyTorch on a TPU chip, where each operator is a program that is compiled once for each shape.

    The names with an underscore are those of torch_tpu 0.2 (`tests/torch_tpu/test_torch_tpu_contract.py`).
    """

    name = "tpu"
    static_shapes = True
    compiles_operators = True
    compiles_functions = True
    metrics_on_device = True
    unknown_upstream = True

    def __init__(self, reason: str):
        super().__init__(reason)
        self.loops = TorchTPULoops()
        self.programs = TorchTPUPrograms(self)
        self._on_chip = tpu_chips() > 0
        # Functions that were compiled, and their calls.
        self._functions = self._calls = 0
        # Transfers from the device that the trainers asked for. Of others, torch_tpu says nothing.
        self._reads = 0
        #: Calls of functions by their program, none of their Python.
        self.replays = 0
        self._as_written = False
        self._compile_cache: CompileCache | None = None
        self._processes: Processes | None = None
        self._mesh = {"data": 1, "fsdp": 1}

    @property
    def device(self) -> torch.device:
        # A process has one chip, whose index is 0.
        return torch.device("tpu", 0)

    @property
    def device_name(self) -> str:
        return tpu_kind() if self._on_chip else "CPU, by a PJRT plug-in"

    @property
    def chip(self) -> Chip | None:
        return find_chip(tpu_kind()) if self._on_chip else None

    @property
    def processes(self) -> Processes:
        if self._processes is None:
            self._processes = self._meet() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ALONE
        return self._processes

    def _meet(self) -> Processes:
        if self._on_chip and "TORCH_TPU_SLICEBUILDER_ADDRESSES" not in os.environ:
            raise UserError(
                f"A launcher has started {os.environ['WORLD_SIZE']} processes without what torch_tpu needs to connect their chips. "
                "Start the command once, by hf-tpu, which starts one process for each chip; or before torchrun: "
                "eval $(python -m torch.tpu.distributed | sed 's/^/export /')"
            )
        if not dist.is_initialized():
            # Numbers on the host are exchanged besides.
            dist.init_process_group("cpu:gloo,tpu:tpu_dist" if self._on_chip else "gloo")
        return DeviceProcesses(by_host=not self._on_chip)

    def peak_memory(self) -> int | None:
        return torch.accelerator.max_memory_allocated() if self._on_chip else peak_of_process()

    def use_chips(self, num_chips: int | None, setting: str) -> None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if num_chips not in (None, processes):
            raise UserError(
                f"{setting}={num_chips}, but with torch_tpu each process drives one chip, and here "
                f"{'are' if processes > 1 else 'is'} {processes}. Start the command by hf-tpu, which starts a process for each "
                f"chip, or by torchrun --nproc_per_node={num_chips}."
            )

    @property
    def chips_of_host(self) -> int:
        return max(1, tpu_chips())

    def prepare_processes(self, count: int, setting: str) -> None:
        if not 1 <= count <= self.chips_of_host:
            raise UserError(
                f"{setting}={count}, but this machine has {self.chips_of_host} chips. Leave it out to use all of them."
            )
        if not self._on_chip:
            return
        try:
            torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=count)
        except RuntimeError as error:
            raise UserError(
                f"{setting}={count}: torch_tpu cannot connect as many chips of this machine ({error}). Leave it out to use all of "
                "them, or set it to 1."
            ) from error
        addresses = os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
        if len(addresses) != count:
            raise UserError(
                f"This machine is one of several hosts ({len(addresses)} chips together), on which hf-tpu does not start processes "
                "with torch_tpu yet. Start them by torchrun on each host, as torch_tpu's documentation says, or use torch_xla."
            )

    def prepare_host(self) -> list[str]:
        lines = enable_hugepages() if self._on_chip else []
        if self.chips_of_host > 1 and "WORLD_SIZE" not in os.environ:
            lines.append(
                f"This process drives one of {self.chips_of_host} chips; hf-tpu, or torchrun, starts a process for each"
            )
        return lines

    def use_compile_cache(self, setting: str) -> list[str]:
        root, is_explicit = cache_root(setting)
        if root is None or not (is_explicit or self._on_chip):
            return []
        if self._compile_cache is not None:
            if (used := self._compile_cache.directory.parent) == root:
                return []
            return [f"compile_cache_dir={root} has no effect: this process has its programs in {used}"]
        if (used := os.environ.get(_CACHE_VARIABLE)) is not None:
            return [f"compile_cache_dir={root} has no effect: {_CACHE_VARIABLE}={used} is set"]
        # The variable is read once.
        if self.compiles():
            return [
                "The compilation cache is off: this process had compiled a program before its first trainer was made"
            ]
        # Its keys hold all else that a program depends on.
        toolchain = {"torch": torch.__version__, "torch_tpu": version("torch_tpu")}
        self._compile_cache, lines = CompileCache.open(root, f"torch_tpu-{toolchain['torch_tpu']}", toolchain)
        if self._compile_cache is not None:
            os.environ[_CACHE_VARIABLE] = str(self._compile_cache.directory)
        return lines

    def cache_use(self) -> CacheUse | None:
        if self._compile_cache is None:
            return None
        counters = self.counters()
        return self._compile_cache.use(
            hits=counters.loads,
            misses=counters.compiles,
            unreadable=0,
            compile_seconds=counters.compile_seconds,
        )

    # ---- Weights that are split over processes ----

    def use_mesh(self, mesh: dict[str, int]) -> None:
        self._mesh = mesh

    @property
    def splits_weights(self) -> bool:
        return self._mesh["fsdp"] > 1

    def place(self, model: nn.Module) -> nn.Module:
        place = super().place
        return split_model(model, self._mesh, self.device.type, place) if self.splits_weights else place(model)

    def place_as(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return split_as(tensor, like) if is_split(like) else super().place_as(tensor, like)

    def _to_host(self, tensor: torch.Tensor, row: int | None = None) -> torch.Tensor:
        whole_tensor = whole(tensor.detach() if row is None else tensor.detach()[row])
        if self._for_first and self.processes.index > 0 and is_split(tensor):
            return torch.empty_like(whole_tensor, device="meta")
        return whole_tensor.cpu()

    def stream(self, data: Any) -> Any:
        def read_later(tensor: torch.Tensor) -> Any:
            return stream_tensor(tensor, self._to_host) if is_split(tensor) else self._to_host(tensor)

        self._reads += 1
        return map_tensors(read_later, data)

    # ---- Steps ----

    def wait(self) -> None:
        torch.accelerator.synchronize()

    def fetch(self, data: Any, on_finished: Callable[[], None] | None = None) -> Any:
        self.wait()
        if on_finished is not None:
            on_finished()
        self._reads += 1
        # A tensor that stands in it twice (tied weights) stays one tensor.
        return map_tensors(cache(self._to_host), data)

    def separate(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.ops.tpu._optimization_barrier(tensors))

    def compile_function(self, function: Callable, arguments: Sequence[Any]) -> Callable:
        """Trace a function of nested tensors, and compile it for the shapes of these `arguments`. It may change them in place."""
        leaves, structure = tree_flatten(arguments)
        structure_of_results = None

        def flat(*tensors: torch.Tensor) -> tuple:
            nonlocal structure_of_results
            results, structure_of_results = tree_flatten(function(*tree_unflatten(tensors, structure)))
            return tuple(results)

        with sdpa_kernel(_COMPILED_ATTENTION), warnings.catch_warnings():
            # A tracer looks for gradients everywhere.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf Tensor")
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
        # An operator that has raised is there, too: to see whether it does, accelerate takes rows of a single number.
        graph.graph.eliminate_dead_code()
        graph.recompile()
        compiled = cut_at_collectives(graph, leaves, self._compile_graph)

        def run(*arguments: Any) -> Any:
            with torch.no_grad():
                return tree_unflatten(compiled(*tree_leaves(arguments)), structure_of_results)

        return run

    def _compile_graph(self, graph: GraphModule, arguments: Sequence[torch.Tensor]) -> Callable:
        # Not above: this module is imported where torch_tpu is absent, too.
        from torch_tpu._internal.compile.compiler import StaticCompiler

        graph, changed_places = changes_as_results(graph, arguments)
        compute_on(self.device, graph)
        with torch.no_grad():
            for place in changed_places:
                # `clone` and `copy_` share memory with what they copy, which a program that is given it would take from both.
                arguments[place].copy_(arguments[place] * 1)
            # Not `torch.compile`, which would trace the graph once more, cut it, and keep what is changed in memory twice.
            compiled = StaticCompiler()(graph, arguments, donated_inputs=changed_places)
        self._functions += 1

        def run(*arguments: torch.Tensor) -> Sequence[torch.Tensor]:
            self._calls += 1
            results = compiled(*arguments)
            for place, value in zip(changed_places, results[len(results) - len(changed_places) :], strict=True):
                arguments[place].copy_(value)
            return results[: len(results) - len(changed_places)]

        return run

    def compile_module(self, module: nn.Module) -> Callable[[], None]:
        # One for each declared length, with gradients and without: beyond the limit, operators would be run one by one.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
        # What gathers weights and splits them again is around the forward pass.
        name, function = "_compiled_call_impl", module._call_impl
        if isinstance(module, FSDPModule):
            name, function = "forward", module.forward
        compiled = torch.compile(function, backend="tpu", dynamic=False)

        def call(*args, **kwargs):
            if self._as_written:
                return function(*args, **kwargs)
            # A mode that looks at each operator, as that of deferred reads, would be traced as a part of the layer. What was
            # compiled draws a seed when it is first run, from the generator that a resumed run is to find as it was.
            with torch._C.DisableTorchFunction(), sdpa_kernel(_COMPILED_ATTENTION), torch.random.fork_rng(devices=[]):
                return compiled(*args, **kwargs)

        # The first as `module.compile` sets it, over a class attribute as well.
        vars(module)[name] = call
        return partial(vars(module).pop, name)

    def as_written(self) -> AbstractContextManager[None]:
        return temporarily(self, _as_written=True)

    # ---- Counts ----

    def compiles(self) -> int:
        stats = torch.tpu._get_cache_stats()
        return stats.num_cache_reqs - stats.num_cache_hits

    @property
    def compile_mark(self) -> Callable[[], object]:
        return self.compiles

    def counters(self) -> Counters:
        stats = torch.tpu._get_cache_stats()
        misses = stats.num_cache_reqs - stats.num_cache_hits
        return Counters(
            compiles=stats.num_compilations,
            compile_seconds=sum(entry.compilation_duration.total_seconds() for entry in stats.per_entry_stats),
            # Operators ask for their program each time, functions once.
            executions=stats.num_cache_reqs - self._functions + self._calls,
            reads=self._reads,
            replays=self.replays,
            loads=misses - stats.num_compilations,
        )

    # ---- Random numbers ----

    def rng_state(self) -> int:
        generator = torch.tpu.default_generators[0]
        return int.from_bytes(generator.get_state().numpy().tobytes(), "little")

    def set_rng_state(self, state: int) -> None:
        generator = torch.tpu.default_generators[0]
        size = generator.get_state().numel()
        generator.set_state(torch.frombuffer(bytearray(state.to_bytes(size, "little")), dtype=torch.uint8))
