"""The page of a report in a browser: what is drawn, the mark, the zoom, the legend, and that nothing of others runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import PROGRAM, Chromium

from tests.made_up_runs import MakeRun, records
from trainkit.html_report.collect import collect
from trainkit.html_report.page import page
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo

pytestmark = [
    pytest.mark.cli,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed (scripts/cluster/packages installs it)"),
]
Info = Callable[[RunLayout], RunInfo]
STEPS, SPIKE = 5000, 4321
ATTACK = "</script></pre><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LOSS = "report.charts[0]"
STEP = "[...document.querySelectorAll('.values')].map(each => each.firstChild.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as opened:
        yield opened


@pytest.fixture
def address(make_run: MakeRun, info: Info, tmp_path: Path) -> str:
    """A page about a long run with a spike of one step, and one that has failed and whose every text is an attack."""

    def loss(step: int) -> float:
        return 50.0 if step == SPIKE else 2 + math.cos(step / 700)

    long = make_run("long", records(STEPS, loss, every=1000), summary={"sample": ATTACK})
    verdict = {"exit_code": 1, "failure": "program", "why": ATTACK, "rank": 0}
    short = make_run("short", [*records(STEPS // 2, loss), {"step": STEPS, ATTACK: 1.0}], verdict=verdict)
    short.attempt(1).log(0, "err").write_text(ATTACK)
    (short.root / "predictions.jsonl").write_text(json.dumps({"sample": 0, "source": ATTACK, "prediction": ATTACK}))
    runs = [collect(info(long), "long", {}), collect(info(short), ATTACK, {})]
    file = tmp_path / "report.html"
    file.write_text(page(runs, ATTACK))
    return file.as_uri()


def settled(browser: Chromium) -> None:
    """Wait until what was changed is drawn."""
    browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def undisturbed(browser: Chromium, address: str) -> None:
    assert browser.complaints == []
    assert browser.requests == [address]
    assert browser.evaluate("document.title") != "taken"
    assert browser.evaluate("document.querySelectorAll('img').length") == 0


def place(browser: Chromium, share: float, selector: str = ".u-over") -> tuple[float, float]:
    """The middle of the first chart from top to bottom, at a share of its width."""
    browser.evaluate(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    box = browser.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return box["left"] + share * box["width"], box["top"] + box["height"] / 2


@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_charts_are_drawn_at_any_width_in_both_colour_schemes(
    browser: Chromium, address: str, width: int, dark: bool
) -> None:
    browser.open(address, width, dark=dark)
    settled(browser)
    undisturbed(browser, address)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("document.querySelectorAll('figure canvas').length") == 10
    assert browser.evaluate("document.querySelectorAll('.key').length") == 2
    drawn: list[dict[str, Any]] = browser.evaluate(
        f"{LOSS}.parts.map((part, place) => ({{run: part.run, marks: Boolean(part.marks), points: "
        f"{LOSS}.plot.data[place + 1].filter(value => value != null)}}))"
    )
    assert [(each["run"], each["marks"]) for each in drawn] == [(0, False), (0, True), (1, False)]
    assert [1900 < len(each["points"]) <= 2000 or len(each["points"]) for each in drawn] == [True, 5, True]
    assert max(drawn[0]["points"]) == 50
    # The spike reaches the top of the canvas, in the first run's colour and in a column of its own.
    lit = browser.evaluate(f"""(() => {{
        const plot = {LOSS}.plot, y = Math.round(plot.valToPos(30, "y", true));
        const x = Math.round(plot.valToPos({SPIKE}, "x", true));
        const painted = left => [...plot.ctx.getImageData(left - 1, y, 3, 1).data]
            .some((value, at) => at % 4 === 3 && value > 99);
        return [painted(x), painted(x - 9)];
    }})()""")
    assert lit == [True, False]
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_the_mark_shows_the_values_of_all_charts_at_one_step(browser: Chromium, address: str) -> None:
    browser.open(address)
    settled(browser)
    assert browser.evaluate("document.querySelectorAll('.values')[0].textContent").startswith("last")
    left, top = place(browser, 0.25)
    browser.mouse("mouseMoved", left, top)
    settled(browser)
    step = browser.evaluate(f"{LOSS}.plot.data[0][{LOSS}.plot.cursor.idx]")
    assert abs(step - STEPS / 4) < STEPS / 100
    shown: list[str] = browser.evaluate("[...document.querySelectorAll('.values')].map(each => each.textContent)")
    assert shown[0].startswith(f"step {step:,}")
    assert f"{2 + math.cos(step / 700):.3f}"[:4] in shown[0]
    assert "0.003" in shown[2]
    assert shown[2].startswith("step ")
    browser.mouse("mouseMoved", 2, 2)
    settled(browser)
    assert {*browser.evaluate(STEP)} == {"last"}
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.key("ArrowLeft")
    settled(browser)
    assert browser.evaluate(f"{LOSS}.plot.data[0][{LOSS}.plot.cursor.idx]") == STEPS
    browser.key("ArrowLeft")
    settled(browser)
    assert browser.evaluate(f"{LOSS}.plot.data[0][{LOSS}.plot.cursor.idx]") < STEPS
    assert all(text.startswith("step ") for text in browser.evaluate(STEP))
    undisturbed(browser, address)


def test_a_drag_zooms_all_charts_and_a_double_click_shows_the_whole(browser: Chromium, address: str) -> None:
    browser.open(address)
    settled(browser)
    (left, top), (right, _) = place(browser, 0.2), place(browser, 0.4)
    browser.mouse("mouseMoved", left, top)
    browser.mouse("mousePressed", left, top, clicks=1)
    browser.mouse("mouseMoved", right, top)
    browser.mouse("mouseReleased", right, top, clicks=1)
    settled(browser)
    ranges: list[list[float]] = browser.evaluate(
        "report.charts.map(each => [each.plot.scales.x.min, each.plot.scales.x.max])"
    )
    assert all(each == ranges[0] for each in ranges)
    assert [round(each / STEPS, 1) for each in ranges[0]] == [0.2, 0.4]
    assert browser.evaluate(f"{LOSS}.plot.scales.y.max") < 5  # the spike is outside
    for clicks in (1, 2):
        browser.mouse("mousePressed", left, top, clicks=clicks)
        browser.mouse("mouseReleased", left, top, clicks=clicks)
    settled(browser)
    assert browser.evaluate(f"[{LOSS}.plot.scales.x.min, {LOSS}.plot.scales.x.max]") == [1, STEPS]
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.key("+")
    settled(browser)
    assert browser.evaluate(f"{LOSS}.plot.scales.x.max - {LOSS}.plot.scales.x.min") < STEPS * 0.51
    browser.key("Escape")
    settled(browser)
    assert browser.evaluate("report.view()") is None
    undisturbed(browser, address)


def test_controls_change_what_is_drawn(browser: Chromium, address: str) -> None:
    browser.open(address, 400)
    settled(browser)

    def choose(name: str, value: str) -> None:
        what = "checked = true" if value == "on" else f"value = '{value}'"
        browser.evaluate(f"document.getElementById('{name}').{what};")
        browser.evaluate(f"document.getElementById('{name}').dispatchEvent(new Event('change'))")
        settled(browser)

    browser.evaluate("document.querySelectorAll('.key')[1].click()")
    hidden = browser.evaluate(
        "report.charts.map(each => each.parts.map((part, at) => each.plot.series[at + 1].show === (part.run === 0)))"
    )
    assert all(all(each) for each in hidden)
    choose("axis", "time")
    assert abs(browser.evaluate(f"{LOSS}.plot.scales.x.max") - STEPS * 0.061) < 0.1
    assert browser.evaluate("document.querySelectorAll('figure').length") == 10
    choose("smoothing", "0.1")
    means: list[float] = browser.evaluate(
        f"{LOSS}.plot.data[{LOSS}.parts.findIndex(part => part.smooth) + 1].filter(value => value != null)"
    )
    assert len(means) == 1000
    assert max(means) < 3.5  # of the spike there is a hundredth, and the raw curve beside it has all of it
    assert browser.evaluate(f"Math.max(...{LOSS}.plot.data[1].filter(value => value != null))") == 50
    choose("log", "on")
    assert browser.evaluate(f"{LOSS}.plot.scales.y.distr") == 3
    assert browser.evaluate("report.charts[2].plot.scales.y.distr") == 1
    before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.evaluate("document.getElementById('theme').click()")
    settled(browser)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != before
    undisturbed(browser, address)


def test_without_curves_the_page_is_as_quiet(browser: Chromium, make_run: MakeRun, info: Info, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page([collect(info(make_run("none")), "none", {})], "none"))
    browser.open(file.as_uri())
    assert "No curves" in browser.evaluate("document.body.textContent")
    undisturbed(browser, file.as_uri())


def test_a_page_that_would_load_or_run_something_else_is_seen(browser: Chromium, address: str, tmp_path: Path) -> None:
    file = tmp_path / "spoilt.html"
    text = Path(address.removeprefix("file://")).read_text()
    file.write_text(text.replace("</main>", f"{ATTACK}<link rel=stylesheet href=http://127.0.0.1:9/a.css></main>", 1))
    browser.open(file.as_uri())
    settled(browser)
    assert len(browser.complaints) >= 3
    assert browser.evaluate("document.title") != "taken"
