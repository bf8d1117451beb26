"""Code of the user's, of many kinds, trains as with upstream's trainer; and a table says with which steps are replayed."""

from pathlib import Path

import pytest
import torch
from kinds_of_user_code import KINDS, REPLAYED, STAGES, STEPS, TRACED, Setup, describe
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTTrainer

from hf_tpu_ext import TPUSFTTrainer
from hf_tpu_ext.trainers import ExtensionArguments


BY_DEFAULT = {
    "holds_a_state_dict",
    "logs_more",
    "replaces_data",
    "loads_an_adapter",
    "freezes",
    "changes_gradients",
    "replaces_the_optimizer",
}


class NotesSteps(TrainerCallback):
    """Notes what the last step was."""

    def __init__(self, steps):
        self.steps, self.last = steps, None

    def on_step_end(self, args, state, control, **kwargs):
        self.last = REPLAYED if self.steps.replays else STAGES if self.steps.compiled is None else TRACED


def train(runs, name, ours):
    setup = Setup()
    does, text, add = KINDS[name]
    with setup.around:
        add(setup)
        model = AutoModelForCausalLM.from_pretrained(runs.model_dir, dtype=torch.float32)
        setup.prepare_model(model)
        cls = type("Own", (*setup.mixins, TPUSFTTrainer if ours else SFTTrainer), {})
        config = {"max_steps": STEPS, "gradient_checkpointing": False, **setup.config}
        if not ours:
            config["use_cpu"] = True
        lora = {} if setup.lora else None
        trainer = runs.trainer(cls, runs.config(**config), model, lora, callbacks=setup.callbacks, **setup.kwargs)
        setup.trainer = trainer
        if ours:
            setup.does = NotesSteps(trainer.steps)
            trainer.add_callback(setup.does)
        for prepare in setup.prepare:
            prepare(trainer)
        with setup.around_run():
            trainer.train()
    return setup


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in KINDS]
)
def test_it_trains_as_with_upstreams_trainer(runs, same_logs, monkeypatch, name):
    # With torch_tpu other tests of trainers run operators.
    monkeypatch.setattr(ExtensionArguments, "compile_step", "auto")
    ours, stock = (train(runs, name, ours) for ours in (True, False))
    same_logs(ours.trainer, stock.trainer)
    assert ours.seen == pytest.approx(stock.seen, rel=1e-5)
    assert ours.does.last == KINDS[name][0]


def test_the_table_of_the_docs_is_that_of_the_tests():
    assert describe() in (Path(__file__).parents[2] / "docs/recompilation.md").read_text()
