"""Tiny models of families whose layers are unlike those of Llama: equal to upstream's trainer, and replayed."""

import pytest
from families import ACCUMULATION, difference, train


# State over the row and a system for each chunk of it; a mixer and attention; numbers of two modules that are equal.
@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "apertus"])
def test_family_is_replayed_and_equal(xla, tmp_path, model_type):
    run = ["causal", model_type, False, "sft"]
    ours = train(*run, ours=True, output_dir=str(tmp_path / "ours"))
    stock = train(*run, ours=False, output_dir=str(tmp_path / "stock"))
    assert difference(ours, stock) < 1e-5
    assert ours["why_traced"] is None
    expected = dict(compiles=0, executions=ACCUMULATION, reads=0, fallbacks=0, replays=ACCUMULATION)
    assert ours["steps"][-1] == expected
