"""Trains tiny models in one of several processes, each with a device, and notes what all of them have seen."""

import importlib.util
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import cpu_plugin


cpu_plugin.start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TrainerCallback  # noqa: E402


TRAINERS = Path(__file__).parents[1] / "trainers"
sys.path.insert(0, str(TRAINERS))

import preference  # noqa: E402
import rollouts  # noqa: E402
from ranks_data import evaluated_rows, logits_in_mean  # noqa: E402

from hf_tpu_ext import TPUSFTConfig, TrainingPreempted  # noqa: E402


_spec = importlib.util.spec_from_file_location("trainers_conftest", TRAINERS / "conftest.py")
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)


class Watcher(TrainerCallback):
    """Notes the compiles and the shape of each step. Process 1 is told to stop within the step `stop_at`."""

    # No code of the user's, with which a step is not compiled whole.
    __module__ = "hf_tpu_ext.tests"

    def __init__(self, trainer, stop_at):
        self._trainer, self._stop_at = trainer, stop_at
        self.compiles, self.shapes, self.longest, self._before = [], [], [], 0

    def on_step_begin(self, args, state, control, **kwargs):
        self._before = self._trainer.backend.compiles()
        if state.global_step + 1 == self._stop_at and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_end(self, args, state, control, **kwargs):
        self.compiles.append(self._trainer.backend.compiles() - self._before)
        self.shapes.append(list(self._trainer.batch_shape))
        if "attention_mask" in self._trainer.batch_under_way:
            self.longest.append(self._trainer.batch_under_way["attention_mask"].sum(1).max().item())


def sft(model_dir, output_dir, lora=None, metrics=False, quantized=False, **config):
    runs = shared.Runs(model_dir, output_dir)
    runs.train_dataset, runs.eval_dataset = shared.make_rows(24), evaluated_rows()
    kwargs = {"compute_metrics": logits_in_mean} if metrics else {}
    quantization = BitsAndBytesConfig(load_in_4bit=True) if quantized else None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, quantization_config=quantization)
    if dist.get_rank() and not quantized:
        # What is not read from a file may be other weights in each process.
        with torch.no_grad():
            model.lm_head.weight += 1.0
    return runs.ours(model=model, lora=lora, train=False, config_cls=TPUSFTConfig, kwargs=kwargs, **config)


def early(completion_ids, **kwargs):
    """Tokens of the first half of the vocabulary."""
    return [sum(token < 128 for token in tokens) / len(tokens) for tokens in completion_ids]


def on_completions(model_dir, output_dir, rollout, ours=True, writes=False, **config):
    # Made by the first process alone, while others would read it.
    rollouts._model_dir = lambda *_, **__: model_dir
    rewards = {"rewards": (early,)} if writes else {}
    case = rollouts.Case(**{**rewards, **rollout}, settings={**config, "output_dir": str(output_dir)})
    given = rollouts.OURS[case.kind]
    rollouts.OURS[case.kind] = rollouts.WRITING[case.kind] if writes else given
    try:
        # Of a last batch with fewer prompts, upstream leaves out metrics of the second process.
        return rollouts.trainer_for(case, Path(output_dir), ours, train_dataset=rollouts.prompts_for(case, 8))
    finally:
        rollouts.OURS[case.kind] = given


def run(model_dir, output_dir, case=None, rollout=None, resume=None, stop_at=None, refused=False, **config):
    torch.compiler.reset()
    if refused:
        try:
            return run(model_dir, output_dir, case, rollout, resume, **config)
        except ValueError as error:
            return {"refused": str(error)}
    if rollout is not None:
        trainer = on_completions(model_dir, output_dir, rollout, **config)
    elif case is None:
        trainer = sft(model_dir, output_dir, **config)
    else:
        preference._model_dir = lambda *_, **__: model_dir
        trainer = preference.trainer_for(preference.Case(**case, settings=config), Path(output_dir), ours=True)
    if not config.get("ours", True):
        trainer.train()
        return {"log": shared.logged(trainer)}
    watcher = Watcher(trainer, stop_at)
    trainer.add_callback(watcher)
    with suppress(TrainingPreempted):
        trainer.train(resume_from_checkpoint=resume)
    parts = trainer.model.state_dict(keep_vars=True)
    weights = trainer.backend.fetch(parts)
    return {
        "log": shared.logged(trainer),
        "step": trainer.state.global_step,
        "compiles": watcher.compiles,
        "shapes": watcher.shapes,
        "longest": watcher.longest,
        "recompiles": trainer.watch.recompiles,
        "held": [_bytes(parts), _bytes(weights)],
        "weights": {name: value.double().sum().item() for name, value in weights.items()},
    }


def _bytes(weights):
    """Of what this process holds; tied weights once."""
    local = {id(weight): weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights.values()}
    return sum(weight.nbytes for weight in local.values())


def main(model_dir, directory, spec_file, output_file):
    spec = json.loads(Path(spec_file).read_text())
    results = {
        # By the same name on the disk of each host, or on one that all see.
        name: run(model_dir, name if config.pop("own_disk", False) else f"{directory}/{name}", **config)
        for name, config in spec.items()
    }
    noted = [None] * dist.get_world_size()
    dist.all_gather_object(noted, results)
    if dist.get_rank() == 0:
        Path(output_file).write_text(json.dumps(noted))


if __name__ == "__main__":
    main(*sys.argv[1:])
