"""
Traces the schemes of `schemes.py` for a plan.

    python trace_schemes.py DIRECTORY

The directory is one of `schemes.make_inputs`. Writes `traced.json` into it: by scheme its parameters and its programs.
"""

import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path

from schemes import CHIPS, SCHEMES, Scheme, make_trainer

from hf_tpu_ext import TPUSFTTrainer
from hf_tpu_ext.backends.selection import select_tracing
from hf_tpu_ext.layers import chunked_head
from hf_tpu_ext.plan.trace import trace_run


IN_A_LOOP = Scheme("fully sharded, LoRA, layers in a loop", "fsdp", lora=True, saving=True, scan_layers="on")


def main(directory: Path) -> None:
    """
    Trace all schemes.

    Args:
        directory (`Path`):
            Where model and rows are, and where the programs go.
    """
    select_tracing(CHIPS)
    # The loop over slices of the head has turns, as with a real vocabulary.
    chunked_head._TILE_ELEMENTS, chunked_head._LEAST_SLICE = 1, 64
    traced = {}
    for name, scheme in (SCHEMES | {"fsdp_in_a_loop": IN_A_LOOP}).items():
        trainers = []

        def train(adapt, scheme=scheme, trainers=trainers):
            trainers.append(make_trainer(adapt(TPUSFTTrainer), scheme, directory))
            trainers[0].train()

        programs, _ = trace_run(train)
        traced[name] = {
            "mesh": trainers[0].chips.mesh,
            "parameters": [asdict(parameter) for parameter in trainers[0].chips.sharding_plan.parameters],
            "programs": [
                asdict(program) | {"module": base64.b64encode(program.module).decode()} for program in programs
            ],
        }
    (directory / "traced.json").write_text(json.dumps(traced), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
