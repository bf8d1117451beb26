"""
How each family of vision language models takes the images of a batch in static shapes.

Upstream's models gather images from all rows into one list, and go by its length, by the sizes of images and by where their tokens
are: boolean indices, `masked_scatter`, `split(tolist())`, which are another graph for each batch, or a read. Here each row has room
for a declared number of image tokens. The host lays images out by rows and fills what is left with padding; the device computes the
features of all, and takes a row's features one after the other for its image tokens. Nothing reads those of padding.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from ..errors import UserError


#: The column of a batch that has the pixels of each row's images.
PIXELS = "pixels_by_row"


class ImageFamily(ABC):
    """
    How one family takes images. The methods of the host come first; they run where batches are collated, which may be a worker of
    the DataLoader, and hold no weights.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model that takes images, without its head: upstream's `base_model`.
    """

    #: What upstream's processor makes of images, and `lay_out` replaces.
    keys: tuple[str, ...] = ("pixel_values",)
    #: Tokens of what a row has whole: an image, or a tile.
    tokens = 1
    #: Whether layers of the text add features to what the layer before has computed.
    adds_between_layers = False

    def __init__(self, model: PreTrainedModel):
        self.config: PreTrainedConfig = model.config

    @abstractmethod
    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        """The image tokens that upstream's processor has put into each row, for its features, of so many images a row."""

    @abstractmethod
    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        """The most tokens that the processor makes of an image."""

    def round_up(self, tokens: int) -> int:
        """The room that a row needs for so many image tokens: the tokens of whole images, or of whole tiles."""
        return -(-tokens // self.tokens) * self.tokens

    @abstractmethod
    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        """The images of a batch by rows, `(batch, ...)`, with room for as many tokens in each. All of it is data of a step."""

    @abstractmethod
    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        """
        On the device: take from `inputs` what was laid out. Returns features `(rooms, width)`, those of a row one after the other: those
        to embed, and those that the first layers add.
        """


def _longest_edge(processor: ProcessorMixin) -> int:
    size = processor.image_processor.size
    if "longest_edge" not in size or size["longest_edge"] is None:
        raise UserError(
            f"The processor has no longest_edge (its size is {dict(size)}), and so no most tokens of an image. Set "
            "processor.image_processor.size['longest_edge'], or the room of a row: image_tokens=1024."
        )
    return size["longest_edge"]


class OneSize(ImageFamily):
    """Gemma 3 and LLaVA: every image has one size, and as many tokens. Upstream's own code computes its features."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        config = self.config
        if config.model_type == "gemma3":
            self.tokens = config.mm_tokens_per_image
        else:
            vision = config.vision_config
            self.tokens = (vision.image_size // vision.patch_size) ** 2
            # CLIP has one more position, of the class, and "default" leaves the first one out.
            has_class = vision.model_type == "clip_vision_model"
            self.tokens += has_class - (config.vision_feature_select_strategy == "default")

    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        if len(batch["pixel_values"]) != sum(images):
            raise UserError(
                f"The processor made {len(batch['pixel_values'])} pictures of {sum(images)} images: it adds crops of them. Set "
                "processor.image_processor.do_pan_and_scan = False."
            )
        return [count * self.tokens for count in images]

    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        return self.tokens

    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        pixels = batch["pixel_values"]
        laid_out = pixels.new_zeros(len(images), room // self.tokens, *pixels.shape[1:])
        for row, own in enumerate(pixels.split(list(images))):
            laid_out[row, : len(own)] = own
        return {PIXELS: laid_out}

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        features = model.get_image_features(inputs.pop(PIXELS).flatten(0, 1), return_dict=True).pooler_output
        # LLaVA has a list of those of each image.
        return [features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))]


class Tiles(ImageFamily):
    """
    Idefics 3 and SmolVLM: an image is one or more square tiles, some pixels of which may be masked. Upstream drops the tiles that it
    finds empty, on the device; here they are computed, and nothing reads them.
    """

    keys = ("pixel_values", "pixel_attention_mask")

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        vision = self.config.vision_config
        self.patch_size = vision.patch_size
        self.tokens = (vision.image_size // vision.patch_size) ** 2 // self.config.scale_factor**2

    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        return (batch["pixel_attention_mask"].flatten(2).any(2).sum(1) * self.tokens).tolist()

    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        images = processor.image_processor
        if not images.do_image_splitting:
            return self.tokens
        # A square image has the most.
        side = _longest_edge(processor)
        tiles, _, _ = images.get_number_of_image_patches(side, side)
        return max(1, tiles) * self.tokens

    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        pixels, mask, size = batch["pixel_values"], batch["pixel_attention_mask"], self.patch_size
        rows, tiles = pixels.shape[:2]
        laid_out = pixels.new_zeros(rows, room // self.tokens, *pixels.shape[2:])
        laid_out[:, :tiles] = pixels
        # Padding has no mask: scores of nothing are no numbers.
        patches = torch.ones(*laid_out.shape[:2], *(side // size for side in pixels.shape[-2:]), dtype=torch.bool)
        real = mask.unfold(2, size, size).unfold(3, size, size).flatten(4).any(4)
        patches[:, :tiles] = real | ~real.flatten(2).any(2)[..., None, None]
        return {PIXELS: laid_out, "patch_attention_mask": patches}

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        pixels, mask = inputs.pop(PIXELS).flatten(0, 1), inputs.pop("patch_attention_mask").flatten(0, 1)
        # Rows that complete a last batch are masked.
        mask = mask | ~mask.flatten(1).any(1)[:, None, None]
        hidden = model.vision_model(pixel_values=pixels.to(model.dtype), patch_attention_mask=mask, return_dict=True)
        return [model.connector(hidden.last_hidden_state).flatten(0, 1)]


class Patches(ImageFamily):
    """
    Qwen2.5-VL and Qwen3-VL: an image has as many patches as its size asks for. Those of a row come one after the other, and attention
    is within an image, or within a window of it, by the numbers of these.
    """

    keys = ("pixel_values", "image_grid_thw")

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.merge = self.config.vision_config.spatial_merge_size
        self._find_positions = type(model).get_rope_index
        self._find_positions_of_image = type(model).get_vision_position_ids

    @abstractmethod
    def of_image(self, grid: tuple[int, int, int]) -> dict[str, Tensor]:
        """What upstream computes of the size of an image: columns of its patches, and of its tokens."""

    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        tokens = iter((batch["image_grid_thw"].prod(1) // self.merge**2).tolist())
        return [sum(next(tokens) for _ in range(count)) for count in images]

    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        images = processor.image_processor
        return _longest_edge(processor) // (images.patch_size * images.merge_size) ** 2

    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        grids = batch["image_grid_thw"]
        of_image = iter(zip(grids.tolist(), batch["pixel_values"].split(grids.prod(1).tolist()), strict=True))
        rows = [self._lay_out_row([next(of_image) for _ in range(count)], room) for count in images]
        # A row of images as if it were one image: no dimension has the length of the text.
        laid_out = {key: torch.stack([row[key] for row in rows])[:, None] for key in rows[0]}
        return laid_out | self._positions_of_text(batch)

    def _lay_out_row(self, images: list[tuple[list[int], Tensor]], room: int) -> dict[str, Tensor]:
        """The columns of a row's images, one after the other, each with its number, and those of padding, which have 0."""
        columns = []
        for number, (grid, pixels) in enumerate(images, 1):
            numbers = torch.full((len(pixels),), number)
            columns.append({PIXELS: pixels, "image_numbers": numbers, **self.of_image(tuple(grid))})
        missing = room - sum(len(image[PIXELS]) for image in columns) // self.merge**2
        vision, num_patches = self.config.vision_config, missing * self.merge**2
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        # As an image of one token, again and again.
        of_one = self.of_image((1, self.merge, self.merge))
        padding = {key: column.repeat(missing, *[1] * (column.ndim - 1)) for key, column in of_one.items()}
        padding |= {
            PIXELS: torch.zeros(num_patches, width),
            "image_numbers": torch.zeros(num_patches, dtype=torch.long),
        }
        return {key: torch.cat([*(image[key] for image in columns), padding[key]]) for key in padding}

    def _positions_of_text(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """
        Positions `(batch, length, 3)` of the tokens, which upstream finds in loops over their types. They stand in the place of the
        types, which nothing else is made of: KTO gives its mismatched rows those under a name of their own.
        """
        stand_in = SimpleNamespace(
            config=self.config,
            get_vision_position_ids=lambda *args, **kwargs: self._find_positions_of_image(None, *args, **kwargs),
        )
        positions = {}
        for key in batch:
            if key.endswith("mm_token_type_ids"):
                prefix = key.removesuffix("mm_token_type_ids")
                text_positions, _ = self._find_positions(
                    stand_in,
                    batch[f"{prefix}input_ids"],
                    batch[key],
                    image_grid_thw=batch["image_grid_thw"],
                    attention_mask=batch[f"{prefix}attention_mask"],
                )
                positions[key] = text_positions.permute(1, 2, 0).contiguous()
        return positions

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> list[Tensor]:
        inputs["position_ids"] = inputs.pop("mm_token_type_ids").permute(2, 0, 1)
        numbers = inputs.pop("image_numbers").flatten(0, 1)
        vision = model.visual(
            inputs.pop(PIXELS).flatten(0, 2).to(model.visual.dtype),
            grid_thw=None,
            position_ids=inputs.pop("image_positions").flatten(0, 2),
            # The attention that is registered for it takes these for lengths, see `model.py`.
            cu_seqlens=numbers,
            max_seqlen=numbers.shape[1],
            return_dict=True,
            **self._more_of_images(inputs),
        )
        return [vision.pooler_output, *vision.get("deepstack_features", ())]

    @abstractmethod
    def _more_of_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Take from `inputs` what else the tower is given."""


class WindowedPatches(Patches):
    """Qwen2.5-VL: most of its layers attend within windows, by which its tokens are ordered."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        vision = self.config.vision_config
        self._windows = self.merge, vision.window_size, vision.patch_size

    def of_image(self, grid: tuple[int, int, int]) -> dict[str, Tensor]:
        return _windows_of(grid, *self._windows)

    def _lay_out_row(self, images: list[tuple[list[int], Tensor]], room: int) -> dict[str, Tensor]:
        row = super()._lay_out_row(images, room)
        # Those of one image are no more than its patches.
        row["image_windows"] += row["image_numbers"] * len(row["image_numbers"])
        starts = torch.zeros(room, dtype=torch.long)
        start = 0
        for grid, _ in images:
            tokens = math.prod(grid) // self.merge**2
            starts[start : start + tokens] = start
            start += tokens
        starts[start:] = torch.arange(start, room)
        row["image_order"] += starts
        return row

    def _more_of_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        order = inputs.pop("image_order").flatten(0, 1)
        # Of all rows together.
        order = order + torch.arange(len(order), device=order.device)[:, None] * order.shape[1]
        windows = inputs.pop("image_windows").flatten(0, 1)
        return {
            "window_index": order.flatten(),
            "cu_window_seqlens": windows,
            "max_window_seqlen": windows.shape[1],
        }


@cache
def _windows_of(grid: tuple[int, int, int], merge: int, window: int, patch: int) -> dict[str, Tensor]:
    """Positions of the patches of an image, the order of its tokens by windows, and, in that order, the window of each patch."""
    sizes = torch.tensor([grid])
    order, ends = get_vision_window_index(sizes, merge, window, patch)
    lengths = ends.diff()
    windows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return {"image_positions": get_vision_position_ids(sizes, merge), "image_windows": windows, "image_order": order}


class DeepPatches(Patches):
    """Qwen3-VL: learned positions are interpolated, and the first layers of the text add features of earlier layers of the tower."""

    adds_between_layers = True

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        visual = model.visual
        self._table = visual.num_grid_per_side, visual.interpolation_mode, visual.interpolation_align_corners

    def of_image(self, grid: tuple[int, int, int]) -> dict[str, Tensor]:
        return _interpolations_of(grid, self.merge, *self._table)

    def _more_of_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {
            "interp_indices": inputs.pop("image_indices").flatten(0, 2),
            "interp_weights": inputs.pop("image_weights").flatten(0, 2),
        }


@cache
def _interpolations_of(
    grid: tuple[int, int, int], merge: int, side: int, mode: str, align_corners: bool
) -> dict[str, Tensor]:
    """Positions of the patches of an image, and which learned positions they are interpolated from."""
    sizes = torch.tensor([grid])
    indices, weights = get_vision_interpolation_indices_and_weights(
        sizes, side, mode=mode, align_corners=align_corners, spatial_merge_size=merge
    )
    return {
        "image_positions": get_vision_position_ids(sizes, merge),
        "image_indices": indices,
        "image_weights": weights,
    }


#: Families, by `model_type`.
FAMILIES: dict[str, type[ImageFamily]] = {
    "gemma3": OneSize,
    "idefics3": Tiles,
    "llava": OneSize,
    "qwen2_5_vl": WindowedPatches,
    "qwen3_vl": DeepPatches,
    "smolvlm": Tiles,
}
