"""The code blocks of the documentation run."""

import os
import sys
from pathlib import Path

import forked
import pytest
from block_driver import BLOCK


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    "pages",
    [pytest.param(PAGES[:1], marks=pytest.mark.ci), pytest.param(PAGES[1:], marks=pytest.mark.slow)],
    ids=["README", "the rest"],
)
def test_code_blocks_run(pages, tmp_path):
    pages = [str(page) for page in pages if BLOCK.search(page.read_text(encoding="utf-8"))]
    assert pages
    done = forked.run(
        [sys.executable, Path(__file__).with_name("block_driver.py"), *pages],
        cwd=tmp_path,
        env={**os.environ, "PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert [line.removeprefix("page ") for line in done.stdout.splitlines() if line.startswith("page ")] == pages
