"""
What makes the stock `trl` command and scripts that use TRL's trainers train with the trainers of this package.

PyTorch calls [`autoload`] at the end of every `import torch` in the environment (entry point group `torch.backends`), so
it costs a few milliseconds in a process that it does not act on. Nothing of this package is imported at the top: such
an import may import torch, which would then ask for a module that is not there yet.
"""

import importlib.util
import os
import sys


_SWITCH = "HF_TPU_EXT"
_ON = {"1", "true", "yes", "on"}
_OFF = {"0", "false", "no", "off"}
#: Commands of `trl` that train, and the trainers of their scripts. `SFTTrainer` is replaced by `TPUSFTTrainer`, and so on.
TRAINERS = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "reward": "RewardTrainer",
    "kto": "KTOTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "distillation": "DistillationTrainer",
}
# Where TRL defines them.
_MODULES = {f"trl.trainer.{command}_trainer": trainer for command, trainer in TRAINERS.items()}


def autoload() -> None:
    """
    Act on two kinds of process, and leave every other as it is.

    - A stock `trl sft`, `dpo`, `reward`, `kto`, `grpo`, `rloo` or `distillation` is replaced by `hf-tpu` with the same arguments, if it is asked for. Stock
      `trl` reads the recipe in a parent process, which starts the accelerator's runtime, and trains in a child of it; a TPU
      chip can be held by one process only.
    - In any other process that has `HF_TPU_EXT=1` in its environment, `trl.SFTTrainer` is
      [`~hf_tpu_ext.TPUSFTTrainer`], and likewise for the other [`TRAINERS`].

    `trl` is replaced if `HF_TPU_EXT` is `1` in the environment or under the recipe's `env:` key, which counts more,
    or if it is set nowhere and the machine has a TPU. `HF_TPU_EXT=0` in the environment switches all of this off. Of a
    value that means neither, a line says so.
    """
    from ..backends.detect import remember_pjrt_device, skip_metadata_query

    remember_pjrt_device()
    skip_metadata_query()
    switch = os.environ.get(_SWITCH, "").lower()
    _check(switch, "the environment")
    if switch in _OFF:
        return
    if not _is_trl_training(sys.argv):
        if switch in _ON:
            sys.meta_path.insert(0, _TrainerSwap())
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
    if switch and switch not in _ON | _OFF:
        print(
            f"hf_tpu_ext: {_SWITCH}={switch!r} in {where} has no effect. Allowed: {', '.join(sorted(_ON))}; "
            f"{', '.join(sorted(_OFF))}.",
            file=sys.stderr,
        )


def _is_trl_training(argv: list[str]) -> bool:
    program = argv[0].replace(os.sep, "/") if argv else ""
    is_trl = program.rpartition("/")[2] == "trl" or program.endswith("/trl/cli/main.py")
    return is_trl and len(argv) > 1 and argv[1] in TRAINERS


def _reason_to_replace(switch: str, argv: list[str]) -> str | None:
    from ..backends.detect import tpu_chips
    from .recipe import read_recipe

    try:
        in_recipe = read_recipe(argv).env.get(_SWITCH, "").lower()
    except ValueError:
        # The command that reads the recipe next, stock or not, says what is wrong with it.
        in_recipe = ""
    _check(in_recipe, "the recipe's env")
    if in_recipe in _OFF:
        return None
    if in_recipe in _ON:
        return f"the recipe's env says {_SWITCH}: {in_recipe}"
    if switch in _ON:
        return f"{_SWITCH}={switch} is set"
    return "this machine has a TPU" if tpu_chips() else None


class _TrainerSwap:
    """
    A `sys.meta_path` finder that puts our trainers in place of TRL's once the first module of a trainer has run.

    The names are replaced in the modules that define them, and in `trl` and `trl.trainer`, which keep what they have looked
    up there.
    """

    def find_spec(self, name, path=None, target=None):
        if name not in _MODULES:
            return None
        sys.meta_path.remove(self)
        # A script that imports our trainers chooses between them and upstream's by itself; and while they are being
        # imported, as the first to import this module, they cannot be put into it.
        if "hf_tpu_ext.trainers" in sys.modules:
            return None
        spec = importlib.util.find_spec(name)
        exec_module = spec.loader.exec_module

        def exec_and_swap(module):
            exec_module(module)
            from hf_tpu_ext import trainers

            for defined_in, trainer in _MODULES.items():
                for place in (defined_in, "trl.trainer", "trl"):
                    setattr(sys.modules[place], trainer, vars(trainers)[f"TPU{trainer}"])

        spec.loader.exec_module = exec_and_swap
        return spec
