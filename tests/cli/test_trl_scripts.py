"""TRL's scripts as `hf-tpu` runs them."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import trl
import yaml

from hf_tpu_ext.cli.recipe import read_recipe
from hf_tpu_ext.cli.trl_scripts import SCRIPTS, _sees


def test_rows_that_are_held_out_are_the_same_at_each_start(tmp_path, monkeypatch):
    """A resumed run, and each of several processes, would train on rows that another evaluates on."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(40)))
    recipe = tmp_path / "recipe.yaml"
    mixture = {"datasets": [{"path": "json", "data_files": str(tmp_path / "rows.jsonl")}], "test_split_size": 0.25}
    recipe.write_text(yaml.safe_dump({"model_name_or_path": "m", "use_cpu": True, **mixture}))
    held_out = []

    def load(script_args, training_args, model_args, dataset_args):
        held_out.append(trl.scripts.utils.get_dataset(dataset_args)["test"]["text"])

    monkeypatch.setattr(importlib.import_module("trl.scripts.sft"), "main", load)
    for state, seed in ((1, 0), (2, 0), (2, 1)):
        np.random.seed(state)
        script = SCRIPTS["sft"]
        words = ["--config", str(recipe), "--seed", str(seed), "--output_dir", str(tmp_path / "run")]
        script.train(read_recipe(words), script.parser())
    assert held_out[0] == held_out[1] != held_out[2] and len(held_out[0]) == 10


def test_a_model_without_architectures_is_one_of_text(tmp_path):
    """A reward model may be trained from it, and the end of its run says how it is loaded."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not _sees(SimpleNamespace(model_name_or_path=str(tmp_path), model_revision=None), False)
