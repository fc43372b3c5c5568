"""The plot of a comparison: memory and throughput side by side, distinguishable without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.bench.comparison import MEMORY_MEANING, Comparison, Row, rate
from trainkit.text import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg")
_ROW_INCHES = 0.42
# White behind the text: the lines of the grid and of the base pass below them.
_LABEL: dict[str, Any] = {
    "va": "center",
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "boxstyle": "square,pad=0.12"},
}
_MIDDLE, _LIGHT, _EDGE, _PALE = "#8f8f8f", "#dddddd", "#111111", "#8c8c8c"


def can_plot() -> bool:
    """Whether matplotlib is installed; nothing of it is loaded."""
    return find_spec("matplotlib") is not None


def draw(found: Comparison, folder: Path) -> list[Path]:
    """Write bench.png and bench.svg into the folder; their paths."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = list(found.rows)
    # Text stays text in SVG; a fixed salt makes the same figure the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trainkit", "font.size": 9, "hatch.linewidth": 0.6}):
        # A figure of its own, not pyplot's: no window system is looked for, no state is shared.
        figure = Figure(figsize=(11, 1.75 + _ROW_INCHES * len(rows)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        memory = [None if row.memory_bytes is None else row.memory_bytes / MIB for row in rows]
        _draw(left, rows, memory, [None] * len(rows), "{:,.0f} MiB".format, color=_LIGHT, hatch="///")
        left.set_title("Memory (less is better)", loc="left", fontweight="bold")
        left.set_xlabel(f"{MEMORY_MEANING[found.memory]}, MiB")
        rates, spreads = [row.median("samples_per_second") for row in rows], [row.spread for row in rows]
        _draw(right, rows, rates, spreads, rate, color=_MIDDLE)
        right.set_title("Throughput (more is better)", loc="left", fontweight="bold")
        right.set_xlabel("samples per second")
        left.set_yticks(range(len(rows)), [row.name for row in rows])
        left.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
        based = "; the dashed line is the base" if any(row.speed is not None for row in rows) else ""
        figure.suptitle(f"{found.recipe} on {found.machine}{based}", x=0.01, ha="left", fontsize=10)
        paths = [folder / f"bench.{kind}" for kind in FORMATS]
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _draw(
    axes: Axes,
    rows: Sequence[Row],
    values: Sequence[float | None],
    spreads: Sequence[tuple[float, float] | None],
    label: Callable[[float], str],
    **style: Any,
) -> None:
    """Bars with their values written behind them, the base's as a dashed line; what did not run says why.

    values, spreads: of each row, None where unknown; label: how a value is written at its bar; style: of the bars.
    """
    shown = [
        value if row.outcome == "ok" and value is not None else 0.0 for row, value in zip(rows, values, strict=True)
    ]
    axes.barh(range(len(rows)), shown, height=0.66, edgecolor=_EDGE, linewidth=0.8, zorder=2, **style)
    ends = [max(value, spread[1]) if spread else value for value, spread in zip(shown, spreads, strict=True)]
    axes.set_xlim(0, (max(ends, default=0) or 1) * 1.2)
    for place, (row, value, end, spread) in enumerate(zip(rows, shown, ends, spreads, strict=True)):
        text = label(value) if value else row.outcome if row.outcome != "ok" else "not reported"
        axes.annotate(
            text, (end, place), (5, 0), textcoords="offset points", style="normal" if value else "italic", **_LABEL
        )
        if spread:  # from the slowest to the fastest of several runs
            axes.plot(spread, (place, place), color=_EDGE, linewidth=1.4, marker="|", markersize=7, zorder=4)
    if rows and shown[0] and rows[0].speed is not None:
        axes.axvline(shown[0], color=_EDGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    axes.grid(axis="x", color=_PALE, linewidth=0.4, alpha=0.6, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
