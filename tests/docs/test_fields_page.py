"""docs/fields.md is what the table of fields says."""

import pytest
from fields_page import PAGE, tables


@pytest.mark.parametrize("name", tables())
def test_page_is_up_to_date(name):
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(f"<!-- {name}:start -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]
    assert written == tables()[name], "run: python tests/docs/fields_page.py --write-docs"
