"""The table of docs/recipes.md is what the first lines of the recipes say."""

from recipes_page import PAGE, table


def test_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    written = text.partition("<!-- recipes:start -->\n")[2].partition("\n<!-- recipes:end -->")[0]
    assert written == table(), "run: python tests/docs/recipes_page.py --write-docs"
