"""Variants of a run that fit, found by compiling them."""

import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from tqdm.auto import tqdm

from ..errors import UserError
from ..formatting import count, format_bytes, format_seconds
from ..hardware.topologies import Topology
from .programs import find_state
from .result import Plan, Trial


# What a search tries of each setting. Rematerialization goes from computing nothing again to most.
_CHOICES = {
    "attention": ("splash", "slices"),
    "rematerialization": ("none", "dots", "full"),
}
_ROWS = "per_device_train_batch_size"
# A batch that is so much larger is not looked for.
_NEAR = 1.1
# How much of the memory a predicted batch is to take.
_MARGIN = 0.98
# Batches that are mostly tried until the largest is known.
_USUAL_TRIES = 3
# After so many compilations the batch is no longer predicted, but what is between is halved.
_TRIES = 5


@dataclass(eq=False)
class _Variant:
    """Settings besides the batch, and the batches that are still to be tried with them."""

    settings: dict[str, str]
    batches: Generator[int, Trial, None]
    #: The batch that comes next.
    rows: int


def search(
    plan: Plan,
    settings: Mapping[str, str],
    varied_names: Collection[str],
    trace: Callable[[dict[str, str]], Callable[[int], Plan]],
    jobs: int = 1,
) -> Iterator[Plan]:
    """
    Try what is computed again, how chips share the work, and how many rows a chip takes at once.

    For each policy and mesh, if rows are varied, the largest batch is looked for: what a program needs grows with its rows
    about along a line, of which two points are known once two batches were compiled, as the compiler says what a program
    would need that it refuses. So a few compilations are enough.

    Args:
        plan ([`Plan`]): The plan of the run as it is.
        settings (`Mapping[str, str]`):
            Its `rematerialization`, `attention`, `per_device_train_batch_size` and, on several chips, `mesh`.
        varied_names (`Collection[str]`): Names of those that are to be tried; the others stay.
        trace (`Callable[[dict[str, str]], Callable[[int], Plan]]`):
            Traces the run with other settings, by name. What it returns is called in another thread, compiles so many programs
            at once, and makes the plan.
        jobs (`int`, *optional*, defaults to `1`):
            How many programs to compile at once. What is found does not depend on it.

    Yields:
        [`Plan`]: After each compilation, the plan with the variants so far that no other one is better than, and with advice. A line
        of each is printed.
    """
    limit, rows = plan.topology.chip.memory_bytes, int(settings[_ROWS])
    # What it is computed with goes without saying, unless it is asked for.
    own_settings = {name: value for name, value in settings.items() if name != "attention" or name in varied_names}
    choices = {name: [value] for name, value in own_settings.items() if name != _ROWS}
    possible = {**_CHOICES, "mesh": _meshes(plan.topology)}
    choices |= {name: values for name, values in possible.items() if name in choices and name in varied_names}
    batches = find_largest_batch if _ROWS in varied_names else _one_batch
    variants = []
    for values in itertools.product(*choices.values()):
        tries = batches(rows, limit)
        variants.append(_Variant(dict(zip(choices, values, strict=True)), tries, next(tries)))
    # First what is compiled already, and what is like it.
    variants.sort(key=lambda variant: sum(settings[name] != value for name, value in variant.settings.items()))
    print(_announce(plan, variants, _ROWS in varied_names, jobs), flush=True)
    for trials in _try_all(variants, limit, trace, jobs):
        fitting = [trial for trial in trials if trial.fits]
        best = [trial for trial in fitting if not any(_is_better(other, trial) for other in fitting)]
        best.sort(key=lambda trial: trial.tokens_per_second, reverse=True)
        yield replace(plan, trials=best, advice=_advice(trials, settings, _ROWS in varied_names))


def _announce(plan: Plan, variants: Sequence[_Variant], varies_rows: bool, jobs: int) -> str:
    """How much is to be compiled, and about how long that takes."""
    seconds, number = sum(program.seconds for program in plan.programs), len(variants)
    what = count(number, "combination")
    if varies_rows:
        what += f" of settings, each with about {_USUAL_TRIES} batch sizes until the largest that fits is known"
        number *= _USUAL_TRIES
    return (
        f"\nSearch: {what}. The first was compiled in {format_seconds(seconds)}; at this rate all take "
        f"{format_seconds(number * seconds / min(jobs, len(variants)))}, {min(jobs, len(variants))} at once. Each has a line as soon as "
        "it is compiled. Ctrl-C stops the search, and keeps what is known."
    )


def _try_all(
    variants: list[_Variant], limit: int, trace: Callable[[dict[str, str]], Callable[[int], Plan]], jobs: int
) -> Iterator[list[Trial]]:
    """
    Compile the batches of variants, several variants at once, and yield all trials after each. They are traced one at a time, in this
    thread.
    """
    trials: list[Trial] = []
    ready = deque(variants)
    compiling: dict[Future[Plan], tuple[_Variant, dict[str, str]]] = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(desc="search", unit="combination", total=len(variants)) as bar:
        while ready or compiling:
            while ready and len(compiling) < jobs:
                variant = ready.popleft()
                settings = {**variant.settings, _ROWS: str(variant.rows)}
                bar.set_postfix(settings)
                plan_future = pool.submit(trace(settings), max(1, jobs // len(variants)))
                compiling[plan_future] = variant, settings
            for future in wait(compiling, return_when=FIRST_COMPLETED).done:
                variant, settings = compiling.pop(future)
                try:
                    trial = _as_trial(future.result(), settings)
                except UserError as error:
                    # Its compiler had no memory on this host. The others go on.
                    trial = Trial(settings, None, error=str(error).partition("\n")[0])
                trials.append(trial)
                try:
                    variant.rows = variant.batches.send(trial)
                    # What has begun comes to its end first.
                    ready.appendleft(variant)
                except StopIteration:
                    bar.update()
                # It is kept before it is shown, for a stop to find it. All may take hours, and somebody may not wait for the end.
                yield trials
                progress = f"variant {len(trials)} ({bar.n} of {count(len(variants), 'combination')} done)"
                bar.write(f"{progress}: {_outcome(trial, limit)}", file=sys.stdout)


def _meshes(topology: Topology) -> list[str]:
    """Weights whole on every chip, split over all chips, and on several hosts, split over one host, two, four, ..."""
    chips, between = topology.num_chips, []
    split = chips // topology.num_hosts
    while topology.num_hosts > 1 and split < chips:
        between.append(f"data={chips // split},fsdp={split}")
        split *= 2
    return ["data", *between, "fsdp"]


def _as_trial(plan: Plan, settings: dict[str, str]) -> Trial:
    """What a plan of other settings says of them."""
    if not plan.programs:
        return Trial(settings, None, error="; ".join(plan.unknown))
    trial = Trial(settings, plan.fits, plan.peak_bytes)
    if trial.fits is False:
        rows, kept = int(settings[_ROWS]), sum(find_state(plan.programs).values())
        # One row needs at least its share of what a chip does not keep.
        of_one_row = 0 if trial.peak_bytes is None else kept + (trial.peak_bytes - kept) / rows
        trial = replace(trial, no_batch_fits=rows == 1 or of_one_row > plan.topology.chip.memory_bytes)
    errors = [program.error for program in plan.programs if program.error is not None]
    if errors:
        return replace(trial, error=errors[0])
    return replace(trial, seconds=plan.step.seconds[1], tokens_per_second=plan.tokens_per_second)


def _outcome(trial: Trial, limit: int) -> str:
    settings = _settings_in_words(trial.settings)
    if trial.fits is None:
        return f"{settings}: unknown ({trial.error})"
    if trial.fits:
        return f"{settings}: fits, {format_bytes(trial.peak_bytes)}, expected step {format_seconds(trial.seconds)}"
    lacking = "" if trial.peak_bytes is None else f", {format_bytes(trial.peak_bytes - limit)} too much"
    return f"{settings}: does not fit{lacking}{', nor does a smaller batch' if trial.no_batch_fits else ''}"


def _one_batch(rows: int, limit: int) -> Generator[int, Trial, None]:
    yield rows


def find_largest_batch(start: int, limit: int) -> Generator[int, Trial, None]:
    """
    Try batches, from one of `start` rows, until the largest that fits into `limit` bytes is known to a tenth of it, or
    until one cannot be told. Yielded are the rows of each; what came of it is sent back.
    """
    bytes_of_rows: dict[int, int] = {}
    largest, too_large = 0, None
    rows = start
    for tries in itertools.count(1):
        trial = yield rows
        if trial.fits is None or trial.no_batch_fits:
            return
        if trial.fits:
            largest = rows
        else:
            too_large = rows
        if trial.peak_bytes is not None:
            bytes_of_rows[rows] = trial.peak_bytes
        rows_on_line = _predict_rows(bytes_of_rows, limit)
        if too_large is None:
            rows = 2 * largest if rows_on_line is None else rows_on_line
            if rows <= _NEAR * largest:
                return
        else:
            if too_large - 1 <= int(_NEAR * largest):
                return
            # What is next but one tenth larger shows that the line is right.
            rows = None if rows_on_line is None else max(rows_on_line, int(_NEAR * largest) + 1)
            if rows is None or rows >= too_large or tries >= _TRIES:
                rows = (largest + too_large) // 2


def _predict_rows(bytes_of_rows: dict[int, int], limit: int) -> int | None:
    """Say where the line through the two batches that are nearest to the limit reaches it."""
    if len(bytes_of_rows) < 2:
        return None
    (few, less), (many, more) = sorted(sorted(bytes_of_rows.items(), key=lambda item: abs(item[1] - limit))[:2])
    if more <= less:
        return None
    # A little less than the line says: programs of other sizes are put together a little differently.
    rows = few + math.floor((_MARGIN * limit - less) / (more - less) * (many - few))
    # A person would choose a multiple of 8, which is as close as the largest batch is known.
    return rows if rows < 100 else rows - rows % 8


def _is_better(other: Trial, trial: Trial) -> bool:
    """Whether another variant is at least as fast in no more memory, and better in one of them."""
    mine, theirs = (trial.tokens_per_second, -trial.peak_bytes), (other.tokens_per_second, -other.peak_bytes)
    return theirs != mine and all(their >= my for their, my in zip(theirs, mine, strict=True))


def _advice(trials: list[Trial], settings: Mapping[str, str], varies_rows: bool) -> list[str]:
    if all(trial.fits is None for trial in trials):
        return []
    fitting = [trial for trial in trials if trial.fits]
    if not fitting:
        return ["No variant that was tried fits."]
    # A search that was stopped has tried fewer.
    of_all = f"of {count(len(trials), 'variant')}"
    best = {
        f"the fastest {of_all} by the compiler's estimate": max(fitting, key=lambda trial: trial.tokens_per_second)
    }
    if varies_rows:
        largest = max(fitting, key=lambda trial: (int(trial.settings[_ROWS]), trial.tokens_per_second))
        best = {f"the largest batch {of_all} that was found to fit": largest, **best}
    same = [trial for trial in fitting if trial.settings[_ROWS] == settings[_ROWS]]
    if varies_rows and same:
        best["the fastest with the present global batch size"] = max(same, key=lambda trial: trial.tokens_per_second)
    advice = [f"{what}: {_words(trial, settings)}" for what, trial in best.items()]
    without = [
        {name: value for name, value in trial.settings.items() if name != _ROWS}
        for trial in trials
        if trial.no_batch_fits
    ]
    if without:
        advice.append(f"fits with no batch size: {'; '.join(map(_settings_in_words, without))}")
    return advice


def _words(trial: Trial, settings: Mapping[str, str]) -> str:
    is_present = all(settings[name] == value for name, value in trial.settings.items())
    what = "the present settings" if is_present else _settings_in_words(trial.settings)
    return f"{what} (expected step {format_seconds(trial.seconds)})"


def _settings_in_words(settings: dict[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in settings.items())
