"""Each row of a batch is held against its images on the host, before anything is sent."""

import re
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPVisionConfig,
    LlavaConfig,
    Qwen2Config,
    SiglipVisionConfig,
)
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from hf_tpu_ext.data import StaticShapeCollator
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny_vision import make_vision_model
from hf_tpu_ext.vision.collator import ImageCollator
from hf_tpu_ext.vision.families import FAMILIES, PIXELS, OneSize


@pytest.fixture(scope="module", params=["gemma3", "smolvlm", "qwen2_5_vl"])
def family(request, tmp_path_factory):
    path = make_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    model = AutoModelForImageTextToText.from_pretrained(path)
    return FAMILIES[request.param](model.base_model), AutoProcessor.from_pretrained(path)


def make_collator(family, room, max_length=96):
    family, processor = family
    upstream = DataCollatorForVisionLanguageModeling(processor, max_length=max_length)
    static = StaticShapeCollator(upstream, [max_length], processor.tokenizer.pad_token_id)
    return ImageCollator(static, family, room, processor.tokenizer, "TPUSFTConfig", max_length)


def make_row(*images, text="What is it?"):
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "A cat."}]
    return {"images": list(images), "messages": messages}


def picture(mode="RGB", size=(56, 56)):
    return Image.new(mode, size, 120)


@pytest.mark.parametrize(
    ("vision", "strategy", "tokens"),
    [
        (CLIPVisionConfig(image_size=336, patch_size=14), "default", 576),
        (CLIPVisionConfig(image_size=336, patch_size=14), "full", 577),
        (SiglipVisionConfig(image_size=384, patch_size=14), "full", 729),
    ],
    ids=["clip", "clip-full", "siglip"],
)
def test_tokens_of_an_image_of_llava(vision, strategy, tokens):
    """As upstream's processors count them. SigLIP has no position of a class."""
    config = LlavaConfig(vision_config=vision, text_config=Qwen2Config(), vision_feature_select_strategy=strategy)
    assert OneSize(SimpleNamespace(config=config)).tokens == tokens


def test_batches_have_one_shape_whatever_their_images(family):
    collate = make_collator(family, room=8)
    rows = (
        [make_row(picture()), make_row(picture(), picture(size=(60, 44)))],
        [make_row(picture(size=(90, 31))), make_row()],
    )
    shapes = [{key: value.shape for key, value in collate(batch).items()} for batch in rows]
    assert shapes[0] == shapes[1]
    assert all(shape[0] == 2 for shape in shapes[0].values())
    assert PIXELS not in collate([make_row(), make_row()])


def test_settings_of_the_collator_are_upstreams(family):
    """Read and set through both collators around it."""
    collate = make_collator(family, room=8)
    upstream = collate.collator.collator
    assert collate.processor is upstream.processor
    collate.max_length = 95
    assert upstream.max_length == 95 and collate.max_length == 95


def test_image_tokens_that_are_cut_off(family):
    row = make_row(picture(), picture(), picture())
    with pytest.raises(
        UserError, match="Row 1 of the batch, with 3 images and the text .*What is it.*max_length"
    ) as error:
        make_collator(family, 12, max_length=20)([make_row(), row])
    assert "max_length=40" in str(error.value)
    assert PIXELS in make_collator(family, 12, max_length=40)([make_row(), row])


def test_image_tokens_of_a_prompt_that_are_cut_off(family):
    """TRL cuts prompts with their completions, after the processor has looked at them."""
    answer = [{"role": "assistant", "content": "A cat."}]
    row = {"images": [picture()] * 3, "prompt": [{"role": "user", "content": "What?"}], "completion": answer}
    with pytest.raises(
        UserError, match=r"Row 0 of the batch has \d+ of the 12 image tokens that its images make"
    ) as error:
        make_collator(family, 12, max_length=20)([row])
    length = int(re.search(r"TPUSFTConfig\(max_length=(\d+)\)", str(error.value))[1])
    assert PIXELS in make_collator(family, 12, max_length=length)([row])


def test_more_image_tokens_than_declared(family):
    row = make_row(picture(), picture())
    with pytest.raises(
        UserError,
        match=r"Row 1 of the batch has 8 image tokens, but there is room for 4 \(it begins with .*image_tokens=8",
    ):
        make_collator(family, room=4)([make_row(picture()), row])
    assert PIXELS in make_collator(family, room=8)([make_row(picture()), row])


def test_tokens_without_an_image(family):
    text = family[1].tokenizer.decode([family[0].config.image_token_id])
    with pytest.raises(UserError, match="Row 1 of the batch.*dataset.filter|Row 1 of the batch has 1 image tokens"):
        make_collator(family, room=8)([make_row(picture()), make_row(text=text)])


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "1", "I;16"])
def test_pictures_of_other_modes(family, mode):
    batch = make_collator(family, room=4)([make_row(picture(mode))])
    assert batch[PIXELS].isfinite().all()


def test_pictures_of_one_pixel(family):
    batch = make_collator(family, room=4)([make_row(picture(size=(1, 1)))])
    assert torch.isfinite(batch[PIXELS]).all()
