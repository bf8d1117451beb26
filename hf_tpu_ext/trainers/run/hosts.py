"""What has to be the same on all hosts of a slice: found before the first step where it is not, and named."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import TrainerControl, TrainingArguments

from ...backends.base import Backend
from ...backends.compile_cache import compiler_settings
from ...backends.processes import HostsDisagree
from ...backends.random_state import read_random_state, set_random_state
from ...redaction import redact
from ..checkpoint.base_record import sample_of
from .status import find_versions


# Rows of a dataset that are hashed: all, up to so many bytes in memory, and of a larger one as many from all over it.
_MOST_BYTES = 2**30
_BLOCKS = 64
# Fields of [`~transformers.TrainerControl`] that a callback may set.
_DECISIONS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def check_same_settings(backend: Backend, args: TrainingArguments) -> None:
    """
    Compare package versions, arguments and the compiler's environment variables between hosts, before anything is done
    on the chips. A difference is named on all hosts ([`~hf_tpu_ext.backends.processes.HostsDisagree`], a `ValueError`).
    """
    if not backend.processes.one_program:
        return
    mine = {
        "package": find_versions(),
        "argument": {name: json.dumps(value, default=str) for name, value in redact(args.to_dict()).items()},
        "environment variable": compiler_settings(),
    }
    _compare(backend, "the comparison of arguments", mine)


def _compare(backend: Backend, what: str, mine: dict[str, dict[str, Any]]) -> None:
    of_hosts = backend.processes.exchange(what, mine)
    differing = []
    for kind in mine:
        for name in dict.fromkeys(name for of_host in of_hosts for name in of_host[kind]):
            values = [of_host[kind].get(name) for of_host in of_hosts]
            if any(value != values[0] for value in values):
                hosts: dict[Any, list[str]] = {}
                for host, value in enumerate(values):
                    hosts.setdefault(value, []).append(str(host))
                said = ", ".join(f"{_short(value)} on host {' '.join(those)}" for value, those in hosts.items())
                differing.append(f"{kind} {name}: {said}")
    if differing:
        raise HostsDisagree(
            "Hosts differ, and would not train the same model. "
            + "; ".join(differing[:5])
            + ". Start the same command with the same packages, files and environment on all hosts."
        )


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


class HostAgreement:
    """
    Keeps the hosts of a slice together: what they begin a run with, send to their chips and decide. On one host it does
    nothing.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._several = backend.processes.one_program
        # The hash of the trained model.
        self._hash_of_weights = ""
        self._sent_first = False

    def note_weights(self, model: nn.Module) -> None:
        """Note the weights of the model, while they are on the host."""
        if not self._several:
            return
        digest = hashlib.blake2b(digest_size=16)
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            digest.update(f"{key} {value.dtype} {tuple(value.shape)} {value.device.type}".encode())
            if value.device.type == "cpu" and value.numel():
                digest.update(sample_of(value).contiguous().view(torch.uint8).numpy())
        self._hash_of_weights = digest.hexdigest()

    def take_random_state(self) -> None:
        """
        Begin with the host's random state of the first. Upstream's trainers of online methods seed each process otherwise,
        for it to draw other rows, while here all draw the same and take their chips' part.
        """
        if not self._several:
            return
        set_random_state(self._backend.processes.of_first("the random state of the first host", read_random_state()))

    def check_beginning(self, datasets: Mapping[str, Any]) -> None:
        """Compare what a run begins with: models, datasets by their names, and the random state of the host."""
        self._sent_first = False
        if not self._several:
            return
        mine = {
            "model": {"weights": self._hash_of_weights},
            "data:": {name: _hash_rows(dataset) for name, dataset in datasets.items()},
            "random state of": {name: _hash(repr(state).encode()) for name, state in read_random_state().items()},
        }
        _compare(self._backend, "the comparison of data", mine)

    def batch_sent(self) -> None:
        """Compare the first batch of a run, before it is trained on. Others are compared when their step ends."""
        if self._several and not self._sent_first:
            self._sent_first = True
            self._compare_sent("the first batch", None)

    def _compare_sent(self, what: str, decisions: list[bool] | None) -> list[bool] | None:
        processes = self._backend.processes
        of_hosts = processes.exchange(what, [decisions, processes.checksum])
        sums = [checksum for _, checksum in of_hosts]
        if len(set(sums)) > 1:
            odd = [str(host) for host, checksum in enumerate(sums) if checksum != sums[0]]
            raise HostsDisagree(
                f"Host {' '.join(odd)} has sent other data to its chips than host 0 up to {what}: rows in another order, or a "
                "number that a callback has changed, as the learning rate by the clock. Give every host the same files in "
                "the same order, and let callbacks go by steps."
            )
        return of_hosts[0][0]

    @contextmanager
    def deciding(self, step: int, control: Callable[[], TrainerControl]) -> Iterator[None]:
        """
        Context of logging, evaluation and saving after a step. What is due, and whether training stops, the first host
        decides for all: callbacks may go by a clock. `control` gives what says so, which a callback may replace.
        """
        if not self._several:
            yield
            return
        where = f"step {step}"
        self._decide(where, control())
        acts = any(vars(control())[name] for name in _DECISIONS[2:])
        yield
        if acts:
            self._decide(f"the end of {where}", control())

    def _decide(self, where: str, control: TrainerControl) -> None:
        mine = [bool(vars(control)[name]) for name in _DECISIONS]
        vars(control).update(zip(_DECISIONS, self._compare_sent(where, mine), strict=True))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_rows(dataset: Any) -> str:
    """Of the rows of a dataset, or where they cannot be known before they are drawn, of how many there are."""
    size = len(dataset) if isinstance(dataset, Sized) else None
    digest = hashlib.blake2b(f"{size}".encode(), digest_size=16)
    if isinstance(dataset, Dataset):
        digest.update(repr(dataset.column_names).encode())
        for part in _parts_of(dataset):
            for table in part.with_format("arrow").iter(10_000):
                for batch in table.combine_chunks().to_batches():
                    digest.update(batch.serialize())
    return f"{size} rows, {digest.hexdigest()}"


def _parts_of(dataset: Dataset) -> Iterable[Dataset]:
    size = len(dataset)
    if not size:
        return
    bytes_of_row = dataset.data.nbytes / max(1, dataset.data.num_rows)
    most = int(_MOST_BYTES / max(1, bytes_of_row))
    if size <= most:
        yield dataset
        return
    rows = max(1, most // _BLOCKS)
    for start in np.linspace(0, size - rows, _BLOCKS).astype(int):
        yield dataset.select(range(start, start + rows))
