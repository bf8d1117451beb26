"""Trains the tiny model in one of several processes, with a device each, and notes what the first of them logged."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import cpu_plugin


cpu_plugin.start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from hf_tpu_ext import TPUSFTConfig  # noqa: E402


_path = Path(__file__).parents[1] / "trainers" / "conftest.py"
_spec = importlib.util.spec_from_file_location("trainers_conftest", _path)
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)


class Count(TrainerCallback):
    """Notes what each step compiles, and the shape of its last batch."""

    # No code of the user's, with which a step is not compiled whole.
    __module__ = "hf_tpu_ext.tests"

    def __init__(self):
        self.trainer, self.compiles, self.shapes, self._before = None, [], [], 0

    def on_step_begin(self, args, state, control, **kwargs):
        self._before = self.trainer.backend.compiles()

    def on_step_end(self, args, state, control, **kwargs):
        self.compiles.append(self.trainer.backend.compiles() - self._before)
        self.shapes.append(list(self.trainer.watching.batch_shape))


def run(model_dir, output_dir, lora=None, resume=None, stop_after=None, rows=24, **config):
    runs = shared.Runs(model_dir, output_dir)
    runs.train_dataset, runs.eval_dataset = shared.make_rows(rows), shared.make_rows(16, seed=1)
    # Weights that are drawn are not the same in all processes.
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    trainer = runs.ours(lora=lora, train=False, config_cls=TPUSFTConfig, **config)
    count = Count()
    count.trainer = trainer
    trainer.add_callback(count)
    trainer.train(resume_from_checkpoint=resume)
    weights = {name: value.double().sum().item() for name, value in trainer.model.state_dict().items()}
    return {
        "log": shared.logged(trainer),
        "compiles": count.compiles,
        "shapes": count.shapes,
        "weights": weights,
        "tokens": trainer.state.num_input_tokens_seen,
    }


def main(model_dir, directory, spec_file, output_file):
    results = {}
    for name, config in json.loads(Path(spec_file).read_text()).items():
        torch.compiler.reset()
        results[name] = run(model_dir, f"{directory}/{name}", **config)
    noted = [results]
    if dist.is_initialized():
        noted = [None] * dist.get_world_size()
        dist.all_gather_object(noted, results)
    if int(os.environ.get("RANK", "0")) == 0:
        Path(output_file).write_text(json.dumps(noted))


if __name__ == "__main__":
    main(*sys.argv[1:])
