"""
What of each recipe is compiled with torch_tpu: a table in `docs/torch_tpu.md`.

    python tests/torch_tpu/recipe_table.py [--only NAME] [--write-docs]

Each recipe trains as `--smoke` shortens it, in a process of its own, on the host by the PJRT plug-in for CPU.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "benchmarks")]

from recipe_commands import RECIPES, command_of  # noqa: E402
from tables import make_parser, publish  # noqa: E402


ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "torch_tpu.md"
#: How a line begins that says of a run that its steps are not compiled whole.
LAYERS, OPERATORS = (
    r"The \d+ layers are compiled one by one, and the rest is run by operators: (.*)",
    r"Steps are run by operators: (.*)",
)


def run(directory: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run `hf-tpu` on the host."""
    (directory / "sitecustomize.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport cpu_plugin\ncpu_plugin.start()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), str(ROOT)])}
    command = [sys.executable, "-m", "hf_tpu_ext.cli.main", *argv]
    return subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, check=False)


def row_of(directory: Path, recipe: Path) -> str:
    """The row of a recipe."""
    model = "tiny_vision" if recipe.stem.startswith("sft_vlm") else "tiny"
    argv = ["--config", str(recipe), "--smoke", model]
    if "\nkd_cache:" in recipe.read_text(encoding="utf-8"):
        argv += ["--kd_cache", str(directory / "cache")]
        cached = run(directory, "cache-teacher", *argv)
        assert cached.returncode == 0, cached.stderr[-3000:]
    made = run(directory, command_of(recipe), *argv, "--output_dir", f"out_{recipe.stem}")
    told = made.stdout + made.stderr
    if made.returncode:
        error = re.search(r"^(?:\w*Error|hf-tpu: error): (.*)$", told, re.MULTILINE)
        return f"| `{recipe.stem}` | fails | {error[1] if error else made.returncode} |"
    for what, pattern in (("layers", LAYERS), ("operators", OPERATORS)):
        if found := re.search(pattern, told):
            return f"| `{recipe.stem}` | {what} | {found[1].strip().rstrip('.')} |"
    return f"| `{recipe.stem}` | the whole step | |"


def main() -> None:
    """Print the table, or write it."""
    parser = make_parser(__doc__, PAGE)
    parser.add_argument("--only", help="a part of the names of recipes")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp())
    for model, name in (("qwen3", "tiny"), ("smolvlm", "tiny_vision")):
        made = run(directory, "prepare", "tiny", "--model_type", model, "--output_dir", name)
        assert made.returncode == 0, made.stderr[-3000:]
    rows = []
    for recipe in RECIPES:
        if args.only is None or args.only in recipe.stem:
            rows.append(row_of(directory, recipe))
            print(rows[-1], flush=True)
    publish(args, PAGE, "recipes", "\n".join(["| Recipe | Compiled | Why no more |", "|---|---|---|", *rows]), rows)


if __name__ == "__main__":
    main()
