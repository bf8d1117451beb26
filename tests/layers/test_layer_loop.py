"""Into which blocks the rows of a batch are cut."""

import pytest

from hf_tpu_ext.backends.cpu import CPUBackend
from hf_tpu_ext.layers.layer_loop import RowBlocks


@pytest.mark.parametrize(
    ("rows", "length", "blocks"),
    [
        (4, 1024, 1),
        (32, 1024, 8),
        (6, 1024, 2),
        # Rows stay whole, and blocks are of the same size.
        (7, 1024, 7),
        (2, 8192, 2),
        # Of a row each they would be too small.
        (37, 128, 1),
        (1, 32768, 1),
    ],
)
def test_size_of_blocks(rows, length, blocks):
    backend = CPUBackend("for the test")
    assert RowBlocks(backend, rows, length).count == blocks
    assert RowBlocks(backend, rows, length, is_enabled=False).count == 1


def test_rows_that_are_split_over_chips_are_not_cut(monkeypatch):
    backend = CPUBackend("for the test")
    monkeypatch.setattr(CPUBackend, "num_chips", 8)
    assert RowBlocks(backend, 32, 1024).count == 1
    with backend.manual_sharding.region():
        assert RowBlocks(backend, 32, 1024).count == 8
