"""
How each family of vision language models takes the images of a batch in static shapes.

Upstream's models gather images from all rows into one list, and go by its length, by the sizes of images and by where their tokens
are: boolean indices, `masked_scatter`, `split(tolist())`, which are another graph for each batch, or a read. Here each row has room
for a declared number of image tokens. The host lays images out by rows and fills what is left with padding; the device computes the
features of all, and takes a row's features one after the other for its image tokens. Nothing reads those of padding.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

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

    def __init__(self, model: PreTrainedModel):
        self.config: PreTrainedConfig = model.config

    @abstractmethod
    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        """The image tokens that upstream's processor has put into each row, for its features, of so many images a row."""

    @abstractmethod
    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        """The most tokens that the processor makes of an image."""

    @abstractmethod
    def round_up(self, tokens: int) -> int:
        """The room that a row needs for so many image tokens: the tokens of whole images, or of whole tiles."""

    @abstractmethod
    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        """The images of a batch by rows, `(batch, ...)`, with room for as many tokens in each. All of it is data of a step."""

    @abstractmethod
    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        """On the device: take from `inputs` what was laid out. Returns features `(rooms, width)`, those of a row one after the other."""


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
            self.tokens += config.vision_feature_select_strategy != "default"

    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        if len(batch["pixel_values"]) != sum(images):
            raise UserError(
                f"The processor made {len(batch['pixel_values'])} pictures of {sum(images)} images: it adds crops of them. Set "
                "processor.image_processor.do_pan_and_scan = False."
            )
        return [count * self.tokens for count in images]

    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        return self.tokens

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.tokens) * self.tokens

    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        pixels = batch["pixel_values"]
        laid_out = pixels.new_zeros(len(images), room // self.tokens, *pixels.shape[1:])
        for row, own in enumerate(pixels.split(list(images))):
            laid_out[row, : len(own)] = own
        return {PIXELS: laid_out}

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        features = model.get_image_features(inputs.pop(PIXELS).flatten(0, 1), return_dict=True).pooler_output
        # LLaVA has a list of those of each image.
        return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))


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
        side = images.size["longest_edge"]
        tiles, _, _ = images.get_number_of_image_patches(side, side)
        return max(1, tiles) * self.tokens

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.tokens) * self.tokens

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

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        pixels, mask = inputs.pop(PIXELS).flatten(0, 1), inputs.pop("patch_attention_mask").flatten(0, 1)
        # Rows that complete a last batch are masked.
        mask = mask | ~mask.flatten(1).any(1)[:, None, None]
        hidden = model.vision_model(pixel_values=pixels.to(model.dtype), patch_attention_mask=mask, return_dict=True)
        return model.connector(hidden.last_hidden_state).flatten(0, 1)


class Patches(ImageFamily):
    """
    Qwen2.5-VL: an image has as many patches as its size asks for. Those of a row come one after the other, and attention is within
    an image, or within a window of it, by the numbers of these.
    """

    keys = ("pixel_values", "image_grid_thw")

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        vision = self.config.vision_config
        self.merged = vision.spatial_merge_size**2
        self.windows = vision.spatial_merge_size, vision.window_size, vision.patch_size
        self._find_positions = type(model).get_rope_index
        self._find_positions_of_image = type(model).get_vision_position_ids

    def _tokens(self, batch: Mapping[str, Any]) -> list[int]:
        return (batch["image_grid_thw"].prod(1) // self.merged).tolist()

    def tokens_of_images(self, batch: Mapping[str, Any], images: Sequence[int]) -> list[int]:
        tokens = iter(self._tokens(batch))
        return [sum(next(tokens) for _ in range(count)) for count in images]

    def tokens_per_image(self, processor: ProcessorMixin) -> int:
        images = processor.image_processor
        return images.size["longest_edge"] // (images.patch_size * images.merge_size) ** 2

    def round_up(self, tokens: int) -> int:
        return tokens

    def lay_out(self, batch: Mapping[str, Any], images: Sequence[int], room: int) -> dict[str, Tensor]:
        pixels, grids, rows = batch["pixel_values"], batch["image_grid_thw"], len(images)
        patches = room * self.merged
        # One row of images after another, as if they were one image: no dimension has the length of the text.
        laid_out = {
            PIXELS: pixels.new_zeros(rows, 1, patches, pixels.shape[1]),
            "image_positions": torch.zeros(rows, 1, patches, 2, dtype=torch.long),
            "image_numbers": torch.zeros(rows, 1, patches, dtype=torch.long),
            "image_windows": torch.zeros(rows, 1, patches, dtype=torch.long),
            "image_order": torch.arange(room).repeat(rows, 1)[:, None],
        }
        of_image = iter(zip(grids.tolist(), pixels.split(grids.prod(1).tolist()), strict=True))
        for row, count in enumerate(images):
            start, windows = 0, 0
            for number in range(1, count + 1):
                grid, own = next(of_image)
                positions, order, numbers = _arrange(tuple(grid), *self.windows)
                place = slice(start, start + len(own))
                laid_out[PIXELS][row, 0, place] = own
                laid_out["image_positions"][row, 0, place] = positions
                laid_out["image_numbers"][row, 0, place] = number
                laid_out["image_windows"][row, 0, place] = numbers + windows
                first = start // self.merged
                laid_out["image_order"][row, 0, first : first + len(order)] = order + first
                start, windows = start + len(own), windows + int(numbers[-1])
        return laid_out | self._positions_of_text(batch)

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
                found, _ = self._find_positions(
                    stand_in,
                    batch[f"{prefix}input_ids"],
                    batch[key],
                    image_grid_thw=batch["image_grid_thw"],
                    attention_mask=batch[f"{prefix}attention_mask"],
                )
                positions[key] = found.permute(1, 2, 0).contiguous()
        return positions

    def features(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
        numbers, windows = inputs.pop("image_numbers").flatten(0, 1), inputs.pop("image_windows").flatten(0, 1)
        order = inputs.pop("image_order").flatten(0, 1)
        rows, room = order.shape
        # Of all rows together.
        order = order + torch.arange(rows, device=order.device)[:, None] * room
        inputs["position_ids"] = inputs.pop("mm_token_type_ids").permute(2, 0, 1)
        vision = model.visual(
            inputs.pop(PIXELS).flatten(0, 2).to(model.visual.dtype),
            grid_thw=None,
            position_ids=inputs.pop("image_positions").flatten(0, 2),
            # The attention that is registered for it takes these for lengths, see `segments.py`.
            cu_seqlens=numbers,
            cu_window_seqlens=windows,
            window_index=order.flatten(),
            max_seqlen=room,
            max_window_seqlen=room,
            return_dict=True,
        )
        return vision.pooler_output


@cache
def _arrange(grid: tuple[int, int, int], merge: int, window: int, patch: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Upstream's positions of the patches of an image, the order of its tokens by windows, and, in that order, the window of each
    patch, from 1.
    """
    grid = torch.tensor([grid])
    order, ends = get_vision_window_index(grid, merge, window, patch)
    lengths = ends.diff()
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
    return get_vision_position_ids(grid, merge), order, numbers


#: Families, by `model_type`.
FAMILIES: dict[str, type[ImageFamily]] = {
    "gemma3": OneSize,
    "idefics3": Tiles,
    "llava": OneSize,
    "qwen2_5_vl": Patches,
    "smolvlm": Tiles,
}
