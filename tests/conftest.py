"""
Tests run on XLA compiled for the host, beside eager PyTorch as the reference: with torch_xla, or in the environment of
`make test-torch-tpu` with torch_tpu. Nothing is fetched from anywhere.
"""

import gc
import importlib.metadata
import os
import sys
from functools import cache


# To compile the tests and the package anew takes every process seconds, where the environment asks for no files of bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Until modules are imported, see `pytest_collection_finish`.
gc.disable()
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["HF_HUB_OFFLINE"] = "1"
# A compiled program of XLA on CPU takes some hundred memory maps, of which a process may have 65,530: kept without end, the
# programs of all tests are more than that, and the compiler crashes.
os.environ["XLA_COMPILATION_CACHE_SIZE"] = "64"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Of a program that runs a few times, making machine code takes nine tenths of what compiling it takes: LLVM's passes two
# thirds, and MLIR's emitters of fused operators most of the rest. What XLA does before, on HLO, is as in any run, up to what
# is fused with what.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
)
# Two threads per operator on tiny tensors cost more than they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")
for _name in ("HF_TPU_EXT", "HF_TPU_EXT_BACKEND", "USE_TORCH_XLA", "XLA_USE_BF16", "ACCELERATE_MIXED_PRECISION"):
    os.environ.pop(_name, None)

# Accelerate reads files of PEFT's a dozen times for each trainer, to see whether it is installed.
importlib.metadata.metadata = cache(importlib.metadata.metadata)

import cpu_plugin  # noqa: E402
import pytest  # noqa: E402


#: Whether `xla` is torch_tpu.
ON_TORCH_TPU = cpu_plugin.why_absent() is None
if ON_TORCH_TPU:
    # A flag that the plug-in's XLA does not have yet.
    flags = os.environ["XLA_FLAGS"].split()
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in flags if "fusion_emitters" not in flag)
    cpu_plugin.start()


def pytest_collection_finish(session):
    """
    Start XLA where a test uses it, before any of them runs: autograd counts devices once, at the first backward pass. Then leave the
    modules out of garbage collection.

    Accelerate collects at the beginning and the end of each training. With a million objects of PyTorch and Transformers
    to look at, that takes longer than a tiny model's steps.
    """
    if not session.config.option.collectonly and any("xla" in item.fixturenames for item in session.items):
        _select_xla()
    gc.enable()
    gc.collect()
    gc.freeze()
    # Tracing makes many objects that live for one step, which need not be looked through as often as by default.
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """What a file of tests leaves is not looked at by the next ones."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items:
        if ON_TORCH_TPU and item.get_closest_marker("torch_xla") is not None:
            item.add_marker(pytest.mark.skip(reason="of torch_xla"))


@cache
def _select_xla():
    from hf_tpu_ext.backends import select_backend

    name = "tpu" if ON_TORCH_TPU else "xla"
    backend = select_backend(name)
    assert backend.device.type == backend.name == name
    return backend


@pytest.fixture(scope="session")
def xla():
    """The backend whose programs XLA compiles."""
    return _select_xla()


@pytest.fixture(params=["cpu", "xla"])
def backend(request, xla):
    """Each of the two backends that this machine has. The CPU's runs eagerly what the other one compiles."""
    from hf_tpu_ext.backends.cpu import CPUBackend

    return xla if request.param == "xla" else CPUBackend("for the test")
