"""Pages in a real browser: they fit, fetch nothing, complain of nothing, and are named."""

import json

import pytest

from t5x_fwdloss import report
from t5x_fwdloss.analysis import (
    DirectionalDerivatives,
    Eigenpairs,
    GroupTraces,
    SpectralDensity,
)
from tests.analysis import runs

from . import browser

WIDTHS = (800, 1400)
PAPER = 680  # CSS pixels of A4 within its margins
pytestmark = pytest.mark.skipif(
    browser.PATH is None, reason="there is no chromium on PATH"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The report of a run, and that of two with long names side by side."""
    root = tmp_path_factory.mktemp("pages")
    folders = [root / f"{'a_long_name_' * 5}{seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        measured = [
            DirectionalDerivatives(num_random=1),
            Eigenpairs(num_largest=2, max_steps=6),
            SpectralDensity(num_probes=2, num_steps=5),
            GroupTraces(num_probes=4),
        ]
        assert runs.run(folder, seed=seed, measurements=measured) == 0
    comparison = root / "comparison.html"
    assert report.report([str(x) for x in folders], output=str(comparison)) == 0
    return {"run": folders[0] / "report.html", "comparison": comparison}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.opened(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.mark.parametrize("name", ["run", "comparison"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_window_and_is_all_there_is(page, pages, name, width):
    page.open(pages[name], width)
    assert page.value("innerWidth") == width
    assert page.value("document.scrollingElement.scrollWidth") <= width
    requests = [x["request"]["url"] for x in page.named("Network.requestWillBeSent")]
    assert requests == [pages[name].as_uri()]
    said = [*page.named("Log.entryAdded"), *page.named("Runtime.consoleAPICalled")]
    assert said + page.named("Runtime.exceptionThrown") == []


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_a_browser_finds_a_name_for_every_figure_and_table(page, pages, name):
    page.open(pages[name], 800)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    names = {
        role: [
            x["name"]["value"] for x in nodes if x.get("role", {}).get("value") == role
        ]
        for role in ("image", "table", "columnheader", "rowheader")
    }
    figures = page.value("document.querySelectorAll('figure svg').length")
    assert len(names["image"]) == figures > 0
    assert all(x.startswith("Figure") for x in names["image"])
    assert len(names["table"]) == page.value(
        "document.querySelectorAll('table').length"
    )
    assert all(names["table"])
    assert len(set(names["table"])) == len(names["table"])
    rows = page.value("document.querySelectorAll('tbody th[scope=row]').length")
    assert len(names["rowheader"]) == rows > 0
    heads = page.value("document.querySelectorAll('thead th[scope=col]').length")
    assert len(names["columnheader"]) == heads > 0


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_a_page_is_black_on_white_on_paper_and_light_on_black_in_the_dark(
    page, pages, name
):
    page.open(pages[name], 800)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    colors = {}
    for medium in ("screen", "print"):
        page.call("Emulation.setEmulatedMedia", media=medium, features=dark)
        found = page.value(
            "JSON.stringify(['backgroundColor', 'color'].map("
            "x => getComputedStyle(document.body)[x].match(/\\d+/g).map(Number)))"
        )
        colors[medium] = json.loads(found)
    page.call("Emulation.setEmulatedMedia", media="", features=[])
    assert colors["print"][0] == [255, 255, 255]
    assert max(colors["print"][1]) < 80
    assert max(colors["screen"][0]) < 80
    assert min(colors["screen"][1]) > 180


# Lines that each number of a table is set in.
LINES = """
JSON.stringify([...document.querySelectorAll('td, th')].flatMap(cell => {
  const found = [], walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    for (const match of node.data.matchAll(/[-\u2212]?\\d[\\d.,]*(e[-+]?\\d+)?/g)) {
      const range = document.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const tops = [...range.getClientRects()].map(x => Math.round(x.top));
      found.push([match[0], new Set(tops).size]);
    }
  }
  return found;
}))
"""


@pytest.mark.parametrize("name", ["run", "comparison"])
def test_on_paper_the_tables_fit_and_no_number_is_broken(page, pages, name):
    page.open(pages[name], PAPER)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    lines = json.loads(page.value(LINES))
    width = page.value("document.scrollingElement.scrollWidth")
    page.call("Emulation.setEmulatedMedia", media="", features=[])
    assert len([x for x, _ in lines if "e-" in x]) > 3
    assert [x for x, count in lines if count > 1] == []
    assert width <= PAPER
