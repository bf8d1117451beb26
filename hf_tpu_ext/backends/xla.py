"""torch_xla: TPU chips, or XLA compiled for the host. The only module that imports torch_xla."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch import nn
from torch_xla.utils.checkpoint import checkpoint

from .base import Backend, Counters
from .detect import local_chips


def _metric(name: str) -> tuple[int, float]:
    """Count and sum (nanoseconds for times) of one of torch_xla's metrics."""
    data = met.metric_data(name)
    return (0, 0.0) if data is None else (data[0], data[1])


def runtime_started() -> bool:
    """Whether the XLA runtime of this process already holds its devices."""
    return torch_xla._XLAC._xla_runtime_is_initialized()


class XLABackend(Backend):
    """
    Lazy tensors compiled by XLA.

    Args:
        reason (`str`):
            Why this backend was chosen.
        pjrt_device (`str`):
            `"TPU"` or `"CPU"`.

    Raises:
        `ValueError`: The runtime of this process was already started for another device type.
    """

    name = "xla"
    lazy = True

    def __init__(self, reason: str, pjrt_device: str):
        super().__init__(reason)
        # Asked of the device: the variable may have been changed since.
        if runtime_started() and (started_with := xm.xla_device_hw(self.device)) != pjrt_device:
            raise ValueError(
                f"The XLA runtime of this process was already started with PJRT_DEVICE={started_with}, but "
                f"{pjrt_device} is asked for. Set PJRT_DEVICE={pjrt_device} before anything uses an XLA device: in the "
                "shell, under the recipe's `env:` key, or in the notebook's first cell; then restart the process."
            )
        os.environ["PJRT_DEVICE"] = pjrt_device
        # With several local chips and no SPMD, accelerate registers all of them as replicas of one process, and the
        # first collective waits for participants that do not exist. It must be said before the runtime starts.
        if not runtime_started() and local_chips(pjrt_device) > 1:
            xr.use_spmd()

    @cached_property
    def device(self) -> torch.device:
        # Start the runtime here: autograd counts the devices at the first backward pass of the process, and an XLA
        # device that appears later has no queue to run on.
        xr.global_runtime_device_count()
        return torch_xla.device()

    @property
    def device_name(self) -> str:
        kind = xr.device_type()
        return f"{kind}, compiled by XLA" if kind == "CPU" else xm.xla_device_kind(self.device)

    @property
    def num_chips(self) -> int:
        return xr.global_runtime_device_count()

    def _sync(self, wait: bool = False) -> None:
        # torch_xla draws another seed at every sync. Kept as it is, random numbers depend on the random operators alone,
        # as on an eager device, and not on how often something was logged, evaluated or saved.
        state = xm.get_rng_state()
        torch_xla.sync(wait=wait)
        xm.set_rng_state(state)

    def end_step(self) -> None:
        self._sync()

    def wait(self) -> None:
        self._sync()
        xm.wait_device_ops()

    def send(self, data: Any) -> Any:
        # `tensor.to("xla")` folds a 0-dimensional 0, 1 or -1 into the program as a constant, so a learning rate of
        # exactly 0 would be another program. Data sent this way never is, and all tensors go in one transfer.
        is_tensor = isinstance(data, torch.Tensor)
        sent = xm.send_cpu_data_to_device([data] if is_tensor else data, self.device)
        return sent[0] if is_tensor else sent

    def fetch(self, data: Any) -> Any:
        # One transfer for the whole structure. A tensor that stands in it twice (tied weights) is fetched once and stays
        # one tensor, so that what is saved from it is stored once.
        unique: dict[int, torch.Tensor] = {}

        def collect(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                if value.device.type == "xla":
                    unique.setdefault(id(value), value)
            elif isinstance(value, Mapping):
                for item in value.values():
                    collect(item)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    collect(item)

        def replace(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return fetched.get(id(value), value)
            if isinstance(value, Mapping):
                return type(value)((key, replace(item)) for key, item in value.items())
            if isinstance(value, (list, tuple)):
                return type(value)(replace(item) for item in value)
            return value

        collect(data)
        tensors = [tensor.detach() for tensor in unique.values()]
        self._sync(wait=True)
        fetched = dict(zip(unique, torch_xla._XLAC._xla_get_cpu_tensors(tensors), strict=True)) if tensors else {}
        return replace(data)

    def place(self, model: nn.Module) -> nn.Module:
        # `.to("xla")` gives every name a tensor of its own, so weights that were one tensor before are made one again.
        # Going by identity rather than by `tie_weights()` also covers models that are not from transformers.
        first_name: dict[int, str] = {}
        tied: list[tuple[str, str]] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            original = first_name.setdefault(id(parameter), name)
            if original != name:
                tied.append((name, original))
        model.to(self.device)
        for name, original in tied:
            module_name, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module_name), attribute, model.get_parameter(original))
        return model

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager:
        return nullcontext() if dtype is None else torch.autocast("xla", dtype)

    @property
    def checkpoint_function(self) -> Callable:
        # PyTorch's own checkpoint fails on XLA (`torch.xla` does not exist), and a shim for that trains but saves
        # nothing: XLA removes the recomputation as a duplicate. torch_xla's puts an optimization barrier before it.
        return partial(checkpoint, use_reentrant=True)

    def compiles(self) -> int:
        return met.counter_value("UncachedCompile") or 0

    def counters(self) -> Counters:
        compiles, compile_ns = _metric("CompileTime")
        return Counters(
            compiles=compiles,
            compile_seconds=compile_ns / 1e9,
            executions=_metric("ExecuteTime")[0] + _metric("ExecuteReplicatedTime")[0],
            reads=_metric("TransferFromDeviceTime")[0],
            fallbacks=sum(met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")),
        )

    def rng_state(self) -> int:
        return xm.get_rng_state()

    def set_rng_state(self, state: int) -> None:
        xm.set_rng_state(state)
