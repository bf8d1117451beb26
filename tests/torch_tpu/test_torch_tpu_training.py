"""Steps with torch_tpu, besides what tests of `tests/trainers` assert there: counts, and more settings."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from hf_tpu_ext import TPUSFTConfig
from hf_tpu_ext.watch.compilations import TooManyRecompiles


# Operators that read the device, or copy from it.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
_COPIES = {"aten::_to_copy", "aten::copy_"}


class CountReads(TorchDispatchMode):
    """Counts operators that wait for the device."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        on_device = any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in args)
        copied = name in _COPIES and isinstance(result, torch.Tensor) and result.device.type == "cpu"
        self.reads += on_device and (name in _READS or copied)
        return result


class CountSteps(TrainerCallback):
    """New compilations of each step."""

    def __init__(self):
        self.compiles: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.accelerator.synchronize()
        self._before = torch.tpu._get_cache_stats().num_compilations

    def on_step_end(self, args, state, control, **kwargs):
        torch.accelerator.synchronize()
        self.compiles.append(torch.tpu._get_cache_stats().num_compilations - self._before)


class CountStepReads(TrainerCallback):
    """What read the device in each step."""

    def __init__(self):
        self.reads: list[int] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._mode = CountReads()
        self._mode.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        self._mode.__exit__(None, None, None)
        self.reads.append(self._mode.reads)


@pytest.mark.parametrize(
    "config",
    [
        dict(gradient_accumulation_steps=4, num_train_epochs=2, max_steps=-1, logging_steps=2),
        dict(optim="adamw_torch", max_grad_norm=0.5, lr_scheduler_type="cosine", max_steps=4),
        dict(optim="sgd", label_smoothing_factor=0.1, max_grad_norm=0.0, max_steps=4),
        dict(dataloader_num_workers=1, max_steps=4),
    ],
    ids=lambda config: "-".join(f"{key}={value}" for key, value in config.items()),
)
def test_setting(runs, same_logs, config):
    same_logs(runs.ours(**config), runs.stock(**config))


def test_buckets_of_lengths(runs, same_logs):
    # Of other tests.
    torch.tpu._clear_cache()
    config = dict(max_steps=20, per_device_train_batch_size=2)
    ours = runs.ours(config_cls=TPUSFTConfig, length_buckets=[16, 24, 32, 48], **config)
    same_logs(ours, runs.stock(**config))
    shapes = [event.shape for event in ours.watch.events if event.kind == "training step"]
    assert len(shapes) == len(set(shapes)) > 1
    assert ours.watch.recompiles == 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_compiles_in_the_first_step_only(runs, accumulation):
    """From a learning rate of 0 up and down to 0 again."""
    # Of other tests.
    torch.tpu._clear_cache()
    counted = CountSteps()
    trainer = runs.ours(
        kwargs={"callbacks": [counted]}, max_steps=8, logging_steps=4, gradient_accumulation_steps=accumulation
    )
    assert counted.compiles[0] > 0
    assert counted.compiles[1:] == [0] * 7
    kinds = ["training step"] if accumulation == 1 else ["micro-step", "training step"]
    assert [event.kind for event in trainer.watch.events if event.shape] == kinds
    assert trainer.watch.recompiles == 0


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_reads_at_logs_only(runs, lora):
    with CountReads() as mode:
        (torch.ones(2, device="tpu:0").sum().item(), torch.ones(2, device="tpu:0").cpu())
    assert mode.reads == 2
    counted = CountStepReads()
    runs.ours(lora=lora, kwargs={"callbacks": [counted]}, max_steps=6, logging_steps=3, gradient_accumulation_steps=2)
    assert counted.reads == [0] * 6


def test_what_a_step_compiles_anew_is_counted_and_can_be_too_much(runs):
    from hf_tpu_ext import TPUSFTTrainer

    class AnotherShapeEachTime(TPUSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            torch.ones(7 + self.state.global_step, device="tpu:0").tanh()
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(TooManyRecompiles, match="step 3: recompilation of the training step for batches of 4 x 40"):
        runs.ours(cls=AnotherShapeEachTime, config_cls=TPUSFTConfig, max_recompiles=1, logging_steps=1)


def test_resumes_bit_for_bit(runs, tmp_path):
    config = dict(max_steps=6, save_strategy="steps", save_steps=3, gradient_accumulation_steps=2)
    whole = runs.ours(output_dir=str(tmp_path / "whole"), **config)
    resumed = runs.ours(train=False, output_dir=str(tmp_path / "resumed"), **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    theirs = whole.backend.fetch(whole.model.state_dict())
    for name, weight in resumed.backend.fetch(resumed.model.state_dict()).items():
        assert torch.equal(weight, theirs[name]), name
    losses = [[log["loss"] for log in run.state.log_history if "loss" in log][3:] for run in (whole, resumed)]
    assert losses[0] == losses[1]


def test_hooks_of_the_optimizer_are_called_once(runs):
    """Also where another AdamW was made in this process: PyTorch wraps the `step` of each class."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    trainer = runs.ours(train=False, max_steps=2)
    calls = []
    trainer.create_optimizer().register_step_post_hook(lambda *_: calls.append(1))
    trainer.train()
    assert calls == [1, 1]
    assert isinstance(trainer.optimizer.param_groups[0]["lr"], float)
