"""What `save_model` leaves in a directory: the new model whole, or what was there before."""

import threading

import pytest
import torch
from full_disk import largest_file
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.trainers.checkpoint.saved_model import EMA_FILE, whole_model


class FullDisk(TPUSFTTrainer):
    """The disk is full while the model is saved."""

    limit = None

    def _save(self, *args):
        if self.limit is None:
            return super()._save(*args)
        with largest_file(self.limit):
            super()._save(*args)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_two_models_saved_to_one_directory(tmp_path):
    """The second one waits, and takes the place of the first as a whole."""
    went_on = threading.Event()

    def save_another():
        with whole_model(tmp_path) as written:
            went_on.set()
            (written / "model-00001-of-00002.safetensors").touch()

    second = threading.Thread(target=save_another)
    with whole_model(tmp_path) as written:
        (written / "model.safetensors").touch()
        second.start()
        assert not went_on.wait(0.3)
    second.join()
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]


# Nothing fits; the weights do not; PyTorch's own file does not.
@pytest.mark.parametrize("limit", [10, 5000, 4600])
@pytest.mark.parametrize("saved_before", [True, False])
def test_a_full_disk_leaves_what_was_there(runs, limit, saved_before):
    trainer = runs.ours(max_steps=1, cls=FullDisk, save_strategy="steps" if saved_before else "no", save_steps=1)
    if saved_before:
        trainer.save_model()
    before = files(runs.output_dir)
    trainer.model.lm_head.weight.data += 1
    trainer.limit = limit
    with pytest.raises(OSError) as error:
        trainer.save_model()
    for words in (f"could not be saved in {runs.output_dir}", "left as it was", f"The disk of {runs.output_dir} has "):
        assert words in str(error.value)
    last = f"use {runs.output_dir / 'checkpoint-1'}, which is complete: the same command with --resume_from_checkpoint true"
    assert (last in str(error.value)) == saved_before
    assert files(runs.output_dir) == before and not list(runs.output_dir.glob("_*"))
    # What the message says.
    trainer.limit = None
    trainer.save_model(str(runs.output_dir / "elsewhere"))
    saved = AutoModelForCausalLM.from_pretrained(runs.output_dir / "elsewhere")
    trained = trainer.backend.fetch(dict(trainer.model.state_dict()))
    torch.testing.assert_close(dict(saved.state_dict()), trained, rtol=0, atol=0)


def test_an_earlier_adapter_is_not_loaded_in_place_of_the_new_model(tmp_path):
    """Nor are settings of rounding of an earlier run taken for those of the new one. Both are moved."""
    of_earlier = {"adapter_config.json", "adapter_model.safetensors", "base_model.json", "quantization.json"}
    with whole_model(tmp_path) as written:
        for name in of_earlier:
            (written / name).touch()
    with whole_model(tmp_path) as written:
        save_file({}, written / "model.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "_earlier-1"}
    assert {path.name for path in (tmp_path / "_earlier-1").iterdir()} == of_earlier


def test_nothing_of_an_earlier_model_is_taken_for_the_new_one(tmp_path):
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "mine.safetensors", "models.safetensors"):
        save_file({}, tmp_path / name)
    (tmp_path / "model.safetensors.index.json").touch()
    save_file({}, tmp_path / EMA_FILE, {"updates": "3"})
    with whole_model(tmp_path) as written:
        save_file({}, written / "model-00001-of-00001.safetensors")
        (written / "part").mkdir()
        (written / "part" / "file").touch()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == [
        f"_earlier-1/{EMA_FILE}",
        "mine.safetensors",
        "model-00001-of-00001.safetensors",
        "models.safetensors",
        "part/file",
    ]


@pytest.mark.ci
def test_the_card_names_this_package_and_has_figures(runs):
    """With an adapter, whose card PEFT writes once more."""
    settings = dict(max_steps=2, save_strategy="steps", save_steps=2, run_report=True, config_cls=TPUSFTConfig)
    trainer = runs.ours(lora={}, **settings)
    trainer.save_model()
    card = ModelCard.load(runs.output_dir / "README.md")
    assert {"trl", "sft", "lora", "hf_tpu_ext"} <= set(card.data.tags)
    assert f"fine-tuned version of `{runs.model_dir.name}`, a local model" in card.text
    # The report has the time until the end.
    assert "Until this card was written:\n\n| | |\n|---|---|\n" in card.text
    assert "| steps | 2 of 2 |" in card.text and "on CPU, compiled by XLA, 1 chip" in card.text


def test_the_card_of_a_run_is_kept(runs):
    """PEFT adds to the one that is there."""
    trainer = runs.ours(lora={}, max_steps=1)
    trainer.save_model()
    card = runs.output_dir / "README.md"
    card.write_text(card.read_text() + "\nMine.\n")
    trainer.save_model()
    assert "Mine." in card.read_text()
