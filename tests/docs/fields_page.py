"""
Writes the tables of docs/configuration.md: the fields of this package, and which field of upstream does what on XLA.

    python tests/docs/fields_page.py --write-docs
"""

import dataclasses
import re
import sys
from pathlib import Path

from hf_tpu_ext import trainers
from hf_tpu_ext.trainers.checks import fields


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from tables import make_parser, publish  # noqa: E402


PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def own_fields() -> str:
    """The fields that this package adds to upstream's arguments, in the words of `--help`, and which configs have them."""
    configs = [
        value for name, value in vars(trainers).items() if name.startswith("TPU") and dataclasses.is_dataclass(value)
    ]
    found: dict[str, tuple[dataclasses.Field, list[str]]] = {}
    for config in configs:
        names = {
            name
            for cls in config.__mro__
            if cls.__module__.startswith("hf_tpu_ext.")
            for name in vars(cls).get("__annotations__", {})
        }
        for field in dataclasses.fields(config):
            if field.name in names:
                found.setdefault(field.name, (field, []))[1].append(config.__name__)
    lines = ["| Field | Default | Meaning |", "|---|---|---|"]
    for name, (field, owners) in found.items():
        of = "" if len(owners) == len(configs) else f" ({_code(sorted(owners))})"
        lines.append(f"| `{name}` | `{field.default!r}` | {field.metadata['help'].replace('|', '&#124;')}{of} |")
    return "\n".join(lines)


def tables() -> dict[str, str]:
    """The tables of the page, by the names of their markers."""
    about: dict[str, list[str]] = {}
    for row in fields.WORK:
        about.setdefault(row.says, []).extend(row.names.split())
    works = ["| About | Fields |", "|---|---|", *(f"| {what} | {_code(names)} |" for what, names in about.items())]
    found = {"own_fields": own_fields(), "fields_work": "\n".join(works)}
    for name, rows in (
        ("fields_replaced", fields.REPLACED),
        ("fields_without_effect", fields.WITHOUT_EFFECT),
        ("fields_refused", fields.REFUSED_ON_XLA),
        ("fields_refused_anywhere", fields.REFUSED_ANYWHERE),
    ):
        found[name] = "\n".join(["| Field | |", "|---|---|", *map(_line, rows)])
    return found


def _line(row) -> str:
    beside = f"; with it {_code(row.beside.split())}" if row.beside else ""
    # What a message takes from the arguments.
    says = re.sub(r"=?\{args[^}]*\}", "", row.says.replace("{on}", ""))
    said = says.removeprefix("is replaced by ").removeprefix("has no effect: ")
    return f"| {_code(row.names.split())}{row.values and f' {row.values}'}{beside} | {said} |"


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    arguments = make_parser(__doc__, PAGE).parse_args()
    for name, table in tables().items():
        publish(arguments, PAGE, name, table, table)
