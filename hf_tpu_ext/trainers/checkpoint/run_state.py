"""What upstream's checkpoint leaves out of the state of a run."""

import json
from pathlib import Path
from typing import Any

from ...atomic_write import write_atomically


_FILE = "run_state.json"


def write_run_state(checkpoint: str, state: dict[str, Any]) -> None:
    """Write, as JSON, what upstream's checkpoint leaves out. The file is whole or not there."""
    write_atomically(Path(checkpoint) / _FILE, json.dumps(state))


def read_run_state(checkpoint: str) -> dict[str, Any]:
    """Read what [`write_run_state`] wrote; of a checkpoint of upstream's trainer, nothing."""
    path = Path(checkpoint) / _FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
