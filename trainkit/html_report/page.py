"""The page of a report: HTML that a browser shows without a network, from what was collected of runs."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from itertools import pairwise
from typing import Any

from trainkit import __version__
from trainkit.decode import finite, whole
from trainkit.heartbeat import PHASES
from trainkit.html_report.collect import PREDICTIONS, READ, Collected, Pieces
from trainkit.html_report.curves import chart_data, phase_seconds
from trainkit.text import format_duration, format_measure, format_memory, format_rate, pluralize, strip_control

# In the first bytes of every page: a file without it is somebody else's.
MARK = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="trainkit report">'
COLOURS, DASHES = 6, ("", "7 3", "2 2", "10 3 2 3")
MOST = COLOURS * len(DASHES)  # runs that can be told from each other
LONG = 40_000  # characters of a text
COLUMNS = ("sample", "text", "source", "reference", "prediction", "probabilities", "loss")
FEW = 24  # differing keys that are shown at once
CELL = 600  # of a text in a table
NONE = "-"  # what is unknown
_OTHER = ("start", "steps")  # phases that are of no step
CONTROLS = """
<div class="controls">
<label>Over <select id="axis"><option value="step">steps</option><option value="time">time</option></select></label>
<label>Smoothing <select id="smoothing"><option value="0">none</option>
<option value="0.02">mean of 2 %</option><option value="0.1">mean of 10 %</option></select></label>
<label><input type="checkbox" id="log"> Loss logarithmic</label>
<button type="button" id="reset" disabled>Whole range</button>
</div></div>
<div id="charts"><noscript><p>The curves are drawn by JavaScript, which is switched off.</p></noscript></div>
<p class="dim">Drag to zoom, double click for the whole range. With the keyboard: arrows move the mark, + and - zoom,
Escape shows the whole range. Long curves keep the extremes of each stretch.</p>
"""


def page(runs: Sequence[Collected], title: str, comparison: str = "") -> str:
    """The whole page. comparison: a table of a bench as text, shown first."""
    style = _own("uplot", "uPlot.min.css") + _own("page.css")
    scripts = [_own("uplot", "uPlot.iife.min.js"), _own("page.js")]
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {' '.join(map(_digest, scripts))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = chart_data(runs)
    sections = [(name, "".join(body)) for name, body in _sections(runs, comparison, charts=bool(data["charts"]))]
    shown = [(name, body) for name, body in sections if body]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name, _ in shown)
    parts = (
        f'{MARK}<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f'<meta name="viewport" content="width=device-width"><title>{_e(title)} · trainkit report</title>',
        f'<style>{style}</style></head><body><header><h1>{_e(title)}</h1><p class="dim">{_head(runs)}</p>',
        f'<nav aria-label="Sections">{links}<button type="button" id="theme">Dark or light</button></nav></header>',
        "<main>",
        *(f'<section id="{name.lower()}"><h2>{name}</h2>{body}</section>' for name, body in shown),
        f'</main><script type="application/json" id="data">{_json(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    )
    return "".join(parts)


def _own(*path: str) -> str:
    return files("trainkit.html_report").joinpath(*path).read_text("utf-8").strip()


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: object) -> str:
    """JSON that ends no element of HTML: what HTML or JavaScript reads otherwise is escaped."""
    found = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII alone
    return found.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _e(value: object) -> str:
    """Any text for HTML. Controls are shown as U+FFFD: they are of no use there, or turn the direction of the rest."""
    return html.escape(strip_control(str(value)))


def _head(runs: Sequence[Collected]) -> str:
    of = _e(runs[0].standing.run.layout.root) if len(runs) == 1 else pluralize(len(runs), "run")
    return f"{of} · written {time.strftime('%Y-%m-%d %H:%M:%S')} by trainkit {__version__}"


def _sections(runs: Sequence[Collected], comparison: str, *, charts: bool) -> Iterator[tuple[str, Iterable[str]]]:
    """The sections by their names; one without content is left out."""
    yield "Comparison", [_pre(comparison)] if comparison else []
    yield "Summary", _summary(runs)
    yield "Failures", _of_each(runs, lambda run: "".join(_titled(title, _pre(text)) for title, text in run.failures))
    yield "Curves", _curves(runs, charts=charts)
    yield "Phases", _phases(runs)
    yield "Samples", _of_each(runs, lambda run: _pre(run.standing.run.summary.get("sample") or ""))
    yield "Predictions", _of_each(runs, _predictions)
    yield "Rows", _of_each(runs, _rows)
    yield "Recipe", _recipe(runs)
    yield "Plan", _of_each(runs, lambda run: _pre(run.plan), "Show the plan")
    yield "Environment", _of_each(runs, _environment, "Show the environment")


def _of_each(runs: Sequence[Collected], body: Callable[[Collected], str], closed: str = "") -> Iterator[str]:
    """What there is of each run, below its name where there are several. closed: what opens it, if it is not."""
    for number, run in enumerate(runs):
        shown = body(run)
        if shown and (closed or len(runs) > 1):
            heading = f"{_swatch(number)}{_e(run.label)}" if len(runs) > 1 else closed
            opened = "" if closed else " open"
            yield f"<details{opened}><summary><h3>{heading}</h3></summary>{shown}</details>"
        else:
            yield shown


def _titled(title: str, body: str) -> str:
    return f'<h3 class="sub">{_e(title)}</h3>{body}'


def _pre(text: object) -> str:
    shown = str(text)
    rest = f"\n… {len(shown) - LONG:,} more characters" if len(shown) > LONG else ""
    return f'<pre tabindex="0">{_e(shown[:LONG])}{rest}</pre>' if shown else ""


def _swatch(number: int) -> str:
    dash = DASHES[number // COLOURS % len(DASHES)] if number >= COLOURS else DASHES[number % len(DASHES)]
    line = f'<line x1="0" y1="5" x2="26" y2="5" stroke-dasharray="{dash}"/>'
    return f'<svg class="swatch run{number % COLOURS}" width="26" height="10" aria-hidden="true">{line}</svg>'


def _summary(runs: Sequence[Collected]) -> Iterator[str]:
    """Tiles of one run; a table of several."""
    found = [dict(facts(run)) for run in runs]
    if len(runs) == 1:
        tiles = (f"<div><dt>{_e(name)}</dt><dd>{_e(value)}</dd></div>" for name, value in found[0].items())
        yield f'<dl class="tiles">{"".join(tiles)}</dl>'
        if (training := runs[0].standing.run.summary.get("training")) and isinstance(training, Mapping):
            yield _table(("What was trained", ""), [(_e(name), _e(value)) for name, value in training.items()])
        return
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = [
        (f"{_swatch(number)}{_e(run.label)}", *(_e(each.get(name, NONE)) for name in names))
        for number, (run, each) in enumerate(zip(runs, found, strict=True))
    ]
    yield f'<div class="many">{_table(("Run", *names), rows)}</div>'


def facts(run: Collected) -> Iterator[tuple[str, str]]:
    """The results of a run in a few words, by their names. What is unknown is left out."""
    standing, info, summary = run.standing, run.standing.run, run.standing.run.summary
    yield "State", standing.state.title + (f", exit code {standing.exit_code}" if standing.exit_code else "")
    if info.started:
        yield "Started", f"{datetime.fromtimestamp(info.started):%Y-%m-%d %H:%M}"
    if standing.duration is not None:
        yield "Duration", format_duration(standing.duration)
    if standing.left is not None:
        yield "Left", format_duration(standing.left)
    if (step := standing.step) is not None:
        yield "Steps", f"{step:,}" + (f" of {standing.total:,}" if standing.total not in (None, step) else "")
    evaluated = finite(summary.get("eval_loss"))
    measured = {"loss": evaluated} | dict([standing.evaluation] if standing.evaluation else [])
    losses = {"Final loss" if standing.state.is_over else "Loss": standing.loss}
    for name, value in (losses | {f"Evaluation {name}": value for name, value in measured.items()}).items():
        if value is not None:
            yield name, format_measure(value)
    if standing.diverged:
        yield "Loss", "not finite"
    if (best := finite(summary.get("best_value"))) is not None:
        yield f"Best {summary.get('best_metric')}", f"{format_measure(best)} at step {summary.get('best_step')}"
    for name, value in (("Samples/s", standing.samples_per_second), ("Tokens/s", standing.tokens_per_second)):
        if value:
            yield name, format_rate(value)
    occupied = summary.get("gpu_memory_occupied")
    known = map(whole, occupied.values()) if isinstance(occupied, Mapping) else ()
    used = [each for each in known if each is not None]
    if (memory := max(used, default=standing.memory_bytes)) is not None:
        yield "GPU memory occupied" if used else "Peak memory", format_memory(memory)
    world, strategy = run.start.get("world_size") or summary.get("world_size"), info.launched.get("strategy", "")
    if strategy:
        ranks = f" \N{MULTIPLICATION SIGN} {pluralize(world, 'rank')}" if isinstance(world, int) else ""
        yield "Strategy", f"{strategy}{ranks}"
    if info.program:
        yield "Program", info.program if info.program != "builtin" else "built-in trainer"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML. It scrolls by itself where it is wide."""
    body = "".join(
        f"<tr>{''.join(each if each.startswith('<td') else f'<td>{each}</td>' for each in row)}</tr>" for row in rows
    )
    names = "".join(f'<th scope="col">{_e(each)}</th>' for each in head)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


def _curves(runs: Sequence[Collected], *, charts: bool) -> Iterator[str]:
    yield from (f'<p class="dim">{_e(run.label)}: {_e(run.refusal)}</p>' for run in runs if run.refusal)
    if not charts:
        yield '<p class="dim">No curves: only the built-in trainer and Trainer log metrics.</p>'
        return
    keys = "".join(
        f'<button type="button" class="key" data-run="{number}" aria-pressed="true">{_swatch(number)}'
        f"<span>{_e(run.label)}</span></button>"
        for number, run in enumerate(runs)
    )
    yield f'<div id="bar"><div id="legend" role="group" aria-label="Runs">{keys}</div>{CONTROLS}'


def _phases(runs: Sequence[Collected]) -> Iterator[str]:
    """A bar for each run, as long as its step compared with the longest, and the seconds in a table."""
    found = [phase_seconds(run.curves, run.first_step) for run in runs]
    names = [name for name in PHASES if name not in _OTHER and any(each.get(name) for each in found)]
    whole = [sum(each.get(name, 0.0) for name in names) for each in found]
    if not names or not max(whole):
        return
    yield '<p class="dim">Mean of a step of rank 0, evaluations and checkpoints spread over all steps.</p>'
    for number, (run, each, seconds) in enumerate(zip(runs, found, whole, strict=True)):
        if len(runs) > 1:
            told = f"{_seconds(seconds)} a step" if seconds else "no phases recorded"
            yield f'<p class="bar">{_swatch(number)}{_e(run.label)}: {told}</p>'
        if not seconds:
            continue
        ends = [
            1000 * sum(each.get(name, 0.0) for name in names[:place]) / max(whole) for place in range(len(names) + 1)
        ]
        bars = "".join(
            f'<rect class="phase{place}" x="{start:.2f}" width="{end - start:.2f}" height="24"/>'
            for place, (start, end) in enumerate(pairwise(ends))
        )
        yield f'<svg class="phases" viewBox="0 0 1000 24" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'
    rows = []
    for place, name in enumerate(names):
        square = (
            f'<svg width="12" height="12" aria-hidden="true"><rect class="phase{place}" width="12" height="12"/></svg>'
        )
        cells = (
            f"{_seconds(each.get(name, 0.0))} · {each.get(name, 0.0) / seconds:.1%}" if seconds else NONE
            for each, seconds in zip(found, whole, strict=True)
        )
        rows.append((f'<td class="name">{square} {_e(name)}</td>', *cells))
    yield _table(("Phase", *(run.label if len(runs) > 1 else "Time" for run in runs)), rows)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _predictions(run: Collected) -> str:
    found = run.predictions
    if not found.count:
        return ""
    right = "" if found.right is None else f", {found.right:,} right ({found.right / found.count:.1%})"
    read = f"the first {READ:,} lines" if found.more else pluralize(found.count, "line")
    parts = [f'<p class="dim">{PREDICTIONS}: {read}{right}</p>']
    for title, lines in (("The first ones", found.first), ("Furthest off among the others", found.worst)):
        names = [name for name in COLUMNS if any(name in each for each in lines)]
        rows = ([_cell(each, name) for name in names] for each in lines)
        heads = ("probability" if name == "probabilities" else name for name in names)
        parts += [_titled(title, _table([*heads], rows))] if lines else []
    return "".join(parts)


def _cell(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if name == "probabilities" and isinstance(value, list):  # that of the predicted label
        label = line.get("label")
        value = value[label] if isinstance(label, int) and 0 <= label < len(value) else None
    shown = NONE if value is None else format_measure(value) if isinstance(value, float) else str(value)
    cut = _e(shown[:CELL]) + ("…" if len(shown) > CELL else "")
    wrong = name == "prediction" and line.get("target") is not None and line.get("label") != line.get("target")
    return f'<td class="wrong">{cut} <span>wrong</span></td>' if wrong else f'<td class="{name}">{cut}</td>'


def _rows(run: Collected) -> str:
    if not run.rows:
        return f'<p class="dim">No rows: {_e(run.why_no_rows)}.</p>' if run.why_no_rows else ""
    shown = "".join(
        f'<pre tabindex="0" class="row">{"".join(_piece(*each) for each in row)}</pre>' for row in map(_cut, run.rows)
    )
    return f'<p class="dim">As the model reads them; it learns to write what is <mark>marked</mark>.</p>{shown}'


def _piece(text: str, learned: bool) -> str:
    return f"<mark>{_e(text)}</mark>" if learned else _e(text)


def _cut(row: Pieces) -> Iterator[tuple[str, bool]]:
    left = LONG // 10
    for text, learned in row:
        if left <= 0:
            yield " …", False
            return
        yield text[:left], learned
        left -= len(text)


def _recipe(runs: Sequence[Collected]) -> Iterator[str]:
    """The keys in which runs differ, then each recipe as a whole."""
    if len(runs) > 1:
        keys = dict.fromkeys(key for run in runs for key in run.settings)
        differing = [key for key in keys if len({run.settings.get(key) for run in runs}) > 1]
        if differing:
            table = _table(("Key", *(run.label for run in runs)), [_differing(key, runs) for key in differing])
            opened = " open" if len(differing) <= FEW else ""
            count = f"{pluralize(len(differing), 'key')} with different values"
            yield f"<details{opened}><summary><h3>{count}</h3></summary>{table}</details>"
        else:
            yield '<p class="dim">The recipes are equal.</p>'
    yield from _of_each(runs, lambda run: _pre(run.recipe), "Show the recipe")


def _differing(key: str, runs: Sequence[Collected]) -> list[str]:
    """A row of the table: what not most runs have is marked."""
    values = [run.settings.get(key, NONE) for run in runs]
    usual = max(values, key=values.count) if len(set(values)) < len(values) else None
    cells = ((f"{_e(value[:CELL])}", value) for value in values)
    return [
        f"<td><code>{_e(key)}</code></td>",
        *(f"<td>{cell}</td>" if value == usual else f"<td><mark>{cell}</mark></td>" for cell, value in cells),
    ]


def _environment(run: Collected) -> str:
    info = run.standing.run
    topology = ", ".join(filter(None, (info.launched.get("launcher"), str(info.summary.get("device") or ""))))
    rows = [("Code", run.code), ("Launcher, device", topology), ("Run directory", str(info.layout.root))]
    table = _table(("What", ""), [(_e(name), _e(value)) for name, value in rows if value])
    return table + (_titled("Variables of the ranks", _pre(run.environment)) if run.environment else "")
