"""
Training runs for `test_stopped_runs.py` to stop at any moment.

Started as a script it imports everything once, and then forks a process for each run that it is asked for: nothing of the
accelerator's runtime is started before the fork. Each line of its input is a run; it answers with the run's process id, with
`training` when `train` is called, with `step` at the end of each step, and with the exit status.
"""

import json
import os
import sys
import traceback
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


def _serve():
    disable_progress_bars()
    for line in sys.stdin:
        spec = json.loads(line)
        process = os.fork()
        if process:
            print(process, flush=True)
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
            continue
        answers = os.dup(1)
        log = os.open(spec.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            run(**spec, tell=lambda word: os.write(answers, f"{word}\n".encode()))  # noqa: B023
            status = 0
        except SystemExit as error:
            status = error.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    _serve()
