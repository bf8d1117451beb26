"""A tiny vision language model learns to see."""

import pytest
from read_digits import measure


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "smolvlm", "qwen2_5_vl"])
def test_a_model_learns_to_read_digits(xla, family, tmp_path):
    found = measure(family, "this package, XLA", tmp_path)
    assert found["held out"] >= 0.95 and found["shuffled"] <= 0.2
