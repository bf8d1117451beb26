"""Makes a plan of traced graphs."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from threading import Event

from tqdm.auto import tqdm

from ..formatting import count
from ..hardware.prices import PRICES, read_prices
from ..hardware.topologies import Topology
from ..installing import install_command
from ..kernels.versions import find_wrong_versions, required_versions
from ..layers.flops import step_flops
from ..sharding import describe_hosts, describe_mesh
from ..step.train_step import MICRO_STEP, OPTIMIZER_STEP
from .compiler import compile_programs
from .hlo_cost import measure_cost
from .page import format_count
from .programs import CompiledProgram, TracedProgram
from .result import Plan
from .trace import Run


def make_plan(
    title: str,
    topology: Topology,
    programs: Sequence[TracedProgram],
    run: Run,
    prices: Path = PRICES,
    jobs: int = 1,
    output_dir: Path | None = None,
    quiet: bool = False,
    stop: Event | None = None,
) -> Plan:
    """
    Compile the programs of a run, and put together what is known of it. `jobs` programs are compiled at once, and their text is
    written to `output_dir`. `quiet` leaves out the progress, and `stop` ends the compilers when it is set.

    Where the compiler is not there, the plan has no programs and says how to install it. Raises `ValueError` if the
    compiler was stopped or does not know the topology, or the prices cannot be read.
    """
    price = read_prices(prices).get(topology.chip.name)
    unknown, plans = [], []
    if wrong := find_wrong_versions():
        unknown.append(f"The TPU compiler is not installed: {', '.join(wrong)}. Install it: {install_command('tpu')}")
    else:
        with tqdm(total=len(programs), desc=f"compiling for {topology.name}", unit="graph", disable=quiet) as bar:
            for program in compile_programs(programs, topology, jobs, stop):
                if output_dir is not None:
                    output_dir.mkdir(parents=True, exist_ok=True)
                    name = f"{program.kind.replace(' ', '_')}_{'x'.join(map(str, program.batch_shape))}.txt"
                    (output_dir / name).write_text(program.text, encoding="utf-8")
                cost = measure_cost(program.text) if program.error is None else None
                plans.append(replace(program, text="", cost=cost, model_flops=_model_flops(run, program)))
                bar.update()
    if price is None:
        unknown.append(f"the price: {prices} has none for {topology.chip.name}")
    if run.optimizer_steps is None:
        unknown.append("time and cost of the run: the number of steps is not known without the data (set max_steps)")
    costs = [program.cost for program in plans if program.cost is not None]
    if run.attention == "splash" and costs and not any(cost.kernel_flops for cost in costs):
        run = replace(run, attention="slices: the kernel cannot serve, as a line above says")
    return Plan(
        title=title,
        facts=_describe(run, programs, topology),
        topology=topology,
        programs=plans,
        versions={name: version(name) for name in ("torch_xla", "transformers", "trl")}
        | ({} if wrong else required_versions()),
        parameters=(run.parameters, run.trained_parameters),
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        optimizer_steps=run.optimizer_steps,
        token_share=run.token_share,
        generations=run.generations,
        price=price,
        unknown=unknown,
    )


def _model_flops(run: Run, program: CompiledProgram) -> float | None:
    """FLOPs of a training program that are not computed again, where the model can be counted."""
    if run.other_passes or program.kind not in (MICRO_STEP, OPTIMIZER_STEP):
        return None
    adapters = run.trained_parameters if run.trained_parameters < run.parameters else None
    return step_flops(run.config, program.batch_shape, adapters)


def _describe(run: Run, programs: Sequence[TracedProgram], topology: Topology) -> dict[str, str]:
    chips = programs[0].num_chips
    rows = run.per_device_train_batch_size * run.gradient_accumulation_steps * chips
    lengths = sorted({program.batch_shape[1] for program in programs if program.kind in (MICRO_STEP, OPTIMIZER_STEP)})
    share = 100 * run.trained_parameters / run.parameters
    description = {
        "model": f"{run.config.model_type}, {format_count(run.parameters).strip()} parameters, "
        f"{format_count(run.trained_parameters).strip()} trained ({share:.3g} %)"
        + (
            f"; {format_count(run.other_parameters).strip()} of other models beside it" if run.other_parameters else ""
        ),
        "precision": run.precision,
        "global batch size": f"{rows}{' pairs' if run.pairs else ''} = {run.per_device_train_batch_size} per chip x {run.gradient_accumulation_steps} "
        f"gradient accumulation step{'s' if run.gradient_accumulation_steps > 1 else ''} x {count(chips, 'chip')}; "
        f"sequence length{'s' if len(lengths) > 1 else ''} {', '.join(map(str, lengths))}",
    }
    if chips > 1:
        description["chips"] = describe_mesh(run.mesh)
    if topology.num_hosts > 1:
        description["hosts"] = describe_hosts(run.mesh, topology.num_hosts)
    description |= {"rematerialization": run.rematerialization, "attention": run.attention}
    if run.token_waste is not None:
        description["data"] = run.token_waste
    elif run.rows is not None:
        description["data"] = f"{run.rows:,} rows"
    return description
