"""Runs of a tiny model, and the lines that they print about recompilations and reads."""

from functools import partial

import pytest
from planted import said, train_tiny


@pytest.fixture
def train(xla, tmp_path):
    return partial(train_tiny, tmp_path)


@pytest.fixture
def lines(caplog):
    return partial(said, caplog)
