"""docs/fields.md and docs/configuration.md are what the tables of fields say."""

import pytest
from fields_page import CONFIGURATION, PAGE, own_fields, tables


@pytest.mark.parametrize(
    ("page", "name", "table"),
    [*((PAGE, *item) for item in tables().items()), (CONFIGURATION, "own_fields", own_fields())],
    ids=lambda value: value if isinstance(value, str) and "\n" not in value else "",
)
def test_page_is_up_to_date(page, name, table):
    text = page.read_text(encoding="utf-8")
    written = text.partition(f"<!-- {name}:start -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]
    assert written == table, "run: python tests/docs/fields_page.py --write-docs"
