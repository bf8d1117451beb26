"""
The small training of the doctor: `python -m hf_tpu_ext.doctor.training DIRECTORY TICKS`.

A tiny model with LoRA learns to add, with the trainer and the defaults of every run. What it computes is set beside eager
PyTorch on the CPU.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from ..backends import select_backend
from ..examples.tiny import make_arithmetic, make_model
from ..export.make import export_run
from ..installing import install_command
from ..trainers import TPUSFTConfig, TPUSFTTrainer
from .smoke import PHASES


_ROWS_PER_CHIP = 4
_MAX_LENGTH = 64
_STEPS = 4
_SAVE_STEPS = 2
# Of numbers computed in bfloat16, beside those in float32.
_TOLERANCE = 0.05


@dataclass(eq=False)
class WrongError(Exception):
    """What was computed is wrong: what it is and what it should be, and what to do."""

    text: str
    fix: str


class _Ticks(TrainerCallback):
    """Ticks off what happens in a training step, when it has happened."""

    def __init__(self, tick: Callable, chips: int, norm: float):
        self._tick = tick
        self._chips = chips
        self._norm = norm
        self._first_loss = 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.global_step == 1:
            self._first_loss = float(logs["loss"])
            norm = float(logs["grad_norm"])
            _check_near("the gradient's norm", norm, self._norm)
            self._tick("ok", f"norm of the gradient {norm:.4f}; {self._norm:.4f} on eager CPU")
        elif state.global_step == _SAVE_STEPS:
            loss = float(logs["loss"])
            if not loss < self._first_loss:
                raise WrongError(
                    f"the loss did not fall: {self._first_loss:.4f} -> {loss:.4f}",
                    f"Reinstall torch and torch_xla: {install_command('tpu', '--force-reinstall')}",
                )
            self._tick("ok", f"loss {self._first_loss:.4f} -> {loss:.4f}")
            if self._chips == 1:
                self._tick("none", "one chip")
            else:
                # What was compared above is the gradient of the rows of all chips.
                self._tick("ok", f"{self._chips} chips have the gradient of one device")

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == _SAVE_STEPS:
            checkpoint = Path(args.output_dir, f"checkpoint-{_SAVE_STEPS}")
            size = sum(path.stat().st_size for path in checkpoint.iterdir())
            self._tick("ok", f"{checkpoint.name}, {size / 1000:.0f} kB")


def _check_near(what: str, value: float, reference: float) -> None:
    # The other way round, a NaN would pass.
    if not abs(value - reference) <= _TOLERANCE * abs(reference):
        raise WrongError(
            f"{what} is {value:.4f}, and {reference:.4f} on eager CPU",
            f"Unset XLA_USE_BF16 and XLA_FLAGS; reinstall: {install_command('tpu', '--force-reinstall')}",
        )


def _make_trainer(directory: Path, name: str, rows: Dataset) -> TPUSFTTrainer:
    args = TPUSFTConfig(
        str(directory / name),
        per_device_train_batch_size=_ROWS_PER_CHIP,
        per_device_eval_batch_size=_ROWS_PER_CHIP,
        max_length=_MAX_LENGTH,
        max_steps=_STEPS,
        save_steps=_SAVE_STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        report_to="none",
        run_report=False,
        disable_tqdm=True,
    )
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    return TPUSFTTrainer(str(directory / "model"), args, train_dataset=rows, eval_dataset=rows, peft_config=lora)


def _compute_on_cpu(adapter: Path, batch: dict) -> tuple[float, float]:
    """Loss of a batch and norm of its gradient, by transformers on eager CPU in float32."""
    base = AutoModelForCausalLM.from_pretrained(adapter.with_name("model"))
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True, torch_device="cpu")
    loss = model(**{name: batch[name].cpu() for name in ("input_ids", "attention_mask", "labels")}).loss
    loss.backward()
    return loss.item(), nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()


def train(directory: Path, tick: Callable[[str, str], None]) -> None:
    """
    Train, save, resume and export, and tick off each phase with a status and a text. Raises [`WrongError`] where
    something that was computed is wrong.
    """
    start = time.monotonic()
    backend = select_backend()
    chips = backend.num_chips
    device = f"{backend.name} ({backend.device_name}), {chips} chip{'s' if chips > 1 else ''}"
    tick("ok", f"{device}, started in {time.monotonic() - start:.1f} s")

    make_model(directory / "model")
    data = load_dataset(str(make_arithmetic(directory / "data", 2 * _ROWS_PER_CHIP * chips)), split="train")
    # One batch: every step, and the evaluation, have the same rows.
    rows = data.select(range(_ROWS_PER_CHIP * chips))
    trainer = _make_trainer(directory, "run", rows)
    batch = next(iter(trainer.get_train_dataloader()))
    tick("ok", f"a batch of {' x '.join(map(str, batch['input_ids'].shape))}")

    trainer.save_model(directory / "start")
    loss, norm = _compute_on_cpu(directory / "start", batch)
    eval_loss = trainer.evaluate()["eval_loss"]
    _check_near("the loss", eval_loss, loss)
    tick("ok", f"loss {eval_loss:.4f}; {loss:.4f} on eager CPU")

    trainer.add_callback(_Ticks(tick, chips, norm))
    trainer.train()
    trainer.save_model()

    resumed_trainer = _make_trainer(directory, "resumed", rows)
    resumed_trainer.train(resume_from_checkpoint=str(directory / "run" / f"checkpoint-{_SAVE_STEPS}"))
    resumed_trainer.save_model()
    tick("ok", _compare(directory / "run", directory / "resumed"))

    export = export_run(directory / "run", merge=True)
    if not export.good:
        raise WrongError(export.verdict, "pip install --upgrade peft")
    tick("ok", f"merged; logits differ by {export.exported.max_abs:.1g} from those of the adapter on its base")


def _compare(run: Path, resumed_run: Path) -> str:
    first, second = (load_file(path / "adapter_model.safetensors") for path in (run, resumed_run))
    if all(torch.equal(first[name], second[name]) for name in first):
        return "ends with the same weights, bit for bit"
    most = max((first[name] - second[name]).abs().max().item() for name in first)
    if not most <= 1e-3:
        raise WrongError(
            f"weights differ by {most:.1g} from those of a run that was not stopped",
            "Look whether checkpoints are written to a disk that keeps them: TMPDIR",
        )
    return f"ends with the same weights, to {most:.1g}"


def main(directory: str, ticks: str) -> int:
    """Train in a directory, write a line of JSON to `ticks` for each phase, and return the exit status."""
    phases = iter(PHASES)

    def tick(status: str, text: str, fix: str | None = None) -> None:
        line = {"name": next(phases), "status": status, "text": text, "fix": fix}
        with open(ticks, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    try:
        train(Path(directory), tick)
    except WrongError as error:
        tick("failed", error.text, error.fix)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
