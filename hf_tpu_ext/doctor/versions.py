"""Looks whether the installed packages fit together. Nothing of them is imported but their metadata."""

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..installing import install_command, requirement
from .check import Check


_PACKAGE = "hf_tpu_ext"
# Either says where libtpu is, in place of the package.
_LIBTPU_VARIABLES = ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH")


def installed_version(name: str) -> str | None:
    """The version of an installed package, or `None` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(
    has_tpu: bool,
    requires: Sequence[str] | None = None,
    find_version: Callable[[str], str | None] = installed_version,
    python: str | None = None,
) -> list[Check]:
    """
    Set installed versions beside those that this package asks for, as `importlib.metadata.requires` gives them. A TPU
    makes the packages of the extra `[tpu]` necessary, or those of `[torch_tpu]`, which exclude them.
    """
    if find_version(_PACKAGE) is None:
        return [
            Check(_PACKAGE, "failed", "not installed, only found on the path", "pip install -e . in its directory")
        ]
    requirements = [Requirement(line) for line in requires or importlib.metadata.requires(_PACKAGE)]
    checks = [_check_python(python or platform.python_version())]
    checks += [_check(line, find_version) for line in requirements if line.marker is None]
    with_xla, with_torch_tpu = (find_version(name) is not None for name in ("torch_xla", "torch_tpu"))
    if with_xla and with_torch_tpu:
        versions = ", ".join(f"{name} {find_version(name)}" for name in ("torch", "torch_xla", "torch_tpu"))
        both = Check(
            "torch_xla and torch_tpu",
            "failed",
            f"{versions}: torch_xla needs torch 2.9, torch_tpu 2.11 or newer, so one of them cannot work",
            f"Make an environment for each: {install_command('tpu')} in one, {requirement('torch_tpu')} in the other",
        )
        return [*checks, both]
    extra = "torch_tpu" if with_torch_tpu else "tpu" if with_xla or has_tpu else None
    if extra is None:
        how = f"{install_command('tpu')}, or {requirement('torch_tpu')} for torch_tpu"
        return [*checks, Check("torch_xla", "none", f"not installed; a TPU needs it: {how}")]
    return checks + [
        _check(line, find_version, extra)
        for line in requirements
        if line.marker is not None and _is_of_extra(line, extra)
    ]


def check_libtpu(
    has_tpu: bool,
    requires: Sequence[str] | None = None,
    find_version: Callable[[str], str | None] = installed_version,
) -> Check:
    """
    Look for the TPU runtime, in the version that torch_xla or torch_tpu asks for. The arguments are as for [`check_versions`].
    """
    if not has_tpu:
        return Check(
            "libtpu",
            "none",
            f"{find_version('libtpu') or 'not installed'}; for a TPU, and to compile what hf-tpu plan asks",
        )
    for variable in _LIBTPU_VARIABLES:
        if path := os.environ.get(variable):
            if os.path.isfile(path):
                return Check("libtpu", "ok", f"{variable}={path}")
            return Check("libtpu", "failed", f"{variable}={path} is no file", f"unset {variable}")
    if requires is None:
        drives = next((name for name in ("torch_tpu", "torch_xla") if installed_version(name)), None)
        requires = [] if drives is None else importlib.metadata.requires(drives) or []
    for line in map(Requirement, requires):
        if line.name == "libtpu" and (line.marker is None or _is_of_extra(line, "tpu")):
            return _check(line, find_version)
    return _check(Requirement("libtpu"), find_version)


def _check_python(version: str) -> Check:
    specifier = importlib.metadata.metadata(_PACKAGE)["Requires-Python"]
    if SpecifierSet(specifier).contains(version, prereleases=True):
        return Check("python", "ok", f"{version} ({specifier})")
    return Check(
        "python", "failed", f"{version}, {specifier} is needed", "Make an environment with Python 3.11 or newer"
    )


def _check(requirement: Requirement, find_version: Callable[[str], str | None], extra: str | None = None) -> Check:
    name, specifier = requirement.name, str(requirement.specifier)
    label = f"{name} [{extra}]" if extra else name
    fix = f"pip install '{name}{specifier}'" if extra is None else install_command(extra)
    version = find_version(name)
    if version is None:
        return Check(label, "failed", f"not installed; {specifier or 'any version'} is needed", fix)
    # A release candidate is the version that it is a candidate for.
    if not requirement.specifier.contains(Version(version), prereleases=True):
        return Check(label, "failed", f"{version}, {specifier} is needed", fix)
    return Check(label, "ok", f"{version} ({specifier})" if specifier else version)


def _is_of_extra(line: Requirement, extra: str) -> bool:
    return line.marker.evaluate({"extra": extra}) and not line.marker.evaluate({"extra": ""})
