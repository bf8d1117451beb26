"""
One of two processes that train on the eager CPU until they are told to stop, with upstream's way to save then: with the
trainer of this package, or upstream's (`STOCK=1`).
"""

import os
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer


class SayWhenItTrains(TrainerCallback):
    """Tells the test that a step is over, and makes steps long enough for both processes to be told within the same one."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            # At once: two processes may write to one pipe.
            sys.stdout.write("training\n")
            sys.stdout.flush()
        time.sleep(0.3)


if __name__ == "__main__":
    model_dir, output_dir = Path(sys.argv[1]), sys.argv[2]
    # Until they are told to stop, or for some steps.
    max_steps = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
    torch.set_num_threads(1)
    stock = os.environ.get("STOCK") == "1"
    config_cls, trainer_cls = (SFTConfig, SFTTrainer) if stock else (TPUSFTConfig, TPUSFTTrainer)
    config = config_cls(
        output_dir,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=max_steps,
        max_length=16,
        save_strategy="no",
        logging_steps=min(1000, max_steps),
        report_to="none",
        disable_tqdm=True,
        enable_jit_checkpoint=True,
        **({} if stock else {"run_report": len(sys.argv) > 3}),
    )
    trainer = trainer_cls(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        config,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=Dataset.from_list([{"text": "a b c"}] * 16),
        callbacks=[SayWhenItTrains()],
    )
    trainer.train()
