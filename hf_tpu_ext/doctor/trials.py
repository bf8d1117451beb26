"""What the doctor tries, what a run does where it fails, and the processes that try it, which may crash or hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from .check import Check
from .machine import explain_end


#: Each mechanism, and what a run does instead where it fails.
MECHANISMS = {
    "runtime": "Try again: a machine that is busy is slow, and a TPU that another process holds makes it wait",
    "parity": "Do not train on this device yet: its losses are not those of eager CPU",
    "adapter": "Train all weights, or elsewhere: checkpoints move between backends",
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
#: Tried in processes of their own: what dies takes the accelerator after it does, and the large one needs its memory.
_APART = (("kill and resume", "compile cache"), ("SmolLM2-135M",))
#: The mechanisms of each process, of the short examination and of the whole one.
QUICK = (("runtime", "parity", "adapter"),)
FULL = (tuple(name for name in MECHANISMS if not any(name in names for names in _APART)), *_APART)
#: Of all the time, what one mechanism may take: three of ten minutes. Its first program on a TPU may take one.
MOST_OF_ONE = 0.3
_WORKER = (sys.executable, "-m", "hf_tpu_ext.doctor.mechanisms")


class Trials:
    """
    Tries mechanisms, each against eager CPU. One that fails hides no other: the rest go on in a new process.

    The command gets more arguments: a directory for itself, a file to which it adds a line of JSON for each name that it has
    finished, with `name`, `status`, `text` and, if it failed, `fix`; and the names.

    Args:
        groups (`Sequence[Sequence[str]]`): The mechanisms of each process: [`QUICK`] or [`FULL`].
        minutes (`float`, *optional*, defaults to `10`): How long all of it may take. What was not reached then has failed.
        command (`Sequence[str]`, *optional*): Starts a process that tries them.
    """

    def __init__(self, groups: Sequence[Sequence[str]], minutes: float = 10, command: Sequence[str] = _WORKER):
        self._groups, self._command = groups, command
        self._patience = MOST_OF_ONE * 60 * minutes
        self._ends = time.monotonic() + 60 * minutes
        #: All that processes with a failure wrote.
        self.output = ""

    def run(self) -> Iterator[Check]:
        """Try the mechanisms. Yields a check for each, as soon as it is known. Without a runtime there are no others."""
        with TemporaryDirectory(prefix="hf_tpu_doctor_") as directory:
            for group in self._groups:
                names = list(group)
                while names:
                    for check in self._run_process(Path(directory), tuple(names)):
                        names.remove(check.name)
                        yield check
                    if (check.name, check.status) == ("runtime", "failed"):
                        return

    def _run_process(self, directory: Path, names: Sequence[str]) -> Iterator[Check]:
        ticks, log = directory / "ticks.jsonl", directory / "output.txt"
        ticks.write_text("")
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self._command, str(directory), str(ticks), *names],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                start_new_session=True,
            )
        try:
            for number, name in enumerate(names):
                yield (check := self._await(process, ticks, number, name, log))
                if check.status == "failed":
                    self.output += log.read_text(encoding="utf-8", errors="replace")
                    return
        finally:
            if process.poll() is None:
                # Its workers are of the same group.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _await(self, process: subprocess.Popen, ticks: Path, number: int, name: str, log: Path) -> Check:
        """Wait for a line of the process, for its end, or until it has hung for too long."""
        deadline = min(time.monotonic() + self._patience, self._ends)
        while True:
            # The end is asked for before the ticks are read: the process may tick and end in between.
            has_ended, hung = process.poll() is not None, time.monotonic() > deadline
            lines = ticks.read_text(encoding="utf-8").split("\n")[:-1]
            if len(lines) > number:
                return Check(**json.loads(lines[number]))
            if has_ended:
                text, fix = explain_end(process.returncode, log.read_text(encoding="utf-8", errors="replace"))
                return Check(name, "failed", text, fix if name == "runtime" else MECHANISMS[name])
            if hung:
                text = (
                    "the time was over" if deadline == self._ends else f"nothing happened for {self._patience:.0f} s"
                )
                return Check(name, "failed", text, MECHANISMS[name])
            time.sleep(0.05)
