"""Datasets as a directory of JSON Lines files, one per split, as `datasets.load_dataset(directory)` reads them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..atomic_write import write_atomically


def write_splits(output_dir: str | Path, splits: Mapping[str, Iterable[dict]]) -> Path:
    """Write the rows of each split as `<split>.jsonl`. A file appears under its name only when it is complete."""
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomically(output_dir / f"{split}.jsonl", "".join(lines))
    return output_dir


def count_rows(data_dir: str | Path) -> dict[str, int]:
    """Number of rows of each split in a directory that [`write_splits`] wrote."""
    return {path.stem: path.read_bytes().count(b"\n") for path in sorted(Path(data_dir).glob("*.jsonl"))}
