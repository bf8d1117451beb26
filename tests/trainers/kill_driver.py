"""A training run that says where it is and waits for an answer there, so that `test_kill.py` can kill it at any point."""

import sys
from collections.abc import Callable
from pathlib import Path

import rollouts
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from preference import Case, trainer_for
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
    TrainerCallback,
)

from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
from hf_tpu_ext.examples.tiny_vision import make_vision_model
from hf_tpu_ext.trainers.checkpoint.directories import checkpoints_by_step


MAX_STEPS = 8
PREFERENCES = ("dpo", "kto", "reward")
KINDS = ("sft", "qlora", "images", "grpo", *PREFERENCES)
SAVES = dict(save_strategy="steps", save_steps=2, save_total_limit=1, logging_steps=1, ema_decay=0.9)
# With torch_tpu: the callback below does the same at every step, and a step is compiled whole or the run ends.
SAVES |= dict(step_replay=True, compile_step="step")


class _StepBegins(TrainerCallback):
    def __init__(self, reach):
        self._reach = reach

    def on_step_begin(self, args, state, control, **kwargs):
        self._reach(f"step {state.global_step + 1}")


def train(kind: str, model_dir: str | Path, output_dir: str | Path, reach: Callable[[str], None]) -> None:
    """
    Train from the newest whole checkpoint if there is one, with random numbers drawn on the device.

    Args:
        kind (`str`):
            `"sft"` trains a whole model; `"qlora"` an adapter beside packed weights of 4 bits; `"images"` a whole model that sees; the names of [`PREFERENCES`] an
            adapter, over accumulated gradients; `"grpo"` an adapter on completions that it writes, each for several steps.
        model_dir (`str` or `Path`):
            Directory of the model to start from.
        output_dir (`str` or `Path`):
            Directory of the run.
        reach (`Callable`):
            Called with `"step N"` where a step begins, and with `"save N"` towards the end of a save.
    """
    make = {"sft": _fine_tuning, "qlora": _fine_tuning, "images": _seeing, "grpo": _completions}.get(
        kind, _preferences
    )
    trainer = make(kind, str(model_dir), str(output_dir), [_StepBegins(reach)])
    save_rng_state = trainer._save_rng_state

    def save_and_say(output_dir):
        save_rng_state(output_dir)
        # Everything but the trainer's state is written.
        reach(f"save {trainer.state.global_step}")

    trainer._save_rng_state = save_and_say
    trainer.train(resume_from_checkpoint=bool(checkpoints_by_step(output_dir)))
    trainer.save_model()


def _config(output_dir: str, rows: int, max_length: int) -> TPUSFTConfig:
    return TPUSFTConfig(
        output_dir=output_dir,
        **SAVES,
        max_steps=MAX_STEPS,
        per_device_train_batch_size=rows,
        learning_rate=1e-3,
        neftune_noise_alpha=5.0,
        gradient_checkpointing=False,
        bf16=False,
        max_length=max_length,
        report_to="none",
        disable_tqdm=True,
        run_report=False,
    )


def _fine_tuning(kind: str, model_dir: str, output_dir: str, callbacks: list[TrainerCallback]) -> TPUSFTTrainer:
    rows = [{"prompt": f"{n} to the fifth?", "completion": str(n**5)} for n in range(22)]
    quantization, lora = None, None
    if kind == "qlora":
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        lora = LoraConfig(target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return TPUSFTTrainer(
        AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, quantization_config=quantization),
        _config(output_dir, rows=4, max_length=48),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
        peft_config=lora,
    )


def _seeing(kind: str, model_dir: str, output_dir: str, callbacks: list[TrainerCallback]) -> TPUSFTTrainer:
    if not (Path(model_dir) / "config.json").exists():
        make_vision_model(model_dir, "qwen2_5_vl")
    rows = [
        {
            "images": [Image.new("RGB", (30 + 2 * n, 60), (10 * n, 90, 200 - 8 * n))],
            "prompt": [{"role": "user", "content": "How red is it?"}],
            "completion": [{"role": "assistant", "content": str(10 * n)}],
        }
        for n in range(13)
    ]
    return TPUSFTTrainer(
        AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32),
        _config(output_dir, rows=2, max_length=64),
        processing_class=AutoProcessor.from_pretrained(model_dir),
        train_dataset=Dataset.from_list(rows),
        callbacks=callbacks,
    )


def _preferences(kind: str, model_dir: str, output_dir: str, callbacks: list[TrainerCallback]) -> Trainer:
    case = Case(
        kind,
        {
            **SAVES,
            "output_dir": output_dir,
            "gradient_accumulation_steps": 2,
            "disable_dropout": False,
            "dataloader_drop_last": True,
        },
        lora="new",
        lora_dropout=0.1,
        steps=MAX_STEPS,
    )
    return trainer_for(case, Path(model_dir), ours=True, callbacks=callbacks)


def _completions(kind: str, model_dir: str, output_dir: str, callbacks: list[TrainerCallback]) -> Trainer:
    # What it writes, not what a test gives it.
    rollouts.OURS[kind] = rollouts.WRITING[kind]
    settings = {**SAVES, "output_dir": output_dir, "num_iterations": 2, "steps_per_generation": 3}
    case = rollouts.Case(kind, settings, lora="new", steps=MAX_STEPS)
    return rollouts.trainer_for(case, Path(model_dir), ours=True, callbacks=callbacks)


def _say_and_wait(moment: str) -> None:
    print(f"reached {moment}", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    train(*sys.argv[1:], _say_and_wait)
