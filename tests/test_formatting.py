"""Numbers and names for people."""

import pytest

from hf_tpu_ext.formatting import name_of_any_layer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.*.mlp.up_proj.weight"),
        ("blocks.0.1.weight", "blocks.*.*.weight"),
        ("weights.3", "weights.3"),
    ],
)
def test_the_name_of_a_parameter_without_the_numbers_of_its_layer(name, expected):
    assert name_of_any_layer(name) == expected
