"""The sub-commands that train from a recipe, for those that work on such a recipe without training from it."""

from . import pretrain
from .trl_scripts import SCRIPTS


#: By name: TRL's scripts, and the script of this package.
COMMANDS = {**SCRIPTS, "pretrain": pretrain}


def take_command(own: str, argv: list[str]) -> tuple[str, str, list[str]]:
    """
    Take the name of a training command off the arguments of the command `own`. Returns that name, `"sft"` where none is
    given; the title of both, e.g. `"plan dpo"`; and the other arguments.
    """
    if argv and argv[0] in COMMANDS:
        return argv[0], f"{own} {argv[0]}", argv[1:]
    return "sft", own, argv
