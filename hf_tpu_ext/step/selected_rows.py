"""Rows or elements that are chosen by a mask on the device, whose number the host does not know, and statistics over them."""

from typing import Any

import torch
from torch import Tensor, nn


_NOTHING = torch.empty(0)


class SelectedRows(Tensor):
    """
    `values[mask]`, as all `values` and the `mask`.

    Element by element it computes with all values; sums and means are over the chosen ones. Its shape is that of all. Made by
    [`select`].
    """

    # Beside the tensor that this is: one that is traced cannot be of another class.
    of_all: Tensor
    mask: Tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ACCESSORS:
            return func(_plain(args[0])[0], *args[1:], **kwargs)
        if func in _REDUCTIONS and len(args) == 1 and not kwargs:
            return _REDUCTIONS[func](*_plain(args[0]))
        if func in _REDUCTIONS and args[1:] == (-1,) and not kwargs and args[0].ndim > args[0].mask.ndim:
            # Within each row that is chosen.
            return _with_mask(func(args[0].of_all, -1), args[0].mask)
        if func in (torch.cat, torch.concat):
            values, masks = zip(*map(_plain, args[0]), strict=True)
            return select(torch.cat(values, *args[1:], **kwargs), torch.cat(masks, *args[1:], **kwargs))
        if func is nn.functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in (Tensor.view, Tensor.reshape) and args[1:] == (-1,) and args[0].ndim == 1:
            return args[0]
        selections = [arg for arg in args if isinstance(arg, SelectedRows)]
        assert selections, func
        mask = selections[0].mask
        if func not in _ELEMENTWISE or any(other.mask is not mask for other in selections):
            raise NotImplementedError(
                f"{func.__name__} of rows that a mask on the device has chosen: their number is not known on the host."
            )
        result = func(*(_plain(arg)[0] if isinstance(arg, SelectedRows) else arg for arg in args), **kwargs)
        return _with_mask(result, mask)


def _plain(selection: SelectedRows) -> tuple[Tensor, Tensor]:
    return selection.of_all, selection.mask


def _with_mask(values: Tensor, mask: Tensor) -> SelectedRows:
    selection = Tensor._make_subclass(SelectedRows, _NOTHING)
    selection.of_all, selection.mask = values, mask
    return selection


def select(values: Tensor, mask: Tensor) -> SelectedRows:
    """
    Choose rows or elements of `values`, all of them or those that were chosen before, by a bool mask of its first
    dimensions.
    """
    of_mask = None
    if isinstance(mask, SelectedRows):
        mask, of_mask = _plain(mask)
    if isinstance(values, SelectedRows):
        values, before = _plain(values)
        of_mask = before if of_mask is None else of_mask & before
    if of_mask is not None:
        mask = mask & of_mask.view((*of_mask.shape, *[1] * (mask.ndim - of_mask.ndim)))
    return _with_mask(values, mask)


def _elements(values: Tensor, mask: Tensor) -> Tensor:
    return mask.view((*mask.shape, *[1] * (values.ndim - mask.ndim))).expand_as(values)


def _sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(_elements(values, mask), values, torch.zeros_like(values)).sum()


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return _sum(values, mask) / _elements(values, mask).sum()


def _cross_entropy(logits: SelectedRows, labels: SelectedRows, *, ignore_index: int = -100, **kwargs) -> Tensor:
    """Upstream's loss of chosen tokens: those that are not chosen are ignored. A loss of each token keeps the mask."""
    assert logits.mask is labels.mask, "logits and labels are not chosen by the same mask"
    mask = labels.mask
    targets = torch.where(mask, labels.of_all, torch.full_like(labels.of_all, ignore_index)).flatten()
    loss = nn.functional.cross_entropy(logits.of_all.flatten(0, -2), targets, ignore_index=ignore_index, **kwargs)
    return loss if loss.ndim == 0 else _with_mask(loss.view(mask.shape), mask)


def _numbers(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return values, _elements(values, mask) & ~torch.isnan(values)


_REDUCTIONS = {
    Tensor.sum: _sum,
    torch.sum: _sum,
    Tensor.mean: _mean,
    torch.mean: _mean,
    Tensor.nansum: lambda values, mask: _sum(*_numbers(values, mask)),
    torch.nansum: lambda values, mask: _sum(*_numbers(values, mask)),
    Tensor.nanmean: lambda values, mask: _mean(*_numbers(values, mask)),
    torch.nanmean: lambda values, mask: _mean(*_numbers(values, mask)),
}
_ACCESSORS = {
    Tensor.device.__get__,
    Tensor.dtype.__get__,
    Tensor.ndim.__get__,
    Tensor.requires_grad.__get__,
    Tensor.shape.__get__,
    Tensor.dim,
    Tensor.size,
    Tensor.__len__,
}
_ELEMENTWISE = {
    *(
        getattr(Tensor, name)
        for name in (
            *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__"),
            *("add", "sub", "mul", "div", "neg", "abs", "square", "exp", "log", "sigmoid", "tanh", "relu", "clamp"),
            *("bool", "float", "to", "detach", "gt", "lt", "ge", "le", "__gt__", "__lt__", "__ge__", "__le__"),
            *("masked_fill", "type_as"),
        )
    ),
    *(torch.sigmoid, torch.exp, torch.log, torch.relu, torch.tanh, torch.clamp, torch.neg, torch.abs),
    *(nn.functional.sigmoid, nn.functional.logsigmoid, nn.functional.relu, nn.functional.softplus),
}


def nanmin_of_all(values: Tensor, **_: Any) -> Tensor:
    """What `nanmin` of TRL gives of a vector, which picks the elements out: the least number, or NaN where there is none."""
    is_nan = torch.isnan(values)
    return torch.where(is_nan.all(), torch.nan, torch.where(is_nan, torch.inf, values).min())


def nanmax_of_all(values: Tensor, **_: Any) -> Tensor:
    """As [`nanmin_of_all`], of the greatest."""
    return -nanmin_of_all(-values)


def quantile_of_chosen(values: Tensor, is_chosen: Tensor, threshold: float) -> Tensor:
    """What `torch.quantile` gives of the elements that are chosen, of shape `()`; NaN where none is, which no element is at least."""
    in_order = torch.where(is_chosen, values, torch.inf).flatten().sort().values
    rank = threshold * (is_chosen.sum() - 1).clamp(min=0).to(values.dtype)
    below = rank.floor()
    lower, upper = (in_order.gather(0, index.long()[None])[0] for index in (below, rank.ceil()))
    return torch.lerp(lower, upper, rank - below)
