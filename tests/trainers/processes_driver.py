"""
Trains tiny models in one of several processes that a launcher has started on the eager CPU, or in one on a GPU, with this package's
trainers and with upstream's, and notes what each process has seen.
"""

import hashlib
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


HERE = Path(__file__).parent
SECONDS = 300

# ---- What is trained ----

LEARNS = dict(max_steps=3, learning_rate=1e-2)
SAVES = dict(
    max_steps=6,
    kd_teacher="TEACHER",
    ema_decay=0.5,
    gradient_accumulation_steps=2,
    save_strategy="steps",
    save_steps=2,
    report_to="none",
)
TAUGHT = {
    "online": dict(LEARNS, kd_teacher="TEACHER"),
    "top-k": dict(LEARNS, kd_teacher="TEACHER", kd_top_k=8, kd_loss="jsd", gradient_accumulation_steps=2),
    "base": dict(LEARNS, kd_teacher="base", lora={}),
    "cached": dict(LEARNS, kd_cache="CACHE", lora={}),
}
# As upstream's trainers.
KINDS = {
    "sft": dict(max_steps=3, evaluate=True, gradient_accumulation_steps=2),
    "lora": dict(max_steps=3, lora={}, gradient_checkpointing=True),
    "dpo": dict(case=dict(kind="dpo", steps=3)),
    "kto": dict(case=dict(kind="kto", steps=3)),
    "reward": dict(case=dict(kind="reward", steps=3)),
    "grpo": dict(rollout=dict(kind="grpo", steps=3)),
    "rloo": dict(rollout=dict(kind="rloo", steps=3)),
    "distillation": dict(rollout=dict(kind="distillation", rewards=[], steps=3)),
}


def of_test(spec, teacher, cache):
    """A specification with the paths of a test."""
    paths = {"TEACHER": teacher, "CACHE": str(cache)}
    return {
        name: {key: paths.get(value, value) if isinstance(value, str) else value for key, value in config.items()}
        for name, config in spec.items()
    }


def build(directory, model_dir, teacher, data, per_file=4, use_cpu=True, **more):
    """What builds a cache of the rows that runs are taught on."""
    recipe = directory / "cache.yaml"
    directory.mkdir(exist_ok=True)
    values = {
        "model_name_or_path": str(model_dir),
        "dataset_name": str(data),
        "kd_teacher": teacher,
        "kd_cache": str(directory / "cache"),
        "max_length": 48,
        "per_device_eval_batch_size": 4,
        "bf16": False,
        "use_cpu": use_cpu,
        "disable_tqdm": True,
        "output_dir": str(directory / "unused"),
    }
    recipe.write_text(yaml.safe_dump(values))
    return {"command": {"words": ["cache-teacher", "--config", str(recipe)], "per_file": per_file, **more}}


def assert_same(found, expected, rel=1e-6):
    """
    Logged numbers are those of another run. Of a divergence, which is a difference of logarithms of about 5.4, to 1e-7 at least: the last bit
    of such a logarithm is 4.8e-7, and rows of other batches are summed in another order.
    """
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert sorted(mine) == sorted(other)
        for key, value in other.items():
            assert mine[key] == pytest.approx(value, rel=rel, abs=1e-7 if key == "kd_loss" else 1e-8), (
                f"{key} at step {other['step']}"
            )


def in_processes(spec, model_dir, directory, count=2, lost=False, backend="cpu"):
    """
    Run this file in `count` processes that meet by gloo, or in one with `backend="cuda"`: what each noted of each training, and
    what each printed. With `lost`, one is killed, and the others fail.
    """
    import forked

    directory.mkdir(parents=True, exist_ok=True)
    spec_file = directory / "spec.json"
    spec_file.write_text(json.dumps(spec))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    common |= {"HF_TPU_EXT_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    if backend == "cuda":
        # Of cuBLAS, which rounds otherwise from run to run without it.
        common |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "USE_TORCH_XLA": "0"}
    # Imports may have looked for GPUs, after which a fork cannot use them.
    start = subprocess.Popen if backend == "cuda" else forked.Popen
    outputs = [directory / f"noted-{rank}.json" for rank in range(count)]
    processes = [
        start(
            [sys.executable, __file__, *map(str, (model_dir, directory, spec_file, output))],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    if lost:
        assert -signal.SIGKILL in codes and 0 not in codes, printed
        return None, printed
    assert codes == [0] * count, printed[0][-6000:] + printed[-1][-6000:]
    return [json.loads(output.read_text()) for output in outputs], printed


def taught_rows(count=24):
    """Rows whose completions differ a lot in length: of two processes, one often has ten times the labels of the other."""
    from datasets import Dataset

    rng = random.Random(3)
    rows = []
    for index in range(count):
        # Rows 0 and 1 go to one process, rows 2 and 3 to the other.
        longest = 3 if index % 4 < 2 else 38
        prompt, completion = (
            "".join(rng.choices("abcdefgh ", k=size)) for size in (6, rng.randint(longest // 2, longest))
        )
        rows.append({"prompt": prompt, "completion": completion})
    return Dataset.from_list(rows)


def on_cpu():
    """Whether the processes train on the eager CPU."""
    return os.environ["HF_TPU_EXT_BACKEND"] == "cpu"


def _sft(shared, model_dir, output_dir, ours, lora=None, first_row=0, qlora=False, float32_adapters=False, **config):
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    from hf_tpu_ext import TPUSFTConfig, TPUSFTTrainer

    runs = shared.Runs(model_dir, output_dir)
    runs.eval_dataset = taught_rows()
    runs.train_dataset = runs.eval_dataset.select(range(first_row, len(runs.eval_dataset)))
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4") if qlora else None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, quantization_config=quantization)
    # Adapters begin at random.
    torch.manual_seed(0)
    defaults = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "warmup_steps": 0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "use_cpu": on_cpu(),
    }
    cls, config_cls = (TPUSFTTrainer, TPUSFTConfig) if ours else (SFTTrainer, SFTConfig)
    trainer = runs.trainer(cls, runs.config(config_cls, **{**defaults, **config}), model, lora)
    if float32_adapters:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return trainer


def _other(module, case, output_dir, ours, **config):
    config |= {"logging_steps": 1, "output_dir": str(output_dir), "use_cpu": on_cpu()}
    if ours:
        config["run_report"] = False
    return module.trainer_for(module.Case(**case, settings=config), Path(output_dir), ours)


def split_weights():
    """Have accelerate split weights by FSDP2 on the CPU, where it would make plain DDP of it."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    make = AcceleratorState.__init__

    def make_as_on_gpus(state, *args, **kwargs):
        if not AcceleratorState._shared_state:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        make(state, *args, **kwargs)

    AcceleratorState.__init__ = make_as_on_gpus


def make_trainer(model_dir, output_dir, case=None, rollout=None, ours=True, **config):
    spec = importlib.util.spec_from_file_location("trainers_conftest", HERE / "conftest.py")
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)
    if case is None and rollout is None:
        return _sft(shared, model_dir, output_dir, ours, **config)
    import preference
    import rollouts

    preference._model_dir = rollouts._model_dir = lambda *_, **__: str(model_dir)
    if rollout is not None:
        return _other(rollouts, rollout, output_dir, ours, **config)
    return _other(preference, case, output_dir, ours, **config)


def run_command(words, per_file, dies_at=None):
    """Run a command of `hf-tpu` with so many sequences in a file of a cache. Process 1 may be killed at its n-th file."""
    from hf_tpu_ext.cli.main import main
    from hf_tpu_ext.distillation import cache_writer

    cache_writer._MOST_SEQUENCES = per_file
    write, written = cache_writer.CacheWriter.write, []

    def write_or_die(writer, *args):
        written.append(args)
        if len(written) == dies_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        write(writer, *args)

    cache_writer.CacheWriter.write = write_or_die
    return {"status": main(words), "files": len(written)}


def run(
    model_dir,
    output_dir,
    resume=None,
    split=False,
    stop_at=None,
    stops_evaluation=False,
    left_alone=False,
    evaluate=False,
    **config,
):
    """
    Train as a specification says. The last process gets a SIGTERM within the step `stop_at`, or in an evaluation before it;
    `left_alone`, that ends the processes.
    """
    from torch.distributed.tensor import DTensor
    from transformers import TrainerCallback

    from hf_tpu_ext import TrainingPreempted

    if split:
        split_weights()
    trainer = make_trainer(model_dir, output_dir, **config)

    class StopOne(TrainerCallback):
        def stop(self, args, state, control, **kwargs):
            if state.global_step + 1 == stop_at and args.process_index + 1 == args.world_size:
                os.kill(os.getpid(), signal.SIGTERM)

    if stop_at is not None:
        setattr(StopOne, "on_prediction_step" if stops_evaluation else "on_step_begin", StopOne.stop)
        trainer.add_callback(StopOne())
    noted = {}
    try:
        trainer.train(resume_from_checkpoint=resume)
        if evaluate:
            trainer.evaluate()
    except TrainingPreempted as stop:
        if left_alone:
            raise
        noted["stopped"] = [stop.code, stop.reason, stop.checkpoint, stop.step]
    digest, parts = hashlib.sha256(), 0
    for name, weight in sorted(trainer.model.state_dict().items()):
        if isinstance(weight, DTensor):
            parts += weight.to_local().numel() < weight.numel()
            weight = weight.full_tensor()
        digest.update(name.encode() + weight.detach().float().cpu().numpy().tobytes())
    timed = ("runtime", "per_second", "flos", "preparation_time", "step_time", "phase/", "mfu", "memory")
    noted["log"] = [
        {key: value for key, value in entry.items() if not any(word in key for word in timed)}
        for entry in trainer.state.log_history
    ]
    noted |= {"step": trainer.state.global_step, "weights": digest.hexdigest(), "split weights": parts}
    return {
        **noted,
        "distributed": trainer.accelerator.distributed_type.value,
        "device": trainer.model.device.type,
    }


def main(model_dir, directory, spec_file, output_file):
    import torch

    from hf_tpu_ext.backends import select_backend

    # Else upstream takes the machine for one with a TPU.
    select_backend()
    torch.set_num_threads(1)
    # No sums of a GPU's threads in the order in which they happen to end.
    torch.use_deterministic_algorithms(True, warn_only=True)
    sys.path.insert(0, str(HERE))
    spec = json.loads(Path(spec_file).read_text())
    results = {}
    for name, config in spec.items():
        if "command" in config:
            results[name] = run_command(**config["command"])
        else:
            results[name] = run(model_dir, f"{directory}/{config.pop('dir', name)}", **config)
    Path(output_file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
