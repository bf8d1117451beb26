"""docs/models.md is what the results of the families are."""

import pytest
from models_page import PAGE, tables
from tables import read_block
from tasks import TASKS


@pytest.mark.parametrize("name", [*(f"models_{task}" for task in TASKS), "models_untrained"])
def test_page_is_up_to_date(name):
    assert read_block(PAGE, name) == tables()[name], "run: python tests/models/models_page.py --write-docs"
