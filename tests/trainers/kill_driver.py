"""A training run that says where it is and waits for an answer there, so that `test_kill.py` can kill it at any point."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.trainers.checkpoints import checkpoints_by_step


MAX_STEPS = 8


class _StepBegins(TrainerCallback):
    def __init__(self, reach):
        self._reach = reach

    def on_step_begin(self, args, state, control, **kwargs):
        self._reach(f"step {state.global_step + 1}")


class _SaysWhereItIs(TPUSFTTrainer):
    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # Everything but the trainer's state is written.
        self.reach(f"save {self.state.global_step}")


def train(model_dir: str | Path, output_dir: str | Path, reach: Callable[[str], None]) -> None:
    """
    Train a whole model, with noise drawn on the device, from the newest whole checkpoint if there is one.

    Args:
        model_dir (`str` or `Path`):
            Directory of the model to start from.
        output_dir (`str` or `Path`):
            Directory of the run.
        reach (`Callable`):
            Called with `"step N"` where a step begins, and with `"save N"` towards the end of a save.
    """
    config = TPUSFTConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        max_steps=MAX_STEPS,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        learning_rate=1e-3,
        neftune_noise_alpha=5.0,
        gradient_checkpointing=False,
        bf16=False,
        max_length=48,
        report_to="none",
        disable_tqdm=True,
        run_report=False,
    )
    rows = [{"prompt": f"{n} to the fifth?", "completion": str(n**5)} for n in range(22)]
    trainer = _SaysWhereItIs(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        config,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=Dataset.from_list(rows),
        callbacks=[_StepBegins(reach)],
    )
    trainer.reach = reach
    trainer.train(resume_from_checkpoint=bool(checkpoints_by_step(output_dir)))
    trainer.save_model()


def _say_and_wait(moment: str) -> None:
    print(f"reached {moment}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    train(*sys.argv[1:], _say_and_wait)
