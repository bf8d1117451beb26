"""Every batch that reaches the device has one of a small declared set of shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError


def pad_value_of(key: str, pad_token_id: int) -> int:
    """What the tensor under `key` of a batch is padded with; the key may begin with the name of a sequence, as in `chosen_labels`."""
    if key.endswith("input_ids"):
        return pad_token_id
    return -100 if key == "labels" or key.endswith("_labels") else 0


def _extend(key: str, tensor: Tensor, dim: int, size: int, pad_token_id: int) -> Tensor:
    """Pads `tensor` at the end of dimension `dim` to `size` with the pad value of `key`."""
    shape = list(tensor.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([tensor, tensor.new_full(shape, pad_value_of(key, pad_token_id))], dim=dim)


class CollatedBatch(dict):
    """
    A batch that was padded to a declared length, with what it was before.

    Attributes:
        length (`int`): How many columns upstream's collator gives it: those of its longest row.
        columns_before (`dict`): Along which dimension keys were padded, and how many columns they had before.
        rows_of_example (`int`): How many rows one example is. A pair is two, one after the chosen ones and one after the rejected
            ones.
        num_tokens (`int`, *optional*): How many tokens upstream counts in it; `None` if it counts none.
    """

    def __init__(
        self,
        batch: Mapping[str, Any],
        length: int,
        columns_before: Mapping[str, tuple[int, int]],
        num_examples: int,
        num_tokens: int | None = None,
    ):
        super().__init__(batch)
        self.rows_of_example = max(1, count_rows(batch) // max(1, num_examples))
        self.length = length
        self.columns_before = dict(columns_before)
        self.num_tokens = num_tokens


def as_collated(batch: Any) -> Any:
    """A batch without the columns that were added to it: as upstream's collator gives it, and code of the user's gets it."""
    if not isinstance(batch, CollatedBatch):
        return batch
    own_columns = {key: batch[key].narrow(dim, 0, columns) for key, (dim, columns) in batch.columns_before.items()}
    return {**batch, **own_columns}


def count_all(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a batch with its padding."""
    return batch["input_ids"].numel()


def count_not_padding(pad_token_id: int | None, batch: Mapping[str, Any]) -> int:
    """Count the tokens of a batch without its padding: by its mask, or else by the pad token, if there is one."""
    mask, ids = batch.get("attention_mask"), batch["input_ids"]
    if mask is not None:
        return int(mask.sum())
    return ids.numel() if pad_token_id is None else int((ids != pad_token_id).sum())


def _setting(text: str, config_name: str | None) -> str:
    return f"`{text}`" if config_name is None else f"`{config_name}({text})`"


class WrappedCollator:
    """
    What wraps a data collator in `collator`: what it does not have itself is read and set there.

    Upstream saves the tokenizer of a collator, and callbacks change its settings, for instance `mlm_probability`. A subclass sets
    `collator` last of all: what is set from then on and is not here is the collator's.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.collator, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "collator" not in vars(self) or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self.collator, name, value)


class StaticShapeCollator(WrappedCollator):
    """
    Wraps any data collator and pads its batches on the right to the smallest declared length that fits.

    Padded are the tensors whose first two dimensions are those of `input_ids`, or the first three of rows with several choices,
    `(batch, choices, length)`, which have a mask of that shape. Everything else (class labels, scalars, non-tensors) passes
    unchanged, and so do the rows: see [`pad_rows`] for the last batch. A second sequence of each row, as `KL_input_ids` with
    `KL_attention_mask`, is padded to the same length, for each length to be one shape. Labels are padded with -100, other
    keys with 0.

    Args:
        collator (`Callable`): Data collator to wrap. It yields at least `input_ids` of shape `(batch, length)`.
        lengths (`Sequence[int]`):
            Declared lengths: one for a fixed length, several for buckets; without any, batches keep theirs.
        pad_token_id (`int`): Token id that `input_ids` is padded with.
        config_name (`str`, *optional*):
            Class of the arguments that have `max_length` and `length_buckets`, for messages.
        count_tokens (`Callable`, *optional*): Counts the tokens of what `collator` yields, see [`CollatedBatch`].
        adds_mask (`bool`, *optional*, defaults to `False`):
            Whether to add the int64 `attention_mask` `(batch, length)` that `collator` leaves out: all ones, since it masks
            nothing by then. Without a mask, transformers looks on the host at every step whether the positions restart within a
            row, and a bidirectional model would attend to the padding that is added next. Batches that bring positions of their
            own are left alone, and so are those without `input_ids`.
        decodes (`bool`, *optional*, defaults to `False`):
            Whether a decoder reads the labels, `(batch, other length)`, of an encoder-decoder model: they are padded as `input_ids` are.

    Example:
    ```python
    >>> from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    >>> collator = StaticShapeCollator(DataCollatorForLanguageModeling(pad_token_id=0), [4, 8], pad_token_id=0)
    >>> collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])["labels"]
    tensor([[   1,    2,    3, -100],
            [   4,    5, -100, -100]])
    ```
    """

    def __init__(
        self,
        collator: Callable[[list], Mapping[str, Any]],
        lengths: Sequence[int],
        pad_token_id: int,
        config_name: str | None = None,
        count_tokens: Callable[[Mapping[str, Any]], int] | None = None,
        adds_mask: bool = False,
        decodes: bool = False,
    ):
        self.lengths = sorted(lengths)
        self.pad_token_id = pad_token_id
        self.config_name = config_name
        self.count_tokens = count_tokens
        self.adds_mask = adds_mask
        self.decodes = decodes
        self.collator = collator

    def __call__(self, examples: list) -> CollatedBatch:
        """Collates `examples` and pads the `(batch, length, ...)` tensors; `ValueError` if no length fits."""
        batch = dict(self.collator(examples))
        num_tokens = self.count_tokens(batch) if self.count_tokens is not None and "input_ids" in batch else None
        if self.adds_mask and "input_ids" in batch and "position_ids" not in batch:
            batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        length = length_of(batch)
        labels = batch.get("labels")
        if not (self.decodes and isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()):
            labels = None
        padded_batch = dict(batch)
        if self.lengths:
            target = self._choose_length(length if labels is None else max(length, labels.shape[1]))
            padded_batch = pad_columns(batch, target, self.pad_token_id)
            if labels is not None:
                padded_batch["labels"] = _extend("labels", labels, 1, target, self.pad_token_id)
        columns_before = {
            key: next((dim, size) for dim, size in enumerate(value.shape) if padded_batch[key].shape[dim] != size)
            for key, value in batch.items()
            if isinstance(value, Tensor) and padded_batch[key].shape != value.shape
        }
        return CollatedBatch(padded_batch, length, columns_before, len(examples), num_tokens)

    def _choose_length(self, length: int) -> int:
        target = next((declared_length for declared_length in self.lengths if declared_length >= length), None)
        if target is None:
            raise UserError(
                f"A batch of {length} tokens is longer than the greatest declared length {self.lengths[-1]}. Truncate "
                f"the examples (`max_length={self.lengths[-1]}`), or declare the length of the longest one, of which {length} may not be the last: "
                f"{_setting(f'max_length={length}', self.config_name)}, or several lengths: "
                f"{_setting(f'max_length={length}, length_buckets={[*self.lengths, length]}', self.config_name)}."
            )
        return target


def _sequences(batch: Mapping[str, Any]) -> dict[str, torch.Size]:
    """Shape of each sequence of a batch, its length last, by what its keys begin with: rows, and choices if rows have some."""
    shapes = {}
    for key in batch:
        if key.endswith("input_ids"):
            prefix, shape = key.removesuffix("input_ids"), batch[key].shape
            mask = batch.get(f"{prefix}attention_mask")
            # Without such a mask, a third dimension is that of several tokens in one place, as models of speech have.
            has_choices = isinstance(mask, Tensor) and mask.ndim == 3 and mask.shape == shape
            shapes[prefix] = shape if has_choices else shape[:2]
    return shapes


def length_of(batch: Mapping[str, Any]) -> int:
    """Tokens of the longest row of a batch, its padding included."""
    return max((shape[-1] for shape in _sequences(batch).values()), default=0)


def pad_columns(batch: Mapping[str, Any], length: int, pad_token_id: int) -> dict[str, Any]:
    """
    Pad the rows of a batch with `input_ids` on the right to `length` tokens, as [`StaticShapeCollator`] does. One
    that has as many is returned as it is.
    """
    batch = dict(batch)
    for prefix, shape in _sequences(batch).items():
        for key, value in batch.items():
            is_of_it = key.startswith(prefix) and isinstance(value, Tensor) and value.shape[: len(shape)] == shape
            # Floating-point labels are multi-label targets of shape (batch, num_labels), whatever the batch's length is.
            is_target = is_of_it and key.endswith("labels") and value.is_floating_point()
            if length > shape[-1] and is_of_it and not is_target:
                batch[key] = _extend(key, value, len(shape) - 1, length, pad_token_id)
    return batch


def count_rows(batch: Mapping[str, Any]) -> int:
    """Number of rows of a batch, which its first tensor tells. Raises `ValueError` where it has none."""
    rows = next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.ndim), None)
    if rows is None:
        # The end of an iterator would be taken for that of the data.
        raise UserError(
            f"The data collator gives no tensors ({', '.join(map(str, batch))}). Have it return tensors of PyTorch, as "
            "upstream's collators do by default."
        )
    return rows


def pad_rows(batch: Mapping[str, Any], batch_size: int, pad_token_id: int) -> Mapping[str, Any]:
    """
    Adds rows at the end of a batch until it has `batch_size` of them, masked out of a loss over `labels`.

    The added rows hold pad tokens, `attention_mask` 0 and `labels` -100, so no token of them is counted. Where a row
    has one label, the added ones repeat the last row with `labels` -100: what models make of a row, such as the mean
    over its tokens, may not be finite without tokens. Tensors of any other first dimension, scalars and non-tensors
    are left alone.

    It is for the caller to know that the loss leaves labels of -100 out.

    Args:
        batch (`Mapping[str, Any]`): Batch whose first tensor tells the number of rows.
        batch_size (`int`): Number of rows wanted. A batch that has as many or more is returned as it is.
        pad_token_id (`int`): Token id of the added rows.

    Returns:
        `Mapping[str, Any]`: The batch with `batch_size` rows.
    """
    rows = count_rows(batch)
    if rows >= batch_size:
        return batch
    # `DataCollatorForSeq2Seq` gives `None` for data without labels.
    labels = batch.get("labels")
    repeats = labels is not None and labels.ndim == 1

    def complete(key: str, value: Tensor) -> Tensor:
        if repeats and key != "labels":
            return torch.cat([value, value[-1:].expand(batch_size - rows, *value.shape[1:])])
        return _extend(key, value, 0, batch_size, pad_token_id)

    return {
        key: complete(key, value) if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows else value
        for key, value in batch.items()
    }


class ShapeGuard:
    """
    Stops a run whose collator yields more shapes than the `limit` declared, since each one compiles the whole step
    again. Lengths and the name of the config class are for the error.

    One guard watches one dataloader: training and evaluation batches have different numbers of rows.
    """

    def __init__(self, limit: int, lengths: Sequence[int], config_name: str | None = None):
        self.limit = limit
        self.lengths = sorted(lengths)
        self.config_name = config_name
        # A dict and not a set: the error names the shape that came first.
        self._shapes: dict[frozenset[tuple[str, torch.Size]], dict[str, torch.Size]] = {}

    def check(self, batch: Mapping[str, Any], of_own_loader: bool = False) -> None:
        """Records the shapes of a batch, which may be `of_own_loader` of the user's; `UserError` if they are one more than `limit`."""
        shapes = {key: value.shape for key, value in batch.items() if isinstance(value, Tensor)}
        if (signature := frozenset(shapes.items())) in self._shapes:
            return
        if len(self._shapes) == self.limit:
            raise UserError(self._describe(shapes, of_own_loader))
        self._shapes[signature] = shapes

    def _describe(self, new: dict[str, torch.Size], of_own_loader: bool) -> str:
        earlier = [*self._shapes.values()]
        first = earlier[0]
        changed_keys = [key for key in first | new if first.get(key) != new.get(key)]
        # With buckets several keys differ from the first batch; the culprit is the one whose shape never came before.
        unseen = [key for key in changed_keys if all(shapes.get(key) != new.get(key) for shapes in earlier)]
        key = (unseen or changed_keys)[0]
        before, after = (str(tuple(shapes[key])) if key in shapes else "absent" for shapes in (first, new))
        if key not in first or key not in new:
            fix = f"Yield the same keys in every batch: `{key}` in each or in none."
        elif first[key][1:] == new[key][1:]:
            fix = "Yield the same number of rows in every batch, or set `dataloader_drop_last=True`."
        else:
            length = f" (`max_length={self.lengths[-1]}`)" if self.lengths else ""
            fix = f"Pad `{key}` in the data collator to a fixed length{length}"
            if of_own_loader:
                fix += ": batches of a data loader of your own are taken as they are"
            elif "input_ids" in changed_keys:
                fix += (
                    ", or declare the length of the longest row, to which batches with `input_ids` are then padded: "
                    f"{_setting('max_length=...', self.config_name)}, for several lengths with `length_buckets=[...]`"
                )
            fix += "."
        return (
            f"The data collator yields more shapes than were declared, and each one compiles the training step again: "
            f"`{key}` was {before} in the first batch and is {after} now (allowed: {self.limit} distinct "
            f"shape{'s' if self.limit > 1 else ''}{f', lengths {self.lengths}' if self.lengths else ''}). {fix}"
        )
