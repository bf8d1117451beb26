"""The average of the weights: of the step's own program, in evaluations and in checkpoints."""

import json
import shutil

import pytest
import torch
from refusals import refused
from safetensors import safe_open
from safetensors.torch import load_file
from test_counts import CountPerStep
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUTrainingArguments
from hf_tpu_ext.backends import select_backend
from hf_tpu_ext.trainers.ema import EMA_FILE


class Reference(TrainerCallback):
    """What torch makes of the weights after each step, in float64, with the decay of each update."""

    def __init__(self, decay, warmup=False):
        self.decay, self.warmup, self.updates = decay, warmup, 0

    def _average(self, average, weight, _):
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        get_ema_multi_avg_fn(decay)(average, weight, None)

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.averaged = AveragedModel(model, multi_avg_fn=self._average).double()
        self.averaged.update_parameters(model)

    def on_step_end(self, args, state, control, model, **kwargs):
        self.averaged.update_parameters(model.double())
        model.float()
        self.updates += 1


def averages(trainer):
    """The averages of a run by name, on the host."""
    trainer.save_model()
    return load_file(f"{trainer.args.output_dir}/{EMA_FILE}")


def eager(runs, **config):
    try:
        return runs.ours(config_cls=TPUSFTConfig, backend="cpu", **config)
    finally:
        select_backend("xla")


SETTINGS = dict(ema_decay=0.9, max_steps=8)


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_counts_and_trajectory(runs, lora):
    trainer = runs.ours(config_cls=TPUSFTConfig, train=False, lora=lora, logging_steps=100, **SETTINGS)
    counter = CountPerStep(trainer.backend)
    trainer.add_callback(counter)
    trainer.train()
    print([(s.executions, s.reads, s.compiles, s.fallbacks, s.replays) for s in counter.steps])
    mine = averages(trainer)
    theirs = averages(eager(runs, lora=lora, **SETTINGS))
    assert mine.keys() == theirs.keys()
    print(max((mine[k] - theirs[k]).abs().max() for k in mine))
