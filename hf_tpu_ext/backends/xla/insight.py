"""What torch_xla tells about its programs: source lines of compiles, the operations of a recorded program, reads."""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import compress
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch.utils._pytree import tree_leaves

from ..insight import Counters, Insight, Listing, Operation, SourceLine
from .graphs import REPLAYS


_XLAC = torch_xla._XLAC
_MOST_FRAMES = "100"
# A process that this one starts makes its own.
_DIRECTORY = "hf_tpu_ext_compiles_"
_SITE = re.compile(r"Python Frame Triggered Execution: \n((?:Compilation Analysis:   .*\n)*)")
_FRAME = re.compile(r"Compilation Analysis:   (?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)\n")
_OPERATION = re.compile(
    r"^ *(?:ROOT )?(?P<label>%\S+?(?:\.(?P<number>\d+))?) = (?P<shape>\(.*?\)|\S+) (?P<name>[\w\-]+)\((?P<rest>.*)$"
)
_OPERATOR = re.compile(r'op_type="([^"]*)"')
_PLACE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_LAYOUT = re.compile(r"(?<=\])\{[\d,]*\}")
_NAME = re.compile(r"%[\w.\-]+")
# The form of a number, and of what is computed from numbers alone.
_NUMBER = 0
# An operator that reads one number. torch_xla counts it among those that it has none of.
_READS_A_NUMBER = "aten::_local_scalar_dense"


@cache
def _record_compiles() -> str | None:
    """Have torch_xla say where each compile comes from, before its first one. Returns the file, if there is one."""
    path = os.environ.get("PT_XLA_DEBUG_FILE")
    is_ours = path is not None and os.path.basename(os.path.dirname(path)).startswith(_DIRECTORY)
    if {"PT_XLA_DEBUG_LEVEL", "PT_XLA_DEBUG"} & set(os.environ) and not is_ours:
        # Somebody debugs. Without a file it goes to the terminal.
        return path
    directory = tempfile.mkdtemp(prefix=_DIRECTORY)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = os.path.join(directory, "compiles.txt")
    os.environ |= {"PT_XLA_DEBUG_LEVEL": "1", "PT_XLA_DEBUG_FILE": path, "PT_XLA_DEBUG_MAX_FRAME": _MOST_FRAMES}
    return path


def metric(name: str) -> tuple[int, float]:
    """Count and sum (nanoseconds for times) of one of torch_xla's metrics."""
    data = met.metric_data(name)
    return (0, 0.0) if data is None else (data[0], data[1])


def _reads() -> int:
    return metric("TransferFromDeviceTime")[0]


class XLAInsight(Insight):
    """
    What torch_xla tells.

    It writes the Python lines that led to a compile into a file, if its debug level says so before the first one: one
    record for each compile, nothing for a step.
    """

    def __init__(self):
        self._own_reads = 0
        self._offset = 0
        self._path = _record_compiles()

    def counters(self) -> Counters:
        """As [`~hf_tpu_ext.backends.base.Backend.counters`]."""
        return Counters(
            compiles=metric("CompileTime")[0],
            compile_seconds=(metric("CompileTime")[1] + metric("PersistentCacheLoad")[1]) / 1e9,
            executions=metric("ExecuteTime")[0] + metric("ExecuteReplicatedTime")[0],
            reads=_reads(),
            fallbacks=sum(self.operators_on_host().values()),
            replays=met.counter_value(REPLAYS) or 0,
            loads=met.counter_value("PersistentCacheHit") or 0,
        )

    def compile_sites(self) -> list[list[SourceLine]]:
        if self._path is None or not os.path.exists(self._path):
            return []
        with open(self._path, encoding="utf-8", errors="replace") as file:
            file.seek(self._offset)
            text = file.read()
            self._offset = file.tell()
        return [
            [SourceLine(frame["file"], int(frame["line"]), frame["function"]) for frame in _FRAME.finditer(site[1])]
            for site in _SITE.finditer(text)
        ]

    def note_lines(self, on: bool) -> None:
        _XLAC._set_ir_debug(on)

    def operations(self, results: Sequence[torch.Tensor]) -> Listing | None:
        roots = list(compress(results, _XLAC._check_tensor_need_materialization(list(results))))
        if not roots:
            return None
        # What the last step makes may still be on its way, and the listing asks for its shape.
        xm.wait_device_ops()
        # A listing has the lines that were recorded only while this is on.
        notes_lines = _XLAC._get_ir_debug()
        _XLAC._set_ir_debug(True)
        text = _XLAC._get_xla_tensors_hlo(roots)
        _XLAC._set_ir_debug(notes_lines)
        return partial(_read_operations, text)

    def operators_on_host(self) -> dict[str, int]:
        names = (name for name in met.counter_names() if name.startswith("aten::") and name != _READS_A_NUMBER)
        return {name: met.counter_value(name) for name in names}

    @contextmanager
    def own_reads(self) -> Iterator[None]:
        before = _reads()
        try:
            yield
        finally:
            self._own_reads += _reads() - before

    def stray_reads(self) -> int:
        return _reads() - self._own_reads

    def traffic(self) -> tuple[int, ...]:
        # In this order: operators on the host and reads of one number; copies between devices, and to other dtypes.
        return tuple(met.counter_value(name) or 0 for name in ("xla::_to_cpu", "xla::_to_copy", "xla::_copy_from"))

    def has_read(self, before: tuple[int, ...], result: Any) -> bool:
        traffic = self.traffic()
        if traffic == before:
            return False
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" for leaf in tree_leaves(result))
        # A backward pass returns nothing and copies a lot.
        return traffic[0] > before[0] or (result is not None and not on_device)


def _read_operations(text: str) -> list[Operation]:
    matches = filter(None, map(_OPERATION.match, text.splitlines()))
    operations, structures, forms, numbers = [], {}, {}, set()
    for match in sorted(matches, key=lambda match: int(match["number"] or 0)):
        name, shape = match["name"], _LAYOUT.sub("", match["shape"])
        rest, _, metadata = match["rest"].partition(", metadata={")
        # Operands are named by their number in the program.
        arguments, _, attributes = rest.partition("), ")
        details = rest.removesuffix(")") if name == "constant" else _NAME.sub("", attributes)
        operands = _NAME.findall(arguments)
        structure = structures[match["label"]] = hash((name, shape, details, *map(structures.get, operands)))
        of_operands = [forms.get(operand) for operand in operands]
        is_number = shape.endswith("[]") if name in ("constant", "parameter") else {*of_operands} == {_NUMBER}
        form = forms[match["label"]] = _NUMBER if is_number else hash((name, shape, details, *of_operands))
        if name == "parameter" and is_number:
            numbers.add(match["label"])
        operator, place = _OPERATOR.search(metadata), _PLACE.search(metadata)
        operator_name = "" if operator is None else operator[1].replace("__", "::", 1)
        line = None if place is None else SourceLine(place[1], int(place[2]))
        taken = tuple(filter(numbers.__contains__, operands))
        operations.append(Operation(name, shape, details, operator_name, line, structure, form, taken))
    return operations
