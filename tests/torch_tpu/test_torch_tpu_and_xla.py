"""A run that goes on with torch_xla, in the environment of `make setup`, and with torch_tpu again."""

import json
import os
import subprocess
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
XLA_PYTHON = ROOT / ".venv" / "bin" / "python"
CONFIG = dict(max_steps=6, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
_ON_XLA = """
import json, sys
sys.path.insert(0, "tests/trainers")
from conftest import Runs, logged
from hf_tpu_ext.backends import select_backend
assert select_backend().name == "xla"
model_dir, output_dir, lora, config = sys.argv[1:]
trainer = Runs(model_dir, output_dir).ours(lora=json.loads(lora), train=False, **json.loads(config))
trainer.train(resume_from_checkpoint=f"{output_dir}/checkpoint-2")
"""


@pytest.mark.slow
@pytest.mark.skipif(not XLA_PYTHON.exists(), reason="`make setup` makes an environment with torch_xla")
@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
def test_a_run_goes_on_with_torch_xla_and_again_with_torch_tpu(runs, same_logs, as_trainer, lora):
    from hf_tpu_ext import TPUSFTConfig

    runs.ours(lora=lora, config_cls=TPUSFTConfig, gradient_checkpointing=False, **CONFIG)
    command = [str(XLA_PYTHON), "-c", _ON_XLA, str(runs.model_dir), str(runs.output_dir), json.dumps(lora)]
    # Its own checkpoint of step 4 takes the place of the one that is there.
    subprocess.run(
        [*command, json.dumps({**CONFIG, "gradient_checkpointing": False})],
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=600,
        cwd=ROOT,
    )
    trainer = runs.ours(lora=lora, train=False, config_cls=TPUSFTConfig, gradient_checkpointing=False, **CONFIG)
    trainer.train(resume_from_checkpoint=str(runs.output_dir / "checkpoint-4"))
    stock = runs.stock(lora=lora, gradient_checkpointing=False, **CONFIG)
    # The last entry is of the part of a run that has ended.
    same_logs(as_trainer(trainer.state.log_history[:-1]), as_trainer(stock.state.log_history[:-1]))
