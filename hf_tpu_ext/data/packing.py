"""Several documents in one row of fixed length."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import UserError
from .static_shapes import CollatedBatch


class PackedCollator:
    """
    Collates packed rows into batches of one static shape, with the segment ids that keep their documents apart.

    Takes the rows of [`~trl.pack_dataset`]. With `strategy="bfd"` and `"bfd_split"` the column `seq_lengths` tells
    where documents begin; a row without it (`strategy="wrapped"`, or no packing) is one document.

    Args:
        pad_token_id (`int`): Token id that `input_ids` is padded with.
        max_length (`int`): Length of every row.
        count_tokens (`Callable`, *optional*):
            Counts the tokens of a batch, see [`CollatedBatch`]: it gets the `input_ids` of all documents, one after the other.

    Example:
    ```python
    >>> collator = PackedCollator(pad_token_id=0, max_length=6)
    >>> batch = collator([{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}])
    >>> batch["segment_ids"], batch["position_ids"], batch["labels"]
    (tensor([[1, 1, 1, 2, 2, 0]]), tensor([[0, 1, 2, 0, 1, 0]]), tensor([[-100, 6, 7, -100, 9, -100]]))
    ```
    """

    def __init__(
        self, pad_token_id: int, max_length: int, count_tokens: Callable[[Mapping[str, Any]], int] | None = None
    ):
        self.pad_token_id = pad_token_id
        self.max_length = max_length
        self.count_tokens = count_tokens

    def __call__(self, examples: list[dict[str, Any]]) -> CollatedBatch:
        """
        Collates packed rows with `input_ids`, and optionally `labels` (by default the `input_ids`) and `seq_lengths`
        (lengths of the documents, by default one document).

        Returns:
            `CollatedBatch`: int64 tensors of shape `(batch, max_length)`:
                - `input_ids`: tokens, then pad tokens.
                - `labels`: -100 at pads and at the first token of each document, so that no document is predicted from
                  the one before it.
                - `attention_mask`: 1 at tokens, 0 at pads.
                - `position_ids`: count from 0 in each document; 0 at pads.
                - `segment_ids`: 1, 2, 3, ... per document, 0 at pads.

        Raises:
            `ValueError`: If a row is longer than `max_length`.
        """
        shape = (len(examples), self.max_length)
        input_ids = torch.full(shape, self.pad_token_id)
        labels = torch.full(shape, -100)
        position_ids = torch.zeros(shape, dtype=torch.int64)
        segment_ids = torch.zeros(shape, dtype=torch.int64)
        for row, example in enumerate(examples):
            length = len(example["input_ids"])
            if length > self.max_length:
                raise UserError(
                    f"A packed row of {length} tokens is longer than {self.max_length}. Pack to the length that is "
                    f"trained: set `max_length={length}`, or pack again with `seq_length={self.max_length}`."
                )
            documents = torch.tensor(example.get("seq_lengths", [length]))
            starts = (documents.cumsum(0) - documents).repeat_interleave(documents)
            input_ids[row, :length] = torch.tensor(example["input_ids"])
            labels[row, :length] = torch.tensor(example.get("labels", example["input_ids"]))
            position_ids[row, :length] = torch.arange(length) - starts
            segment_ids[row, :length] = torch.arange(1, len(documents) + 1).repeat_interleave(documents)
        labels[position_ids == 0] = -100
        is_token = segment_ids > 0
        batch = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": is_token.long(),
            "position_ids": position_ids,
            "segment_ids": segment_ids,
        }
        num_tokens = None if self.count_tokens is None else self.count_tokens({"input_ids": input_ids[is_token]})
        # Upstream puts the rows one behind another.
        return CollatedBatch(batch, int(is_token.sum()), {}, len(examples), num_tokens)
