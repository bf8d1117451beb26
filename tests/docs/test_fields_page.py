"""docs/configuration.md is what the tables of fields say."""

import pytest
from fields_page import PAGE, tables


@pytest.mark.parametrize(("name", "table"), tables().items(), ids=tables())
def test_page_is_up_to_date(name, table):
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(f"<!-- {name}:start -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]
    assert written == table, "run: python tests/docs/fields_page.py --write-docs"
