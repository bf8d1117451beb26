"""Trains tiny models as one host of a pretended slice, or where there is none, in a process with as many devices."""

import json
import os
import resource
import sys
import time
from pathlib import Path


if "SLICE_HOST" in os.environ:
    import join_slice  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))

import torch  # noqa: E402
from conftest import LORA, Runs, logged, make_rows  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback  # noqa: E402

from hf_tpu_ext import (  # noqa: E402
    TPUDPOConfig,
    TPUDPOTrainer,
    TPUGRPOConfig,
    TPUGRPOTrainer,
    TPUSFTConfig,
    TPUSFTTrainer,
)
from hf_tpu_ext.backends import select_backend  # noqa: E402
from hf_tpu_ext.backends.xla import backend as xla_backend  # noqa: E402
from hf_tpu_ext.backends.xla import hosts as xla_hosts  # noqa: E402
from hf_tpu_ext.trainers.checkpoint import saving  # noqa: E402


HOST = int(os.environ.get("SLICE_HOST", "0"))


class TellSteps(TrainerCallback):
    """Says when steps end, for the test to act, and makes them as long as asked for."""

    def __init__(self, seconds):
        self.seconds = seconds

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}", flush=True)
        time.sleep(self.seconds)


class StopByTheClock(TrainerCallback):
    """Decides by the clock of its host, which says another time on each."""

    def __init__(self, seconds):
        self.seconds = seconds + HOST

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.begin = time.monotonic()
        past = time.monotonic() - self.begin
        control.should_log = int(past * 3) % 2 == HOST % 2
        if past > self.seconds:
            control.should_training_stop = True


class RateByTheClock(TrainerCallback):
    """Sets a learning rate that is not the same on all hosts, after some steps."""

    def on_step_end(self, args, state, control, optimizer, **kwargs):
        if state.global_step == 3:
            optimizer.param_groups[0]["lr"] = 1e-4 * (1 + HOST)


class ChangeTheModel(TrainerCallback):
    """Changes what Python reads in a step on one host only, to the same program."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == 5 and HOST == 1:
            model.config.note = "changed"


CALLBACKS = {
    "clock": lambda: StopByTheClock(2.0),
    "rate": RateByTheClock,
    "change": ChangeTheModel,
    "slow": lambda: TellSteps(0.4 * HOST),
    "tell": lambda: TellSteps(0.2),
    "early": lambda: EarlyStoppingCallback(early_stopping_patience=1),
}


def preferences(count):
    rows = make_rows(2 * count)
    first, second = rows.select(range(count)), rows.select(range(count, 2 * count))
    return Dataset.from_dict(
        {"prompt": first["prompt"], "chosen": first["completion"], "rejected": second["completion"]}
    )


def reward(completions, **kwargs):
    """Of each host's own: those of the first count."""
    return [len(set(text)) / 10 + 0.01 * HOST * (index % 3) for index, text in enumerate(completions)]


# A tiny model's state is streamed as a large one's.
xla_backend.FETCHED_AT_ONCE = 0


def make(
    model_dir, output_dir, kind="sft", lora=None, callbacks=(), rows=120, rows_seed=0, weights_seed=None, **config
):
    runs = Runs(model_dir, output_dir)
    given = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, **config}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if weights_seed is not None:
        torch.manual_seed(weights_seed)
        torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
    torch.manual_seed(0)
    made = [CALLBACKS[name]() for name in callbacks]
    if kind == "sft":
        runs.train_dataset = make_rows(rows, seed=rows_seed)
        return runs.trainer(TPUSFTTrainer, runs.config(TPUSFTConfig, **given), model, lora, callbacks=made)
    if kind == "grpo":
        common = dict(learning_rate=1e-3, logging_steps=1, report_to="none", bf16=False, disable_tqdm=True)
        common |= dict(num_generations=4, max_completion_length=8, run_report=False)
        return TPUGRPOTrainer(
            model,
            reward_funcs=reward,
            args=TPUGRPOConfig(str(output_dir), **common, **{**given, "per_device_eval_batch_size": 4}),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            train_dataset=make_rows(rows).select_columns("prompt"),
            callbacks=made,
        )
    return TPUDPOTrainer(
        model,
        args=runs.config(TPUDPOConfig, **given),
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=preferences(rows),
        eval_dataset=preferences(16),
        peft_config=None if lora is None else LoraConfig(task_type="CAUSAL_LM", **{**LORA, **lora}),
        callbacks=made,
    )


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def pretend(version=None, disk_full=False, largest_file=None):
    """Make this host another machine than the others: with another version of a package, or a full disk."""
    if version is not None:
        from hf_tpu_ext.trainers.run import status

        find = status.version
        status.version = lambda name: "0.0.0" if name == version else find(name)
    if disk_full:
        saving.seal = fail_for_space
    if largest_file is not None:
        # A write fails in the middle of a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))


def fail_for_space(directory):
    raise OSError(28, "No space left on device", str(directory))


def run(
    model_dir,
    output_dir,
    resume=None,
    stop_after=None,
    saves_alone=False,
    counts=False,
    version=None,
    disk_full=False,
    largest_file=None,
    **settings,
):
    pretend(version, disk_full, largest_file)
    held = count_gathered() if counts else {}
    trainer = make(model_dir, output_dir, **settings)
    if stop_after is not None:
        trainer.add_callback(StopAfter(stop_after))
    if saves_alone and HOST == 0:
        trainer.save_model()
    trainer.train(resume_from_checkpoint=resume)
    return {
        "log": logged(trainer),
        "steps": trainer.state.global_step,
        "replays": trainer.backend.counters().replays,
        "recompiles": trainer.watch.recompiles,
        "why_not": trainer.steps.why_traced,
        "gathered": held,
        "mesh": None if trainer.backend._mesh is None else trainer.backend._mesh.get_logical_mesh().tolist(),
        "best": trainer.state.best_model_checkpoint,
    }


def count_gathered():
    """Bytes of what is made whole for a read, each by itself, how many are kept, and how many of these at once."""
    held = {"largest": 0, "read": 0, "dropped": 0, "at_once": 0}
    kept = []
    gathered, read_split = xla_hosts.gather, xla_hosts.read_split

    def count(tensor, mesh):
        held["largest"] = max(held["largest"], tensor.nbytes)
        return gathered(tensor, mesh)

    def read(*args, **kwargs):
        for tensor in read_split(*args, **kwargs):
            held["dropped" if tensor.device.type == "meta" else "read"] += tensor.nbytes
            if tensor.device.type != "meta":
                kept[:] = [(storage, size) for storage, size in kept if not storage.expired()]
                kept.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
                held["at_once"] = max(held["at_once"], sum(size for _, size in kept))
            yield tensor

    if read_split.__name__ == "read_split":
        xla_hosts.gather = count
        select_backend("xla")
        import hf_tpu_ext.backends.xla.backend as xla

        xla.read_split = read
    return held


if __name__ == "__main__":
    model_dir, spec_file, output_file = sys.argv[1:]
    spec = json.loads(Path(spec_file).read_text())
    results = {}
    for name, settings in spec.items():
        settings |= settings.pop(f"host_{HOST}", {})
        settings = {key: value for key, value in settings.items() if not key.startswith("host_")}
        os.environ.update(settings.pop("environment", {}))
        os.chdir(settings.pop("working_dir", "."))
        results[name] = run(model_dir, **settings)
    Path(f"{output_file}.{HOST}").write_text(json.dumps(results))
