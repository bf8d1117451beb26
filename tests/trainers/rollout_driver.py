"""Trains on completions in a process of its own, which sees as many devices as CPU_NUM_DEVICES says."""

import json
import sys
from pathlib import Path

from rollouts import OURS, WRITING, Case, train


if __name__ == "__main__":
    base, spec_file, output_file = sys.argv[1:]
    results = {}
    of_tests = OURS["grpo"]
    for name, case in json.loads(Path(spec_file).read_text()).items():
        # Completions of the model's own, or of the tests.
        OURS["grpo"] = WRITING["grpo"] if name.startswith("written") else of_tests
        rewards = ("model",) if name.endswith("model") else Case.rewards
        trainer = train(Case(**case, rewards=rewards), Path(base), ours=True)
        results[name] = {
            "log": trainer.state.log_history,
            "mesh": trainer.chips.mesh,
            # Of distillation, a prompt has one completion.
            "shares_prompts": case["kind"] != "distillation" and trainer.shares_prompts,
            "recompiles": trainer.watch.recompiles,
            "rows": [trainer.generation_rows, trainer._train_batch_size],
            "steps": [[step.executions, step.reads, step.fallbacks, step.replays] for step in trainer.counted],
        }
    Path(output_file).write_text(json.dumps(results))
