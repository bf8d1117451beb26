"""The small training of the doctor, watched from outside."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .watched import WatchedProcess


#: What is tried, in this order.
PHASES = ("runtime", "data", "forward", "backward", "step", "gradient sync", "save", "resume", "export")
_FIXES = {"save": "Look at the room on the disk of TMPDIR"}


@dataclass
class SmokeTest(WatchedProcess):
    """A small training. After a phase that failed there is none."""

    command: Sequence[str] = (sys.executable, "-m", "hf_tpu_ext.doctor.training")
    # A first program on a TPU may take a minute.
    patience: float = 180
    names: Sequence[str] = PHASES
    fixes: Mapping[str, str] = field(default_factory=lambda: _FIXES)
