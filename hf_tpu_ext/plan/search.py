"""Variants of a run that fit, found by compiling them."""

from collections.abc import Callable
from dataclasses import replace

from tqdm.auto import tqdm

from .page import format_seconds
from .result import Plan, Trial


#: From the one that computes nothing again to the one that keeps least.
POLICIES = ("none", "dots", "full")
MESHES = ("data", "fsdp")
_ROWS = "per_device_train_batch_size"


def search(plan: Plan, per_device_train_batch_size: int, make: Callable[[dict[str, str]], Plan]) -> Plan:
    """
    Try what is computed again, how chips share the work, and how many rows a chip takes at once.

    For each policy and mesh the largest batch is looked for: what a program needs grows with its rows along a line, of which two
    points are known once two batches were compiled, so a few compilations are enough.

    Args:
        plan ([`Plan`]):
            The plan of the run as it is.
        per_device_train_batch_size (`int`):
            Its rows of a chip.
        make (`Callable[[dict[str, str]], Plan]`):
            Makes the plan of the run with other settings, by name.

    Returns:
        [`Plan`]: The plan, with the variants that no other one is better than, and with advice.
    """
    meshes = MESHES if plan.topology.num_chips > 1 else (None,)
    tried: list[Trial] = []
    with tqdm(desc="trying", unit="variant") as bar:

        def attempt(settings: dict[str, str], rows: int) -> Trial:
            settings = {**settings, _ROWS: str(rows)}
            bar.set_postfix(settings)
            tried.append(_as_trial(settings, make(settings)))
            bar.update()
            return tried[-1]

        for mesh in meshes:
            for policy in POLICIES:
                settings = {"rematerialization": policy} | ({} if mesh is None else {"mesh": mesh})
                _find_largest_batch(per_device_train_batch_size, lambda rows, s=settings: attempt(s, rows), plan)
    fitting = [trial for trial in tried if trial.fits]
    best = [trial for trial in fitting if not any(_is_better(other, trial) for other in fitting)]
    best.sort(key=lambda trial: trial.tokens_per_second, reverse=True)
    return replace(plan, trials=best, advice=_advice(tried, per_device_train_batch_size))


def _as_trial(settings: dict[str, str], plan: Plan) -> Trial:
    errors = [program.error for program in plan.programs if program.error is not None]
    if errors:
        return Trial(settings, plan.fits, error=errors[0])
    if not plan.programs:
        return Trial(settings, None, error="; ".join(plan.unknown))
    return Trial(settings, plan.fits, plan.peak_bytes, plan.roofline.seconds, plan.tokens_per_second)


def _find_largest_batch(start: int, attempt: Callable[[int], Trial], plan: Plan) -> None:
    """Try batches until the largest that fits and the smallest that does not are next to each other, or known to be."""
    limit = plan.topology.chip.memory_bytes
    fits: dict[int, int] = {}
    too_large: int | None = None
    rows = start
    while rows not in fits and rows != too_large and rows > 0:
        trial = attempt(rows)
        if trial.fits is None:
            return
        if trial.fits:
            fits[rows] = trial.peak_bytes
        else:
            too_large = rows
        if len(fits) < 2:
            if too_large is None:
                rows *= 2
            else:
                rows = (max(fits, default=0) + too_large) // 2
            continue
        (few, less), *_, (many, more) = sorted(fits.items())
        # A little less than the line says: programs of other sizes are put together a little differently.
        predicted = many + int(0.95 * (limit - more) / max(1, (more - less) / (many - few)))
        rows = predicted if too_large is None else min(predicted, too_large - 1)
        if many >= 0.9 * rows:
            return


def _is_better(other: Trial, trial: Trial) -> bool:
    """Whether another variant is at least as fast in no more memory, and better in one of them."""
    mine, theirs = (trial.tokens_per_second, -trial.peak_bytes), (other.tokens_per_second, -other.peak_bytes)
    return theirs != mine and all(their >= my for their, my in zip(theirs, mine, strict=True))


def _advice(tried: list[Trial], rows: int) -> list[str]:
    if all(trial.fits is None for trial in tried):
        return []
    fitting = [trial for trial in tried if trial.fits]
    if not fitting:
        return [
            "Nothing that was tried fits: take more chips, fewer trained weights (use_peft: true) or shorter rows."
        ]
    largest = max(fitting, key=lambda trial: (int(trial.settings[_ROWS]), trial.tokens_per_second))
    fastest = max(fitting, key=lambda trial: trial.tokens_per_second)
    advice = [
        f"the largest batch that was found to fit: {_words(largest)}",
        f"the fastest by its bound: {_words(fastest)}",
    ]
    same = [trial for trial in fitting if int(trial.settings[_ROWS]) == rows]
    if same:
        cheapest = max(same, key=lambda trial: trial.tokens_per_second)
        advice.append(f"the fastest with as many rows as now: {_words(cheapest)}")
    return advice


def _words(trial: Trial) -> str:
    settings = ", ".join(f"{name}: {value}" for name, value in trial.settings.items())
    return f"{settings} ({format_seconds(trial.seconds)} a step at least)"
