"""Versions beside those that are asked for, of made sets of packages."""

import importlib.metadata
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hf_tpu_ext.doctor.versions import check_libtpu, check_versions
from hf_tpu_ext.installing import install_command


REQUIRES = [
    "torch>=2.6",
    "trl<2,>=1.15",
    'torch==2.9.*; extra == "tpu"',
    'torch_xla==2.9.*; extra == "tpu"',
    'torch<=2.15.0,>=2.11; extra == "torch_tpu"',
    'torch_tpu==0.2.*; extra == "torch_tpu"',
    'jax==0.7.1; extra == "plan"',
]
TORCH_XLA_REQUIRES = ['libtpu==0.0.21; extra == "tpu"', "numpy", 'jax==0.7.1; extra == "pallas"']


def examine(installed, has_tpu=False, python="3.11.7"):
    checks = check_versions(has_tpu, REQUIRES, {"hf_tpu_ext": "0.1.0", **installed}.get, python)
    return {check.name: check for check in checks}


def test_all_fits():
    checks = examine({"torch": "2.9.1", "trl": "1.16.0", "torch_xla": "2.9.0"})
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["trl"].text == "1.16.0 (<2,>=1.15)"
    assert "torch [tpu]" in checks
    assert "jax" not in str(checks)


@pytest.mark.parametrize(
    ("name", "version", "text", "fix"),
    [
        ("trl", None, "not installed", "pip install 'trl<2,>=1.15'"),
        ("trl", "1.14.9", "1.14.9, <2,>=1.15 is needed", "pip install 'trl<2,>=1.15'"),
        ("trl", "2.0.0", "2.0.0, <2,>=1.15 is needed", "pip install 'trl<2,>=1.15'"),
        ("torch", "2.5.1", "2.5.1, >=2.6 is needed", "pip install 'torch>=2.6'"),
    ],
)
def test_a_version_that_does_not_fit(name, version, text, fix):
    check = examine({"torch": "2.9.1", "trl": "1.16.0", name: version})[name]
    assert (check.status, check.fix) == ("failed", fix)
    assert text in check.text


@pytest.mark.parametrize("version", ["2.9.0+cpu", "2.9.0rc5", "2.9.1.dev20251001"])
def test_versions_with_a_suffix_fit(version):
    assert examine({"torch": version, "torch_xla": "2.9.0", "trl": "1.16.0"})["torch [tpu]"].status == "ok"


def test_torch_that_does_not_match_torch_xla():
    checks = examine({"torch": "2.10.0", "torch_xla": "2.9.0", "trl": "1.16.0"})
    assert checks["torch"].status == "ok"
    assert checks["torch [tpu]"].status == "failed"
    assert checks["torch [tpu]"].fix == install_command("tpu")


@pytest.mark.parametrize(
    ("has_tpu", "name", "status"), [(False, "torch_xla", "none"), (True, "torch_xla [tpu]", "failed")]
)
def test_torch_xla_is_needed_by_a_tpu_only(has_tpu, name, status):
    check = examine({"torch": "2.9.1", "trl": "1.16.0"}, has_tpu)[name]
    assert check.status == status
    assert install_command("tpu") in (check.fix or check.text)


@pytest.mark.parametrize("has_tpu", [False, True])
def test_torch_tpu_in_place_of_torch_xla(has_tpu):
    checks = examine({"torch": "2.13.0+cpu", "torch_tpu": "0.2.0", "trl": "1.16.0"}, has_tpu)
    assert {check.status for check in checks.values()} == {"ok"}
    assert "torch_tpu [torch_tpu]" in checks and "torch_xla" not in str(checks)


@pytest.mark.parametrize("torch", ["2.9.1", "2.16.0"])
def test_torch_that_does_not_match_torch_tpu(torch):
    check = examine({"torch": torch, "torch_tpu": "0.2.0", "trl": "1.16.0"})["torch [torch_tpu]"]
    assert (check.status, check.fix) == ("failed", install_command("torch_tpu"))


def test_both_in_one_environment():
    check = examine({"torch": "2.9.1", "torch_xla": "2.9.0", "torch_tpu": "0.2.0", "trl": "1.16.0"})[
        "torch_xla and torch_tpu"
    ]
    assert check.status == "failed"
    assert "an environment for each" in check.fix and "torch 2.9.1, torch_xla 2.9.0, torch_tpu 0.2.0" in check.text


def test_the_extras_exclude_each_other():
    """So that pip refuses both at once."""
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    by_extra = {
        extra: next(
            requirement
            for requirement in map(Requirement, setup["options.extras_require"][extra].split())
            if requirement.name == "torch"
        )
        for extra in ("tpu", "torch_tpu")
    }
    versions = [f"2.{minor}.{patch}" for minor in range(6, 18) for patch in range(3)]
    allowed = [set(requirement.specifier.filter(versions)) for requirement in by_extra.values()]
    assert all(allowed) and not allowed[0] & allowed[1]


def test_every_extra_allows_a_compressed_tensors_for_the_torch_of_torch_xla():
    """Newer ones need torch 2.10, and pip would replace torch 2.9 by it."""
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extras = [
        Requirement(line) for extra in setup["options.extras_require"].values() for line in extra.split("\n") if line
    ]
    ranges = [each.specifier for each in extras if each.name == "compressed-tensors"]
    assert len(ranges) == 2
    assert all([*each.filter(["0.15.0.1", "0.16.0", "0.20.0"])] == ["0.15.0.1"] for each in ranges)


def test_an_old_python():
    check = examine({}, python="3.10.2")["python"]
    assert check.status == "failed"
    assert "3.10.2, >=3.11 is needed" in check.text


@pytest.mark.parametrize(("version", "status"), [("0.0.21", "ok"), ("0.0.17", "failed"), (None, "failed")])
def test_libtpu_is_that_of_torch_xla(version, status, monkeypatch):
    for variable in ("TPU_LIBRARY_PATH", "PTXLA_TPU_LIBRARY_PATH"):
        monkeypatch.delenv(variable, raising=False)
    check = check_libtpu(True, TORCH_XLA_REQUIRES, {"libtpu": version}.get)
    assert check.status == status
    assert check.fix == (None if status == "ok" else "pip install 'libtpu==0.0.21'")


def test_libtpu_of_a_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert check_libtpu(True, TORCH_XLA_REQUIRES, {}.get).fix == "unset TPU_LIBRARY_PATH"
    (tmp_path / "libtpu.so").touch()
    assert check_libtpu(True, TORCH_XLA_REQUIRES, {}.get).status == "ok"
    without_tpu = check_libtpu(False, TORCH_XLA_REQUIRES, {}.get)
    assert without_tpu.status == "none" and "not installed" in without_tpu.text


def test_a_copy_that_is_not_installed():
    (check,) = check_versions(False, REQUIRES, {}.get)
    assert (check.name, check.status) == ("hf_tpu_ext", "failed")


def test_the_package_says_what_it_needs():
    """What is installed here is checked against this package's own metadata."""
    asked = {line.split(";")[0] for line in importlib.metadata.requires("hf_tpu_ext") if "extra" not in line}
    checks = check_versions(has_tpu=False)
    assert len([check for check in checks if check.name != "python" and "[tpu]" not in check.name]) >= len(asked)
    assert all(check.status == "ok" for check in checks)
