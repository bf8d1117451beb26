"""`model.generate` of a trainer's model, as TRL's callbacks call it in the middle of a run."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, TrainerCallback, pipeline
from trl import LogCompletionsCallback, SFTTrainer

from hf_tpu_ext import generate
from hf_tpu_ext.trainers.run.text import _OF_MODELS


GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)


class Completions(LogCompletionsCallback):
    """TRL's callback, with the programs that were compiled by the end of each of its calls."""

    def __init__(self, trainer, **kwargs):
        super().__init__(trainer, **kwargs)
        self.compiles = []

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if hasattr(self.trainer, "backend"):
            self.compiles.append(self.trainer.backend.counters().compiles)


@pytest.mark.ci
@pytest.mark.usefixtures("two_layers")
@pytest.mark.parametrize("scan_layers", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_completions_that_trl_logs_are_upstreams(runs, scan_layers):
    """With activation checkpointing, which TRL's callback switches off and on. Its second batch has fewer rows."""
    from hf_tpu_ext import TPUSFTConfig

    config = dict(max_steps=6, gradient_checkpointing=True, learning_rate=3e-2, per_device_eval_batch_size=4)
    tables, compiles = [], []
    for make in (
        lambda: runs.ours(train=False, config_cls=TPUSFTConfig, scan_layers=scan_layers, **config),
        lambda: runs.trainer(SFTTrainer, runs.config(use_cpu=True, **config)),
    ):
        trainer = make()
        callback = Completions(trainer, generation_config=GREEDY, num_prompts=6, freq=2)
        trainer.add_callback(callback)
        trainer.train()
        compiles += callback.compiles
        tables.append((callback.table, [log["loss"] for log in trainer.state.log_history if "loss" in log]))
    (found, losses), (expected, stock_losses) = tables
    assert len(found) == 18 and found == expected
    assert losses == pytest.approx(stock_losses, rel=1e-5)
    # Nothing is compiled after the first two steps and the first completions.
    assert compiles[-1] == compiles[1]


class Writes(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        ids = torch.tensor([[5, 9, 7]], device=model.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY)


@pytest.mark.ci
def test_what_is_written_is_no_sync_of_the_step(runs, caplog):
    """Prompts that a callback has put on the device, as upstream's `generate` wants them, are fetched on purpose."""
    trainer = runs.ours(train=False, max_steps=8, logging_steps=2)
    trainer.add_callback(Writes())
    trainer.train()
    assert trainer.sync_monitor.syncs == {}
    assert "syncs device to host" not in caplog.text


class Beams(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        ids = torch.tensor([[5, 9, 7]], device=model.device)
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, num_beams=2, do_sample=False)


@pytest.mark.ci
def test_what_programs_cannot_do_is_done_as_upstream_does_it(runs, caplog):
    trainer = runs.ours(train=False, max_steps=2)
    trainer.add_callback(Beams())
    trainer.train()
    (line,) = [record.getMessage() for record in caplog.records if "model.generate runs as" in record.getMessage()]
    assert "num_beams" in line


def test_a_pipeline_generates_on_the_host(runs):
    """Upstream's pipelines move a model that is on no device that they know."""
    trainer = runs.ours(max_steps=1)
    writes = pipeline("text-generation", trainer.model, tokenizer=runs.tokenizer)
    (answer,) = writes("What is 3+4?", max_new_tokens=4, do_sample=False, return_tensors=True)
    trainer.save_model()
    saved = AutoModelForCausalLM.from_pretrained(runs.output_dir)
    prompt = runs.tokenizer("What is 3+4?", return_tensors="pt")
    expected = saved.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert answer["generated_token_ids"] == expected[0].tolist()


def test_copies_of_the_model_generate_for_themselves(runs):
    """A copy has other weights by and by, and no trainer. Outside of a run, tokens are as in it."""
    trainer = runs.ours(max_steps=1)
    ids = torch.tensor([[5, 9, 7]])
    tokens = trainer.model.generate(ids, generation_config=GREEDY)
    assert tokens.device.type == "cpu" and torch.equal(tokens, generate(trainer.model, ids, generation_config=GREEDY))
    other = copy.deepcopy(trainer.model)
    assert other.generate.__self__ is other and other not in _OF_MODELS
    # Pickled as the method of the class.
    assert trainer.model.generate.__reduce__() == (getattr, (trainer.model, "generate"))
