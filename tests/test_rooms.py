"""Packages import one way: each from those above it in the table of CONTRIBUTING.md, and so do the rooms of `trainers/`."""

import ast
import re
from pathlib import Path

import pytest

import hf_tpu_ext


ROOT = Path(hf_tpu_ext.__file__).parent
CONTRIBUTING = ROOT.parent / "CONTRIBUTING.md"


def rooms_of(heading: str) -> list[list[str]]:
    """The names in the first column of the table below a heading, a list for each row."""
    _, _, text = CONTRIBUTING.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    rows = re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.M)
    return [[name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", row)] for row in rows]


def imported(file: Path, package: tuple[str, ...]) -> set[str]:
    """The rooms of a package that a file of it imports from, at whatever depth of the code."""
    here = (hf_tpu_ext.__name__, *file.relative_to(ROOT).with_suffix("").parts)
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        is_relative = isinstance(node, ast.ImportFrom) and node.level
        base = here[: -node.level] if is_relative else ()
        for alias in node.names:
            parts = f"{node.module or ''}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            name = (*base, *filter(None, parts.split(".")))
            if name[: len(package)] == package and len(name) > len(package):
                rooms.add(name[len(package)])
    return rooms


@pytest.mark.parametrize("package, heading", [((), "Packages"), (("trainers",), "Rooms of the trainers")])
def test_a_room_imports_only_from_rooms_above_it(package, heading):
    order = {name: place for place, row in enumerate(rooms_of(heading)) for name in row}
    directory = ROOT.joinpath(*package)
    files = {
        file: file.relative_to(directory).parts[0].removesuffix(".py")
        for file in sorted(directory.rglob("*.py"))
        if file.parent != directory or file.name != "__init__.py"
    }
    assert set(files.values()) <= order.keys()
    wrong = [
        f"{file.relative_to(ROOT)} imports from {other}"
        for file, room in files.items()
        for other in imported(file, (hf_tpu_ext.__name__, *package)) - {room}
        if other in order and order[other] > order[room]
    ]
    assert not wrong
