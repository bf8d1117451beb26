"""Start and end lines of a run."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..backends.base import Backend
from ..backends.compile_cache import CacheUse
from ..backends.insight import Counters
from ..formatting import count, kind_of_device


@dataclass
class RunFacts:
    """
    What is known about a run before its first step.

    `rows` are those of one micro-batch, of all chips of this process; of preferences, each is a pair of sequences (`pairs`). There are
    no lengths where they follow the data, and `programs` are the graphs that the device will compile for training. `changes` are
    settings that were replaced or have no effect,
    `token_waste` says how much is padding and what to set against it, and `token_share` is the share of the tokens in
    batches that are not, where row lengths are known.
    """

    precision: str
    rows: int
    lengths: list[int]
    programs: int | None
    changes: list[str]
    token_waste: str | None = None
    token_share: float | None = None
    pairs: bool = False


class RunLines(TrainerCallback):
    """Prints where and how a run trains when it starts, and what it compiled and reached when it ends."""

    def __init__(self, backend: Backend, find_facts: Callable[[], RunFacts]):
        self._backend = backend
        self._find_facts = find_facts
        self._at_start, self._strays_at_start = backend.counters(), 0
        self._first_step = 0
        # What the last run has spent, once it has ended.
        self._spent: Counters | None = None
        #: What was known when the last run began.
        self.facts: RunFacts | None = None

    @property
    def spent(self) -> Counters:
        """What the run under way, or the last one, has compiled, run and transferred."""
        return self._backend.counters() - self._at_start if self._spent is None else self._spent

    def on_train_begin(self, args, state, control, **kwargs):
        self._spent = None
        self._at_start, self._strays_at_start = self._backend.counters(), self._backend.insight.stray_reads()
        self._first_step = state.global_step
        if not state.is_world_process_zero:
            return
        self.facts = facts = self._find_facts()
        chips, hosts = self._backend.num_chips, self._backend.processes.hosts
        accumulation = args.gradient_accumulation_steps
        # There may be several processes of one chip each.
        workers, kind = chips * args.world_size, kind_of_device(self._backend.name)
        where = f" in {args.world_size} processes" * (args.world_size > 1) + f" on {hosts} hosts" * (hosts > 1)
        local, total = facts.rows // chips, facts.rows * args.world_size * accumulation
        rows = count(local, "pair") if facts.pairs else str(local)
        shape = " or ".join(f"{rows} x {length}" for length in facts.lengths) or rows
        parts = [
            f"{self._backend.name} ({self._backend.device_name}): {self._backend.reason}",
            count(workers, kind) + where,
            facts.precision,
            f"local batch size {shape} per {kind}",
            f"global batch size {total} ({local} per {kind} x {count(accumulation, 'gradient accumulation step')} x "
            f"{count(workers, kind)})",
        ]
        if facts.lengths:
            tokens = total * (1 + facts.pairs) * max(facts.lengths)
            parts.append(
                f"{'up to ' * (len(facts.lengths) > 1)}{tokens:,} tokens per optimizer step, padding included"
            )
        if facts.programs is not None:
            # Without the lengths of rows, it is not known which of the declared ones occur.
            most = "up to " * (len(facts.lengths) > 1 and facts.token_share is None)
            parts.append(f"{most}{count(facts.programs, 'training graph')} to compile")
        tqdm.write("Training on " + "; ".join(parts))
        if self._first_step:
            left = ", so that no step is left" * (self._first_step >= state.max_steps)
            tqdm.write(f"  resumed after step {self._first_step} of {state.max_steps}{left}")
        for change in facts.changes:
            tqdm.write(f"  {change}")
        if facts.token_waste:
            tqdm.write(f"  {facts.token_waste}")

    def on_train_end(self, args, state, control, **kwargs):
        self._spent = spent = self.spent
        if not state.is_world_process_zero:
            return
        steps = state.global_step - self._first_step
        if self._backend.traces_steps and steps:
            strays = self._backend.insight.stray_reads() - self._strays_at_start
            tqdm.write(
                f"Trained {count(steps, 'step')}: {describe_compiles(spent)}, "
                f"{count(spent.executions, 'execution')} ({spent.replays} replayed), "
                f"{count(spent.reads, 'device-to-host transfer')} ({strays} outside this package), "
                f"{count(spent.fallbacks, 'CPU fallback')} (including evaluation, logs and checkpoints)"
            )
        if (cache := self._backend.cache_use()) is not None:
            tqdm.write(describe_cache_use(cache))
        losses = [(entry["step"], entry["eval_loss"]) for entry in state.log_history if "eval_loss" in entry]
        if len(losses) > 1 and steps:
            (first_step, first), (last_step, last) = losses[0], losses[-1]
            best_step = step_of_loaded_weights(args, state)
            best = dict(losses).get(best_step)
            if best is None:
                tqdm.write(f"Evaluation loss: {first:.4f} -> {last:.4f} (steps {first_step} to {last_step})")
            else:
                metric = args.metric_for_best_model
                by_metric = "" if metric in (None, "loss", "eval_loss") else f", the best by {metric}"
                tqdm.write(
                    f"Evaluation loss: {first:.4f} -> {best:.4f} at step {best_step}{by_metric}, whose weights are loaded "
                    f"(at the last step {last:.4f})"
                )
        tqdm.write(f"Output: {os.path.abspath(args.output_dir)}")


def step_of_loaded_weights(args: TrainingArguments, state: TrainerState) -> int | None:
    """The step whose weights upstream loads at the end, `None` where those of the last one stay."""
    # One that a resumed run does not find is not loaded, and `best_global_step` may have no checkpoint.
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return None
    return int(state.best_model_checkpoint.rpartition("-")[2])


def describe_compiles(spent: Counters) -> str:
    """How many graphs were compiled, and in which time."""
    loads = f" and {spent.loads} loaded" if spent.loads else ""
    return f"{count(spent.compiles, 'graph')} compiled{loads} in {spent.compile_seconds:.1f} s"


def describe_cache_use(cache: CacheUse) -> str:
    """One line on how a process used its compilation cache."""
    text = f"hits: {cache.hits}, misses: {cache.misses}"
    if cache.unreadable:
        text += f", unreadable: {cache.unreadable}"
    num_compiled, lookups = cache.misses + cache.unreadable, cache.hits + cache.misses + cache.unreadable
    if lookups:
        graphs = count(lookups, "graph")
        text += f" ({num_compiled} of {graphs} compiled)" if num_compiled else " (nothing was compiled)"
    return (
        f"Compilation cache: {text}; compiling: {cache.compile_seconds:.1f} s; {count(cache.programs, 'executable')}, "
        f"{cache.size / 2**20:,.1f} MiB in {cache.directory}"
    )
