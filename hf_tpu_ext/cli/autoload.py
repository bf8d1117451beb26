"""
What makes the stock `trl` command and scripts that use TRL's trainers train with the trainers of this package.

PyTorch calls [`autoload`] at the end of every `import torch` in the environment (entry point group `torch.backends`), so
it costs a few milliseconds in a process that it does not act on. Of this package only the words for yes and no are
imported at the top: another import may import torch, which would then ask for a module that is not there yet.
"""

import os
import sys

from ..yes_no import NO, YES


_SWITCH = "HF_TPU_EXT"
# What a stock `trl` that was asked for tells its child, in whose environment it puts what the recipe says.
_STOCK = "_HF_TPU_EXT_STOCK"


def autoload() -> None:
    """[`act`], without ever breaking `import torch` in an environment that this package is installed in."""
    try:
        act()
    except Exception as error:
        # Whatever it is: most processes that import PyTorch have nothing to do with this package.
        print(
            f"hf_tpu_ext does nothing in this process, because of an error of its own ({type(error).__name__}: {error}). Please "
            "report it with the output of: hf-tpu doctor --json",
            file=sys.stderr,
        )


def act() -> None:
    """
    Act on two kinds of process, and leave every other as it is.

    - A stock `trl sft`, `dpo`, `reward`, `kto`, `grpo`, `rloo` or `distillation` is replaced by `hf-tpu` with the same
      arguments, if it is asked for. Stock `trl` reads the recipe in a parent process, which starts the accelerator's runtime,
      and trains in a child of it; a TPU chip can be held by one process only. And only `hf-tpu` knows the settings of this
      package.
    - In any other process that has `HF_TPU_EXT=1` in its environment, TRL's trainers and configs are those of this
      package: [`~hf_tpu_ext.cli.swap.replace_trainers`].

    `trl` is replaced if `HF_TPU_EXT` is `1` in the environment or under the recipe's `env:` key, which counts more,
    or if it is set nowhere and the recipe would be trained on a TPU. `HF_TPU_EXT=0` in the environment switches all of this
    off, whatever the recipe says. Of a value that means neither, a line says so.
    """
    from ..backends.detect import remember_pjrt_device, skip_metadata_query
    from .swap import replace_trainers

    remember_pjrt_device()
    skip_metadata_query()
    switch = os.environ.get(_SWITCH, "").lower()
    _check(switch, "the environment")
    if switch in NO and _is_trl_training(sys.argv):
        os.environ[_STOCK] = "1"
    if switch in NO or _STOCK in os.environ:
        return
    if not _is_trl_training(sys.argv):
        if switch in YES:
            replace_trainers()
        return
    reason = _reason_to_replace(switch, sys.argv[2:])
    if reason is None:
        return
    command = f"trl {sys.argv[1]}"
    print(f"`{command}` is run by hf_tpu_ext, because {reason}; {_SWITCH}=0 runs the stock command.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without -P, `-m` would put the working directory on the module path, which the `trl` command does not.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "hf_tpu_ext.cli.main", *sys.argv[1:]])


def _check(switch: str, where: str) -> None:
    if switch and switch not in YES | NO:
        print(
            f"hf_tpu_ext: {_SWITCH}={switch!r} in {where} has no effect. Allowed: {', '.join(sorted(YES))}; "
            f"{', '.join(sorted(NO))}.",
            file=sys.stderr,
        )


def _is_trl_training(argv: list[str]) -> bool:
    from .swap import TRAINERS

    program = argv[0].replace(os.sep, "/") if argv else ""
    is_trl = program.rpartition("/")[2] == "trl" or program.endswith("/trl/cli/main.py")
    return is_trl and len(argv) > 1 and argv[1] in TRAINERS


def _reason_to_replace(switch: str, argv: list[str]) -> str | None:
    from ..backends.detect import would_use_tpu
    from .recipe import Recipe, read_recipe

    try:
        recipe = read_recipe(argv)
    except ValueError:
        # The command that reads the recipe next, stock or not, says what is wrong with it.
        recipe = Recipe()
    in_recipe = recipe.env.get(_SWITCH, "").lower()
    _check(in_recipe, "the recipe's env")
    if in_recipe in NO:
        return None
    if in_recipe in YES:
        return f"the recipe's env says {_SWITCH}: {in_recipe}"
    if switch in YES:
        return f"{_SWITCH}={switch} is set"
    if recipe.uses_cpu or not would_use_tpu(recipe.get("backend"), os.environ | recipe.env):
        return None
    return "this machine has a TPU"
