"""docs/models.md is what the results of the families are."""

import pytest
from models_page import PAGE, tables
from tasks import TASKS


@pytest.mark.parametrize("name", [*(f"models_{task}" for task in TASKS), "models_untrained"])
def test_page_is_up_to_date(name):
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition(f"<!-- {name}:start -->\n")[2].partition(f"\n<!-- {name}:end -->")[0]
    assert written == tables()[name], "run: python tests/models/models_page.py --write-docs"
