"""
A training run for `test_stopped_runs.py` to stop at any moment.

It prints `training` when `train` is called, `step` at the end of each step, and `trained`.
"""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step


MAX_STEPS, SAVE_STEPS = 10, 3


class NoteSteps(TrainerCallback):
    """Writes down each process, the step that it began from, and each optimizer step."""

    def __init__(self, output_dir, tell):
        self.tell = tell
        self.file = open(Path(output_dir) / "steps.txt", "a", buffering=1, encoding="utf-8")
        self.file.write("process\n")

    def on_train_begin(self, args, state, control, **kwargs):
        self.file.write(f"from {state.global_step}\n")

    def on_step_end(self, args, state, control, **kwargs):
        self.file.write(f"step {state.global_step}\n")
        self.tell("step")


def run(model_dir, output_dir, tell):
    """
    Train, from the newest whole checkpoint if there is any, and save the model.

    The run draws random numbers on the device (noise) and on the host (the order of an epoch), and evaluates.
    """
    os.makedirs(output_dir, exist_ok=True)
    config = TPUSFTConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=MAX_STEPS,
        save_steps=SAVE_STEPS,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        train_sampling_strategy="group_by_length",
        neftune_noise_alpha=5.0,
        gradient_checkpointing=False,
        bf16=False,
        max_length=32,
        report_to="none",
        disable_tqdm=True,
        run_report=False,
    )
    rows = [{"prompt": f"{n} to the fifth?", "completion": str(n ** (n % 5))} for n in range(26)]
    dataset = Dataset.from_list(rows)
    trainer = TPUSFTTrainer(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        config,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(14)),
        callbacks=[NoteSteps(output_dir, tell)],
    )
    tell("training")
    trainer.train(resume_from_checkpoint=bool(checkpoints_by_step(output_dir)))
    tell("trained")
    trainer.save_model()


if __name__ == "__main__":
    disable_progress_bars()
    run(*sys.argv[1:], tell=lambda word: print(word, flush=True))
