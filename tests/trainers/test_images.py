"""Rows with images: each logged number is stock's on eager CPU, from the same pixels, and a step is one graph."""

import io
import os
import re

import cpu_plugin
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset, List, concatenate_datasets
from datasets import Image as ImageFeature
from peft import LoraConfig
from PIL import Image
from test_counts import on_torch_tpu
from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

import hf_tpu_ext
from hf_tpu_ext.errors import UserError
from hf_tpu_ext.examples.tiny_vision import FAMILIES, make_vision_model
from hf_tpu_ext.vision import families


OF_TEXT = {
    "r": 4,
    "target_modules": "all-linear",
    "exclude_modules": r".*(vision_tower|vision_model|visual|multi_modal_projector|connector).*",
}
slow = pytest.mark.slow
# As in `conftest.py`.
CHIPS = int(os.environ.get("CPU_NUM_DEVICES", "1"))
FULLY_SHARDED = "TEST_FULLY_SHARDED" in os.environ
ON_TORCH_TPU = cpu_plugin.why_absent() is None
# Its environment has no torchvision, which most processors need, and its plug-in for CPU lacks an operator of others.
ON_TORCH_TPU_TOO = ("llava", "smolvlm")


def make_images(count, rng, sizes=True):
    side = lambda: int(rng.integers(30, 90)) if sizes else 56  # noqa: E731
    return [Image.fromarray(rng.integers(0, 255, (side(), side(), 3), dtype=np.uint8)) for _ in range(count)]


def make_rows(counts, answers="completion", sizes=True):
    """Rows with so many images each, as messages, or as prompts and completions."""
    rng = np.random.default_rng(0)
    rows = []
    for count in counts:
        answer = " ".join(rng.choice("red green blue cat dog sits on the mat".split(), int(rng.integers(2, 9))))
        user, assistant = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": answer}
        texts = {"prompt": [user], "completion": [assistant]}
        rows.append(
            {
                "images": make_images(count, rng, sizes),
                **(texts if answers == "completion" else {"messages": [user, assistant]}),
            }
        )
    return Dataset.from_list(rows).cast_column("images", List(ImageFeature()))


class Counts(TrainerCallback):
    def __init__(self, backend):
        self.backend, self.seen = backend, [backend.counters()]

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(self.backend.counters())


class ImageRuns:
    """Trains a tiny model of a family with stock and with ours, from the same weights, data and arguments."""

    def __init__(self, directory):
        self.directory = directory
        self.models = {}

    def trainer(self, cls, config_cls, family, rows, evaluated=None, lora=None, prepare=None, **config):
        if ON_TORCH_TPU and family.partition(" ")[0] not in ON_TORCH_TPU_TOO:
            pytest.skip("not in torch_tpu's environment")
        if family not in self.models:
            self.models[family] = make_vision_model(self.directory / family, family)
        path = self.models[family]
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        if prepare is not None:
            prepare(model)
        defaults = dict(
            output_dir=str(self.directory / "run"),
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-3,
            bf16=False,
            gradient_checkpointing=False,
            max_length=96,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        return cls(
            model,
            args=config_cls(**{**defaults, **config}),
            train_dataset=rows,
            eval_dataset=evaluated,
            processing_class=AutoProcessor.from_pretrained(path),
            peft_config=None if lora is None else LoraConfig(task_type="CAUSAL_LM", **lora),
        )

    def stock(self, *args, method="SFT", **kwargs):
        trainer = self.trainer(
            *(getattr(trl, f"{method}{kind}") for kind in ("Trainer", "Config")), *args, use_cpu=True, **kwargs
        )
        trainer.train()
        return trainer

    def ours(self, *args, method="SFT", train=True, **kwargs):
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            kwargs[name] = kwargs.get(name, 4) // CHIPS
        if FULLY_SHARDED:
            kwargs["fsdp"] = "full_shard"
        classes = (getattr(hf_tpu_ext, f"TPU{method}{kind}") for kind in ("Trainer", "Config"))
        trainer = self.trainer(*classes, *args, run_report=False, **kwargs)
        trainer.counts = Counts(trainer.backend)
        trainer.add_callback(trainer.counts)
        if train:
            trainer.train()
        return trainer


@pytest.fixture(scope="module")
def images(xla, tmp_path_factory):
    return ImageRuns(tmp_path_factory.mktemp("images"))


def logged(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


def check_same(stock, ours, evaluated=False):
    keys = stock.state.log_history[0].keys() - {"learning_rate", "epoch", "step", "kl"}
    assert {"loss", "grad_norm"} <= keys
    for key in keys:
        assert logged(ours, key) == pytest.approx(logged(stock, key), rel=1e-5, abs=1e-5), key
    if evaluated:
        expected = stock.evaluate()
        assert ours.evaluate()["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    trained = dict(stock.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        # The gradient of a bias of keys is zero, and what AdamW makes of its rounding is not.
        if "k_proj.bias" not in name and "qkv.bias" not in name:
            expected = trained[name].detach()
            # A step is 1e-3 an element, and AdamW makes one of rounding where a gradient is next to nothing.
            assert (parameter.detach().cpu() - expected).norm() <= 1e-3 * expected.norm(), name


def check_one_graph(trainer, graphs=1, accumulation=1):
    """A micro-step is one execution; the only reads are those of logs. With torch_tpu layers are compiled one by one here."""
    if on_torch_tpu(trainer.backend):
        assert trainer.watch.recompiles == 0
        return
    spent = trainer.counts.seen[-1] - trainer.counts.seen[1]
    steps = len(trainer.counts.seen) - 2
    # The last may still be under way, and so may have been the first.
    assert abs(spent.executions - steps * accumulation) <= 1
    assert (spent.reads, spent.fallbacks) == (steps, 0)
    assert spent.replays >= 1
    # On several chips Idefics 3 has the very graph that SmolVLM has compiled.
    assert sum(event.kind != "other graph" for event in trainer.watch.events) in (graphs, 0)
    assert trainer.watch.recompiles == 0


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            name,
            marks=slow
            if name in ("gemma3", "idefics3", "qwen3_vl") or name == "llava" and not ON_TORCH_TPU
            else pytest.mark.ci
            if name == "qwen2_5_vl"
            else (),
        )
        for name in FAMILIES
    ],
)
@pytest.mark.parametrize("compile_step", ["auto", "off"] if ON_TORCH_TPU else ["auto"])
def test_several_images_of_several_sizes_train_as_with_stock(images, family, compile_step):
    rows = make_rows([1, 3, 2, 1, 2, 1, 1, 3, 1, 1, 2, 1, 2, 3, 1, 1])
    kwargs = {"evaluated": rows.select(range(6))}
    ours = images.ours(family, rows, compile_step=compile_step, **kwargs)
    assert ours.model.device.type == ours.backend.name
    check_one_graph(ours)
    check_same(images.stock(family, rows, **kwargs), ours, evaluated=True)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_and_accumulation_train_as_with_stock(images, family):
    rows = make_rows([1] * 32, answers="messages", sizes=family != "llava")
    kwargs = {"gradient_accumulation_steps": 2, "max_steps": 4, "gradient_checkpointing": True}
    ours = images.ours(family, rows, **kwargs)
    check_one_graph(ours, graphs=2, accumulation=2)
    check_same(images.stock(family, rows, **kwargs), ours)


@pytest.mark.parametrize("family", [pytest.param(name, marks=slow) for name in FAMILIES])
def test_batches_without_images_are_a_graph_of_their_own(images, family):
    rows = make_rows([1, 0, 0, 1, *[0] * 4, 0, 1, 1, 1, *[0] * 4] * 2)
    kwargs = {"lora": OF_TEXT, "max_steps": 8}
    ours = images.ours(family, rows, **kwargs)
    check_one_graph(ours, graphs=2)
    check_same(images.stock(family, rows, **kwargs), ours)


@pytest.mark.parametrize(
    "family, accumulation",
    [
        pytest.param("gemma3", 1, marks=pytest.mark.ci),
        *(pytest.param(*case, marks=slow) for case in (("gemma3", 2), ("qwen2_5_vl", 1), ("qwen2_5_vl", 2))),
    ],
)
def test_batches_without_images_leave_a_trained_tower_as_stock_leaves_it(images, family, accumulation, caplog):
    rows = make_rows([1, 0, 0, 1, *[0] * 4, 0, 1, 1, 1, *[0] * 8] * 2 * accumulation)
    kwargs = {"max_steps": 9, "gradient_accumulation_steps": accumulation, "weight_decay": 0.1}
    ours = images.ours(family, rows, **kwargs)
    # The graph with images is the same before and after a step without. With accumulation, an update has the tower or not.
    assert ours.watch.recompiles <= accumulation - 1
    assert (ours.counts.seen[-1].replays > ours.counts.seen[0].replays) == (accumulation == 1)
    assert ("steps without images leave the weights of the vision tower as they are" in caplog.text) == (
        accumulation > 1
    )
    check_same(images.stock(family, rows, **kwargs), ours)


@slow
def test_predictions_are_stocks(images):
    rows = make_rows([1, 2, 1, 0, 1, 1, 0])
    ours, stock = (train("smolvlm", rows, max_steps=2).predict(rows) for train in (images.ours, images.stock))
    assert ours.metrics["test_loss"] == pytest.approx(stock.metrics["test_loss"], rel=1e-5)


# ---- Parts of a model, layers as a loop ----


def freeze_tower(model):
    text = set(model.model.get_decoder().parameters())
    for parameter in model.model.parameters():
        parameter.requires_grad_(parameter in text)


@slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trained", ["text", "adapters everywhere"])
def test_what_is_trained_may_be_a_part(images, family, trained):
    rows = make_rows([1, 2, 1, 1] * 6)
    everywhere = {"r": 4, "target_modules": "all-linear"}
    kwargs = {"prepare": freeze_tower} if trained == "text" else {"lora": everywhere}
    ours = images.ours(family, rows, max_steps=6, **kwargs)
    check_one_graph(ours)
    check_same(images.stock(family, rows, max_steps=6, **kwargs), ours)


@slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_vl"])
def test_layers_of_the_text_are_a_loop(images, family, tmp_path):
    images.models[f"{family} of 8"] = make_vision_model(tmp_path, family, num_hidden_layers=8)
    rows = make_rows([1, 2, 1, 1] * 6)
    kwargs = {"max_steps": 6, "gradient_checkpointing": family != "gemma3"}
    ours = images.ours(f"{family} of 8", rows, scan_layers="on", **kwargs)
    assert ours.layers.stack is not None
    check_one_graph(ours)
    check_same(images.stock(f"{family} of 8", rows, **kwargs), ours)


def test_layers_with_something_between_them_are_no_loop(images):
    trainer = images.ours("qwen3_vl", make_rows([1] * 4), train=False, scan_layers="on")
    with pytest.raises(UserError, match="features of images are added between the layers"):
        trainer.train()


# ---- Preferences ----


def make_preferences(counts, paired):
    rng = np.random.default_rng(1)
    rows = []
    for place, count in enumerate(counts):
        texts = [
            " ".join(rng.choice("red green blue cat dog sits".split(), int(rng.integers(2, 7)))) for _ in range(2)
        ]
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        prompt = [{"role": "user", "content": "What is it?"}]
        of_pair = {"chosen": answers[0], "rejected": answers[1]}
        single = {"completion": answers[0], "label": place % 2 == 0}
        rows.append({"images": make_images(count, rng), "prompt": prompt, **(of_pair if paired else single)})
    return Dataset.from_list(rows)


@pytest.mark.parametrize("lora", [None, OF_TEXT], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["DPO", "KTO"])
@pytest.mark.parametrize("family", FAMILIES)
@slow
def test_preferences_train_as_with_stock(images, family, method, lora):
    rows = make_preferences([1, 2, 1, 1] * 4, paired=method == "DPO")
    kwargs = {"method": method, "lora": lora, "max_steps": 4, "learning_rate": 1e-4}
    ours = images.ours(family, rows, **kwargs)
    check_one_graph(ours)
    check_same(images.stock(family, rows, **kwargs), ours)


def test_pairs_have_the_images_of_their_example(images):
    rows = make_preferences([2, 1, 1, 1], paired=True)
    trainer = images.ours("gemma3", rows, method="DPO", train=False, per_device_train_batch_size=2 * CHIPS)
    batch = trainer.data_collator([rows[0], rows[1]])
    pixels, found = batch[families.PIXELS], batch["input_ids"] == trainer.model.config.image_token_id
    assert torch.equal(pixels[:2], pixels[2:]) and found.sum(1).tolist() == [8, 4, 8, 4]


@pytest.mark.parametrize(
    "family", [pytest.param("smolvlm", marks=pytest.mark.ci), pytest.param("qwen2_5_vl", marks=slow)]
)
def test_without_max_length_the_longest_row_is_looked_for(images, family):
    """As in TRL's `sft_vlm.py`. Of the rows to evaluate, too."""
    rows, more = make_rows([1, 2, 1, 1] * 2), make_rows([3, 1, 1, 1])
    kwargs = {"evaluated": more, "max_length": None, "max_steps": 2}
    ours = images.ours(family, rows, **kwargs)
    collate = images.stock(family, rows, **kwargs).data_collator
    longest = max(collate([dict(row)])["input_ids"].shape[1] for row in [*rows, *more])
    assert longest <= ours.args.max_length < longest + 16
    room = 12 if family == "smolvlm" else ours.data_collator.room
    assert any(f"room for {room} image tokens (as the row with the most has)" in line for line in ours.adapted.changes)
    check_same(images.stock(family, rows, **kwargs), ours, evaluated=True)


@slow
@pytest.mark.parametrize("method", ["DPO", "KTO"])
def test_preferences_without_max_length(images, method):
    """KTO has each prompt with the answer of another row, too."""
    rows = make_preferences([1, 2, 1, 1] * 4, paired=method == "DPO")
    kwargs = {"method": method, "max_steps": 4, "learning_rate": 1e-4, "max_length": None}
    check_same(images.stock("gemma3", rows, **kwargs), images.ours("gemma3", rows, **kwargs))


def test_a_stream_without_max_length(images):
    rows = make_rows([1] * 4)
    with pytest.raises(UserError, match=r"longest row of a stream is not known.*TPUSFTConfig\(max_length=2048\)"):
        images.ours("gemma3", rows.to_iterable_dataset(), train=False, max_length=None)


# ---- Programs ahead of a run ----


@pytest.mark.parametrize(
    ("method", "family"),
    [("SFT", "gemma3"), *(pytest.param(*case, marks=slow) for case in (("DPO", "smolvlm"), ("KTO", "qwen2_5_vl")))],
)
def test_rows_that_take_every_length(images, method, family):
    """With an image, and without one where some rows of the data have none."""
    rows = make_rows([1, 0, 1, 1]) if method == "SFT" else make_preferences([1, 0, 1, 1], paired=method == "DPO")
    trainer = images.ours(family, rows, method=method, train=False, length_buckets=[12, 64])
    made = trainer.synthetic_rows(trainer.train_dataset)
    batches = [trainer.data_collator([row] * 2) for row in made]
    found = [(batch["input_ids"].shape[1], families.PIXELS in batch) for batch in batches]
    # An image and the template around it have more than 12 tokens.
    assert found == [(64, True), (96, True), (64, False), (96, False)]


# ---- What is refused ----


def test_a_model_of_another_family(images, monkeypatch):
    monkeypatch.delitem(families.FAMILIES, "gemma3")
    rows = make_rows([1] * 4)
    with pytest.raises(UserError, match="'gemma3'.*dataset.remove_columns.'images'.") as error:
        images.ours("gemma3", rows, train=False)
    assert all(name in str(error.value) for name in families.FAMILIES)


@pytest.mark.parametrize(
    "setting",
    [{"predict_with_generate": True}, {"show_samples": 2}, {"kd_teacher": "base"}, {"qat_weight_dtype": "int4"}],
)
def test_settings_that_know_no_images(images, setting):
    (name,) = setting
    rows = make_rows([1] * 4)
    with pytest.raises(UserError, match=f"{name}=.* knows no images, .* Leave it out"):
        images.ours("gemma3", rows, rows, train=False, **setting)
    images.ours("gemma3", rows, rows, train=False)


def test_the_line_at_the_start(images):
    """Room for the images of the row that has the most, unless it is declared."""
    rows = make_rows([1, 2, 1, 1])
    trainer = images.ours("gemma3", rows, train=False)
    assert "images: rows have room for 8 image tokens (2 x 4); image_tokens declares fewer" in trainer.adapted.changes
    trainer = images.ours("gemma3", rows, train=False, image_tokens=14)
    assert any("room for 16 image tokens (as image_tokens says)" in line for line in trainer.adapted.changes)
    trainer = images.ours("gemma3", rows.to_iterable_dataset(), train=False)
    assert any(
        "(as max_length=96 allows); image_tokens declares fewer. A batch" in line for line in trainer.adapted.changes
    )


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=slow)])
def test_an_image_that_does_not_open(images, workers):
    rows = make_rows([1] * 8)
    broken = [{**row, "images": [{"bytes": b"GIF89a, more or less", "path": None}]} for row in rows.select([0])]
    broken = Dataset.from_list(broken).cast(rows.features)
    train_dataset = concatenate_datasets([rows.select(range(5)), broken, rows.select(range(6, 8))])
    with pytest.raises(
        UserError, match=r"An image of row 5 of train_dataset \(the first is row 0\) cannot be opened"
    ) as error:
        images.ours("gemma3", train_dataset, max_steps=2, dataloader_num_workers=workers)
    fix = re.search(r"train_dataset\.select\(.* != 5\)", str(error.value)).group()
    fixed = eval(fix, {"train_dataset": train_dataset})
    assert len(fixed) == 7 and all(fixed["images"])


def test_paths_and_a_row_that_upstream_refuses(images, tmp_path):
    """A column of paths is as one of images; where one cannot be opened, it is named with its row."""
    rows = make_rows([1] * 3)
    trainer = images.ours("gemma3", rows, train=False)
    rows[0]["images"][0].save(tmp_path / "0.png")
    row = {**rows[0], "images": [str(tmp_path / "0.png")]}
    found = trainer.data_collator([row])[families.PIXELS]
    assert torch.equal(found, trainer.data_collator([rows[0]])[families.PIXELS])
    missing = str(tmp_path / "1.png")
    with pytest.raises(
        UserError, match=f"Row 1 of the batch, with 1 images .{missing}, .*Correct the row, or leave it out"
    ):
        trainer.data_collator([row, {**row, "images": [missing]}])


def test_a_processor_without_a_size(images):
    rows = make_rows([1] * 4)
    trainer = images.ours("qwen2_5_vl", rows, train=False)
    processor = trainer.processing_class
    processor.image_processor.size = {"height": 56, "width": 56}
    with pytest.raises(UserError, match=r"has no longest_edge .*or the room of a row: image_tokens=1024"):
        trainer.data_collator.family.tokens_per_image(processor)
    processor.image_processor.size["longest_edge"] = 56 * 56
    assert trainer.data_collator.family.tokens_per_image(processor) == 4


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "1", "one pixel"])
def test_pictures_of_other_modes_are_converted_as_with_stock(images, mode):
    rows = make_rows([1])
    picture = Image.new("RGB", (1, 1)) if mode == "one pixel" else rows[0]["images"][0].convert(mode)
    trainer = images.ours("gemma3", rows, train=False)
    row = {**rows[0], "images": [picture]}
    expected = trainer.data_collator.collator.collator([dict(row)])["pixel_values"]
    assert torch.equal(trainer.data_collator([row])[families.PIXELS].flatten(0, 1), expected)


def test_a_moving_picture_is_its_first_one(images):
    """As with stock."""
    frames = make_images(3, np.random.default_rng(0), sizes=False)
    file = io.BytesIO()
    frames[0].save(file, "gif", save_all=True, append_images=frames[1:])
    rows = make_rows([1])
    moving = Dataset.from_list([{**rows[0], "images": [{"bytes": file.getvalue(), "path": None}]}]).cast(rows.features)
    still = Dataset.from_list([{**rows[0], "images": [moving[0]["images"][0].convert("RGB")]}]).cast(rows.features)
    collate = images.ours("gemma3", rows, train=False).data_collator
    assert torch.equal(collate([moving[0]])[families.PIXELS], collate([still[0]])[families.PIXELS])
