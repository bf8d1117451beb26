"""
Counts the words of the documentation, without generated tables.

    python tests/docs/words.py
"""

import json
import re
from pathlib import Path


DOCS = Path(__file__).parents[2] / "docs"
_GENERATED = re.compile(r"<!-- (\w+):start -->.*?<!-- \1:end -->", re.DOTALL)


def words_of(page: Path) -> int:
    """Words of a page, or of the text of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return len(_GENERATED.sub("", text).split())


if __name__ == "__main__":
    counts = {page: words_of(page) for page in [*DOCS.glob("*.md"), *DOCS.glob("notebooks/*.ipynb")]}
    for page, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{count:>6} {page.relative_to(DOCS)}")
    print(f"{sum(counts.values()):>6} in all")
