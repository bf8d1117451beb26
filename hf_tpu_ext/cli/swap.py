"""
With `HF_TPU_EXT=1`, scripts that use TRL's trainers train with those of this package, unedited.

Nothing of this package is imported at the top: this module is loaded at the end of `import torch`, see `autoload.py`.
"""

import functools
import os
import sys
from types import ModuleType


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
# The modules in which TRL defines them and their configs, and what of each is replaced.
_REPLACED = {f"trl.trainer.{command}_trainer": trainer for command, trainer in TRAINERS.items()} | {
    f"trl.trainer.{command}_config": trainer.replace("Trainer", "Config") for command, trainer in TRAINERS.items()
}
_TRAINER_MODULE = "transformers.trainer"
_NAMES = {*_REPLACED.values(), "Trainer"}


def replace_trainers() -> None:
    """
    From now on `trl.SFTTrainer` is [`~hf_tpu_ext.TPUSFTTrainer`], `trl.SFTConfig` is [`~hf_tpu_ext.TPUSFTConfig`], and so
    on for all [`TRAINERS`]; what subclasses them in `trl.experimental` derives from ours. A script that imports our
    trainers before it reads one of TRL's chooses by itself. Of a trainer that stays upstream's, a line says so.
    """
    sys.meta_path.insert(0, _Finder())
    # `import torch` may be within the import of one of them: `from trl import SFTTrainer` as the first line of a script.
    for name in (*_REPLACED, _TRAINER_MODULE):
        if name in sys.modules:
            sys.modules[name].__class__ = _Watched


class _Watched(ModuleType):
    """
    A module of upstream that says when a trainer or a config is first read from it. It may be watched while it is being
    imported, which no import hook can: what it defines is there only later.
    """

    def __getattribute__(self, name):
        if name in _NAMES:
            if name == "Trainer":
                if not _is_being_imported(_TRAINER_MODULE):
                    _tell_of_upstreams_trainers()
            elif not any(map(_is_being_imported, _REPLACED)):
                # Not to a trainer's module that is itself being imported: it needs TRL's own.
                _replace()
        # Not `super()`: by now it may be watched no longer.
        return ModuleType.__getattribute__(self, name)


class _Finder:
    """A `sys.meta_path` finder that has modules watched from their import on."""

    #: The modules that nobody has read from yet.
    names = {*_REPLACED, _TRAINER_MODULE}

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            exec_module = spec.loader.exec_module

            def exec_watched(module):
                module.__class__ = _Watched
                exec_module(module)

            spec.loader.exec_module = exec_watched
        return spec


def _is_being_imported(name: str) -> bool:
    # Python's own import system asks this way whether another thread is importing a module.
    return name in sys.modules and sys.modules[name].__spec__._initializing


def _stop_watching(*names: str) -> None:
    _Finder.names = _Finder.names - {*names}
    for name in names:
        if name in sys.modules:
            sys.modules[name].__class__ = ModuleType


def _replace() -> None:
    _stop_watching(*_REPLACED)
    # Our trainers, or a script that imports them, read TRL's then.
    if "hf_tpu_ext.trainers" in sys.modules:
        return
    from hf_tpu_ext import trainers

    for defined_in, name in _REPLACED.items():
        # `trl` and `trl.trainer` keep what they have looked up.
        for place in (defined_in, "trl.trainer", "trl"):
            setattr(sys.modules[place], name, vars(trainers)[f"TPU{name}"])


def _tell_of_upstreams_trainers() -> None:
    """Have upstream's trainers, of which all are made by `Trainer.__init__`, say that they are not replaced."""
    _stop_watching(_TRAINER_MODULE)
    trainer = sys.modules[_TRAINER_MODULE].Trainer
    init = trainer.__init__

    @functools.wraps(init)
    def tell_and_init(self, *args, **kwargs):
        _tell_once(type(self))
        init(self, *args, **kwargs)

    trainer.__init__ = tell_and_init


@functools.cache
def _tell_once(cls: type) -> None:
    if any(base.__module__.partition(".")[0] == "hf_tpu_ext" for base in cls.__mro__):
        return
    if os.environ.get("RANK", "0") != "0":
        return
    if cls.__name__ in TRAINERS.values():
        reason, instead = "this script imports hf_tpu_ext itself", f"from hf_tpu_ext import TPU{cls.__name__}"
    elif cls.__name__ == "Trainer":
        reason, instead = f"only {', '.join(TRAINERS.values())} are", "from hf_tpu_ext import TPUTrainer as Trainer"
    else:
        reason = f"only {', '.join(TRAINERS.values())} are"
        instead = f"from hf_tpu_ext.trainers import TPUTrainerMixin; class TPU{cls.__name__}(TPUTrainerMixin, {cls.__name__}): ... (it is refused if it writes text within its steps)"
    print(
        f"hf_tpu_ext: {cls.__name__} is not replaced under HF_TPU_EXT=1, because {reason}. It trains as upstream's, which does "
        f"not know torch_xla's steps. With this package: {instead}",
        file=sys.stderr,
    )
