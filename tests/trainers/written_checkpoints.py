"""Small checkpoints that are written without a run."""

import json
import random
import shutil
from pathlib import Path

from hf_tpu_ext.atomic_write import move_into_place
from hf_tpu_ext.trainers.checkpoint.directories import temporary_dir
from hf_tpu_ext.trainers.checkpoint.verification import seal


def write_checkpoint(run_dir, step, seed=0):
    """A small one, with files of the kinds that a checkpoint has."""
    rng = random.Random(seed + step)
    checkpoint = Path(run_dir) / f"checkpoint-{step}"
    written = temporary_dir(checkpoint) / checkpoint.name
    (written / "adapter").mkdir(parents=True)
    for name, size in {
        "model.safetensors": 4000,
        "optimizer.pt": 3000,
        "adapter/adapter_model.safetensors": 500,
    }.items():
        (written / name).write_bytes(rng.randbytes(size))
    (written / "run_state.json").write_text(json.dumps({"num_tokens": rng.randrange(10**6)}))
    (written / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "log_history": [{"loss": 1.5}] * 5}, indent=2)
    )
    seal(written)
    move_into_place(written, checkpoint)
    shutil.rmtree(temporary_dir(checkpoint))
    return checkpoint


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
