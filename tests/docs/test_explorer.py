"""The explorer in a real browser: its sweeps are those of the reference, and every way to change its state works.

It needs Playwright's Python package and a Chromium (Debian's: ``apt-get install chromium``).
"""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knapgrad as kg
from knapgrad import reference
from knapgrad.lattice import FEASIBLE, Lattice
from knapgrad.regularizers import REGULARIZERS

DOCS = Path(__file__).parents[2] / "docs"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONSTRAINTS = ("knapsack", "topk", "groups")

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the explorer is tested with Playwright: pip install playwright"
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="the explorer is tested in Chromium, which is not installed")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address():
    handler = functools.partial(Quiet, directory=str(DOCS))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/explorer/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """The explorer, just opened. Nothing may go wrong on it, and nothing may be asked from elsewhere."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    page.set_default_timeout(120_000)  # other tests run beside it
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
    page.on("request", lambda request: request.url.startswith((address, "data:")) or troubles.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert not troubles


# The sweeps


def random_state(rng: np.random.Generator, number: int) -> dict[str, Any]:
    constraint = CONSTRAINTS[number % 3]
    n = int(rng.integers(1, 13))
    scores = rng.normal(size=n) * rng.choice([0.1, 1, 10, 1000]) + rng.choice([0, 2])
    if number % 5 == 0:
        scores = scores.round()  # ties
    weights = rng.integers(0 if number % 2 else 1, 9, n)
    groups = np.sort(rng.integers(0, max(n // 2, 1), n))
    items = [
        {"score": s, "weight": w, "group": g} for s, w, g in zip(scores.tolist(), weights.tolist(), groups.tolist())
    ]
    most = n if constraint == "topk" else int(weights.sum())
    capacity = int(rng.integers(0, most + 1))
    at_least = int(rng.choice([0, capacity, rng.integers(0, capacity + 1)]))
    state = {
        "constraint": constraint,
        "items": items,
        "capacity": capacity,
        "atLeast": at_least,
        "optional": bool(rng.integers(2)),
    }
    gamma = float(rng.choice([0.01, 0.5, 1, 3.7]))
    return state | {"gamma": gamma, "regularizer": ("shannon", "gini", "tsallis")[number // 3 % 3]}


def as_arrays(state: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """theta and weights; groups are padded with -inf."""
    items = state["items"]
    if state["constraint"] != "groups":
        weights = [1 if state["constraint"] == "topk" else item["weight"] for item in items]
        return np.array([item["score"] for item in items]), np.array(weights)
    names = sorted({item["group"] for item in items})
    rows = [[item for item in items if item["group"] == name] for name in names]
    theta, weights = np.full((2, len(rows), max(map(len, rows))), -np.inf)
    weights = np.zeros(theta.shape, int)
    for row, group in enumerate(rows):
        theta[row, : len(group)] = [item["score"] for item in group]
        weights[row, : len(group)] = [item["weight"] for item in group]
    return theta, weights


def as_lattice(state: dict[str, Any]) -> tuple[np.ndarray, Lattice]:
    theta, weights = as_arrays(state)
    theta = theta / state["gamma"]
    options = 0
    if state["constraint"] == "groups":
        empty = np.zeros((len(theta), int(state["optional"])))
        theta, weights = np.hstack([empty, theta]), np.hstack([empty.astype(int), weights])
        options = theta.shape[1]
    capacity = state["capacity"]
    lattice = Lattice(weights.ravel(), capacity, capacity - state["atLeast"], capacity, int(weights.max()), options)
    return theta.ravel(), lattice


def as_constraint(state: dict[str, Any]) -> Any:
    weights, capacity, at_least = as_arrays(state)[1], state["capacity"], state["atLeast"]
    if state["constraint"] == "topk":
        return kg.TopK(capacity, at_least=at_least)
    if state["constraint"] == "knapsack":
        return kg.Knapsack(weights, capacity, at_least=at_least)
    return kg.MultipleChoice(weights, capacity, at_least=at_least, optional=state["optional"])


SWEEPS = """async (states) => {
    const m = await import("./sweeps.js");
    return states.map((state) => {
        const problem = m.problemOf(state, state.gamma);
        const { P, V, value, feasible } = m.tables(problem, state.regularizer);
        const found = { P, V, value, feasible };
        if (!feasible) return found;
        const exact = m.solve(m.problemOf(state)).reverse().map(({ k, o }) => [k, o]);
        const best = m.likeliest(problem, P, 1e9);
        return { ...found, ...m.collect(problem, P), ...m.counts(problem, P), exact, best };
    });
}"""


def test_the_sweeps_are_those_of_the_reference(page):
    """500 problems: value, relax, Q and the rest to 1e-9."""
    rng = np.random.default_rng(0)
    states = [random_state(rng, number) for number in range(500)]
    feasible = 0
    for state, found in zip(states, page.evaluate(SWEEPS, states), strict=True):
        theta, lattice = as_lattice(state)
        regularizer = REGULARIZERS[state["regularizer"]]
        V, P = reference.tables(theta, lattice, regularizer)
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-9, err_msg=json.dumps(state))
        close(found["V"], V, rtol=1e-14)  # scores are up to 1e5 gamma
        close(found["P"], P)
        assert found["feasible"] == (V[-1, -1] > FEASIBLE), state
        if not found["feasible"]:
            continue
        feasible += 1
        value, relaxed = reference.operator(theta, lattice, regularizer)
        close(found["value"], value, rtol=1e-14)
        close(np.array(found["y"])[:, slice(None) if lattice.options else 1].ravel(), relaxed)
        close(found["entropy"], reference.entropy(theta, lattice, regularizer)[0])
        exact = np.zeros_like(P[..., 0])
        exact[tuple(np.transpose(found["exact"]))] = 1
        solved = reference.solve(theta * state["gamma"], lattice)
        close(exact[:, slice(None) if lattice.options else 1].ravel(), solved)
        probabilities = [subset["probability"] for subset in found["best"]]
        assert len(probabilities) == found["possible"] <= found["subsets"], state
        assert probabilities == sorted(probabilities, reverse=True)
        close(sum(probabilities), 1)
    assert 300 < feasible < 500


def test_the_problems_are_those_of_the_constraints(page):
    """What the page makes of a constraint, against knapgrad itself; Shannon spreads over all feasible subsets."""
    rng = np.random.default_rng(1)
    states = [random_state(rng, number) | {"regularizer": "shannon", "gamma": 1000.0} for number in range(60)]
    for state, found in zip(states, page.evaluate(SWEEPS, states), strict=True):
        if not found["feasible"]:
            continue
        theta, constraint = as_arrays(state)[0], as_constraint(state)
        np.testing.assert_allclose(found["value"] * 1000, kg.value(theta, constraint, kg.Shannon(1000.0)), rtol=1e-9)
        assert found["subsets"] == found["possible"], state


FRONTIERS = """async (states) => {
    const m = await import("./sweeps.js");
    return states.map((s) => m.frontier(m.problemOf(s, s.gamma), s.capacity, s.atLeast, s.mode, s.regularizer));
}"""


def test_the_frontier_is_the_value_at_every_capacity(page):
    rng = np.random.default_rng(2)
    states = []
    for number in range(60):
        state = random_state(rng, number)
        for at_least, mode in ((0, "most"), (state["capacity"], "exactly"), (state["capacity"] // 2, "band")):
            states.append(state | {"atLeast": at_least, "mode": mode})
    for state, found in zip(states, page.evaluate(FRONTIERS, states), strict=True):
        regularizer = REGULARIZERS[state["regularizer"]]
        for capacity, value in enumerate(found):
            least = {"most": 0, "exactly": capacity, "band": state["atLeast"]}[state["mode"]]
            expected = -np.inf
            if least <= capacity:
                expected = reference.operator(
                    *as_lattice(state | {"capacity": capacity, "atLeast": least}), regularizer
                )[0]
            if value is None:
                assert expected <= FEASIBLE, state
            else:
                np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-9)


def test_drawn_subsets_have_the_relaxed_selection_as_their_mean(page):
    state = random_state(np.random.default_rng(3), 1) | {"gamma": 3.7, "regularizer": "gini"}
    means, relaxed = page.evaluate(
        """async (state) => {
            const m = await import("./sweeps.js"), problem = m.problemOf(state, state.gamma);
            const { P } = m.tables(problem, state.regularizer), y = problem.choices.map(() => 0);
            for (let draw = 0; draw < 20000; draw++) for (const { k, o } of m.sample(problem, P)) y[k] += o / 20000;
            return [y, m.collect(problem, P).y.map((row) => row[1])];
        }""",
        state,
    )
    assert np.max(relaxed) > 0.05 and np.ptp(relaxed) > 0
    np.testing.assert_allclose(means, relaxed, atol=0.02)


# The page


def link(page) -> str:
    """The address that keeps the state. The page writes it after a while: a later timer of its own finds it written,
    however slow the machine is."""
    return page.evaluate("() => new Promise((done) => setTimeout(() => done(location.href), 300))")


def items(page) -> list[tuple[float, int]]:
    """Score and weight of each item, as the link has them."""
    found = re.search(r"items=([^&]+)", link(page))[1].replace("%7E", "~")
    return [(float(score), int(weight)) for score, weight, _ in (item.split("_") for item in found.split("~"))]


def test_a_bar_is_dragged_up_for_its_score(page):
    before = page.locator(".bar[data-item='1'] .score").text_content()
    box = page.locator(".bar[data-item='1'] .frame").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5 - 35, steps=4)  # 210 pixels are 12 units of score
    page.mouse.up()
    assert before == "3.4"
    assert items(page)[1] == (5.4, 3)
    assert page.locator("#edit-score").input_value() == "5.4"


def test_the_edge_of_a_bar_is_dragged_for_its_weight(page):
    box = page.locator(".bar[data-item='1'] .frame").bounding_box()
    unit = box["width"] / 3
    page.mouse.move(box["x"] + box["width"], box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] + 2 * unit, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert items(page)[1] == (3.4, 5)
    first, second = (float(page.locator(f".bar[data-item='{i}'] .frame").get_attribute("width")) for i in (0, 1))
    assert second / first == pytest.approx(5 / 6)


def test_the_keyboard_does_what_dragging_does(page):
    page.locator(".bar[data-item='2']").focus()
    for key in ("ArrowUp", "ArrowUp", "Shift+ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert items(page)[2] == (pytest.approx(1.8), 3)
    label = page.locator(".bar[data-item='2']").get_attribute("aria-valuetext")
    assert label.startswith("score 1.8, weight 3, ")
    page.keyboard.press("Delete")
    assert len(items(page)) == 6
    page.keyboard.press("ArrowUp")  # the focus has moved to the item that took its place
    assert items(page)[2] == (4.3, 5)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.item") == "3"


def test_a_finger_drags_a_bar_and_does_not_scroll_the_page(page):
    page.set_viewport_size({"width": 390, "height": 700})
    box = page.locator(".bar[data-item='1'] .frame").bounding_box()
    device, at, before = page.context.new_cdp_session(page), box["x"] + box["width"] / 2, page.evaluate("scrollY")

    def touch(kind: str, *points: float) -> None:
        event = {"type": kind, "touchPoints": [{"x": at, "y": y} for y in points]}
        device.send("Input.dispatchTouchEvent", event)

    touch("touchStart", box["y"] + 30)
    for step in range(1, 8):
        touch("touchMove", box["y"] + 30 - 5 * step)  # 35 pixels are 2 units of score
    touch("touchEnd")
    assert items(page)[1] == (5.4, 3)
    assert page.evaluate("scrollY") == before


def test_in_top_k_there_are_no_weights_to_change(page):
    page.locator("input[value=topk]").check(force=True)
    page.locator(".bar[data-item='1']").press("ArrowRight")
    page.locator(".bar[data-item='1']").press("ArrowUp")
    assert items(page)[1] == (3.5, 3)
    assert page.locator("#weight-hint").is_hidden()


def test_reset_leads_back_to_the_start(page):
    before = page.locator("#python").text_content()
    page.locator(".bar[data-item='1']").press("ArrowUp")
    page.click("#add")
    page.get_by_text("Shannon").click()
    assert page.locator("#python").text_content() != before
    page.click("#reset")
    assert page.locator("#python").text_content() == before and len(items(page)) == 7


def test_what_is_impossible_is_0_percent_and_what_is_unlikely_is_not(page):
    """Gini has exact zeros, Shannon has none."""

    def shown() -> list[str]:
        return [text.rpartition(" ")[2] for text in page.locator("#table title").all_text_contents()]

    page.locator("#gamma").press("Home")
    gini = shown()
    assert {"0%", "100%"} <= set(gini) <= {"0%", "100%", "50.0%"}  # the last is a tie
    page.get_by_text("Shannon").click()
    assert {"<0.01%", ">99.99%"} <= set(shown())
    assert shown().count("0%") < gini.count("0%")  # items that do not fit


def test_the_theme_is_kept(page):
    page.click("#theme")
    page.reload()
    assert page.locator("html[data-theme=dark]").count() == 1
    page.click("#theme")
    page.reload()
    assert page.locator("html[data-theme=light]").count() == 1


def test_items_are_added_and_removed(page):
    page.click("#add")
    assert len(items(page)) == page.locator(".bar").count() == 8
    page.fill("#edit-score", "7.5")
    page.fill("#edit-weight", "2")
    assert items(page)[7] == (7.5, 2)
    for _ in range(20):
        if page.locator("#add").is_enabled():
            page.click("#add")
    assert len(items(page)) == 14
    for _ in range(20):
        if page.locator("#remove").is_enabled():
            page.click("#remove")
    assert len(items(page)) == page.locator(".bar").count() == 1


def shares(page) -> np.ndarray:
    return np.array([float(text) for text in page.locator(".bar .taken").all_text_contents()])


def test_gamma_and_the_regularizer_change_the_selection(page):
    page.locator("#gamma").focus()
    page.keyboard.press("Home")
    assert set(shares(page)) <= {0, 100}, "with a small gamma the relaxed selection is the exact one"
    page.keyboard.press("End")
    assert page.locator("#gamma-value").text_content() == "10"
    gini = shares(page)
    page.get_by_text("Shannon").click()
    assert not (shares(page) == gini).all()
    assert "kg.Shannon(10)" in page.locator("#python").text_content()


def test_the_capacity_moves_the_frontier_and_the_limit(page):
    page.locator("#capacity").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#capacity-value").text_content() == "11"
    assert page.locator(".now-line").get_attribute("data-capacity") == "11"
    box = page.locator("#frontier").bounding_box()
    page.locator("#frontier").click(position={"x": 34 + (box["width"] - 46) * 20 / 23, "y": 60})
    assert page.locator("#capacity-value").text_content() == "20"


def test_at_least_is_kept_by_every_drawn_subset(page):
    page.locator("#atleast").focus()
    page.keyboard.press("End")  # exactly the capacity
    page.locator("#gamma").focus()
    page.keyboard.press("End")
    seen = set()
    for _ in range(20):
        page.click("#draw")
        note = page.locator("[data-kind=drawn] .total").text_content()
        assert note.startswith("weight 12, ")
        seen.add(note)
    assert len(seen) > 1


def test_what_cannot_be_met_is_said(page):
    page.get_by_text("One per group").click()
    page.locator("#capacity").focus()
    page.keyboard.press("Home")
    assert "No selection is feasible" in page.locator("#numbers").text_content()
    assert page.locator("#draw").is_disabled()
    page.check("#optional")
    assert "smoothed" in page.locator("#numbers").text_content()


def test_a_draw_is_shown_as_a_path_of_the_table(page):
    assert page.locator(".walk").count() == 0
    page.click("#draw")
    assert page.locator("#table circle").count() == 7
    row = page.locator("#subsets tr.now td").first.text_content().removesuffix(" exact")
    assert row == page.locator("#status").text_content().removeprefix("Drawn: ") or "others" in row
    page.locator("#gamma").press("ArrowLeft")
    assert page.locator(".walk").count() == 0, "the subset was drawn from another distribution"


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_link_keeps_the_state(page, browser, constraint):
    page.locator(f"input[value={constraint}]").check(force=True)
    if constraint == "groups":
        page.check("#optional")
    page.locator("input[value=tsallis]").check(force=True)
    page.locator(".bar[data-item='0']").press("ArrowDown")
    page.locator("#capacity").press("ArrowRight")
    page.click("#draw")
    other = browser.new_page(viewport={"width": 1200, "height": 900})
    other.goto(link(page))
    for part in ("#python", "#numbers", "#subsets", "#selections", "#bars", "#table", "#frontier"):
        assert other.locator(part).inner_html() == page.locator(part).inner_html(), part
    other.close()


@pytest.mark.parametrize("link", ["#items=1_2", "#gamma=x&capacity=-3&constraint=none", "#items=~~&drawn=111", "#%"])
def test_a_broken_link_opens_the_page_all_the_same(page, address, link):
    page.goto(address + link)
    page.reload()
    assert page.locator(".bar").count() == 7
    assert "smoothed" in page.locator("#numbers").text_content()


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_code_on_the_page_gives_the_numbers_on_the_page(page, constraint):
    page.locator(f"input[value={constraint}]").check(force=True)
    page.locator("#capacity").press("ArrowRight")
    page.locator("#atleast").press("ArrowRight")
    if constraint == "groups":
        page.check("#optional")
    *setup, relax, solve, _ = page.locator("#python").text_content().splitlines()
    names: dict[str, Any] = {}
    exec("\n".join(setup), names)
    soft, hard = eval(relax, names), eval(solve, names)
    there = np.isfinite(names["theta"])
    np.testing.assert_allclose(shares(page), 100 * soft[there], atol=0.5 + 1e-9)
    picked = "".join(str(i + 1) for i in np.flatnonzero(hard[there]))
    assert "".join(page.locator("[data-kind=exact] .part").all_text_contents()) == picked


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_nothing_is_wider_than_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.wait_for_function("width => innerWidth === width", arg=width)
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(page, scheme):
    """At least 4.5 to 1 between text and what is behind it, as WCAG asks."""
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("scheme => matchMedia(`(prefers-color-scheme: ${scheme})`).matches", arg=scheme)

    def luminance(name: str) -> float:
        code = page.evaluate("name => getComputedStyle(document.documentElement).getPropertyValue(name)", name).strip()
        parts = np.array([int(code[at : at + 2], 16) for at in (1, 3, 5)]) / 255
        return float(
            np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
        )

    pairs = [(text, "--card") for text in ("--ink", "--muted", "--relaxed", "--exact", "--drawn")]
    assert (luminance("--card") < 0.5) == (scheme == "dark")
    for text, back in [*pairs, ("--muted", "--page")]:
        low, high = sorted((luminance(text), luminance(back)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, back)
