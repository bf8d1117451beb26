"""`hf-tpu doctor --full`: what is tried, what a run does where it fails, and the processes that try it."""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .check import Check
from .watched import WatchedProcess


#: Each mechanism, and what a run does instead where it fails.
MECHANISMS = {
    "parity": "Do not train on this device yet: its losses are not those of eager CPU",
    "replay": "`step_replay: false` traces every step: slower, and independent of replayed graphs",
    "donation": "A step needs room for a second copy of weights and moments: a smaller model, or `mesh: fsdp`",
    "two lengths": "Leave `length_buckets` out: all batches are padded to max_length",
    "accumulation": "`gradient_accumulation_steps: 1` with a larger per_device_train_batch_size",
    "bfloat16": "`bf16: false` computes in float32",
    "activation checkpointing": "`gradient_checkpointing: false`, with a smaller batch",
    "layers as a loop": "`scan_layers: off` compiles each layer",
    "splash attention": "`attention: slices`",
    "evaluation": "`eval_strategy: no`, and evaluate the saved model elsewhere",
    "teacher": "Precompute the teacher elsewhere: `hf-tpu cache-teacher`, then `kd_cache`",
    "DPO": "Train preferences on a GPU or a CPU: checkpoints move between backends",
    "generation": "Train with GRPO, RLOO or on-policy distillation on a GPU or a CPU",
    "all chips": "`num_chips: 1` trains on one chip; on GPUs, start one process: CUDA_VISIBLE_DEVICES=0",
    "kill and resume": "Start again from step 0: `resume_from_checkpoint` is not to be trusted here",
    "compile cache": "`compile_cache_dir: off`: every run compiles from scratch",
    "SmolLM2-135M": "A larger model does not run as planned: choose the batch by trying",
}
#: The mechanisms of each process: a crash ends one process, and those after a kill need a new one.
GROUPS: Sequence[Sequence[str]] = (
    (
        "parity",
        "replay",
        "donation",
        "two lengths",
        "accumulation",
        "bfloat16",
        "activation checkpointing",
        "layers as a loop",
        "splash attention",
        "evaluation",
        "teacher",
        "DPO",
        "generation",
        "all chips",
    ),
    ("kill and resume", "compile cache"),
    ("SmolLM2-135M",),
)
#: Of all the time, what one mechanism may take: three of ten minutes. Its first program on a TPU may take one.
MOST_OF_ONE = 0.3
_WORKER = (sys.executable, "-m", "hf_tpu_ext.doctor.mechanisms")


class FullTest:
    """
    Tries every mechanism, each against eager CPU. One that fails hides no other: the rest go on in a new process.

    Args:
        minutes (`float`, *optional*, defaults to `10`):
            How long all of it may take. What was not reached then has failed.
        command (`Sequence[str]`, *optional*):
            Starts the process that tries them.
        groups (`Sequence[Sequence[str]]`, *optional*):
            The mechanisms of each process.
    """

    def __init__(
        self, minutes: float = 10, command: Sequence[str] = _WORKER, groups: Sequence[Sequence[str]] = GROUPS
    ):
        self._minutes = minutes
        self._command = command
        self._groups = groups
        #: All that processes with a failure wrote.
        self.output = ""

    def run(self) -> Iterator[Check]:
        """Try the mechanisms. Yields a check for each, as soon as it is known."""
        seconds = 60 * self._minutes
        ends = time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="hf_tpu_doctor_") as directory:
            for names in self._groups:
                process = WatchedProcess(
                    self._command,
                    names,
                    MOST_OF_ONE * seconds,
                    MECHANISMS,
                    goes_on=True,
                    directory=Path(directory),
                    ends=ends,
                )
                yield from process.run()
                self.output += process.output
