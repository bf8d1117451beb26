"""Parts of a model in compiled programs: the metadata of instructions names them."""

import re

from .hlo import Instruction


ATTENTION, ROPE_AND_NORMS, ADAPTERS = "attention", "rope and norms", "adapters"
HEAD, OPTIMIZER = "head", "optimizer"
#: The rest of a layer: its matrix products, and what is between them.
LAYER = "layer"
_PARTS = (ATTENTION, ROPE_AND_NORMS, ADAPTERS, HEAD, OPTIMIZER, LAYER)
_SCOPE = re.compile(rf"\[({'|'.join(_PARTS)})\]")


def scope_of(part: str) -> str:
    """The name of the operations of a part, which compilers keep as the metadata of instructions."""
    return f"[{part}]"


def part_of(line: Instruction) -> str | None:
    """The part that the metadata of an instruction names, the innermost if it names several; `None` if it names none."""
    found = _SCOPE.findall(line.op_name)
    return found[-1] if found else None
