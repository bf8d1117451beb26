"""Code of the user's that runs in a trace is noted, wherever it stands."""

import importlib
import logging
import sys
from functools import wraps

import pytest
import torch
from torch import nn

from hf_tpu_ext.step.running_code import RunningCode


def double(x):
    return x * 2


def doubled(function):
    @wraps(function)
    def call(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return call


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def in_a_hook(x):
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda *_: None)
    return linear(x)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (double, "double (test_running_code.py, line "),
        (doubled(torch.square), "doubled.<locals>.call (test_running_code.py"),
        (Doubled.apply, "Doubled.forward"),
        (in_a_hook, "in_a_hook"),
        (nn.Sequential(nn.Linear(2, 2), nn.GELU()), None),
        (torch.nn.functional.silu, None),
    ],
)
def test_functions_of_anybody_but_libraries(run, name):
    with RunningCode() as running:
        run(torch.ones(2, 2))
    assert running.user_code is None if name is None else running.user_code.startswith(name)
    assert name is None or running.user_code.endswith(" is user code")
    assert sys.getprofile() is None


def test_imports_and_logs_are_no_part_of_a_step(tmp_path, monkeypatch):
    (tmp_path / "imported_in_a_step.py").write_text("def begin():\n    pass\n\nbegin()\n")
    monkeypatch.syspath_prepend(tmp_path)
    logger, handler = logging.getLogger("hf_tpu_ext.test"), logging.StreamHandler()
    handler.filter = lambda record: True
    logger.addHandler(handler)
    with RunningCode() as running:
        importlib.import_module("imported_in_a_step")
        logger.error("said")
    logger.removeHandler(handler)
    assert running.user_code is None


def test_beside_a_profiler_nothing_can_be_said():
    def profiler(*_):
        pass

    sys.setprofile(profiler)
    try:
        with RunningCode() as running:
            pass
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert "a profiler is active" in running.user_code
