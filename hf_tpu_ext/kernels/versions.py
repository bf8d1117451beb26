"""The versions of what makes programs for TPU."""

import re
from importlib.metadata import PackageNotFoundError, requires, version


def required_versions(*names: str) -> dict[str, str]:
    """
    Versions of the packages that compile for TPU, by name, or of those named. The client that compiles without a TPU is an
    internal interface of jaxlib, and kernels are of the version that libtpu reads: these are the versions that torch_xla's own
    extras ask for, so that plans and kernels are made for the compiler of the run.
    """
    matches = (
        re.fullmatch(r"(\w+)==([\w.]+); extra == ['\"]plan['\"]", line) for line in requires("hf_tpu_ext") or ()
    )
    return {match[1]: match[2] for match in matches if match and (not names or match[1] in names)}


def find_wrong_versions(*names: str) -> list[str]:
    """Say which of the [`required_versions`] are not the ones that are installed, and what is; empty where all are."""
    wrong = []
    for name, right_version in required_versions(*names).items():
        try:
            own_version = version(name)
        except PackageNotFoundError:
            wrong.append(f"{name} {right_version} is not installed")
        else:
            if own_version != right_version:
                wrong.append(f"{name} is {own_version}, not {right_version}")
    return wrong
