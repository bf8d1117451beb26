"""Finds the line of a call that is the user's own."""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from importlib.util import find_spec

from ..backends.insight import SourceLine


#: Directories of the packages whose lines are nobody's own.
PACKAGES = {
    name: os.path.dirname(spec.origin)
    for name in ("accelerate", "datasets", "hf_tpu_ext", "peft", "torch", "torch_xla", "transformers", "trl")
    if (spec := find_spec(name)) is not None and spec.origin is not None
}
#: Of these, the packages whose own code models compute with.
OF_MODELS = ("peft", "transformers", "trl")
# Code without a file, other than that of a shell or a notebook.
_GENERATED = ("<frozen", "<string>", "<eval_with_key>")
_NOTEBOOK = re.compile(r"ipykernel_\d+|ipython-input")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# Outside of these is who called the trainer.
_ENTRANCES = ("train", "evaluate", "predict", "save_model")


def package_of(file: str) -> str | None:
    """The known package that a source file belongs to: `"python"` is the standard library, and `None` anybody else's."""
    for name, directory in PACKAGES.items():
        if file.startswith(directory + os.sep):
            return name
    if file.startswith(_GENERATED) or (file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file):
        return "python"
    return None


def own_line(frames: Iterable[SourceLine]) -> SourceLine | None:
    """
    The line of the user's code that led to something within a run: of its calls, innermost first, the first line that
    is in no known package, or `None` where the trainer did it by itself.
    """
    for frame in frames:
        package = package_of(frame.file)
        if package is None:
            return frame
        if package in ("transformers", "hf_tpu_ext") and frame.function in _ENTRANCES:
            return None
    return None


def library_line(frames: Iterable[SourceLine]) -> SourceLine | None:
    """The first line of calls, innermost first, that is neither PyTorch's nor Python's."""
    return next((frame for frame in frames if package_of(frame.file) not in ("torch", "torch_xla", "python")), None)


def explain_library(package: str) -> str:
    """What to say to the user of a package whose own code reads the device within a step."""
    return f"It is code of {package} that needs values on the host: on CUDA and the CPU, no program ends there."


def current_frames() -> Iterable[SourceLine]:
    """The calls under way, innermost first, from the caller's on."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        yield SourceLine(frame.f_code.co_filename, line, frame.f_code.co_name)


def describe_line(line: SourceLine) -> str:
    """Write a line short: `"my_loss.py:12"`, or with the path inside a known package, `"trl/trainer/utils.py:12"`."""
    package = package_of(line.file)
    if package in PACKAGES:
        path = os.path.relpath(line.file, os.path.dirname(PACKAGES[package]))
    elif _NOTEBOOK.search(line.file):
        path = "notebook cell"
    else:
        path = os.path.basename(line.file)
    return f"{path}:{line.line}"
