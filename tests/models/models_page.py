"""
Writes the tables of docs/models.md from the results of tests/models/families.py:

    python tests/models/models_page.py --write-docs
"""

import sys
from pathlib import Path

from families import (
    LAYERS_OF,
    difference,
    is_equal,
    is_equal_by_sgd,
    is_near_to_exact,
    read_results,
    why_not_replayed,
)
from tasks import TASKS


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tables import make_parser, publish  # noqa: E402


PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_RECIPES = {
    "sft": "`TPUSFTTrainer`",
    "sft without checkpointing": "`TPUSFTTrainer`, `gradient_checkpointing=False`",
    "trainer": "`TPUTrainer`",
}
# What was found out about a family of a task otherwise.
_KNOWN = {
    "image_text/paligemma": "beside upstream's eager attention: with SDPA, tokens of a batch without padding see later ones there",
}


def tables() -> dict[str, str]:
    """The tables of the page, by the names of their markers."""
    families: dict[str, dict[str, dict[str, dict]]] = {task: {} for task in TASKS}
    for key, result in read_results().items():
        task, family, kind = key.split("/")
        families[task].setdefault(family, {})[kind] = result
    layers = {"causal": read_results(LAYERS_OF)}
    found = {f"models_{task}": _table(task, runs_of, layers.get(task)) for task, runs_of in families.items()}
    others = ["| Auto class | `model_type` | Upstream's error on the CPU |", "|---|---|---|"]
    others += [
        f"| `{TASKS[task].auto}` | `{name}` | {_code(runs['full']['stock']['error'])} |"
        for task, runs_of in families.items()
        for name, runs in runs_of.items()
        if not _is_trained(runs)
    ]
    return {**found, "models_untrained": "\n".join(others)}


def _is_trained(runs: dict[str, dict]) -> bool:
    return any("ours" in run for run in runs.values())


def _table(task: str, families: dict[str, dict[str, dict]], layers: dict[str, dict] | None) -> str:
    trained = {name: runs for name, runs in families.items() if _is_trained(runs)}
    good = [name for name, runs in trained.items() if all(_is_good(run) for run in runs.values() if "ours" in run)]
    summary = (
        f"Of {len(families)} families, upstream trains {len(trained)} here. {len(good)} of these are trained with equal numbers by "
        "replayed steps, without a transfer to the host; the last column says what the others do."
    )
    columns = ["`model_type`", "Recipe", "Full fine-tuning", "LoRA", *(["Loop", "Kernel"] if layers else []), "Remark"]
    rows = [" | ".join(["", *columns, ""]).strip(), "|---" * len(columns) + "|"]
    rows += [_row(f"{task}/{name}", runs, layers and layers.get(name, {})) for name, runs in trained.items()]
    if layers:
        of_trained = [layers[name] for name in trained if name in layers]
        counts = [sum(found.get(kind, "") is None for found in of_trained) for kind in ("loop", "kernel")]
        summary += " Of {} that were looked at, {} have a loop and {} the kernel.".format(len(of_trained), *counts)
    return summary + "\n\n" + "\n".join(rows)


def _is_good(run: dict) -> bool:
    ours = run["ours"]
    return "losses" in ours and is_equal(run) and why_not_replayed(ours) is None and not ours["fallbacks_of"]


def _row(key: str, runs: dict[str, dict], layers: dict[str, str | None] | None) -> str:
    (recipe, *_) = (_RECIPES[run["stock"]["recipe"]] for run in runs.values() if "ours" in run)
    remarks = list(dict.fromkeys(remark for run in runs.values() if (remark := _remark(run))))
    remarks += [_KNOWN[key]] if key in _KNOWN else []
    cells = [_cell(runs.get(kind)) for kind in ("full", "lora")]
    if layers is not None:
        cells += ["yes" if (reason := layers.get(kind, "")) is None else reason for kind in ("loop", "kernel")]
    return f"| `{key.partition('/')[2]}` | {recipe} | {' | '.join(cells)} | {'; '.join(remarks)} |"


def _cell(run: dict | None) -> str:
    if run is None or "ours" not in run:
        return "upstream fails" if run else ""
    ours = run["ours"]
    if "error" in ours:
        return "refused" if ours.get("refused") else "fails"
    off = f"{difference(ours, run['stock']):.0e}"
    return off if is_equal(run) else f"**{off}**"


def _remark(run: dict) -> str:
    ours = run.get("ours")
    if ours is None:
        return f"upstream: {_code(run['stock']['error'])}"
    if "error" in ours:
        return ours["error"].partition(": ")[2] or ours["error"]
    said = []
    if (reason := why_not_replayed(ours)) is not None:
        said.append(f"steps are traced: {reason}")
    if ours["fallbacks_of"]:
        said.append(f"on the host: {', '.join(f'`{name}`' for name in ours['fallbacks_of'])}")
    if difference(ours, run["stock"]) > 1e-5 and is_near_to_exact(run):
        said.append("as near to float64 as upstream")
    elif is_equal_by_sgd(run):
        off = difference(**run["by_sgd"])
        said.append(
            f"with SGD {off:.0e}: Adam makes whole steps of gradients that are rounding alone, or 0 and not absent"
        )
    return "; ".join(said)


def _code(error: str) -> str:
    return f"`{error[:110].replace('|', ' ').replace('`', '')}`"


def main() -> None:
    arguments = make_parser(__doc__, PAGE).parse_args()
    for name, block in tables().items():
        publish(arguments, PAGE, name, block, read_results())


if __name__ == "__main__":
    main()
