"""Whose code runs while a step is traced: what cannot be known of it may be something else at each step."""

import os
import sys
from types import CodeType, FrameType
from typing import Any


#: Their code does the same at every step if what it reads is the same.
KNOWN_PACKAGES = ("hf_tpu_ext", "transformers", "trl", "peft", "accelerate", "torch", "torch_xla")
# What these need in turn. Code of another package may be anybody's.
_LIBRARIES = (
    "datasets",
    "filelock",
    "huggingface_hub",
    "jax",
    "jaxlib",
    "numpy",
    "packaging",
    "psutil",
    "pyarrow",
    "regex",
    "safetensors",
    "sympy",
    "tokenizers",
    "torch_tpu",
    "tqdm",
    "typing_extensions",
    "yaml",
)
# The modules that Python says of the classes that it has generated.
_GENERATED = "namedtuple_"
# What these call is no part of a step: modules that are imported, and whatever listens to a log.
_ASIDE = ("importlib._bootstrap", "logging")


def is_known(module: str) -> bool:
    """Whether a module is in a package whose code does the same at every step if what it reads is the same."""
    return module.partition(".")[0] in KNOWN_PACKAGES


def is_of_library(module: str) -> bool:
    """Whether a module is in a known package, in a library that these use, or in Python's."""
    package = module.partition(".")[0]
    return (
        package in (*KNOWN_PACKAGES, *_LIBRARIES)
        or package in sys.stdlib_module_names
        or package.startswith(_GENERATED)
    )


class RunningCode:
    """
    Context that notes code of the user's that runs in it: Python functions of this thread, by `sys.setprofile`.

    Upstream calls what is registered with it by name (attention, losses, activations), and what a decorator or a patch has put in
    the place of a function; where all of these may stand, nobody can list. Hooks of a backward pass run on autograd's threads, which
    no profiler sees: these are looked for where they are registered.
    """

    def __init__(self):
        #: The first that was noted, as a clause, or `None`.
        self.user_code: str | None = None
        self._code_ids: set[int] = set()

    def __enter__(self) -> "RunningCode":
        if sys.getprofile() is None:
            sys.setprofile(self._note)
        else:
            self.user_code = "a profiler is active, and this package cannot see which code runs in a step"
        return self

    def __exit__(self, *_: Any) -> None:
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        # Not code objects: their hash is of all that is in them.
        if event != "call" or id(frame.f_code) in self._code_ids:
            return
        self._code_ids.add(id(frame.f_code))
        if self.user_code is None and not is_of_library(_module_of(frame)) and not _is_aside(frame):
            self.user_code = f"{frame.f_code.co_qualname} ({place_of(frame.f_code)}) is user code"


def place_of(code: CodeType) -> str:
    """The file and the first line of code, for people."""
    return f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}"


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_aside(frame: FrameType | None) -> bool:
    while frame is not None:
        if _module_of(frame) in _ASIDE:
            return True
        frame = frame.f_back
    return False
