"""What a run says at its start and at its end."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm
from transformers import TrainerCallback

from ..backends.base import Backend
from ..backends.compile_cache import CacheUse


@dataclass
class RunFacts:
    """
    What is known about a run before its first step.

    Rows of a micro-batch are those of all chips. There are no lengths where they follow the data, and `programs` are
    those that the device will compile for training. `changes` are settings that were replaced or have no effect,
    `token_waste` says how much is padding and what to set against it, and `token_share` is the share of the tokens in
    batches that are not, where row lengths are known.
    """

    precision: str
    batch_size: int
    lengths: list[int]
    programs: int | None
    changes: list[str]
    token_waste: str | None = None
    token_share: float | None = None


class RunLines(TrainerCallback):
    """Prints where and how a run trains when it starts, and what it compiled and reached when it ends."""

    def __init__(self, backend: Backend, find_facts: Callable[[], RunFacts]):
        self._backend = backend
        self._find_facts = find_facts
        self._at_start = backend.counters()
        self._first_step = 0
        #: What was known when the last run began.
        self.facts: RunFacts | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._at_start = self._backend.counters()
        self._first_step = state.global_step
        if not state.is_world_process_zero:
            return
        self.facts = facts = self._find_facts()
        chips = self._backend.num_chips
        shape = f"{facts.batch_size} rows"
        if facts.lengths:
            shape = " or ".join(f"{facts.batch_size} x {length}" for length in facts.lengths)
        parts = [
            f"{self._backend.name} ({self._backend.device_name}): {self._backend.reason}",
            f"{chips} chip{'s' if chips > 1 else ''}",
            facts.precision,
            f"batch {shape} x {args.gradient_accumulation_steps} accumulated",
        ]
        if facts.lengths:
            tokens = facts.batch_size * max(facts.lengths) * args.gradient_accumulation_steps
            parts.append(f"{'up to ' * (len(facts.lengths) > 1)}{tokens:,} tokens per optimizer step")
        if facts.programs is not None:
            parts.append(f"{facts.programs} training program{'s' if facts.programs > 1 else ''} to compile")
        _say("Training on " + "; ".join(parts))
        for change in facts.changes:
            _say(f"  {change}")
        if facts.token_waste:
            _say(f"  {facts.token_waste}")

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        steps = state.global_step - self._first_step
        if self._backend.traces_steps and steps:
            spent = self._backend.counters() - self._at_start
            _say(
                f"Trained {steps} steps: {spent.compiles} programs compiled in {spent.compile_seconds:.1f} s, "
                f"{spent.executions} executions ({spent.replays} replayed), {spent.reads} reads from the device, "
                f"{spent.fallbacks} operators on the host (evaluation, logs and saves included)"
            )
        if (cache := self._backend.cache_use()) is not None:
            _say(describe_cache_use(cache))
        losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
        if len(losses) > 1:
            _say(f"Held-out loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
        _say(f"Output: {os.path.abspath(args.output_dir)}")


def describe_cache_use(cache: CacheUse) -> str:
    """Say in a line what a process has had of its compile cache."""
    found = f"hits: {cache.hits}, misses: {cache.misses}"
    if cache.unreadable:
        found += f", found but not loaded: {cache.unreadable}"
    return (
        f"Compile cache: {found}; compiling: {cache.compile_seconds:.1f} s; programs: {cache.programs}, "
        f"{cache.size / 2**20:,.1f} MiB in {cache.directory}"
    )


def _say(line: str) -> None:
    tqdm.write(line)
