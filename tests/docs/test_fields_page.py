"""docs/configuration.md is what the tables of fields say."""

import pytest
from fields_page import PAGE, tables
from tables import read_block


@pytest.mark.parametrize(("name", "table"), tables().items(), ids=tables())
def test_page_is_up_to_date(name, table):
    assert read_block(PAGE, name) == table, "run: python tests/docs/fields_page.py --write-docs"
