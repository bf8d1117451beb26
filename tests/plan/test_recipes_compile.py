"""
Every recipe, with a tiny model, compiles for a v5e-8, into the programs that it was seen to compile into.

    HF_TPU_EXT_WRITE_GOLDEN=1 pytest -m slow tests/plan/test_recipes_compile.py

writes down what it compiles into now. What changed is then seen in the difference of `golden/`.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import forked
import pytest
import yaml
from recipe_commands import RECIPES, command_of

from hf_tpu_ext.cli.main import main
from hf_tpu_ext.plan.hlo import parse_module


GOLDEN = Path(__file__).parent / "golden"
#: Instructions by which a program waits for the host.
HOST = ("infeed", "outfeed", "send", "recv")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    assert main(["prepare", "tiny", "--output_dir", str(directory / "text")]) == 0
    assert main(["prepare", "tiny", "--model_type", "smolvlm", "--output_dir", str(directory / "images")]) == 0
    return directory


def summarize(planned, directory):
    """What is to stay the same of a recipe's programs."""
    programs = {}
    for program in planned["programs"]:
        shape = "x".join(map(str, program["batch_shape"]))
        text = (directory / f"{program['kind'].replace(' ', '_')}_{shape}.txt").read_text()
        counts = Counter(line.opcode for lines in parse_module(text).computations.values() for line in lines.values())
        programs[f"{program['kind']} {shape}"] = {
            "donated": len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0])),
            "exchanges": {item["kind"]: item["count"] for item in program["cost"]["exchanges"]},
            "host transfers": sum(counts[opcode] for opcode in HOST),
        }
    return programs


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_compiles_into_the_same_programs(recipe, tiny, tmp_path):
    command = command_of(recipe)
    argv = ["--config", recipe, "--smoke", tiny / ("images" if "vlm" in recipe.stem else "text")]
    if command not in ("grpo", "distillation"):
        # Prompts and completions are as long as they are.
        argv += ["--max_length", "128"]
    if "kd_cache" in yaml.safe_load(recipe.read_text()):
        argv += ["--kd_cache", tmp_path / "cache"]
        assert main(["cache-teacher", *map(str, argv)]) == 0
    done = forked.run(
        [sys.executable, "-m", "hf_tpu_ext.cli.main", "plan", command, *argv, "--jobs", "2"]
        + ["--topology", "v5e-8", "--json", tmp_path / "plan.json", "--hlo", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = summarize(json.loads((tmp_path / "plan.json").read_text()), tmp_path)
    golden = GOLDEN / f"{recipe.stem}.json"
    if os.environ.get("HF_TPU_EXT_WRITE_GOLDEN") == "1":
        golden.write_text(json.dumps(found, indent=2) + "\n")
    assert {program["host transfers"] for program in found.values()} == {0}
    assert found == json.loads(golden.read_text())
