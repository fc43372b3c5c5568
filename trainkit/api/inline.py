"""A run in a cell of a notebook: its state, a bar, the curves of the losses, and what it has said last."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from trainkit.cli.commands.runs import figures
from trainkit.metrics import LOSS, PREFIX
from trainkit.runner.report.history import Curve, History, trainer_curves
from trainkit.runner.rundir.listing import read_plan
from trainkit.schedulers.jobs.standing import Standing
from trainkit.text import format_measure, strip_control

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 200, 56, 24  # pixels of the chart, and of the margins with its scales
POINTS = 1000  # of a curve: more than the chart has pixels
LINES = 16  # of the output
# A notebook is light or dark: what carries no meaning takes the colour of its text.
COLOURS = {LOSS: "#3b82f6", PREFIX + LOSS: "#f97316"}
NAMES = {LOSS: "training loss", PREFIX + LOSS: "evaluation loss"}
NOT_SHOWN = ("Job", "Source", "Where")


def html_of(standing: Standing, output: str) -> str:
    """The picture. output: what the command line has shown; empty where it was not kept."""
    layout, state = standing.run.layout, standing.state
    history = History(layout.metrics)
    history.read()
    curves = {name: history.curves[name] for name in COLOURS if name in history.curves}
    if not curves and standing.run.launched.get("program") == "hf":
        found = trainer_curves(read_plan(layout), layout, standing.run.started or 0.0)
        curves = {name: found[name] for name in COLOURS if name in found}
    code = f", exit code {standing.exit_code}" if standing.exit_code else ""
    head = f"<b>{_e(layout.name)}</b> {_e(layout.short_id)}: <b>{_e(state.title)}</b>{code}"
    facts = " · ".join(f"{_e(name)} {_e(text)}" for name, text in figures(standing)[1:] if name not in NOT_SHOWN)
    why = f"<div>{_e(state.why)}</div>" if state.why and state.is_over and standing.exit_code else ""
    bar = ""
    if standing.total and standing.step is not None and not state.is_over:
        bar = f'<progress style="width:{WIDTH}px" max="{standing.total}" value="{standing.step}"></progress>'
    return f"<div>{head}</div>{why}{bar}<div><small>{facts}</small></div>{_chart(curves)}{said(output)}"


def said(output: str) -> str:
    """Warnings, and the last lines; of one that was overwritten, as by a progress bar, the last text."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in output.split("\n") if line.strip()]
    shown = [line for line in lines[:-LINES] if line.startswith("warning: ")] + lines[-LINES:]
    return f'<pre style="font-size:smaller">{_e(chr(10).join(shown))}</pre>' if shown else ""


def _chart(curves: dict[str, Curve]) -> str:
    """The losses over the steps as SVG; empty where fewer than two are known."""
    points = {name: list(_points(curve)) for name, curve in curves.items()}
    every = [point for each in points.values() for point in each]
    if len(every) < 2:
        return ""
    (first, last), (low, high) = (
        (min(values), max(values)) for values in ([step for step, _ in every], [value for _, value in every])
    )
    across, up = (WIDTH - LEFT - 8) / max(1, last - first), (HEIGHT - BOTTOM - 8) / ((high - low) or 1.0)

    def place(step: int, value: float) -> str:
        return f"{LEFT + (step - first) * across:.1f},{HEIGHT - BOTTOM - (value - low) * up:.1f}"

    drawn, names = [], []
    for number, (name, each) in enumerate(points.items()):
        colour = COLOURS[name]
        if len(each) > 1:
            line = " ".join(place(*point) for point in each)
            drawn.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{line}"/>')
        if name != LOSS or len(each) == 1:  # few and far between
            dots = (place(*point).split(",") for point in each)
            drawn += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in dots]
        names.append(f'<text x="{LEFT + 8 + 130 * number}" y="12" fill="{colour}">{NAMES[name]}</text>')
    scale = (
        f'<text x="{LEFT - 6}" y="14" text-anchor="end">{format_measure(high)}</text>'
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">{format_measure(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">step {last}</text>'
        f'<path d="M{LEFT} 4V{HEIGHT - BOTTOM}H{WIDTH - 8}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
    )
    style = "font:11px sans-serif;fill:currentColor;display:block"
    sizes = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f'<svg {sizes} style="{style}" role="img" aria-label="losses">{scale}{"".join(drawn)}{"".join(names)}</svg>'


def _points(curve: Curve) -> Iterator[tuple[int, float]]:
    """At most so many of its points, without what is not finite, and always the last one."""
    known = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]
    stride = -(-len(known) // POINTS) or 1
    yield from known[::-1][::stride][::-1]


def _e(text: object) -> str:
    return escape(strip_control(str(text)))
