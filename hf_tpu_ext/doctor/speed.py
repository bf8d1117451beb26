"""A model of the size of SmolLM2-135M, with random weights: its step time and memory, beside a plan's and stock TRL's."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import trl
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_tpu_ext

from ..backends.base import Backend
from ..examples.tiny import make_tokenizer
from ..formatting import format_bytes, format_seconds
from ..hardware.topologies import read_topologies
from ..report.planned import format_span
from .check import Finding, WrongError
from .small_runs import WARM_STEPS, CountSteps


# huggingface.co/HuggingFaceTB/SmolLM2-135M
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
#: Settings of the run, besides the batch.
SETTINGS = {
    "max_steps": 20,
    "logging_steps": 5,
    "learning_rate": 1e-4,
    "bf16": True,
    "gradient_checkpointing": True,
    "save_strategy": "no",
    "report_to": "none",
}
#: Rows of a batch on a chip, and their length.
BATCH, LENGTH = 8, 512
_BATCH_ON_HOST, _LENGTH_ON_HOST, _STEPS_ON_HOST = 1, 64, 6
# A plan may be below what a chip holds by as much.
_BEYOND_PLAN = 1.25
_PLAN_SECONDS = 150


class _Times(CountSteps):
    """Notes when the numbers of how many steps were read: until then these steps have run."""

    def __init__(self, backend: Backend):
        super().__init__(backend)
        self.logs: list[tuple[int, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.logs.append((state.global_step, time.monotonic()))

    @property
    def seconds(self) -> float:
        """Seconds of a step, after the first log."""
        (first, begin), (last, end) = self.logs[0], self.logs[-1]
        return (end - begin) / (last - first)


def measure_speed(backend: Backend, directory: Path) -> Finding:
    """Train it, and say what a step takes. What cannot be right is an error."""
    on_host = backend.device.type == "cpu" or backend.unknown_upstream and backend.chip is None
    plan = None if on_host else plan_speed(backend, directory)
    settings = dict(SETTINGS)
    batch, length = (_BATCH_ON_HOST, _LENGTH_ON_HOST) if on_host else (BATCH, LENGTH)
    if on_host:
        # Each device of a host would have a copy of all weights and moments, in the memory of one machine.
        settings |= {
            "max_steps": _STEPS_ON_HOST,
            "logging_steps": 2,
            # The host computes bfloat16 slowly.
            "bf16": False,
            "mesh": "fsdp" if backend.num_chips > 1 else None,
        }
    settings |= {"max_length": length, "per_device_train_batch_size": batch}
    losses, times, memory = _train(backend, directory, settings, hf_tpu_ext.TPUSFTTrainer, hf_tpu_ext.TPUSFTConfig)
    numbers: dict[str, Any] = {"loss": losses, "seconds_per_step": times.seconds, "peak_bytes": memory}
    if not all(map(math.isfinite, losses)) or not losses[-1] < losses[0]:
        raise WrongError(f"the loss does not fall: {losses[0]:.4f} -> {losses[-1]:.4f}")
    if times.late.compiles:
        raise WrongError(f"{times.late.compiles} graphs were compiled after step {WARM_STEPS}")
    rows = batch * backend.num_chips
    rate = rows * length / times.seconds
    text = f"{rows} x {length} tokens: {format_seconds(times.seconds)} a step, {rate:,.0f} tokens/s"
    if memory is not None:
        text += f", {format_bytes(memory)} at peak"
    if not backend.unknown_upstream:
        stock_losses, stock, _ = _train(backend, directory, settings, trl.SFTTrainer, trl.SFTConfig)
        numbers["stock_seconds_per_step"] = stock.seconds
        text += f"; stock TRL {format_seconds(stock.seconds)} a step"
        off = max(abs(a - b) / b for a, b in zip(losses, stock_losses, strict=True))
        if not off <= 1e-2:
            raise WrongError(f"the losses differ from stock TRL's by {off:.1g}: {losses} and {stock_losses}")
        text += f", losses within {off:.1g} of its own" if off else ", the same losses"
    if plan is not None:
        numbers["plan"] = plan
        text += f"; {plan['text']}"
        if memory is not None and plan["peak_bytes"] and memory > _BEYOND_PLAN * plan["peak_bytes"]:
            raise WrongError(f"more HBM than planned: {text}")
    return Finding(text, numbers)


def _train(
    backend: Backend, directory: Path, settings: dict[str, Any], trainer_cls: type, config_cls: type
) -> tuple[list[float], _Times, int | None]:
    field_names = config_cls.__dataclass_fields__
    settings = settings | {"disable_tqdm": True, "run_report": False, "use_cpu": backend.device.type == "cpu"}
    args = config_cls(
        str(directory / f"smollm2-{trainer_cls.__name__}"),
        **{key: value for key, value in settings.items() if key in field_names},
    )
    torch.manual_seed(0)
    length = settings["max_length"]
    rows = settings["per_device_train_batch_size"] * backend.num_chips
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (4 * rows, length), generator=generator).tolist()
    times = _Times(backend)
    trainer = trainer_cls(
        AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMOLLM2), dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=AutoTokenizer.from_pretrained(make_tokenizer(directory / "tokenizer")),
        callbacks=[times],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, times, backend.peak_memory()


def write_recipe(directory: Path) -> Path:
    """Write the recipe of this run, with a model of which there is the configuration alone."""
    model = make_tokenizer(directory / "smollm2")
    AutoConfig.for_model("llama", architectures=["LlamaForCausalLM"], **SMOLLM2).save_pretrained(model)
    path = directory / "smollm2.yaml"
    values = {"model_name_or_path": str(model), "max_length": LENGTH, "per_device_train_batch_size": BATCH}
    path.write_text(yaml.safe_dump(values | SETTINGS | {"output_dir": str(directory / "planned")}))
    return path


def plan_speed(backend: Backend, directory: Path) -> dict[str, Any] | None:
    """What `hf-tpu plan` says of this run on the chips of this machine; `None` where there is nothing to plan."""
    if backend.chip is None or find_spec("torch_xla") is None:
        return None
    names = (
        topology.name
        for topology in read_topologies().values()
        if topology.chip == backend.chip and topology.num_chips == backend.num_chips
    )
    topology = next(names, None)
    if topology is None:
        return {"text": f"no plan for {backend.num_chips} of {backend.device_name}", "peak_bytes": None}
    plan_file = directory / "plan.json"
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", "--config", str(write_recipe(directory))]
    command += ["--topology", topology, "--seq_lengths", str(LENGTH), "--json", str(plan_file)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The chips are this process's.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_PLAN_SECONDS)
    except subprocess.TimeoutExpired:
        # The compiler is a process of its own, and ends with the group.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"text": f"hf-tpu plan took more than {_PLAN_SECONDS} s", "peak_bytes": None}
    print(output)
    if process.returncode not in (0, 1):
        return {"text": f"no plan: {(output.strip().splitlines() or [''])[-1]}", "peak_bytes": None}
    estimates = json.loads(plan_file.read_text(encoding="utf-8"))["derived"]
    seconds = estimates["step"]["seconds"]
    text = f"hf-tpu plan: {format_span(seconds, format_seconds)} a step, {format_bytes(estimates['peak_bytes'])}"
    return {"text": text, "peak_bytes": estimates["peak_bytes"], "expected_seconds": seconds}
