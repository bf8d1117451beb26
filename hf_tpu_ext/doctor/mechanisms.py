"""
Tries mechanisms of training one after the other: `python -m hf_tpu_ext.doctor.mechanisms DIRECTORY TICKS NAME ...`.

Each is a small training that is set beside the same on eager CPU, and beside another one on the accelerator where both
are to have the same bits. A line of JSON for each mechanism goes to TICKS. After one that failed the process ends: what
else it would compute may suffer from that.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import hf_tpu_ext

from ..backends import select_backend
from ..backends.insight import Counters
from ..export.make import export_run
from ..formatting import count, kind_of_device
from .check import Check, Finding, WrongError
from .small_runs import RUNS, STEPS, Outcome, SmallRuns, finish, make_trainer
from .speed import measure_speed
from .trials import MECHANISMS


# What may lie between a logged number and that of eager CPU. A TPU multiplies float32 in bfloat16, unless it is told not to.
_TOLERANCES = {"xla": 2e-2, "tpu": 2e-2, "cuda": 2e-3, "cpu": 1e-5}
_ON_HOST = 1e-3
_BFLOAT16 = 3e-2
_SAVED_AT = 4
_DIES_AT = 6
# Greedy tokens of nearly equal logits may change places.
_LOGIT_TOLERANCE = 0.05
_LOGGED = ("loss", "grad_norm")
# Mechanisms that are one training beside the same on eager CPU, and no more: which, and the logged numbers that are compared.
_COMPARED = {
    "parity": ("plain", _LOGGED),
    "accumulation": ("accumulated", _LOGGED),
    "activation checkpointing": ("checkpointed", _LOGGED),
    "layers as a loop": ("loop", _LOGGED),
    "evaluation": ("evaluated", ("loss", "eval_loss")),
    "teacher": ("taught", _LOGGED),
    "DPO": ("preferences", ("loss", "rewards/margins")),
}
# Mechanisms that only torch_xla has, and what is said of them elsewhere.
_OF_XLA = {
    "replay": "only graphs of torch_xla are replayed",
    "donation": "only graphs of torch_xla are donated buffers",
    "layers as a loop": "only graphs of torch_xla have a loop over layers",
    "splash attention": "a kernel for TPU, tried with torch_xla only",
    "compile cache": "only graphs of torch_xla are kept on disk",
}


def _not_here(why: str) -> Finding:
    return Finding(why, applies=False)


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise WrongError(text)


def _describe(counters: Counters, micro_steps: int) -> str:
    return (
        f"{micro_steps} micro-steps: {count(counters.compiles, 'graph')} compiled, {counters.loads} loaded from disk, "
        f"{count(counters.executions, 'execution')}, {count(counters.reads, 'read')}"
    )


def _numbers(**outcomes: Outcome) -> dict[str, Any]:
    return {
        name: {
            "loss": outcome.values("loss"),
            "grad_norm": outcome.values("grad_norm"),
            "counters": vars(outcome.counters),
            "late_counters": vars(outcome.late),
        }
        for name, outcome in outcomes.items()
    }


def _check_same_bits(first: Outcome, second: Outcome, what: str) -> None:
    """Check that the weights of two trainings are the same; `what` says which these are."""
    differing = [name for name, weight in first.weights.items() if not torch.equal(weight, second.weights[name])]
    most = max(((first.weights[name] - second.weights[name]).abs().max().item() for name in differing), default=0.0)
    _check(not differing, f"{what}: {len(differing)} of {len(first.weights)} weights differ, by up to {most:.1g}")


class Mechanisms:
    """Tries mechanisms in a directory, on the accelerator of this process."""

    def __init__(self, directory: Path):
        self._directory = directory

    @cached_property
    def runs(self) -> SmallRuns:
        """The trainings; the accelerator is started when they are first asked for."""
        return SmallRuns(self._directory, select_backend())

    @property
    def backend(self):
        """The accelerator."""
        return self.runs.backend

    @property
    def tolerance(self) -> float:
        """What numbers may differ by from eager CPU's, relative to them."""
        on_host = self.backend.unknown_upstream and self.backend.chip is None
        return _ON_HOST if on_host else _TOLERANCES[self.backend.name]

    def near(self, ours: Outcome, reference: Outcome, names: Iterable[str] = _LOGGED, tolerance: float = 0) -> str:
        """Check logged numbers against those of eager CPU, and say how far the farthest is off."""
        worst = 0.0
        for name in names:
            values, references = ours.values(name), reference.values(name)
            counts = f"{len(values)} logs of {name}, and {len(references)} on eager CPU"
            _check(len(values) == len(references) > 0, counts)
            for place, (value, right) in enumerate(zip(values, references, strict=True)):
                off = abs(value - right) / max(abs(right), 1e-3)
                worst = max(worst, off)
                # The other way round, a NaN would pass.
                _check(
                    off <= max(self.tolerance, tolerance),
                    f"{name} of log {place + 1} is {value:.6g}, and {right:.6g} on eager CPU",
                )
        distance = f"within {worst:.1g} of" if worst else "equal to"
        return f"{', '.join(names)} {distance} eager CPU's"

    def check_counts(self, name: str, outcome: Outcome) -> str:
        """Check what the runtime did, where it says so, and say it."""
        micro_steps = RUNS[name].micro_steps
        if not self.backend.traces_steps:
            return f"{micro_steps} micro-steps"
        text = _describe(outcome.counters, micro_steps)
        _check(outcome.late.compiles == 0, f"{outcome.late.compiles} graphs were compiled late. {text}")
        _check(outcome.counters.fallbacks == 0, f"{outcome.counters.fallbacks} operators ran on the host. {text}")
        expected = micro_steps
        if RUNS[name].evaluates:
            expected += len(outcome.values("eval_loss")) * len(outcome.trainer.get_eval_dataloader())
        _check(outcome.counters.executions == expected, f"each micro-step is to be one execution. {text}")
        return text

    def compare(self, name: str, names: Iterable[str] = _LOGGED, tolerance: float = 0) -> Finding:
        """Check a training against eager CPU, and what the runtime did in it."""
        ours, reference = self.runs.ours(name), self.runs.reference(name)
        text = f"{self.near(ours, reference, names, tolerance)}; {self.check_counts(name, ours)}"
        return Finding(text, _numbers(ours=ours, eager_cpu=reference))

    def find(self, mechanism: str) -> Finding:
        """Try one of [`MECHANISMS`]."""
        if mechanism in _OF_XLA and not self.backend.traces_steps:
            return _not_here(_OF_XLA[mechanism])
        if mechanism in _COMPARED:
            return self.compare(*_COMPARED[mechanism])
        return getattr(self, mechanism.lower().replace(" ", "_").replace("-", "_"))()

    # ---- Mechanisms, by their names ----

    def runtime(self) -> Finding:
        chips = count(self.backend.num_chips, kind_of_device(self.backend.name))
        return Finding(f"{self.backend.name} ({self.backend.device_name}), {chips}")

    def adapter(self) -> Finding:
        ours, reference = self.runs.ours("adapter"), self.runs.reference("adapter")
        text, directory = self.near(ours, reference), self._directory / "adapter-run"
        self.check_counts("adapter", ours)
        export = export_run(directory, merge=True)
        _check(export.good, export.verdict)
        resumed = finish(self.runs.make("adapter"), self.backend, str(directory / f"checkpoint-{_SAVED_AT}"))
        _check_same_bits(resumed, ours, "resumed against never stopped")
        text += f"; resumed, with the same bits; merged, with logits that differ by {export.exported.max_abs:.1g}"
        return Finding(text, _numbers(ours=ours, eager_cpu=reference))

    def replay(self) -> Finding:
        by_replay, by_trace = self.runs.ours("plain"), self.runs.ours("traced")
        _check_same_bits(by_replay, by_trace, "traced against replayed")
        _check(by_trace.counters.replays == 0, f"{by_trace.counters.replays} replays with step_replay=False")
        _check(by_replay.counters.replays > 0, "no step was replayed")
        text = f"{by_replay.counters.replays} of {STEPS} steps replayed, the same bits as traced ones"
        return Finding(text, _numbers(replayed=by_replay, traced=by_trace))

    def donation(self) -> Finding:
        if self.backend.num_chips > 1:
            return _not_here("not visible where one device stands for several chips; TPU_NUM_DEVICES=1 shows it")
        from torch_xla import _XLAC

        backend = self.backend

        class Places(TrainerCallback):
            """Where weights and moments are after each step."""

            steps: list[set[int]] = []

            def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
                moments = (value for values in optimizer.state.values() for value in values.values())
                tensors = [*model.parameters(), *(value for value in moments if isinstance(value, torch.Tensor))]
                on_device = [tensor.detach() for tensor in tensors if tensor.device.type == "xla"]
                backend.wait()
                self.steps.append({_XLAC._unsafe_buffer_pointer(tensor) for tensor in on_device})

        finish(self.runs.make("plain", places := Places()), self.backend)
        before, after = places.steps[-2:]
        # The compiler may let any of the same shape take a place.
        text = f"{len(before & after)} of {len(after)} weights and moments are updated in place"
        _check(before == after, text)
        return Finding(text)

    def two_lengths(self) -> Finding:
        outcome = self.compare("two lengths")
        if not self.backend.traces_steps:
            return outcome
        batches = self.runs.ours("two lengths").trainer.get_train_dataloader()
        lengths = sorted({batch["input_ids"].shape[1] for batch in batches})
        _check(len(lengths) == 2, f"batches have the lengths {lengths}, and are to have two")
        return outcome._replace(text=f"{' and '.join(map(str, lengths))} tokens: {outcome.text}")

    def bfloat16(self) -> Finding:
        ours, plain = self.runs.ours("bfloat16"), self.runs.ours("plain")
        matrices = [weight for name, weight in ours.weights.items() if "norm" not in name]
        num_rounded = sum(torch.equal(weight, weight.bfloat16().float()) for weight in matrices)
        _check(num_rounded == 0, f"{num_rounded} weights are kept in bfloat16")
        _check(ours.values("loss") != plain.values("loss"), "the losses are those of float32")
        outcome = self.compare("bfloat16", tolerance=_BFLOAT16)
        return outcome._replace(text=f"float32 weights; {outcome.text}")

    def splash_attention(self) -> Finding:
        outcome = self.compare("splash", tolerance=_BFLOAT16)
        splash, slices = self.runs.ours("splash"), self.runs.ours("bfloat16")
        text = self.near(splash, slices, tolerance=_BFLOAT16).replace("eager CPU's", "sliced attention's")
        return outcome._replace(text=f"{text}; {outcome.text}")

    def generation(self) -> Finding:
        greedy = self._generate()
        ours, reference = self.runs.ours("completions"), self.runs.reference("completions")
        text = self.near(ours, reference, ("loss", "grad_norm", "reward", "entropy"), 10 * self.tolerance)
        if self.backend.traces_steps:
            _check(ours.late.compiles == 0, f"{ours.late.compiles} graphs were compiled late")
            text += f"; {_describe(ours.counters, STEPS)}"
        return Finding(f"{greedy}; GRPO: {text}", _numbers(ours=ours, eager_cpu=reference))

    def _generate(self) -> str:
        """Greedy tokens, each set beside the logits of eager CPU for what is before it."""
        model_dir = self.runs.directory / "model"
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        prompts = torch.tensor([tokenizer("What is 12+34?")["input_ids"], tokenizer("What is 56+78?")["input_ids"]])
        tokens = hf_tpu_ext.generate(
            AutoModelForCausalLM.from_pretrained(model_dir).to(self.backend.device),
            prompts if self.backend.unknown_upstream else prompts.to(self.backend.device),
            max_new_tokens=16,
            do_sample=False,
        ).cpu()
        with torch.no_grad():
            logits = model(tokens).logits[:, prompts.shape[1] - 1 : -1]
        token_logits = logits.gather(-1, tokens[:, prompts.shape[1] :, None]).squeeze(-1)
        behind = (logits.amax(-1) - token_logits).max().item()
        text = f"a greedy token has a logit that is {behind:.2g} below eager CPU's largest"
        _check(behind <= _LOGIT_TOLERANCE, text)
        return f"{token_logits.numel()} greedy tokens are eager CPU's"

    def all_chips(self) -> Finding:
        if not self.backend.unknown_upstream:
            return self._all_gpus()
        if self.backend.num_chips == 1:
            return _not_here("one chip")
        outcome = self.compare("sharded")
        if self.backend.traces_steps:
            from torch_xla import _XLAC

            weights = list(self.runs.ours("sharded").trainer.model.parameters())
            split = sum("devices=" in _XLAC._get_xla_sharding_spec(weight) for weight in weights)
            _check(split > 0, "mesh: fsdp, and every chip holds every weight whole")
        return outcome._replace(text=f"{self.backend.num_chips} chips, sharded weights: {outcome.text}")

    def _all_gpus(self) -> Finding:
        """A process for each GPU, as torchrun starts them; on eager CPU two."""
        gpus = torch.cuda.device_count() if self.backend.device.type == "cuda" else 2
        if gpus < 2:
            return _not_here("one GPU")
        directory = self.runs.directory
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
        command += ["-m", "hf_tpu_ext.doctor.mechanisms", str(directory), "processes"]
        environment = os.environ | {"HF_TPU_EXT_BACKEND": self.backend.name}
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        print(result.stdout)
        # What they wrote last is the error.
        *_, last = [f"exit status {result.returncode}", *result.stdout.strip().splitlines()]
        _check(result.returncode == 0, last)
        logs = json.loads((directory / "processes.json").read_text())
        reference = finish(make_trainer(RUNS["plain"], directory, "plain-as-many", gpus, stock=True), self.backend)
        ours = Outcome(logs, {}, Counters(), Counters(), None)
        return Finding(f"{gpus} processes (DDP): {self.near(ours, reference)}", _numbers(eager_cpu=reference))

    def kill_and_resume(self) -> Finding:
        # How Python was started for this process, up to the directory: `-m module`, or `-c` and a text that imports it.
        this_program = ["-m", __spec__.name] if sys.orig_argv[1] == "-m" else sys.orig_argv[1:3]
        # Before this process takes the accelerator.
        died = subprocess.run(
            [sys.executable, *this_program, str(self._directory), "die"], stdin=subprocess.DEVNULL
        ).returncode
        _check(died == -signal.SIGKILL, f"the run that was to be killed ended with status {died}")
        checkpoint = self._directory / "killed-run" / f"checkpoint-{_SAVED_AT}"
        whole = self.runs.ours("plain")
        after_resume = finish(self.runs.make("killed"), self.backend, resume=str(checkpoint))
        _check_same_bits(after_resume, whole, "resumed against never stopped")
        text = f"killed at step {_DIES_AT}, resumed from step {_SAVED_AT}, the same bits as a run that was not stopped"
        return Finding(text, _numbers(resumed=after_resume, whole=whole))

    def compile_cache(self) -> Finding:
        self.runs.ours("plain")
        use, counters = self.backend.cache_use(), self.backend.counters()
        _check(use is not None, "the compilation cache is off")
        _check(use.programs > 0, f"no graph was written to {use.directory}")
        numbers = {"counters": vars(counters)}
        if self.backend.chip is None:
            return Finding(f"{use.programs} graphs on disk; XLA:CPU cannot load them", numbers)
        _check(counters.loads > 0, f"{use.programs} graphs on disk, and none was loaded")
        return Finding(f"{counters.loads} graphs loaded, {counters.compiles} compiled in this process", numbers)

    def smollm2_135m(self) -> Finding:
        return measure_speed(self.backend, self._directory)


class _Dies(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == _DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, ticks: str, *names: str) -> int:
    """Try mechanisms, and write a line of JSON for each to the file `ticks`. Returns the exit status."""
    mechanisms = Mechanisms(Path(directory))
    os.environ.setdefault("HF_TPU_EXT_COMPILE_CACHE", str(Path(directory) / "compiled"))
    if ticks == "die":
        finish(mechanisms.runs.make("killed", _Dies()), mechanisms.backend)
        return 0
    if ticks == "processes":
        on_cpu = os.environ["HF_TPU_EXT_BACKEND"] == "cpu"
        trainer = make_trainer(RUNS["plain"], Path(directory), "processes-run", use_cpu=on_cpu)
        trainer.train()
        if trainer.is_world_process_zero():
            Path(directory, "processes.json").write_text(json.dumps(trainer.state.log_history))
        return 0
    for name in names:
        began = time.monotonic()
        try:
            finding = mechanisms.find(name)
            check = Check(name, "ok" if finding.applies else "none", finding.text, numbers={**finding.numbers})
        except Exception as error:
            # Whatever it is: the next mechanism is tried all the same.
            traceback.print_exc()
            words = str(error).strip().splitlines() or [""]
            text = words[0] if isinstance(error, WrongError) else f"{type(error).__name__}: {words[0]}"
            check = Check(name, "failed", text, MECHANISMS[name])
        check.numbers["seconds"] = round(time.monotonic() - began, 1)
        with open(ticks, "a", encoding="utf-8") as file:
            file.write(json.dumps(vars(check)) + "\n")
        if check.status == "failed":
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
