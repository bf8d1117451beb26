"""
Compiles the graphs of `hf-tpu doctor --full` for a TPU v5e-1, without one, and says what that takes:

    python tests/tpu_compiler/doctor_graphs.py [TRAINING ...]

Prints a line for each training, then one of JSON: the number of graphs, and the processor seconds of the compiler in all.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import hf_tpu_ext
from hf_tpu_ext.backends.selection import select_tracing
from hf_tpu_ext.hardware.topologies import find_topology
from hf_tpu_ext.temporarily import temporarily


TOPOLOGY = find_topology("v5e-1")
# Compiled without donation, the graphs are others; what was killed finds its graphs on disk.
AS_OFTEN = {"plain": 2, "traced": 0, "killed": 0}


def main(*names: str) -> None:
    """Trace and compile the graphs of these trainings, by default of all, one after the other."""
    select_tracing(1, chip=TOPOLOGY.chip)

    import hf_tpu_ext.doctor.speed as speed
    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer
    from hf_tpu_ext.doctor.small_runs import RUNS, make_inputs, make_trainer
    from hf_tpu_ext.plan.compiler import compile_programs
    from hf_tpu_ext.plan.trace import trace_run

    def train_small(run, adapt):
        name = f"TPU{run.trainer}Trainer"
        with temporarily(hf_tpu_ext, **{name: adapt(getattr(hf_tpu_ext, name))}):
            make_trainer(run, directory, "traced").train()

    def train_smollm2(adapt):
        from datasets import Dataset

        settings = speed.SETTINGS | {"max_length": speed.LENGTH, "per_device_train_batch_size": speed.BATCH}
        rows = Dataset.from_dict({"input_ids": [[1] * speed.LENGTH] * speed.BATCH})
        model = str(speed.write_recipe(directory).with_suffix(""))
        adapt(TPUSFTTrainer)(
            model=model, args=TPUSFTConfig(str(directory / "run"), **settings), train_dataset=rows
        ).train()

    graphs, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_inputs(directory, 1)
        trainings = {name: partial(train_small, run) for name, run in RUNS.items() if AS_OFTEN.get(name, 1)}
        trainings["SmolLM2-135M"] = train_smollm2
        for name in names or trainings:
            train = trainings[name]
            programs, _ = trace_run(train)
            # The large one is compiled by `hf-tpu plan`, too.
            times = 2 if name == "SmolLM2-135M" else AS_OFTEN.get(name, 1)
            compiled = list(compile_programs(programs, TOPOLOGY))
            for program in compiled:
                assert program.error is None, f"{name}, {program.kind}: {program.error}"
            took = sum(program.cpu_seconds for program in compiled)
            kinds = ", ".join(f"{program.kind} {program.cpu_seconds:.1f} s" for program in compiled)
            print(f"{name:<14} {times} x {len(programs)} graphs, {took:6.1f} s: {kinds}", flush=True)
            graphs += times * len(programs)
            seconds += times * took
    print(json.dumps({"graphs": graphs, "cpu_seconds": round(seconds, 1)}))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
