"""Compiled programs on disk: which of them the runtime may use."""

import os
from typing import Any

import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla.backends import get_mat_mul_precision

from ..base import Backend
from ..compile_cache import CacheUse, CompileCache, cache_root, compiler_settings, library_id
from .insight import metric


class XLACompileCache(Backend):
    """Compiled programs on disk: the compilation cache of [`XLABackend`]."""

    def __init__(self, reason: str, pjrt_device: str):
        super().__init__(reason)
        self._pjrt_device = pjrt_device
        self._compile_cache: CompileCache | None = None

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
