"""Trains on completions in a process of its own, which sees as many devices as CPU_NUM_DEVICES says."""

import json
import sys
from pathlib import Path

from rollouts import Case, train


if __name__ == "__main__":
    base, spec_file, output_file = sys.argv[1:]
    results = {}
    for name, case in json.loads(Path(spec_file).read_text()).items():
        trainer = train(
            Case(**case, rewards=("model",) if name.endswith("model") else Case.rewards), Path(base), ours=True
        )
        results[name] = {
            "log": trainer.state.log_history,
            "mesh": trainer.chips.mesh,
            "recompiles": trainer.watch.recompiles,
            "rows": [trainer.args.generation_batch_size, trainer._train_batch_size],
            "steps": [[step.executions, step.reads, step.fallbacks, step.replays] for step in trainer.counted],
        }
    Path(output_file).write_text(json.dumps(results))
