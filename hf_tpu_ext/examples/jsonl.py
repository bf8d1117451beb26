"""Datasets as a directory of JSON Lines files, one per split, as `datasets.load_dataset(directory)` reads them."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_splits(output_dir: str | Path, splits: Mapping[str, Iterable[dict]]) -> Path:
    """Write the rows of each split as `<split>.jsonl`. A file appears under its name only when it is complete."""
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        partial = output_dir / f".{split}.jsonl.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.replace(partial, output_dir / f"{split}.jsonl")
    return output_dir


def count_rows(data_dir: str | Path) -> dict[str, int]:
    """Number of rows of each split in a directory that [`write_splits`] wrote."""
    counts = {}
    for path in sorted(Path(data_dir).glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            counts[path.stem] = sum(1 for _ in file)
    return counts
