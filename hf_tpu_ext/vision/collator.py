"""Batches whose images are laid out by rows, and checked against the text, on the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..data.static_shapes import CollatedBatch, WrappedCollator, count_rows
from ..errors import UserError
from .families import ImageFamily


#: The key that upstream's processor gives images, and the columns of a dataset that have them.
_PIXELS = "pixel_values"
IMAGE_COLUMNS = ("image", "images")


def count_images(example: Mapping[str, Any]) -> int:
    """How many images an example has."""
    if example.get("image") is not None:
        return 1
    return len(example.get("images") or ())


class ImageCollator(WrappedCollator):
    """
    Wraps a collator that yields batches of a declared length with images as upstream's processor makes them, and lays these out by
    rows, see [`ImageFamily`].

    Upstream truncates text and not images, so each row's image tokens are counted: as many as its images make, or a `ValueError`.
    Images for which a row has no room are one, too. Batches without any image are left as they are.

    Args:
        collator ([`StaticShapeCollator`]): Data collator to wrap.
        family ([`ImageFamily`]): How the model takes images.
        room (`int`): How many image tokens a row may have.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): What shows the text of a row in a message.
        config_name (`str`): Class of the arguments that have `max_length` and `image_tokens`, for messages.
        max_length (`int`): Tokens that upstream truncates rows to.
        text_field (`str`, *optional*, defaults to `"text"`): The column of rows that are plain text.
    """

    def __init__(
        self,
        collator: Callable[[list], CollatedBatch],
        family: ImageFamily,
        room: int,
        tokenizer: PreTrainedTokenizerBase,
        config_name: str,
        max_length: int,
        text_field: str = "text",
    ):
        self.family, self.room, self.tokenizer = family, room, tokenizer
        # Upstream's collator has a `max_length`, too.
        self.config_name, self._max_length, self.text_field = config_name, max_length, text_field
        self.collator = collator

    def __call__(self, examples: list) -> CollatedBatch:
        """Collates `examples`; `ValueError` for a row whose images do not go together with its text, or have no room."""
        images = [count_images(example) for example in examples]
        batch = self._collate(examples)
        # The rows of an example, as of a pair, have the same images.
        images *= count_rows({"input_ids": batch["input_ids"]}) // len(examples)
        image_tokens = self.family.tokens_of_images(batch, images) if _PIXELS in batch else [0] * len(images)
        for key in batch:
            if key.endswith("input_ids"):
                self._check_rows(batch[key], image_tokens)
        if _PIXELS not in batch:
            return batch
        inputs = self.family.lay_out(batch, images, self.room)
        for key in self.family.keys:
            batch.pop(key, None)
        batch.update(inputs)
        return batch

    def _collate(self, examples: list) -> CollatedBatch:
        # Upstream's collator renames columns of the rows that it is given.
        try:
            return self.collator([dict(example) for example in examples])
        except UserError:
            raise
        # Processors raise what they like.
        except Exception as error:
            for row, example in enumerate(examples):
                try:
                    self.collator([dict(example)])
                except Exception:
                    columns = ("prompt", "messages", self.text_field)
                    text = next((str(example[column])[:80] for column in columns if column in example), "")
                    paths = [image for image in example.get("images") or () if isinstance(image, str)]
                    raise UserError(
                        f"Row {row} of the batch, with {count_images(example)} images{f' ({paths[0][:120]}, ...)' if paths else ''} and "
                        f"the text {text!r}, is refused by upstream: {type(error).__name__}: {error}. Correct the row, or leave it out "
                        "with dataset.filter. Where max_length cuts off tokens of its images, truncate less, for example "
                        f"{self.config_name}(max_length={2 * self._max_length})."
                    ) from error
            raise

    def _check_rows(self, input_ids: torch.Tensor, image_tokens: Sequence[int]) -> None:
        counts = (input_ids == self.family.config.image_token_id).sum(1).tolist()
        for row, (tokens, num_needed) in enumerate(zip(counts, image_tokens, strict=True)):
            if tokens < num_needed:
                raise UserError(
                    f"Row {row} of the batch has {tokens} of the {num_needed} image tokens that its images make: max_length cuts off the "
                    f"others{self._text_of(input_ids[row])}. Truncate less, with room for {num_needed} and the text, for example "
                    f"{self.config_name}(max_length={self._max_length + num_needed - tokens + 64}), or make the images smaller."
                )
            if tokens > num_needed:
                raise UserError(
                    f"Row {row} of the batch has {tokens} image tokens, but its images make {num_needed}{self._text_of(input_ids[row])}. "
                    "Leave the tokens that stand for an image out of its text: the chat template writes them, one message part "
                    "{'type': 'image'} for each image."
                )
            if num_needed > self.room:
                raise UserError(
                    f"Row {row} of the batch has {num_needed} image tokens, but there is room for {self.room}"
                    f"{self._text_of(input_ids[row])}. Declare more: {self.config_name}(image_tokens={num_needed})."
                )

    def _text_of(self, ids: torch.Tensor) -> str:
        text = self.tokenizer.decode(ids[ids != self.family.config.image_token_id], skip_special_tokens=True).strip()
        return f" (it begins with {text[:60]!r})" if text else ""
