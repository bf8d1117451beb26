"""One run at a time writes to an output directory."""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from transformers.utils import logging

from ...backends.processes import Processes
from ...errors import UserError


logger = logging.get_logger(__name__)

#: Name of the file in the output directory that a run holds a lock of. Upstream does not push `_*` to the Hub.
LOCK_NAME = "_run.lock"
# What a file system says that has no locks, as some that are mounted over a network.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
# Descriptors of the locks that this process holds.
_descriptors: set[int] = set()


@contextmanager
def only_run_in(output_dir: str | Path, processes: Processes) -> Iterator[None]:
    """
    Context of a run that writes to an output directory, which is created if need be. Raises `ValueError`, in all of its
    processes, if another run is in such a context.

    The lock, which the first process takes, is the kernel's (`flock`), so a run that is killed leaves none. It holds between
    the processes that see the directory, on several machines too if the file system shares locks, as NFS does.
    """
    with ExitStack() as stack:
        in_use = None
        if processes.index == 0:
            try:
                fix = "Set output_dir to another directory, or wait until that run has ended."
                what = f"Another run writes to output_dir={str(output_dir)!r}"
                stack.enter_context(lock(Path(output_dir, LOCK_NAME), what, fix))
            except ValueError as error:
                in_use = error
        processes.exchange("the look for another run in output_dir", error=in_use)
        yield


@contextmanager
def lock(path: Path, what: str | None = None, fix: str = "") -> Iterator[None]:
    """
    Context of the one process that holds the lock of a file, which exists for that only. Where another one holds it, a
    `ValueError` says `what` that one does and the `fix`; by default, this one waits until the other is done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, process = _lock(path, what, fix), os.getpid()
    _descriptors.add(descriptor)
    # The message of another run shows this. A full disk is no reason not to begin.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        since = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
        os.write(descriptor, f"process {process} on {socket.gethostname()}, since {since}".encode())
    try:
        yield
    finally:
        if os.getpid() == process:
            # The disk may be gone, or no longer be written to: the error of the run is the one to see.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _lock(path: Path, what: str | None, fix: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if what is None else fcntl.LOCK_NB))
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise UserError(f"{what} now{f' ({holder})' * bool(holder)}. {fix}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            logger.warning(
                f"{path.parent} is on a file system without locks ({error.strerror}): another process that writes to it at "
                "the same time is not noticed."
            )
            return descriptor
        # A run that ends deletes the file, which another may just have opened: that lock is of a file without a name.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _close_in_child() -> None:
    # A worker of a loader may outlive its process for some seconds. It must not keep the lock.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
