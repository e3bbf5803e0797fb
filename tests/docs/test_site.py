"""What the site is made with, and, once it is built (``make docs``), the site itself in a browser."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = sorted((ROOT / "docs").rglob("*.md"))

sys.path.insert(0, str(ROOT / "docs" / "tools"))
import cells  # noqa: E402
import tables  # noqa: E402


def test_a_block_is_shown_with_what_it_prints_and_gives():
    shown = cells.page("Text.\n\n```python run\nx = 2\nprint('two')\nx + 1\n```\n\nMore.\n", "page")
    assert (
        shown == "Text.\n\n```python\nx = 2\nprint('two')\nx + 1\n```\n\n``` { .text .output }\ntwo\n3\n```\n\nMore.\n"
    )


def test_blocks_share_names_and_an_error_names_its_place():
    text = "```python run\na = 1\n```\n\n```python run\nprint(a)\nb\n```\n"
    with pytest.raises(NameError) as caught:
        cells.page(text, "page.md")
    assert "page.md, code at line 5" in str(caught.traceback[-1].path)
    assert "unknown" in cells.page("```python\nunknown\n```", "page.md"), "other blocks are not run"


def test_a_notebook_becomes_a_page_with_its_figures(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    path = tmp_path / "some.py"
    path.write_text(
        "# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\n"
        "plt.ylabel('height')\n\n# %%\nprint(3)\n"
    )
    with plt.rc_context():
        cells.style()
        page = cells.notebook(path)
    assert page.startswith("# Title\n\nText.\n\n```python\nimport matplotlib")
    assert page.count("<svg") == 1 and "currentColor" in page and "#010203" not in page and "height" in page
    assert page.endswith("``` { .text .output }\n3\n```\n")


@pytest.mark.parametrize("path", [path for path in PAGES if cells.BLOCK.search(path.read_text())], ids=lambda p: p.stem)
def test_the_code_of_the_pages_runs(path):
    pytest.importorskip("torch")
    if "import jax" in path.read_text():
        pytest.importorskip("jax")
    names: dict[str, Any] = {"__name__": "page"}
    for block in cells.BLOCK.findall(path.read_text()):
        cells.run(block, names, path.name)
    if path.stem == "start":
        assert (names["kept"][~names["real"]] == 0).all(), "padding is selected"
        assert (names["same"] > 0.95).item()


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    from docstrings import as_markdown

    text = "See :class:`Gini` and :mod:`knapgrad.reference`::\n\n    >>> f(1)\n    2\n\n    More."
    shapes = as_markdown("Scores (*batch, n), exp(<theta, y> / gamma) and ``(*batch, 2)``.")
    assert shapes == "Scores `(*batch, n)`, `exp(<theta, y> / gamma)` and ``(*batch, 2)``."
    links = "See [`Gini`][knapgrad.Gini] and `knapgrad.reference`:\n\n"
    assert as_markdown(text) == links + "    ```pycon\n    >>> f(1)\n    2\n    ```\n\n    More."


def test_tables_have_the_numbers_of_the_files():
    found = tables.read(tables.CPU)["speed"]
    (row,) = (r for r in found if (r["case"], r["regularizer"], r["threads"]) == ("knapsack n=100", "gini", 1))
    line = next(line for line in tables.cpu().splitlines() if line.startswith("| Gini"))
    last = line.rstrip(" |").rpartition("| ")[2]
    assert last.startswith(f"{row['forward']['ours_us']['median']:.0f} / {row['both']['ours_us']['median']:.0f} (")
    assert [tables.short(x) for x in (1234.5, 45.2, 3.14, 0.0567)] == ["1,234", "45", "3.1", "0.057"]
    for make in tables.TABLES.values():
        rows = [line.count("|") for line in make().splitlines() if line.startswith("|")]
        assert len(rows) > 2 and len(set(rows)) == 1


def test_the_tables_of_the_pages_are_those_of_the_result_files():
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert pages == [tables.rewritten(page) for page in pages], "run: python docs/tools/tables.py"
    assert sum(len(re.findall(r"^<!-- table \w+: begin", x, re.MULTILINE)) for x in pages) == len(tables.TABLES)


def test_the_record_takes_each_run_once(tmp_path):
    from benchmarks import record

    path, kept = ROOT / "benchmarks" / "results" / "h200.json", tmp_path / "record.jsonl"
    found = tables.read(path)
    assert record.append(path, found, kept) and not record.append(path, found, kept)
    (row,) = record.read(kept)
    first = found["speed"][0]
    name = f"{first['shape']}, {first['regularizer']}, relax"
    assert row["microseconds"][name] == pytest.approx(1000 * first["forward"]["ours_ms"]["median"])
    with pytest.raises(SystemExit, match="no times"):
        record.append(path, {"environment": found["environment"]}, kept)


def test_the_latest_results_are_in_the_record():
    from benchmarks import record

    dates = {row["date"] for row in record.read()}
    for path in (tables.CPU, tables.RESULTS / "h200.json", tables.RESULTS / "small-calls-cpu.json"):
        assert tables.read(path)["environment"]["date"] in dates, f"run: python -m benchmarks.record {path.name}"


def test_the_build_is_strict():
    """With --quiet MkDocs would not count warnings, and a broken link would pass."""
    (build,) = re.findall(r"mkdocs build.*", (ROOT / "Makefile").read_text())
    assert "--strict" in build and "--quiet" not in build and "-q " not in build


# The built site


@pytest.fixture(scope="module")
def browse():
    """Opens pages of the site, which lies below a folder, in a browser that may ask nothing from elsewhere."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="the site is tried with Playwright: pip install playwright"
    )
    if BROWSER is None:
        pytest.skip("the site is tried in Chromium, which is not installed")
    if not SITE.exists():
        pytest.skip("the site is not built: make docs")

    class Below(http.server.SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return super().translate_path(path.removeprefix("/some/folder")) if path.startswith("/some/folder/") else ""

        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Below, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, playwright.sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.set_default_timeout(120_000)  # other tests run beside it
        page.host = f"http://127.0.0.1:{server.server_port}"
        troubles: list[str] = []
        page.on(
            "request",
            lambda request: request.url.startswith((page.host, "data:", "blob:")) or troubles.append(request.url),
        )
        page.on("response", lambda response: response.status >= 400 and troubles.append(response.url))
        page.on("pageerror", lambda error: troubles.append(str(error)))

        def browse(name: str) -> Any:
            page.goto(f"{page.host}/some/folder/{name}")
            return page

        yield browse
        browser.close()
        server.shutdown()
        assert not troubles


def test_every_page_opens_below_a_folder_and_fits_a_phone(browse):
    names = [str(path.parent.relative_to(SITE)) for path in sorted(SITE.rglob("index.html"))]
    assert len(names) > 25
    for name in names:
        page = browse("" if name == "." else name + "/")
        assert page.locator("h1").count() >= 1, name
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, name


def test_the_search_finds_an_operation(browse):
    page = browse("faq/")
    page.set_viewport_size({"width": 1200, "height": 800})
    page.locator(".md-search__input").click()  # the index is read now
    page.locator(".md-search-result__meta", has_text="Type to start searching").wait_for(state="attached")
    page.keyboard.type("fenchel_young_loss")
    result = page.locator(".md-search-result__link").first
    result.wait_for()
    assert "/some/folder/" in result.get_attribute("href")


def test_the_explorer_is_dark_where_the_site_is(browse):
    page = browse("faq/")
    page.set_viewport_size({"width": 1200, "height": 800})
    page.locator("label[for=__palette_1]:visible").click()
    assert browse("explorer/").locator("html[data-theme=dark]").count() == 1
    page.click("#theme")
    assert browse("faq/").locator("body[data-md-color-scheme=default]").count() == 1


def test_links_of_pages_stay_inside_the_site(browse):
    """Files of the repository that pages point at are published with them."""
    page = browse("hard/")
    target = page.locator("a", has_text="token_budget.py").first.evaluate("node => node.href")
    assert target == f"{page.host}/some/folder/source/examples/token_budget.py"
    assert "class TokenBudget" in page.request.get(target).text()


def test_formulas_and_code_of_the_site_are_rendered(browse):
    assert browse("theory/").locator("math").count() > 20
    assert re.search(r"exact +tensor\(\[1., 1., 0., 0.\]\)", browse("").locator(".output").first.inner_text())
    assert browse("api/operations/").locator(".doc-heading").count() >= 10
