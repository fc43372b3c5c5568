"""The charts of a report: which curves each has, thinned so that a page stays small and no spike is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from trainkit.html_report.collect import Collected
from trainkit.metrics import LOSS, PREFIX
from trainkit.runner.report.history import NO_CHART, PHASE, Curve

Unit = Literal["number", "bytes", "seconds", "share", "percent"]
POINTS = 2000  # of a curve, at most: more than a chart has pixels
ALL_POINTS = 60_000  # of all curves of a page, which are then about one MiB
FEWEST = 200  # of a curve, however many there are


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. curve: its name in a run's curves. marks: of a curve that is drawn into it as points.

    loss: whether its scale is logarithmic where the page is asked for that.
    """

    title: str
    curve: str
    unit: Unit = "number"
    marks: str = ""
    loss: bool = False


_KNOWN = (
    Chart("Training loss, and evaluation loss as marks", LOSS, marks=PREFIX + LOSS, loss=True),
    Chart("Learning rate", "learning_rate"),
    Chart("Gradient norm", "grad_norm"),
    Chart("Samples per second", "samples_per_second"),
    Chart("Tokens per second", "tokens_per_second"),
    Chart("Time of a step", "step_seconds", "seconds"),
    Chart("Waiting for data", "data_wait_share", "share"),
    Chart("Memory of rank 0", "memory_bytes", "bytes"),
    Chart("GPU memory, fullest GPU", "gpu_memory", "bytes"),
    Chart("GPU utilization, mean of the GPUs", "gpu_utilization", "percent"),
)


def charts_of(runs: Sequence[Collected]) -> list[Chart]:
    """The charts for which at least one of the runs has a curve: loss, metrics, what is known, and the rest."""
    names = dict.fromkeys(name for run in runs for name, curve in run.curves.items() if curve.steps)
    known = NO_CHART | {name for each in _KNOWN for name in (each.curve, each.marks)}
    others = [name for name in names if name not in known and not name.startswith(PHASE)]
    metrics, rest = ([name for name in others if name.startswith(PREFIX) is wanted] for wanted in (True, False))
    charts = (
        *_KNOWN[:1],
        *(Chart(f"Evaluation {name.removeprefix(PREFIX).replace('_', ' ')}", name) for name in metrics),
        *_KNOWN[1:],
        *(Chart(name.replace("_", " "), name) for name in rest),
    )
    return [each for each in charts if each.curve in names or each.marks in names]


def chart_data(runs: Sequence[Collected]) -> dict[str, Any]:
    """What the page's program draws.

    `runs` have their names and, for curves over time, seconds since their first step (`s`) at some steps (`x`). Each of
    the `charts` has its series: values `y` at steps `x` of a run by its number, `marks` if they are to be drawn as
    points, and if it is thinned the means `my` of stretches with their middles `mx`.
    """
    charts = charts_of(runs)
    most = max(FEWEST, min(POINTS, ALL_POINTS // max(1, len(charts) * len(runs))))
    return {
        "runs": [{"label": run.label, **_times(run.times, most)} for run in runs],
        "charts": [
            {"title": each.title, "unit": each.unit, "loss": each.loss, "series": list(_series(each, runs, most))}
            for each in charts
        ],
    }


def _series(chart: Chart, runs: Sequence[Collected], most: int) -> Iterator[dict[str, Any]]:
    for number, run in enumerate(runs):
        for name, marks in ((chart.curve, False), (chart.marks, True)):
            curve = run.curves.get(name)
            if curve is None or not curve.steps:
                continue
            places = kept(curve.values, most)
            thinned = {"x": [curve.steps[place] for place in places], "y": [rounded(curve.values[p]) for p in places]}
            means = {} if marks or len(places) == len(curve.values) else _means(curve, most // 2)
            yield {"run": number, **({"marks": True} if marks else {}), **thinned, **means}


def kept(values: Sequence[float | None], most: int) -> list[int]:
    """The places of at most so many values that keep the look of a curve, in order.

    The first and the last, and of each of as many stretches the lowest and the highest. Of values that are not finite,
    which are None, the first one of a stretch takes the place of its lowest.
    """
    if len(values) <= most:
        return list(range(len(values)))
    chosen, number_at = {0, len(values) - 1}, cast("Sequence[float]", values).__getitem__
    for part in _stretches(len(values), most // 2 - 1):
        known = [place for place in part if values[place] is not None]
        missing = next((place for place in part if values[place] is None), None)
        chosen |= {max(known, key=number_at)} if known else set()
        chosen |= {min(known, key=number_at)} if missing is None else {missing}
    return sorted(chosen)


def _stretches(count: int, parts: int) -> Iterator[range]:
    yield from (range(number * count // parts, (number + 1) * count // parts) for number in range(parts))


def _means(curve: Curve, parts: int) -> dict[str, Any]:
    steps, means = list[int](), list[float | None]()
    for part in _stretches(len(curve.values), parts):
        known = [value for value in curve.values[part.start : part.stop] if value is not None]
        steps.append(curve.steps[(part.start + part.stop) // 2])
        means.append(rounded(sum(known) / len(known)) if known else None)
    return {"mx": steps, "my": means}


def _times(times: Curve, most: int) -> dict[str, Any]:
    places = kept(times.values, most)
    start = times.values[0] if times.values else None
    if start is None:
        return {"x": [], "s": []}
    seconds = (round((times.values[place] or start) - start, 3) for place in places)
    return {"x": [times.steps[place] for place in places], "s": list(seconds)}


def rounded(value: float | None) -> float | None:
    """Five digits, as whole numbers where they are."""
    if value is None:
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def phase_seconds(curves: Mapping[str, Curve], first: int) -> dict[str, float]:
    """Seconds that each phase took in a step, as a mean over the run. first: the step before the first one."""
    phases = {name.removeprefix(PHASE): curve for name, curve in curves.items() if name.startswith(PHASE)}
    ends = sorted({step for curve in phases.values() for step in curve.steps})
    lengths = {step: step - before for before, step in zip([first, *ends], ends, strict=False)}
    steps = sum(lengths.values())
    whole = {
        name: sum((value or 0.0) * lengths[step] for step, value in zip(curve.steps, curve.values, strict=True))
        for name, curve in phases.items()
    }
    return {name: seconds / steps for name, seconds in whole.items()} if steps > 0 else {}
