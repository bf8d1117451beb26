"""Batches with images: how many image tokens a row has room for, and the collator that lays images out."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import format_exception
from typing import Any

import datasets
import pyarrow.compute as pc
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import ProcessorMixin, TrainingArguments

from ...data.buckets import round_up_length
from ...data.static_shapes import StaticShapeCollator
from ...errors import UserError
from ...vision.collator import IMAGE_COLUMNS, ImageCollator
from ...vision.families import FAMILIES, ImageFamily
from ...vision.model import find_base
from ..checks.datasets import has_images, named_datasets
from ..checks.rows import first_that_fails
from ..configs import ImageArguments


# Settings by which models compute or write something else than a loss, which nothing has compared with images.
_WITHOUT_IMAGES = ("predict_with_generate", "show_samples", "kd_teacher", "kd_cache", "qat_weight_dtype")
# The file of `datasets` that opens images, in a traceback.
_DECODER = os.path.join("features", "image.py")


@contextmanager
def naming_broken_images(datasets_by_name: Mapping[str, Any]) -> Iterator[None]:
    """
    Context in which rows are read of datasets, by what to call them in a message. Where an image cannot be opened, a `ValueError` has
    its row: the error of `datasets`, from a worker of the DataLoader perhaps, knows none.
    """
    try:
        yield
    # Decoders raise what they like.
    except Exception as error:
        if _DECODER in "".join(format_exception(error)):
            for name, dataset in datasets_by_name.items():
                if not isinstance(dataset, datasets.Dataset):
                    continue
                columns = [column for column in IMAGE_COLUMNS if column in dataset.column_names]
                images = dataset.select_columns(columns)
                if (row := first_that_fails(len(images), images.__getitem__)) is not None:
                    raise UserError(
                        f"An image of row {row} of {name} (the first is row 0) cannot be opened ({type(error).__name__}). Replace it, or leave the row "
                        "out of the file or, in Python, out with "
                        f"{name}.select(row for row in range({len(dataset)}) if row != {row}). Without decoding, "
                        f"{name}.cast_column({columns[0]!r}, datasets.List(datasets.Image(decode=False))) shows its bytes and its path."
                    ) from error
        raise


def images_of_rows(dataset) -> tuple[int, int] | None:
    """The images of the row that has the fewest, and of that with the most, without a look at any; `None` where that is not known."""
    if not isinstance(dataset, datasets.Dataset):
        return None if has_images(dataset) else (0, 0)
    if "image" in dataset.column_names:
        return 1, 1
    if "images" not in dataset.column_names:
        return 0, 0
    # The counts are of the whole table: a selection of its rows may not have all of them.
    counts = pc.fill_null(pc.list_value_length(dataset.data.column("images")), 0)
    extremes = pc.min_max(counts)
    return extremes["min"].as_py(), extremes["max"].as_py()


class ImagesMixin:
    """The part of [`TPUTrainerMixin`] that gives batches with images a static shape."""

    #: Whether some batches may have images and others none, which is another shape.
    some_without_images = False
    #: The most that a row has, where all rows were looked at.
    most_image_tokens: int | None = None

    def find_longest_row(self) -> None:
        """
        Set `max_length`, in place of `None`, to the tokens of the longest row, which only upstream's collator knows. It goes through all
        rows once. Rows of a stream are a `ValueError`.
        """
        args, base = self.args, find_base(self.model)
        datasets_by_name = named_datasets(vars(self))
        if not all(isinstance(dataset, datasets.Dataset) for dataset in datasets_by_name.values()):
            raise UserError(
                "max_length=None takes all rows whole, but the longest row of a stream is not known. Set it to its tokens, those of its "
                f"images included: {self._config_name}(max_length=2048)."
            )
        if base is None:
            return
        measure = partial(_measure, self.data_collator, base.config.image_token_id)
        with naming_broken_images(datasets_by_name):
            for dataset in datasets_by_name.values():
                rows = DataLoader(dataset, 1, collate_fn=measure, num_workers=args.dataloader_num_workers)
                token_counts = tqdm(
                    rows, "max_length=None: looking for the longest row", unit="row", disable=args.disable_tqdm
                )
                prompt, answer, most = (max(column) for column in zip(*token_counts, strict=True))
                longest = prompt + answer
                args.max_length = max(args.max_length or 0, round_up_length(longest, longest + 128))
                self.most_image_tokens = max(self.most_image_tokens or 0, most)
        self.adapted.changes.append(
            f"max_length=None is {args.max_length}, for the longest row; setting it leaves out the search for that row"
        )

    def lay_out_images(self) -> None:
        """
        Give a trainer whose dataset has images the collator that lays them out, around that which pads rows, with a line that says what
        rows have room for. A model of another family is a `ValueError`.
        """
        args, collator, processor = self.args, self.data_collator, self.processing_class
        for name in _WITHOUT_IMAGES:
            if value := vars(args).get(name):
                raise UserError(
                    f"{name}={value!r} knows no images, and the dataset has some. Leave it out, or train on text."
                )
        base = find_base(self.model)
        if base is None:
            raise UserError(
                f"Images train on XLA with models of these types: {', '.join(sorted(FAMILIES))}. This one is "
                f"{self.model.config.model_type!r}. Train it on CUDA (backend='cuda'), or on text: dataset.remove_columns('images')."
            )
        assert isinstance(collator, StaticShapeCollator)
        family = FAMILIES[base.config.model_type](base)
        counts_of_datasets = [images_of_rows(dataset) for dataset in named_datasets(vars(self)).values()]
        most = None if None in counts_of_datasets else max(most for _, most in counts_of_datasets)
        room, why = _find_room(family, processor, args, most, self.most_image_tokens)
        text_field = vars(args).get("dataset_text_field", "text")
        self.data_collator = ImageCollator(
            collator, family, room, processor.tokenizer, self._config_name, args.max_length, text_field
        )
        self.some_without_images = any(counts is None or counts[0] == 0 for counts in counts_of_datasets)
        if self.some_without_images and self.backend.processes.count > 1:
            raise UserError(
                "Some rows may have no image, and a batch of such rows is another program, but all hosts and processes run the same one at "
                "a time. Leave these rows out: dataset.filter(lambda row: row['images']), of a Dataset and no stream."
            )
        more = ". A batch without images is a graph of its own" if self.some_without_images else ""
        self.adapted.changes.append(
            f"images: rows have room for {room} image tokens ({why}); image_tokens declares fewer{more}"
        )

    def synthetic_rows(self, dataset) -> datasets.Dataset:
        """
        Rows in the columns of a dataset with images: for each length that batches are padded to one with an image, and, where some may be
        without, one without.
        """
        # Pillow may not be installed where there are no images.
        from PIL import Image

        columns, tokenizer = dataset.column_names or next(iter(dataset)), self.processing_class.tokenizer
        answers = [name for name in ("completion", "chosen", "rejected") if name in columns]

        def make_row(with_image: bool, text: str) -> dict[str, Any]:
            user, assistant = (
                [{"role": role, "content": words}] for role, words in (("user", "a"), ("assistant", text))
            )
            row: dict[str, Any] = {"label": True} if "label" in columns else {}
            row |= {"prompt": user, **dict.fromkeys(answers, assistant)} if answers else {"messages": user + assistant}
            image = Image.new("RGB", (64, 64))
            return row | ({"image": image} if "image" in columns else {"images": [image] * with_image})

        rows = []
        for with_image in (True, False) if self.some_without_images else (True,):
            # These are the tokens of the image and of the chat template.
            around = self.data_collator([make_row(with_image, "a")]).length
            for length in self.lengths:
                if around <= length:
                    words = tokenizer(" a" * length)["input_ids"][: length - around]
                    rows.append(make_row(with_image, tokenizer.decode(words)))
        return datasets.Dataset.from_list(rows)

    def sometimes_unused(self) -> set[nn.Parameter]:
        """The trained parameters that some steps leave as they are: those of images, if some batches have none."""
        if not self.some_without_images:
            return set()
        base = find_base(self.model)
        return {each for each in base.parameters() if each.requires_grad} - {*base.get_decoder().parameters()}


def _measure(collate: Callable, image_token: int, examples: list) -> tuple[int, int, int]:
    """The tokens of a row, those of its answer apart where it may get that of another row, and the tokens of its images."""
    batch = collate([dict(example) for example in examples])
    ids = batch["input_ids"]
    answer = int(batch["completion_mask"].sum()) if "KL_input_ids" in batch else 0
    return ids.shape[1] - answer, answer, int((ids == image_token).sum(1).max())


def _find_room(
    family: ImageFamily, processor: ProcessorMixin, args: TrainingArguments, most: int | None, longest: int | None
) -> tuple[int, str]:
    if isinstance(args, ImageArguments) and args.image_tokens is not None:
        return family.round_up(args.image_tokens), "as image_tokens says"
    if longest is not None:
        return family.round_up(longest), "as the row with the most has"
    each = family.tokens_per_image(processor)
    if most is not None and max(1, most) * each <= args.max_length:
        return family.round_up(max(1, most) * each), f"{max(1, most)} x {each}"
    return family.round_up(args.max_length), f"as max_length={args.max_length} allows"
