"""The report as a browser shows it."""

import io

import numpy
import pytest
from browser import Browser, find_browser
from PIL import Image

from hf_tpu_ext.report.figures import can_draw
from hf_tpu_ext.report.make import make_report


pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason="no Chromium or Chrome in PATH or CHROME_PATH"),
    pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def pages(write_run, tmp_path):
    """The report of a run, and of two."""
    typed = '<script>fetch("https://example.com/")</script><img src="https://example.com/a.png" onerror="boom()">'
    run = write_run(
        tmp_path / "run", arguments={"output_dir": typed}, model={"name": typed, "parameters": 10, "trained": 1}
    )
    other = write_run(tmp_path / "$other$", logs={"loss": 1.0})
    return make_report([run]), make_report([run, other], tmp_path)


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)], ids=["wide", "dark", "phone"])
@pytest.mark.parametrize("which", [0, 1], ids=["one run", "two runs"])
def test_a_page_is_whole_and_asks_for_nothing(browser, pages, which, width, dark):
    browser.open(pages[which], width, dark)
    size = browser.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert size[0] <= size[1], "nothing is wider than the window"
    figures = browser.evaluate(
        "[...document.querySelectorAll('section img')].map(image => image.getBoundingClientRect()).map(box => [box.width, box.height])"
    )
    assert len(figures) == (5 if which == 0 else 6)
    assert all(width >= 250 and height >= 60 for width, height in figures)
    assert browser.evaluate(
        "[...document.images].every(image => image.src.startsWith('data:') && image.naturalWidth > 0)"
    )
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    said = [
        params
        for method, params in browser.events
        if method in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    ]
    assert not said
    asked = [params["request"]["url"] for method, params in browser.events if method == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [pages[which].as_uri()]

    picture = numpy.asarray(Image.open(io.BytesIO(browser.screenshot())).convert("RGB")).astype(int)
    assert picture.shape[0] > 1000
    background = picture[2, 2]
    assert (background.mean() < 60) == dark
    # Text and figures are there: much of the page differs strongly from its background, and there are colours.
    assert (abs(picture - background).max(-1) > 100).mean() > 0.01
    assert ((picture.max(-1) - picture.min(-1)) > 90).mean() > 0.001
