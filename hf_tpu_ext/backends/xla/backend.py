"""The backend of torch_xla: TPU chips, or XLA compiled for the host."""

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.backends import get_mat_mul_precision

from ...errors import UserError
from ...hardware.topologies import Chip, find_chip
from ..base import Backend, map_tensors, replace_tensors, tensors_in
from ..compile_cache import CacheUse, CompileCache, cache_root, compiler_settings, library_id
from ..detect import local_chips, show_chips, tpu_kind
from ..host import enable_hugepages, peak_of_process
from ..insight import Counters
from ..processes import Processes
from ..streamed import stream_tensor
from .checkpointing import replace_checkpoint
from .graphs import pending
from .hosts import hosts_of_slice, join_hosts, read_split
from .insight import XLAInsight, metric
from .operators import register_operators
from .program_parts import XLAKernels, XLALoops
from .programs import XLAPrograms
from .sharding import ConstrainRows, XLAManualSharding, gather, is_split, rows_spec
from .tensors import pickle_from_host


#: Bytes of a state that are fetched at once. A larger one is streamed, so that the host never holds all of it.
FETCHED_AT_ONCE = 2**30


def runtime_started() -> bool:
    """Whether the XLA runtime of this process already holds its devices."""
    return torch_xla._XLAC._xla_runtime_is_initialized()


class XLABackend(Backend):
    """Lazy tensors compiled by XLA. A runtime started for another `pjrt_device` is a `ValueError`."""

    name = "xla"
    static_shapes = True
    traces_steps = True
    metrics_on_device = True
    shards_by_annotation = True
    unknown_upstream = True

    def __init__(self, reason: str, pjrt_device: str):
        super().__init__(reason)
        self._pjrt_device = pjrt_device
        # Asked of the device: the variable may have been changed since.
        if runtime_started() and (started_with := xm.xla_device_hw(self.device)) != pjrt_device:
            raise UserError(
                f"The XLA runtime of this process was already started with PJRT_DEVICE={started_with}, but "
                f"{pjrt_device} is asked for. Set PJRT_DEVICE={pjrt_device} before anything uses an XLA device: in the "
                "shell, under the recipe's `env:` key, or in the notebook's first cell; then restart the process."
            )
        os.environ["PJRT_DEVICE"] = pjrt_device
        pickle_from_host()
        register_operators()
        self.insight = XLAInsight()
        self._host_chips = xr.global_runtime_device_count() if runtime_started() else local_chips(pjrt_device)
        self._num_chips: int | None = None
        self._mesh: xs.Mesh | None = None
        self._compile_cache: CompileCache | None = None
        self.loops = XLALoops(self)
        self.programs = XLAPrograms(self)
        self.kernels = XLAKernels(pjrt_device.lower())

    @cached_property
    def device(self) -> torch.device:
        if not runtime_started() and self._num_chips is not None:
            show_chips(self._pjrt_device, self._num_chips, self._host_chips)
        # With several chips in one process and no SPMD, accelerate registers all of them as replicas, and the first
        # collective waits for participants that do not exist. It is best said before the runtime starts.
        visible = xr.global_runtime_device_count() if runtime_started() else local_chips(self._pjrt_device)
        if visible > 1 and not xr.is_spmd():
            xr.use_spmd()
        # Start the runtime here: autograd counts the devices at the first backward pass of the process, and an XLA
        # device that appears later has no queue to run on.
        xr.global_runtime_device_count()
        self._processes = join_hosts()
        self._check_autograd(torch_xla.device())
        return torch_xla.device()

    def _check_autograd(self, device: torch.device) -> None:
        try:
            with torch.inference_mode(False):
                torch.ones((), device=device, requires_grad=True).backward()
        except RuntimeError as error:
            raise UserError(
                "A backward pass ran in this process before the XLA runtime started, and PyTorch's autograd knows only the "
                "devices that were there then. Make the trainer that uses XLA before anything is trained on the CPU or a GPU; "
                "in a notebook, restart the kernel first."
            ) from error

    @cached_property
    def processes(self) -> Processes:
        assert self.device.type == "xla"  # starts the runtime
        return self._processes

    @property
    def device_name(self) -> str:
        kind = xr.device_type()
        return f"{kind}, compiled by XLA" if kind == "CPU" else tpu_kind()

    @cached_property
    def num_chips(self) -> int:
        assert self.device.type == "xla"  # starts the runtime, with the chips that were asked for
        return xr.global_runtime_device_count()

    @property
    def chip(self) -> Chip | None:
        return None if xr.device_type() == "CPU" else find_chip(tpu_kind())

    def peak_memory(self) -> int | None:
        if xr.device_type() == "CPU":
            return peak_of_process()
        # Where one device stands for all chips (SPMD), the runtime does not say.
        return None if self.num_chips > 1 else xm.get_memory_info(self.device)["peak_bytes_used"]

    def prepare_host(self) -> list[str]:
        return [] if self._pjrt_device == "CPU" or runtime_started() else enable_hugepages()

    def use_chips(self, num_chips: int | None, setting: str) -> None:
        hosts = 1
        if runtime_started():
            hosts = xr.process_count()
        elif num_chips is not None:
            # Only then: off Google Cloud the answer takes a while.
            hosts = hosts_of_slice(self._pjrt_device)
        if num_chips is not None and hosts > 1:
            raise UserError(
                f"{setting}={num_chips}, but this machine is one of {hosts} hosts of a slice, whose chips train together. "
                f"Leave {setting} out; for fewer chips, create a smaller slice."
            )
        if num_chips is not None and not 1 <= num_chips <= self._host_chips:
            has = "1 chip" if self._host_chips == 1 else f"{self._host_chips} chips"
            choices = "1" if self._host_chips == 1 else f"1...{self._host_chips}"
            on_host = self._pjrt_device == "CPU" and num_chips > self._host_chips
            more = f", or CPU_NUM_DEVICES={num_chips} for as many on the host" if on_host else ""
            raise UserError(
                f"{setting}={num_chips}, but this machine has {has}. Set {setting} to {choices}, or leave "
                f"it out to use all{more}."
            )
        if runtime_started():
            if num_chips not in (None, self.num_chips):
                raise UserError(
                    f"{setting}={num_chips}, but the XLA runtime of this process already drives {self.num_chips}. Set it "
                    "before anything uses an XLA device, and restart the process."
                )
        else:
            self._num_chips = num_chips

    # ---- Compiled programs on disk ----

    def use_compile_cache(self, setting: str) -> list[str]:
        root, is_explicit = cache_root(setting)
        # Kernels are lowered on the host, and so kept also where programs are not.
        self.kernels.directory = root and root / "kernels"
        on_host = self._pjrt_device == "CPU"
        if self._compile_cache is not None:
            used = self._compile_cache.directory.parent
            if root == used or not is_explicit:
                return []
            return [f"compile_cache_dir={root or 'off'} has no effect: this process keeps its programs in {used}"]
        if root is None or (on_host and not is_explicit):
            return []
        if path := os.environ.get("XLA_PERSISTENT_CACHE_PATH"):
            return [f"compile_cache_dir={root} has no effect: XLA_PERSISTENT_CACHE_PATH={path} is set"]
        if torch_xla._XLAC._xla_computation_cache_is_initialized():
            return [
                "The compilation cache is off: this process had compiled a graph before its first trainer was made"
            ]
        cache, lines = CompileCache.open(root, f"torch_xla-{torch_xla.__version__}", self._toolchain())
        if cache is None:
            return lines
        xr.initialize_cache(str(cache.directory), readonly=cache.problem is not None)
        self._compile_cache = cache
        if on_host:
            lines.append(
                f"compile_cache_dir={root} has no benefit here: XLA:CPU stores executables but cannot load them"
            )
        return lines

    def _toolchain(self) -> dict[str, Any]:
        """What programs depend on besides what the runtime's keys hold (its `XLAGraphExecutor::CollectSyncTensors`)."""
        libtpu = os.environ.get("TPU_LIBRARY_PATH") or os.environ.get("PTXLA_TPU_LIBRARY_PATH")
        return {
            "torch": torch.__version__,
            "torch_xla": torch_xla.__version__,
            "libtpu": library_id(libtpu) if self._pjrt_device == "TPU" and libtpu else None,
            "device": self.device_name,
            "chips": self.num_chips,
            "matmul_precision": get_mat_mul_precision(),
            "environment": compiler_settings(),
        }

    def cache_use(self) -> CacheUse | None:
        if self._compile_cache is None:
            return None
        return self._compile_cache.use(
            hits=self.counters().loads,
            misses=met.counter_value("PersistentCacheMiss") or 0,
            unreadable=met.counter_value("PersistentCacheDeserializeFailure") or 0,
            compile_seconds=metric("CompileTime")[1] / 1e9,
        )

    # ---- Mesh ----

    def use_mesh(self, mesh: dict[str, int]) -> None:
        if self.num_chips > 1:
            # In the order of hosts, within which the inner axis is to stay. Their numbers say nothing of where they are.
            chips = [chip for chips in sorted(self.processes.chips) for chip in chips] or list(range(self.num_chips))
            self._mesh = xs.Mesh(chips, tuple(mesh.values()), tuple(mesh))
            self.manual_sharding = XLAManualSharding(self._mesh)

    def shard(self, tensor: torch.Tensor, spec: tuple) -> None:
        if self._mesh is None:
            return
        sharding = self._mesh.get_op_sharding(spec)
        try:
            torch_xla._XLAC._xla_mark_sharding(tensor, sharding)
        except RuntimeError:
            # It is placed otherwise, by an earlier run with another mesh.
            torch_xla._XLAC._xla_clear_sharding(tensor)
            torch_xla._XLAC._xla_mark_sharding(tensor, sharding)

    def place_as(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if self._mesh is None:
            return self.send(tensor)
        # The copy is on the host until it is said how to split it.
        copy = tensor.to(like.device)
        torch_xla._XLAC._xla_mark_sharding(copy, torch_xla._XLAC._get_xla_op_sharding(like))
        return copy

    def constrain_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._mesh is None or tensor.shape[0] % self.num_chips:
            return tensor
        return ConstrainRows.apply(tensor, self._mesh)

    def gather(self, weight: torch.Tensor) -> torch.Tensor:
        if self._mesh is None or self._mesh.shape()["fsdp"] == 1 or weight.ndim < 2:
            return weight
        return gather(weight, self._mesh)

    # ---- Steps ----

    def _sync(self, wait: bool = False) -> None:
        # torch_xla draws another seed at every sync. Kept as it is, random numbers depend on the random operators alone,
        # as on an eager device, and not on how often something was logged, evaluated or saved.
        state = xm.get_rng_state()
        torch_xla.sync(wait=wait)
        xm.set_rng_state(state)

    def end_step(self) -> None:
        self._sync()

    def flush(self) -> None:
        # What was traced and not run yet.
        if pending.any(self.device):
            self._sync()

    def wait(self) -> None:
        self._sync()
        xm.wait_device_ops()

    def send_rows(self, data: Any, num_rows: int) -> Any:
        if self._mesh is not None and num_rows % self.num_chips:
            raise UserError(
                f"A batch of {num_rows} rows does not divide by {self.num_chips} chips. Yield a multiple of "
                f"{self.num_chips} rows from the data collator, or use fewer chips: num_chips=1."
            )
        return self.send(data, num_rows)

    def send(self, data: Any, num_rows: int | None = None) -> Any:
        # `tensor.to("xla")` folds a 0-dimensional 0, 1 or -1 into the program as a constant, so a learning rate of
        # exactly 0 would be another program. Data sent this way never is, and all tensors go in one transfer.
        tensors = tensors_in(data)
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if not on_host:
            return data
        self.processes.note_sent(on_host)
        shardings = None
        if self._mesh is not None:
            specs = [rows_spec(self._mesh, tensor.ndim, tensor.shape[:1] == (num_rows,)) for tensor in on_host]
            shardings = [
                xs.ShardingSpec(self._mesh, spec).xla_spec(tensor) for spec, tensor in zip(specs, on_host, strict=True)
            ]
        on_device = iter(pending.send(on_host, self.device, shardings))
        return replace_tensors(
            [next(on_device) if tensor.device.type == "cpu" else tensor for tensor in tensors], data
        )

    def fetch(self, data: Any, on_finished: Callable[[], None] | None = None) -> Any:
        # One transfer for the whole structure. A tensor that stands in it twice (tied weights) is fetched once and stays
        # one tensor, so that what is saved from it is stored once.
        unique = dict.fromkeys(tensor for tensor in tensors_in(data) if tensor.device.type == "xla")
        tensors = [tensor.detach() for tensor in unique]
        self.flush()
        xm.wait_device_ops()
        if on_finished is not None:
            on_finished()
        with self.insight.own_reads():
            host_tensors = dict(zip(unique, self._to_host(tensors), strict=True))
        return map_tensors(lambda tensor: host_tensors.get(tensor, tensor), data)

    def stream(self, data: Any) -> Any:
        on_device = dict.fromkeys(tensor for tensor in tensors_in(data) if tensor.device.type == "xla")
        if sum(tensor.nbytes for tensor in on_device) <= FETCHED_AT_ONCE:
            # A transfer for each tensor, or row of stacked ones, would take longer.
            return self.fetch(data)
        self.wait()
        # One that stands in it twice is written once.
        stand_ins = {tensor: stream_tensor(tensor.detach(), self._read) for tensor in on_device}
        return map_tensors(lambda tensor: stand_ins.get(tensor, tensor), data)

    def _read(self, tensor: torch.Tensor, row: int | None) -> torch.Tensor:
        if row is not None:
            # One program for all rows: which one is data.
            tensor = tensor.index_select(0, self.send(torch.tensor([row]))).squeeze(0)
            self.wait()
        with self.insight.own_reads():
            return self._to_host([tensor])[0]

    def _to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        are_split = [is_split(tensor) for tensor in tensors]
        split, whole = ([i for i, is_one in enumerate(are_split) if is_one == wanted] for wanted in (True, False))
        on_host: dict[int, torch.Tensor] = {}
        keep = not self._for_first or self.processes.index == 0
        if not keep:
            on_host.update({i: torch.empty_like(tensors[i], device="meta") for i in whole if tensors[i].ndim})
            whole = [index for index in whole if index not in on_host]
        if whole:
            on_host.update(zip(whole, torch_xla._XLAC._xla_get_cpu_tensors([tensors[i] for i in whole]), strict=True))
        if split and self.processes.count > 1:
            self.processes.exchange("a read of what is split over hosts", len(split))
            split_tensors = (tensors[index] for index in split)
            on_host.update(zip(split, read_split(split_tensors, self._mesh, self._sync, keep), strict=True))
        elif split:
            # Put together here. Read as one, a split tensor would first be made whole on every chip.
            split_tensors = [tensors[index] for index in split]
            shards = torch_xla._XLAC._get_local_shards(split_tensors)
            places = torch_xla._XLAC._get_local_shard_replica_and_indices(split_tensors)
            for index, tensor, parts, where in zip(split, split_tensors, shards, places, strict=True):
                on_host[index] = torch.empty(tensor.shape, dtype=tensor.dtype)
                for (part, _), (replica, slices) in zip(parts, where, strict=True):
                    if replica == 0:
                        on_host[index][tuple(slices)] = part
        return [on_host[index] for index in range(len(tensors))]

    def replace_checkpoint(self, recompute):
        return replace_checkpoint(recompute)

    def separate(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        xm.optimization_barrier_(tensors)
        # In place, and without a tensor of its own.
        pending.note(none=False)
        return tensors

    def compiles(self) -> int:
        return met.counter_value("UncachedCompile") or 0

    @property
    def compile_mark(self) -> Callable[[], object]:
        # Not `compiles`: each phase of a step asks, and this calls nothing of this package.
        return partial(met.counter_value, "UncachedCompile")

    def counters(self) -> Counters:
        return self.insight.counters()

    def rng_state(self) -> int:
        return xm.get_rng_state()

    def set_rng_state(self, state: int) -> None:
        xm.set_rng_state(state)
