"""What a loss reads of the device for its metrics, left on the device until a log."""

import ast
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .selected_rows import SelectedRows, select


_TORCH = str(Path(torch.__file__).parent)


class DeferredReads(TorchFunctionMode):
    """
    Context in which a loss of `package` that reads its metrics from a device of `device_type` leaves them there.

    Within the code of that package, `tensor.item()` is the tensor itself, which goes on to behave like a number. A
    condition on the device does not branch:

    - `value if tensor else constant` is `torch.where`;
    - `if tensor:` around nothing but `self._metrics[...][...].append(value)` makes `value` count only where it is true, see
      [`Appended`];
    - rows or elements chosen by a mask are all of them with the mask, see [`SelectedRows`];
    - `tensor[mask] = number` fills.

    Any other read is one, as outside of the context: a condition, too, where Python was told to keep no positions of its code
    (`PYTHONNODEBUGRANGES=1`), or where there is no source file. Steps are then traced.
    """

    def __init__(self, device_type: str, package: str):
        super().__init__()
        self._device_type = device_type
        self._package = package
        # Conditions of the code that runs, by its conditional expressions and `if` statements.
        self._conditions: dict[CodeType, dict[_Branch, Tensor]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        handle = _HANDLED.get(func)
        if handle is None and not self._conditions:
            return func(*args, **kwargs)
        frame = _caller(sys._getframe(1))
        if handle is None or not self._is_of_loss(frame, args):
            result = func(*args, **kwargs)
        else:
            result = handle(self, frame, func, args, kwargs)
        if frame.f_code in self._conditions and isinstance(result, Tensor):
            return self._where_true(frame, result)
        return result

    def _is_of_loss(self, frame: FrameType, args: tuple) -> bool:
        return (
            bool(args)
            and isinstance(args[0], Tensor)
            and args[0].device.type == self._device_type
            and frame.f_globals.get("__name__", "").partition(".")[0] == self._package
        )

    # ---- Reads ----

    def _item(self, frame, func, args, kwargs) -> Tensor:
        # Upstream reads tensors of one element, too.
        return args[0].detach().reshape(())

    def _bool(self, frame, func, args, kwargs) -> bool:
        branch = _branch_at(frame)
        if branch is None:
            return func(*args, **kwargs)
        conditions = self._conditions.setdefault(frame.f_code, {})
        # Of `a and b`, one after the other.
        earlier = conditions.get(branch) if branch.is_past_first(frame) else None
        conditions[branch] = args[0].detach() if earlier is None else earlier & args[0].detach()
        return True

    def _nonzero(self, frame, func, args, kwargs) -> Tensor:
        # For `index_select`, in place of the numbers of rows.
        mask = args[0] != 0
        return select(mask, mask)

    def _index_select(self, frame, func, args, kwargs) -> Tensor:
        dim, index = args[1:3]
        if dim == 0 and isinstance(index, SelectedRows):
            return select(args[0], index.mask)
        return func(*args, **kwargs)

    def _getitem(self, frame, func, args, kwargs) -> Tensor:
        index = args[1]
        if isinstance(index, Tensor) and index.dtype == torch.bool:
            return select(args[0], index)
        return func(*args, **kwargs)

    def _setitem(self, frame, func, args, kwargs) -> None:
        values, index, value = args
        if isinstance(index, Tensor) and index.dtype == torch.bool and isinstance(value, (int, float)):
            values.masked_fill_(index.view((*index.shape, *[1] * (values.ndim - index.ndim))), value)
        else:
            func(*args, **kwargs)

    def _nan_reduction(self, frame, func, args, kwargs) -> Tensor:
        # XLA has no such operators.
        values = args[0]
        if args[1:] or kwargs:
            return func(*args, **kwargs)
        selection = (
            values if isinstance(values, SelectedRows) else select(values, torch.ones_like(values, dtype=torch.bool))
        )
        return func(selection)

    # ---- Conditions ----

    def _where_true(self, frame: FrameType, value: Tensor) -> Tensor:
        place = _place(frame)
        for branch, condition in self._conditions[frame.f_code].items():
            if branch.constant is not None and branch.body.holds(place):
                return torch.where(condition, value, torch.full_like(value, branch.constant))
        return value

    def condition_at(self, frame: FrameType) -> Tensor | None:
        """
        The condition that decides whether the line where a frame is is reached, a boolean of shape `()` on the device,
        if any.
        """
        reaches = None
        for branch, condition in self._conditions.get(frame.f_code, {}).items():
            if branch.constant is None and branch.body.holds(_place(frame)):
                reaches = condition if reaches is None else reaches & condition
        return reaches


class Appended(list):
    """A list of metrics, with the condition under which each one was appended."""

    def __init__(self, reads: DeferredReads):
        super().__init__()
        self._reads = reads
        #: For each value, a boolean on the device, or `None` where it counts in any case.
        self.conditions: list[Tensor | None] = []

    def append(self, value: Any) -> None:
        """Append a number, or a tensor of shape `()`."""
        super().append(value)
        self.conditions.append(self._reads.condition_at(sys._getframe(1)))


_HANDLED: dict[Callable, Callable] = {
    Tensor.item: DeferredReads._item,
    Tensor.__bool__: DeferredReads._bool,
    torch.nonzero: DeferredReads._nonzero,
    Tensor.nonzero: DeferredReads._nonzero,
    torch.index_select: DeferredReads._index_select,
    Tensor.index_select: DeferredReads._index_select,
    Tensor.__getitem__: DeferredReads._getitem,
    Tensor.__setitem__: DeferredReads._setitem,
    torch.nansum: DeferredReads._nan_reduction,
    Tensor.nansum: DeferredReads._nan_reduction,
    torch.nanmean: DeferredReads._nan_reduction,
    Tensor.nanmean: DeferredReads._nan_reduction,
}


# ---- Source code ----


class _Span(tuple):
    """First and last (line, column) of a piece of code."""

    def holds(self, place: tuple) -> bool:
        return self[0] <= place[0] and place[1] <= self[1]


class _Branch:
    """A conditional expression with a constant as its alternative, or an `if` around metrics."""

    def __init__(self, node: ast.IfExp | ast.If):
        body = node.body if isinstance(node.body, list) else [node.body]
        self.constant = node.orelse.value if isinstance(node, ast.IfExp) else None
        self.test = _span(node.test, node.test)
        self.body = _span(body[0], body[-1])
        # Where the first condition of `a and b` ends.
        first = node.test.values[0] if isinstance(node.test, ast.BoolOp) else node.test
        self._first = _span(first, first)

    def is_past_first(self, frame: FrameType) -> bool:
        """Whether the code is past the first condition."""
        return not self._first.holds(_place(frame))


def _span(first: ast.AST, last: ast.AST) -> _Span:
    return _Span(((first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)))


def _caller(frame: FrameType) -> FrameType:
    """The code that called an operator: not PyTorch's own."""
    while frame.f_code.co_filename.startswith(_TORCH) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@cache
def _positions(code: CodeType) -> list[tuple]:
    return [((line, column), (end, end_column)) for line, end, column, end_column in code.co_positions()]


def _place(frame: FrameType) -> tuple:
    return _positions(frame.f_code)[frame.f_lasti // 2]


def _branch_at(frame: FrameType) -> _Branch | None:
    place = _place(frame)
    if None in place[0] or not Path(frame.f_code.co_filename).is_file():
        return None
    return next((branch for branch in _branches(frame.f_code.co_filename) if branch.test.holds(place)), None)


@cache
def _branches(file: str) -> list[_Branch]:
    nodes = ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
    return [_Branch(node) for node in nodes if _is_deferrable(node)]


def _is_deferrable(node: ast.AST) -> bool:
    match node:
        case ast.IfExp(test=test, orelse=ast.Constant(value=int() | float())):
            return _is_conjunction(test)
        case ast.If(test=test, body=body, orelse=[]):
            return _is_conjunction(test) and all(map(_appends_a_metric, body))
    return False


def _is_conjunction(test: ast.expr) -> bool:
    match test:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(isinstance(value, (ast.Compare, ast.Name)) for value in values)
        case ast.BoolOp() | ast.UnaryOp():
            return False
    return True


def _appends_a_metric(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(
                    attr="append", value=ast.Subscript(value=ast.Subscript(value=ast.Attribute() as owner))
                )
            )
        ):
            return owner.attr == "_metrics"
    return False


def metrics_in(source: ast.AST) -> Iterator[str]:
    """
    Find the names of the metrics that a piece of code appends to: `self._metrics[mode]["name"].append(...)`; or that it
    collects for training and evaluation, as trainers of `trl.experimental` do: `metrics[f"{prefix}name"] = ...`.
    """
    for node in ast.walk(source):
        match node:
            case ast.Attribute(
                attr="append",
                value=ast.Subscript(
                    value=ast.Subscript(value=ast.Attribute(attr="_metrics")), slice=ast.Constant(value=str() as name)
                ),
            ):
                yield name
            case ast.Subscript(
                value=ast.Name(id="metrics"),
                slice=ast.JoinedStr(values=[ast.FormattedValue(), ast.Constant(value=str() as name)]),
                ctx=ast.Store(),
            ):
                yield from (name, f"eval_{name}")
