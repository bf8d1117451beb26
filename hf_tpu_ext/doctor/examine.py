"""All that is looked at before the small training, in the order in which it is shown."""

from collections.abc import Iterator

from ..backends.detect import tpu_chips
from .accelerator import check_backend, check_tpu
from .check import Check
from .machine import check_compile_cache, check_disk, check_hugepages, check_memory, places
from .versions import check_libtpu, check_versions


def examine_machine() -> Iterator[Check]:
    """Look at the packages and the machine. PyTorch is imported in a process of its own."""
    has_tpu = tpu_chips() > 0
    yield from check_versions(has_tpu)
    yield check_libtpu(has_tpu)
    yield from check_tpu()
    yield check_backend(has_tpu)
    yield check_hugepages(has_tpu)
    yield from check_disk(places())
    yield check_memory()
    yield check_compile_cache(has_tpu)
