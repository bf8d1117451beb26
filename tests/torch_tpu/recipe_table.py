"""
What of each recipe is compiled with torch_tpu, and how far its losses are from eager CPU: a table in `docs/torch_tpu.md`.

    python tests/torch_tpu/recipe_table.py [--only NAME] [--write-docs]

Each recipe trains as `--smoke` shortens it, in a process of its own, on the host by the PJRT plug-in for CPU. Then it trains
twice more with what makes losses comparable, see [`comparable`]: on torch_tpu and on eager CPU. With `--only`, the other rows
of the table stay.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "benchmarks")]

from recipe_commands import RECIPES, command_of  # noqa: E402
from tables import make_parser, publish  # noqa: E402


ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "torch_tpu.md"
HEAD = ["| Recipe | Compiled | Why no more | Largest difference of a loss |", "|---|---|---|---:|"]
#: How a line begins that says of a run that its steps are not compiled whole.
LAYERS, OPERATORS = (
    r"The \d+ layers are compiled one by one, and the rest is run by operators: (.*)",
    r"Steps are run by operators: (.*)",
)
#: Runs command lines of `hf-tpu` in one process. With the word `given`, what follows is trained on given completions.
PROGRAM = f"""
import json, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "trainers")!r}, {str(HERE.parent)!r}]
import cpu_plugin
cpu_plugin.start()
from hf_tpu_ext.cli.main import main
for argv in json.loads(sys.argv[1]):
    if argv == ["given"]:
        import rollouts
        for kind in ("grpo", "distillation"):
            turn, (trainer, _) = rollouts.OURS[kind][0].__mro__[1], rollouts.WRITING[kind]
            trainer._generate_single_turn, trainer._completions = turn._generate_single_turn, turn._completions
    elif status := main(argv):
        sys.exit(status)
"""


def run(directory: Path, *commands: list[str]) -> subprocess.CompletedProcess:
    """Run command lines of `hf-tpu` on the host."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def comparable(recipe: Path) -> list[str]:
    """
    What a recipe is given for its losses to be those of another device: float32, no dropout, whose masks are drawn by another
    generator, and a reward that differs from completion to completion, as these are given.
    """
    fields = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    # Of the plug-in the host cannot have pinned memory, which PyTorch's loader asks for where no batch goes to it.
    argv = ["--bf16", "false", "--save_strategy", "steps", "--dataloader_pin_memory", "false"]
    if fields.get("use_peft"):
        argv += ["--lora_dropout", "0"]
    if "load_in_4bit" in fields:
        # On the CPU, bitsandbytes packs weights anew for an evaluation, and gradients after it are others.
        argv += ["--eval_strategy", "no"]
    if "dtype" in fields:
        argv += ["--dtype", "float32"]
    if "teacher_model_init_kwargs" in fields:
        argv += ["--teacher_model_init_kwargs", '{"dtype": "float32"}']
    if command_of(recipe) in ("grpo", "distillation"):
        # With code that is not this package's, which gives completions, a step is whole where that is known to be the same.
        argv += ["--step_replay", "true"]
    if "reward_funcs" in fields:
        argv += ["--reward_funcs", "rollouts.of_length"]
    return argv


def losses_of(output_dir: Path) -> list[float]:
    """Each loss that a run of four steps has logged."""
    state = json.loads((output_dir / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    return [value for entry in state["log_history"] for key, value in entry.items() if "loss" in key]


def row_of(directory: Path, recipe: Path) -> str:
    """The row of a recipe."""
    model = "tiny_vision" if recipe.stem.startswith("sft_vlm") else "tiny"
    argv = ["--config", str(recipe), "--smoke", model]
    if "\nkd_cache:" in recipe.read_text(encoding="utf-8"):
        argv += ["--kd_cache", str(directory / f"cache_{recipe.stem}")]
        cached = run(directory, ["cache-teacher", *argv])
        assert cached.returncode == 0, cached.stderr[-3000:]
    train = [command_of(recipe), *argv, "--output_dir"]
    made = run(directory, [*train, f"out_{recipe.stem}"])
    told = made.stdout + made.stderr
    if made.returncode:
        error = re.search(r"^(?:\w*Error|hf-tpu: error): (.*)$", told, re.MULTILINE)
        return f"| `{recipe.stem}` | fails | {error[1] if error else made.returncode} | |"
    compiled, why, more = "the whole step", "", ["--compile_step", "step"]
    for what, pattern in (("layers", LAYERS), ("operators", OPERATORS)):
        if found := re.search(pattern, told):
            compiled, why, more = what, found[1].strip().rstrip(".") + " ", []
    backends = ("tpu", "cpu")
    twice = [[*train, f"{on}_{recipe.stem}", "--backend", on, *more, *comparable(recipe)] for on in backends]
    compared = run(directory, ["given"], *twice)
    assert compared.returncode == 0, compared.stderr[-3000:]
    ours, eager = (losses_of(directory / f"{on}_{recipe.stem}") for on in backends)
    assert any(eager), eager
    far = max(abs(mine - other) / max(1, abs(other)) for mine, other in zip(ours, eager, strict=True))
    return f"| `{recipe.stem}` | {compiled} | {why}| {far:.0e} |"


def main() -> None:
    """Print the table, or write it."""
    parser = make_parser(__doc__, PAGE)
    parser.add_argument("--only", help="a part of the names of recipes")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    sizes = (("qwen3", "tiny"), ("smolvlm", "tiny_vision"))
    made = run(directory, *(["prepare", "tiny", "--model_type", model, "--output_dir", name] for model, name in sizes))
    assert made.returncode == 0, made.stderr[-3000:]
    table = PAGE.read_text(encoding="utf-8").partition("recipes:start -->")[2].partition("<!--")[0]
    rows = {line.split("`")[1]: line for line in table.splitlines() if "`" in line}
    for recipe in RECIPES:
        if args.only is None or args.only in recipe.stem:
            rows[recipe.stem] = row_of(directory, recipe)
            print(rows[recipe.stem], flush=True)
    found = [rows[recipe.stem] for recipe in RECIPES if recipe.stem in rows]
    publish(args, PAGE, "recipes", "\n".join([*HEAD, *found]), found)


if __name__ == "__main__":
    main()
