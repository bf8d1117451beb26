"""What to change in a run that does not fit, by the numbers of its plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..formatting import format_bytes
from ..generation.generator import DECODE, PREFILL
from ..hardware.topologies import Topology
from ..step.train_step import MICRO_STEP, OPTIMIZER_STEP
from ..trainers.online.rewarded import OF_EVALUATION
from ..trainers.run.evaluation import EVALUATION_STEP, PREDICTION_STEP
from .programs import TracedProgram, find_state
from .result import Plan
from .trace import Run


_BFLOAT16 = "dtype: bfloat16"
_HALVES = " halves weights, gradients and optimizer state, which are float32; updates are rounded to it, too"
#: Advice where all weights are trained in float32.
HALVES_STATE = _BFLOAT16 + _HALVES
# What of a chip is left with less is not enough for the activations of any step.
_NEARLY_ALL = 0.9
# A weight of 16 bits with 4, and a scale of 32 for each 64 of them. Embeddings, the head and adapters keep their bits.
_SAVED_BY_4_BITS = 1 - 4.5 / 16
# Changes of what a search tries.
_SEARCHED = ("mesh", "rematerialization", "per_device_train_batch_size")


@dataclass(frozen=True)
class _Change:
    """
    A setting that is not set, what it does, and about how many bytes of a chip it saves in each program that does not fit: of the state or
    of the activations. The others may change with it. Without `has_figure`, these are the most that it could save, and are not told.
    """

    setting: str
    effect: str
    saved: Sequence[float]
    has_figure: bool = True

    def __str__(self) -> str:
        saved = round(max(self.saved)) if self.has_figure else 0
        return f"{self.setting}{self.effect}{f' (about {format_bytes(saved)} less)' if saved else ''}"


@dataclass(frozen=True)
class _Need:
    """By how many bytes a program does not fit, and what of its bytes grows with its batch."""

    kind: str
    excess: int
    activations: int


def advise(plan: Plan, run: Run, is_searched: bool = False) -> list[str]:
    """
    What to try, of a plan whose variants were not compiled: changes of which one alone may be enough by the plan's numbers, or, where
    there is none, all that help. First what saves most. A search is advised where the next step is none.
    """
    if plan.fits is None:
        return []
    if plan.fits:
        faster = "--search compiles variants, larger batches among them, and says which are faster."
        return ([] if is_searched else [faster]) + _advise_bfloat16(plan, run)
    needs = _find_needs(plan)
    state = find_state(plan.programs)
    changes = _changes_of_state(state, plan.topology, run, len(needs))
    # Several changes of the state save together what all of them leave out.
    left = math.prod(1 - change.saved[0] / sum(state.values()) for change in changes)
    saved_of_state = (1 - left) * sum(state.values())
    if run.rematerialization != "full":
        saved = [need.activations if need.kind in (MICRO_STEP, OPTIMIZER_STEP) else 0 for need in needs]
        changes.append(_Change("rematerialization: full", ", which computes activations again", saved))
    changes += _changes_of_rows(needs, run, saved_of_state)
    if any(need.excess for need in needs):
        changes = [change for change in changes if any(change.saved)]
    if any(need.excess > saved_of_state + need.activations for need in needs):
        return ["More chips (--topology) with mesh: fsdp, or a smaller model: nothing else is enough."]
    enough = [
        change
        for change in changes
        if all(saved >= need.excess for saved, need in zip(change.saved, needs, strict=True))
    ]
    best_first = sorted(enough or changes, key=lambda change: -max(change.saved))
    advice = [str(change) for change in best_first]
    if not enough:
        advice.insert(0, "No one of these is sure to be enough; the first is the next to try, then several:")
    if not is_searched and any(change.setting.startswith(_SEARCHED) for change in best_first):
        advice.append("--search compiles variants, and says which of them fit.")
    return advice


def advise_besides(plan: Plan, run: Run) -> list[str]:
    """What a search does not try, of a plan with the variants that one has found to fit."""
    if plan.fits is None:
        return []
    if plan.fits or plan.trials:
        return _advise_bfloat16(plan, run)
    changes = _changes_of_state(find_state(plan.programs), plan.topology, run)
    return [str(change) for change in changes if not change.setting.startswith("mesh")]


def _advise_bfloat16(plan: Plan, run: Run) -> list[str]:
    """Where a plan leaves room, numbers are not to be less exact for more of it."""
    is_half_full = (plan.peak_bytes or 0) > plan.topology.chip.memory_bytes / 2
    return [HALVES_STATE] if run.trains_in_float32 and is_half_full else []


def foresee(programs: Sequence[TracedProgram], topology: Topology, run: Run) -> str | None:
    """
    A line for a run of which a chip has to keep so much (weights, optimizer state, gradients) that nothing else can fit, as is known
    before anything is compiled; `None` where there is room.
    """
    state, limit = find_state(programs), topology.chip.memory_bytes
    if (kept := sum(state.values())) <= _NEARLY_ALL * limit:
        return None
    parts = ", ".join(f"{role} {format_bytes(size)}" for role, size in state.items() if size)
    changes = _changes_of_state(state, topology, run)
    fix = max(changes, key=lambda change: change.saved, default="take more chips (--topology) or a smaller model")
    how_much = f"{100 * kept / limit:.0f} % of the {format_bytes(limit)} of HBM that a chip has"
    return (
        f"Before anything is computed, {parts} take {how_much}, so this will hardly fit. To change it: {fix}. "
        "It is compiled all the same, to say what is missing: Ctrl-C ends that."
    )


def _find_needs(plan: Plan) -> list[_Need]:
    """The programs that do not fit, first the one that needs most."""
    limit, kept = plan.topology.chip.memory_bytes, sum(find_state(plan.programs).values())
    needs = []
    for program in plan.programs:
        parts = plan.parts(program)
        excess = sum(parts.values()) - limit if program.error is None else plan.excess_bytes(program) or 0
        if excess > 0 or program.out_of_memory:
            activations = parts.get("activations and code", max(0, limit + excess - kept) if excess else 0)
            needs.append(_Need(program.kind, excess, activations))
    return sorted(needs, key=lambda need: -need.excess)


def _changes_of_state(state: Mapping[str, int], topology: Topology, run: Run, needs: int = 1) -> list[_Change]:
    """What makes less of what a chip keeps, in each of so many programs."""
    total, weights = sum(state.values()), state["weights"]
    share = run.mesh.get("fsdp", 1) / topology.num_chips
    found = []
    if share < 1:
        # Where weights were whole on a chip, those of a layer are gathered to compute with them. Where all are trained, gradients among
        # the temporaries are split too, which may be more than that.
        is_more = run.mesh.get("fsdp", 1) == 1 and run.trained_parameters < run.parameters
        gathered = run.layer_bytes if is_more else 0
        effect = ", which shards weights and optimizer state over the chips"
        found.append(("mesh: fsdp", effect, total * (1 - share) - gathered))
    of_reference = run.reference_share * weights
    if of_reference:
        effect = ", which runs the reference once, before training, and drops its copy of the weights"
        found.append(("precompute_ref_log_probs: true", effect, of_reference))
    if run.trained_parameters == run.parameters:
        # The reference is the model without its adapter.
        left = (weights - of_reference) / (2 if run.trains_in_float32 else 1)
        saved = total - left
        found.append(("use_peft: true", " (LoRA): gradients and optimizer state are of adapters alone", saved))
    elif not run.is_quantized:
        saved = weights * run.quantizable_share * _SAVED_BY_4_BITS
        found.append(("load_in_4bit: true", " (QLoRA), for frozen linear layers", saved))
    if run.trains_in_float32:
        found.append((_BFLOAT16, _HALVES, total / 2))
    return [_Change(setting, effect, [saved] * needs) for setting, effect, saved in found if saved > 0]


def _changes_of_rows(needs: Sequence[_Need], run: Run, kept: float) -> list[_Change]:
    """
    Smaller batches of the programs that do not fit: as large as what they need leaves, or, where one row is too many, as large as
    it leaves when what a chip keeps is `kept` less. Sums of gradients that a chip has to keep for it are taken into account.
    """
    changes = []
    evaluates = {
        need.kind: need.kind.startswith((EVALUATION_STEP, PREDICTION_STEP)) or need.kind.endswith(OF_EVALUATION)
        for need in needs
        if need.kind not in (PREFILL, DECODE)
    }
    for is_evaluation, setting, rows in (
        (False, "per_device_train_batch_size", run.per_device_train_batch_size),
        (True, "per_device_eval_batch_size", run.per_device_eval_batch_size),
    ):
        of_these = [need for need in needs if evaluates.get(need.kind) is is_evaluation]
        if not of_these:
            continue
        if rows == 1:
            saved = [need.activations if need in of_these else 0 for need in needs]
            effect = ", of which a plan with smaller --seq_lengths says how much it saves"
            changes.append(_Change("a smaller max_length", effect, saved, has_figure=False))
            continue
        # What is one micro-step now has several then, and sums of gradients to keep.
        sums = 0 if is_evaluation or run.gradient_accumulation_steps > 1 else run.trained_bytes
        fewer = _fewer_rows(of_these, rows, -sums) or _fewer_rows(of_these, rows, kept - sums) or 1
        saved = [max(0, need.activations * (rows - fewer) / rows - sums) if need in of_these else 0 for need in needs]
        effect = "" if is_evaluation else f", with {rows // fewer} times the gradient_accumulation_steps"
        changes.append(_Change(f"{setting}: {fewer}", effect, saved))
    return changes


def _fewer_rows(needs: Sequence[_Need], rows: int, kept: float) -> int | None:
    """The largest batch that divides `rows` and may fit where `kept` bytes are saved besides; `None` where there is none."""
    return next(
        (
            fewer
            for fewer in range(rows // 2, 0, -1)
            if rows % fewer == 0
            and all(need.activations * (rows - fewer) >= (need.excess - kept) * rows for need in needs)
        ),
        None,
    )
