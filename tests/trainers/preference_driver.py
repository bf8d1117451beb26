"""Trains with preferences in a process of its own, which sees as many devices as CPU_NUM_DEVICES says."""

import json
import sys
from pathlib import Path

from chips_driver import shards_of
from preference import Case, train


if __name__ == "__main__":
    base, spec_file, output_file = sys.argv[1:]
    with open(spec_file) as file:
        spec = json.load(file)
    results = {}
    for name, case in spec.items():
        trainer = train(Case(**case), Path(base), ours=True)
        reference = trainer.model if trainer.other_models() == [] else trainer.other_models()[0]
        results[name] = {
            "log": trainer.state.log_history,
            "mesh": trainer.chips.mesh,
            "recompiles": trainer.watch.recompiles,
            "programs": [[kind, list(shape)] for kind, shape in trainer.watch.programs],
            "steps": [[step.executions, step.reads, step.fallbacks, step.replays] for step in trainer.counted],
            "reference": {name: [list(p.shape), shards_of(p)[0]] for name, p in reference.named_parameters()},
        }
    with open(output_file, "w") as file:
        json.dump(results, file)
