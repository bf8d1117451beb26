"""What to change in a run that does not fit: what docs/compile_time.md#out-of-memory says, of its recipe."""

from collections.abc import Collection, Iterator, Sequence

from ..formatting import format_bytes
from ..generation.generator import DECODE, PREFILL
from ..hardware.topologies import Topology
from ..step.train_step import MICRO_STEP, OPTIMIZER_STEP
from ..trainers.online.rewarded import OF_EVALUATION
from ..trainers.run.evaluation import EVALUATION_STEP, PREDICTION_STEP
from .programs import CompiledProgram, TracedProgram, find_state
from .result import Plan
from .trace import Run


# What a search may vary of these.
_SEARCHED = ("rematerialization", "mesh", "per_device_train_batch_size")


def advise(plan: Plan, run: Run, searched: Collection[str] = ()) -> list[str]:
    """
    What to change, in the order to try it, but for settings that are `searched`: what becomes of these is compiled.

    No line says how much a setting saves, since the compiler alone knows that. The last one says how to ask it.
    """
    if plan.fits is None:
        return []
    if plan.fits or plan.trials:
        return (
            [] if searched else ["--search compiles variants, larger batches among them, and says which are faster."]
        )
    return _list_settings(plan.programs, _find_kinds_too_large(plan), plan.topology, run, searched)


def foresee(
    programs: Sequence[TracedProgram], topology: Topology, run: Run, searched: Collection[str] = ()
) -> list[str]:
    """
    Lines for a run of which a chip has to keep more (weights, optimizer state, gradients) than it has, as is known before anything
    is compiled, and what to change, as in [`advise`]; none where there is room.
    """
    state, limit = find_state(programs), topology.chip.memory_bytes
    if (kept := sum(state.values())) <= limit:
        return []
    parts = ", ".join(f"{role} {format_bytes(size)}" for role, size in state.items() if size)
    first, *lines = _list_settings(programs, {program.kind for program in programs}, topology, run, searched)
    return [
        f"Before anything is computed, {parts} take {100 * kept / limit:.0f} % of the {format_bytes(limit)} of HBM that a chip has, so "
        f"this does not fit. {first}",
        *(f"- {line}" for line in lines),
        "It is compiled all the same, to say what is missing: Ctrl-C ends that.",
    ]


def _list_settings(
    programs: Sequence[TracedProgram | CompiledProgram],
    kinds: set[str],
    topology: Topology,
    run: Run,
    searched: Collection[str],
) -> list[str]:
    """Lines on what to change in a run of which programs of these `kinds` do not fit."""
    found = _find_settings(programs, kinds, topology, run)
    settings = {name: line for name, line in found if name not in searched}
    lines = ["Try in this order:", *settings.values(), "more chips (--topology), or a smaller model"]
    if not searched and (names := [name for name in _SEARCHED if name in settings]):
        lines.append(
            f"To know whether {' or '.join(names)} is enough, add --search {' '.join(names)} to this command: it compiles variants, "
            "and says which fit."
        )
    return lines


def _find_settings(
    programs: Sequence[TracedProgram | CompiledProgram], kinds: set[str], topology: Topology, run: Run
) -> Iterator[tuple[str, str]]:
    """Names of settings that are not set and make less of what does not fit, each with a line that says what to type."""
    state = find_state(programs)
    room = topology.chip.memory_bytes - sum(state.values())
    # Otherwise, what a batch takes does not matter.
    state_fits = room > 0
    of_evaluation = {
        kind for kind in kinds if kind.startswith((EVALUATION_STEP, PREDICTION_STEP)) or kind.endswith(OF_EVALUATION)
    }
    if state_fits and run.rematerialization != "full" and kinds & {MICRO_STEP, OPTIMIZER_STEP}:
        yield "rematerialization", "rematerialization: full, which computes activations again"
    if run.mesh.get("fsdp", 1) < topology.num_chips:
        yield "mesh", "mesh: fsdp, which shards weights and optimizer state over the chips"
    if state_fits:
        name, rows = "per_device_train_batch_size", run.per_device_train_batch_size
        if (fewer := _fewer_rows(rows, run.train_rows_multiple)) and kinds - of_evaluation - {PREFILL, DECODE}:
            yield name, f"{name}: {fewer}{_on_global_batch(run, rows // fewer, state['weights'], room)}"
        name = "per_device_eval_batch_size"
        if of_evaluation and (fewer := _fewer_rows(run.per_device_eval_batch_size, run.eval_rows_multiple)):
            yield name, f"{name}: {fewer}"
        if run.generations is None:
            half = max(program.batch_shape[1] for program in programs if program.kind in kinds) // 2
            yield (
                "max_length",
                f"max_length: {half} (--seq_lengths {half}, where these are given), which cuts off longer rows",
            )
        else:
            half = max(program.batch_shape[1] for program in programs if program.kind == DECODE) // 2
            yield "max_completion_length", f"max_completion_length: {half}, which cuts off longer completions"
    if run.could_precompute_reference:
        yield (
            "precompute_ref_log_probs",
            "precompute_ref_log_probs: true, which runs the reference once, before training, and drops its weights",
        )
    if run.could_have_adapter:
        yield "use_peft", "use_peft: true (LoRA), which trains adapters alone"
    if run.trains_in_float32:
        yield "dtype", "dtype: bfloat16, which halves weights, gradients and optimizer state, and rounds them"
    if run.could_be_quantized:
        both = "load_in_4bit: true with use_peft: true" if run.could_have_adapter else "load_in_4bit: true"
        yield "load_in_4bit", f"{both} (QLoRA), with frozen linear layers in 4 bits"


def _on_global_batch(run: Run, times_fewer: int, weight_bytes: int, room: int) -> str:
    """What becomes of the global batch size with so many times fewer rows on a chip."""
    steps = run.gradient_accumulation_steps
    # Gradients that are kept between micro-steps, as large as the weights that they are of.
    kept = weight_bytes * run.trained_parameters // (run.parameters + run.other_parameters) if steps == 1 else 0
    if kept < room:
        return f" with gradient_accumulation_steps: {steps * times_fewer}, the same global batch size"
    return (
        f", a smaller global batch size (gradient_accumulation_steps would keep {format_bytes(kept)} of gradients, for which there is no "
        "room)"
    )


def _find_kinds_too_large(plan: Plan) -> set[str]:
    limit = plan.topology.chip.memory_bytes
    return {
        program.kind for program in plan.programs if program.out_of_memory or sum(plan.parts(program).values()) > limit
    }


def _fewer_rows(rows: int, multiple: int) -> int | None:
    """The next smaller batch that divides `rows` and is a multiple of a number; `None` where there is none."""
    return next((few for few in range(rows // 2, 0, -1) if rows % few == 0 and few % multiple == 0), None)
