"""The hosts of a slice of several: what they tell each other besides the programs that they run."""

import atexit
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import DistError, TCPStore

from ..errors import UserError
from .processes import HostsDisagree, Processes, bytes_of


#: Where the first host listens, if not at the address that the runtime knows: `address:port`.
VARIABLE = "HF_TPU_EXT_HOSTS"
#: Seconds after which a host that says nothing counts as lost.
SILENCE_VARIABLE = "HF_TPU_EXT_HOST_TIMEOUT"
PORT = 12356
#: Status of a process that ends because another host is lost (`EX_UNAVAILABLE`).
EXIT_STATUS = os.EX_UNAVAILABLE
_SILENCE = 60.0
# Longer than hosts start one after the other.
_CONNECT = 300.0
# Longer than a host compiles, or saves.
_EXCHANGE = 1800.0
_INTERVAL = 0.5
# What a host says of itself. One that ends for another's sake is none that others end for.
_ALIVE, _ENDED, _FOLLOWED, _FAILED = "alive", "ended", "followed", "failed"


def read_seconds() -> float:
    """How long a host may say nothing."""
    value = os.environ.get(SILENCE_VARIABLE, "")
    try:
        seconds = float(value or _SILENCE)
    except ValueError:
        seconds = 0.0
    if seconds < 2 * _INTERVAL:
        raise UserError(
            f"{SILENCE_VARIABLE}={value!r} is not a number of seconds from {2 * _INTERVAL:g}. Set it to {_SILENCE:g}, or unset "
            "it."
        )
    return seconds


def read_address() -> tuple[str, int]:
    """Address, empty if it is not set, and port at which the first host listens."""
    value = os.environ.get(VARIABLE, "")
    address, _, port = value.rpartition(":")
    if value and not (address and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(
            f"{VARIABLE}={value!r} is not address:port. Set it to one, for example {VARIABLE}=10.0.0.2:{PORT}."
        )
    return address, int(port or PORT)


class SliceHosts(Processes):
    """
    Hosts that speak over the network (a `torch.distributed.TCPStore` of the first), besides the chips.

    A thread of each tells the others that it is there. Where one says nothing for `silence` seconds, has ended with an error
    or is gone while others wait for it, each of those prints so and ends with [`EXIT_STATUS`]: a program that waits for
    chips of a lost host cannot be left in another way. This is host `index` of `count`, and all can reach the first at `address`,
    where it listens on `port`.
    """

    word = "host"

    def __init__(self, index: int, count: int, address: str, port: int, silence: float = _SILENCE):
        self.index, self.count = index, count
        self.hosts, self.one_program = count, count > 1
        self._silence = silence
        self._exchanges = 0
        # How deep this host is in work that needs all, and the exchange that it waits in.
        self._together = 0
        self._waiting: int | None = None
        # What others know of.
        self._error: Exception | None = None
        self._closing = threading.Event()
        # How often the thread has watched the others.
        self._rounds = 0
        try:
            self._store = self._connect(address, port, is_server=index == 0)
            # A client of its own: one that waits keeps others of its process out.
            self._watch_store = self._connect(address, port, is_server=False)
        except (DistError, RuntimeError) as error:
            raise UserError(
                f"Host {index} of {count} cannot reach the first at {address}:{port} ({str(error).splitlines()[0]}). Start the "
                f"same command on all hosts, and set {VARIABLE}=address:port to an address of the first that all can reach, and a "
                "port that is free there."
            ) from error
        self._watch_store.set(f"state/{index}", _ALIVE)
        self._watch_store.set(f"beat/{index}", "0")
        self.exchange("the start")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        if index > 0:
            threading.Thread(target=self._watch_first, daemon=True).start()
        atexit.register(self.close)

    def _connect(self, address: str, port: int, is_server: bool) -> TCPStore:
        timeout = timedelta(seconds=_CONNECT)
        return TCPStore(address, port, is_master=is_server, wait_for_workers=False, timeout=timeout)

    # ---- Values ----

    def exchange(self, what: str, value: Any = None, error: Exception | None = None) -> list[Any]:
        if error is not None:
            self._error = error
        number = self._exchanges
        self._exchanges += 1
        keys = [f"value/{number}/{host}" for host in range(self.count)]
        self._waiting = number
        try:
            message = None if error is None else f"{type(error).__name__}: {error}"
            self._store.set(keys[self.index], json.dumps([what, value, message]))
            self._wait_for(keys, what)
            entries = [json.loads(text) for text in self._store.multi_get(keys)]
        except DistError as lost:
            self._lose(0, f"cannot be reached any more ({str(lost).splitlines()[0]})")
        finally:
            self._waiting = None
        if number:
            # All are here, so none needs the one before.
            self._store.delete_key(f"value/{number - 1}/{self.index}")
        if error is not None:
            raise error
        failures = [f"host {host}: {message}" for host, (_, _, message) in enumerate(entries) if message is not None]
        if failures:
            raise HostsDisagree("\n".join(failures))
        places = [place for place, *_ in entries]
        if len(set(places)) > 1:
            message = "; ".join(f"host {host}: {place}" for host, place in enumerate(places))
            raise HostsDisagree(
                f"Hosts are at different places of the run ({message}). All have to run the same code: do not use the model "
                "under `if trainer.is_world_process_zero()`, or another question which host this is."
            )
        return [value for _, value, _ in entries]

    def _wait_for(self, keys: list[str], what: str) -> None:
        began = time.monotonic()
        # Asked again and again, for signals to be handled meanwhile: at first at once, as most are there within a millisecond.
        while not self._store.check(keys):
            seconds = time.monotonic() - began
            if seconds > _EXCHANGE:
                missing = [str(host) for host, key in enumerate(keys) if not self._store.check([key])]
                raise HostsDisagree(
                    f"Host {', '.join(missing)} did not come to {what} within {_EXCHANGE:g} seconds, where host {self.index} "
                    "waits. All hosts have to run the same code."
                )
            time.sleep(min(0.05, seconds / 4))

    def note_sent(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.checksum = zlib.crc32(bytes_of(tensor), self.checksum)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        self._together += 1
        stop: SystemExit | None = None
        try:
            yield
        except SystemExit as error:
            # Told to stop, as all are.
            if error.code != os.EX_TEMPFAIL:
                raise
            stop = error
        finally:
            self._together -= 1
        self.exchange(f"the end of {what}")
        if stop is not None:
            raise stop

    def request_stop(self, reason: str) -> None:
        super().request_stop(f"{reason} on host {self.index}")

    # ---- Watching each other ----

    def _watch(self) -> None:
        states = [f"state/{host}" for host in range(self.count)]
        beats = [f"beat/{host}" for host in range(self.count)]
        heard = [("", time.monotonic())] * self.count
        num_needed = [0] * self.count
        while not self._closing.wait(_INTERVAL):
            try:
                self._rounds += 1
                self._watch_store.set(beats[self.index], str(self._rounds))
                state_texts, beat_texts = (
                    [text.decode() for text in self._watch_store.multi_get(keys)] for keys in (states, beats)
                )
            except DistError:
                if not self._closing.is_set():
                    self._lose(0, "cannot be reached any more")
                return
            now = time.monotonic()
            heard = [
                (text, since if text == last else now) for text, (last, since) in zip(beat_texts, heard, strict=True)
            ]
            for host, state in enumerate(state_texts):
                if state.startswith(_FAILED):
                    self._lose(host, f"has ended with an error ({state.removeprefix(_FAILED).strip()})")
            for host, state in enumerate(state_texts):
                # It may have been needed until a moment ago.
                num_needed[host] = num_needed[host] + 1 if state == _ENDED and self._needs(host) else 0
                if num_needed[host] == 3:
                    self._lose(host, "has ended")
                if state == _ALIVE and now - heard[host][1] > self._silence:
                    self._lose(host, f"has said nothing for {self._silence:g} seconds")

    def _watch_first(self) -> None:
        """The first host hangs where a round of watching, which asks it, does not end: its answer is waited for without an end."""
        last, intervals = 0, 0
        while not self._closing.wait(_INTERVAL):
            # Counted, for a host that itself stood still.
            intervals = intervals + 1 if self._rounds == last else 0
            last = self._rounds
            if intervals * _INTERVAL > self._silence:
                self._lose(0, f"has said nothing for {self._silence:g} seconds")

    def _needs(self, host: int) -> bool:
        """Whether this host cannot go on without another."""
        if (number := self._waiting) is not None:
            return not self._watch_store.check([f"value/{number}/{host}"])
        return self._together > 0

    def _lose(self, host: int, how: str) -> None:
        message = (
            f"\nHost {host} of {self.count} {how}, so host {self.index} ends, too. To go on, start the same command on all "
            "hosts again, with --resume_from_checkpoint true once there is a checkpoint.\n"
        )
        with suppress(OSError):
            os.write(2, message.encode())
        if host != 0:
            with suppress(DistError):
                self._watch_store.set(f"state/{self.index}", _FOLLOWED)
                if self.index == 0:
                    # The others are to find out, too.
                    self._wait_until_all_ended(4 * _INTERVAL)
        os._exit(EXIT_STATUS)

    def close(self) -> None:
        """Tell the others that this process ends, and how. The first stays until they have ended, too."""
        if self._closing.is_set():
            return
        # An error that was not handled, as the interpreter notes it.
        error = vars(sys).get("last_value")
        is_known = error is None or isinstance(error, HostsDisagree) or error is self._error
        state = _ENDED if is_known else f"{_FAILED} {type(error).__name__}: {error}"
        with suppress(DistError):
            self._watch_store.set(f"state/{self.index}", state)
            if self.index == 0:
                self._wait_until_all_ended(2 * self._silence)
        self._closing.set()
        self._thread.join()

    def _wait_until_all_ended(self, seconds: float) -> None:
        keys = [f"state/{host}" for host in range(1, self.count)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(not text.decode().startswith(_ALIVE) for text in self._store.multi_get(keys)):
                return
            time.sleep(_INTERVAL / 5)
