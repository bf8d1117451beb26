"""The table of docs/recipes.md is what the first lines of the recipes say."""

from recipes_page import PAGE, table
from tables import read_block


def test_page_is_up_to_date():
    assert read_block(PAGE, "recipes") == table(), "run: python tests/docs/recipes_page.py --write-docs"
