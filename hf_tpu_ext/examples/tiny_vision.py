"""Tiny vision language models with their processors, and pictures for them to tell apart: for tests, benchmarks and smoke runs."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from ..errors import UserError
from .tiny import SIZES, make_tokenizer


#: Pixels of a side of the pictures that families of one size take, and of a patch.
SIDE, PATCH = 56, 14
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IDEFICS = {
    "image_token": "<image>",
    "fake": "<fake_token_around_image>",
    "eou": "<end_of_utterance>",
    "g": "<global-img>",
}
# The tokens that stand for images, by the names that processors look for, and what a chat template writes for an image.
_TOKENS = {
    "gemma3": (
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
    ),
    "idefics3": (_IDEFICS, "<image>"),
    "llava": ({"image_token": "<image>"}, "<image>"),
    "qwen2_5_vl": (_QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "qwen3_vl": (_QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    "smolvlm": (_IDEFICS, "<image>"),
}
FAMILIES = tuple(_TOKENS)
_CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string %}{{- message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{- 'IMAGE' }}{%- else %}{{- part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_vision_model(
    output_dir: str | Path, model_type: str = "gemma3", seed: int = 0, tokens_per_image: int = 4, **overrides: Any
) -> Path:
    """
    Make a randomly initialised float32 model of one of [`FAMILIES`], of two layers for text and two for images, with its processor,
    in a directory that `from_pretrained` loads. Gemma 3 makes `tokens_per_image` of an image; `overrides` are fields of the text's
    configuration.
    """
    if model_type not in FAMILIES:
        raise UserError(f"model_type={model_type!r} is not a tiny family. Choose one of: {', '.join(FAMILIES)}.")
    processor = make_processor(output_dir, model_type, tokens_per_image=tokens_per_image)
    tokenizer = processor.tokenizer
    text = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **overrides,
    }
    config = AutoConfig.for_model(model_type, **_fields(model_type, processor, text))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        if model_type == "gemma3":
            # Upstream begins with zeros, from which no pixel reaches the text.
            torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(output_dir)
    return Path(output_dir)


def make_processor(
    output_dir: str | Path, model_type: str, side: int = SIDE, tokens_per_image: int = 4
) -> ProcessorMixin:
    """
    Make a processor with a tiny tokenizer, and save it. Families of one size make images of `side` x `side` pixels, and of so many
    tokens; of the others that is the largest size.
    """
    tokens, placeholder = _TOKENS[model_type]
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(output_dir), extra_special_tokens=tokens)
    template = _CHAT_TEMPLATE.replace("IMAGE", placeholder)
    square = {"height": side, "width": side}
    if model_type == "gemma3":
        images = Gemma3ImageProcessorPil(size=square)
        processor = Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=tokens_per_image)
    elif model_type == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)
        settings = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor = LlavaProcessor(images, tokenizer, chat_template=template, **settings)
    elif model_type.startswith("qwen"):
        # Their processors of videos need torchvision.
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

        images = Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=28 * 28, max_pixels=side * side)
        if model_type == "qwen2_5_vl":
            processor = Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=template)
        else:
            processor = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=template)
    else:
        edge = {"longest_edge": side}
        images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        processor = Idefics3Processor(images, tokenizer, image_seq_len=tokens_per_image, chat_template=template)
    processor.save_pretrained(output_dir)
    return processor


def find_image_tokens(processor: ProcessorMixin, model_type: str) -> dict[str, int]:
    """The fields of a model's configuration that name tokens of the processor."""
    tokens, _ = _TOKENS[model_type]
    ids = {name: processor.tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    if model_type.startswith("qwen"):
        return {f"{name}_id": token for name, token in ids.items()}
    if model_type == "gemma3":
        return {f"{name}_index": token for name, token in ids.items()}
    return {"image_token_index" if model_type == "llava" else "image_token_id": ids["image_token"]}


def _fields(model_type: str, processor: ProcessorMixin, text: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a tiny model."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "patch_size": PATCH}
    fields = find_image_tokens(processor, model_type)
    if model_type.startswith("qwen"):
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        vision |= {"depth": 2, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
        vision["initializer_range"] = SIZES["initializer_range"]
        if model_type == "qwen2_5_vl":
            vision |= {"window_size": 28, "fullatt_block_indexes": [1]}
        else:
            rope["mrope_interleaved"] = True
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        return {"text_config": {**text, "rope_parameters": rope}, "vision_config": vision, **fields}
    vision |= {"image_size": SIDE, "num_hidden_layers": 2, "num_attention_heads": 2}
    if model_type == "gemma3":
        text = {**text, "query_pre_attn_scalar": 16, "sliding_window": 64}
        fields["mm_tokens_per_image"] = processor.image_seq_length
    elif model_type == "llava":
        text = {"model_type": "llama", **text}
        vision |= {"model_type": "clip_vision_model", "num_hidden_layers": 3}
        fields["image_seq_length"] = (SIDE // PATCH) ** 2
    else:
        text = {"model_type": "llama", **text}
        fields |= {"scale_factor": 2, "pad_token_id": text["pad_token_id"]}
    return {"text_config": text, "vision_config": vision, **fields}


def make_digits(count: int, seed: int = 0, shuffled: bool = False) -> Dataset:
    """
    Make pictures of digits, in TRL's conversational prompt-completion form: `images`, a question, and the digit as its answer. Size,
    place, colours and noise differ. `shuffled` gives each picture its own pixels in another order, which tell nothing.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        digit = int(rng.integers(10))
        pixels = draw_digit(digit, rng)
        if shuffled:
            pixels = rng.permutation(pixels.reshape(-1, 3)).reshape(pixels.shape)
        rows.append(
            {
                "images": [PILImage.fromarray(pixels)],
                "prompt": [{"role": "user", "content": "?"}],
                "completion": [{"role": "assistant", "content": str(digit)}],
            }
        )
    return Dataset.from_list(rows)


def write_digits(output_dir: str | Path) -> Path:
    """Write 512 pictures of digits to train on, and 64 to evaluate, for `load_dataset(output_dir)`."""
    for split, count, seed in (("train", 512, 0), ("test", 64, 1)):
        path = Path(output_dir) / f"{split}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_digits(count, seed).to_parquet(path)
    return Path(output_dir)


def draw_digit(digit: int, rng: np.random.Generator) -> np.ndarray:
    """A picture of a digit, `(height, width, 3)`, of bytes."""
    dark, light = rng.integers(0, 90, 3), rng.integers(165, 256, 3)
    image = PILImage.new("RGB", (SIDE, SIDE), tuple(map(int, dark)))
    size = int(rng.integers(38, 50))
    corner = rng.integers(-4, 5, 2) + (SIDE // 2 - size // 4, SIDE // 2 - 2 * size // 3)
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text(tuple(map(int, corner)), str(digit), tuple(map(int, light)), font)
    noise = rng.normal(0, 8, (SIDE, SIDE, 3))
    return (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
