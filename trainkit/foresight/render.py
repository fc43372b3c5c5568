"""An estimate as a page, as data, and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from trainkit.foresight.timeline import Timeline
from trainkit.foresight.trace import PARTS
from trainkit.launch_plan.model import Foresight
from trainkit.text import format_duration, format_memory, format_rate, table

BAR = 40  # columns of the longest bar
VERDICTS = {
    "fits": "fits, with {left} to spare",
    "tight": "may just fit: {left} are left, and the estimate may be wrong by {margin:.0%}",
    "too large": "does not fit: {missing} are missing",
}
BASIS = {
    "traced": "traced from the model's own code",
    "formula": "from the sizes of the model's architecture",
    "remembered": "as a run of the same settings was measured here",
}


def verdict(found: Foresight) -> str:
    """Whether it fits, and by how much, in words."""
    left, missing = (format_memory(abs(found.headroom)) for _ in range(2))
    if found.verdict == "too large" and found.headroom >= 0 and found.host > found.host_limit:
        return f"does not fit: {format_memory(found.host - found.host_limit)} of the machine's memory are missing"
    if found.verdict == "too large" and found.headroom >= 0:
        return f"does not fit: {left} are left, less than the allocator loses between its blocks"
    if found.verdict != "too large" and found.headroom < 0:
        gives_back = f"torch's allocator gives back {missing} that it holds unused"
        doubt = f"may just fit: {gives_back}, and the estimate may be wrong by {found.margin:.0%}"
        return f"fits: {gives_back}" if found.verdict == "fits" else doubt
    return VERDICTS[found.verdict].format(left=left, missing=missing, margin=found.margin)


def time_in_words(found: Foresight) -> str:
    """Step, rate, share of the peak, hours and price; empty where no time is known."""
    if found.step is None:
        return ""
    words = [f"{found.step * 1000:.3g} ms a step" if found.step < 1 else f"{float(f'{found.step:.3g}'):g} s a step"]
    if found.tokens_per_second:
        words.append(f"{format_rate(found.tokens_per_second)} tokens/s")
    if found.peak_share:
        words.append(f"{found.peak_share:.0%} of the peak (MFU)")
    if found.hours:
        long = f"{found.hours / 24:.3g} days" if found.hours >= 48 else format_duration(found.hours * 3600)
        words.append(f"{long} in all")
    if found.price:
        words.append(f"price {found.price:.4g}")
    return ", ".join(words)


def page(found: Foresight) -> Iterator[str]:
    """The lines of an estimate."""
    longest = max((size for _, size in found.parts), default=1)
    rows = [
        (f"  {name}", format_memory(size), "\N{FULL BLOCK}" * max(1, round(BAR * size / longest)))
        for name, size in found.parts
        if size >= 2**20 / 2
    ]
    yield from table(rows).splitlines()
    yield f"  in all {format_memory(found.total)} of {format_memory(found.limit)} on each rank: {verdict(found)}"
    where = f" ({found.operator})" if found.operator else ""
    yield f"  highest in {found.moment}{where}; {BASIS[found.basis]}, within {found.margin:.0%}"
    device, host = found.start
    if device or found.start_verdict != "fits":
        fits = "" if found.start_verdict == "fits" else ": does not fit"
        sizes = f"{format_memory(device)} on each rank and {format_memory(host)} of the machine's memory"
        yield f"  at the start {sizes}{fits}"
    yield f"  the machine's memory: {format_memory(found.host)} of {format_memory(found.host_limit)}"
    if found.disk:
        each = f", {format_memory(found.checkpoint)} each" if found.disk > found.checkpoint else ""
        yield f"  on the disk: {format_memory(found.disk)} of checkpoints{each}"
    if words := time_in_words(found):
        yield f"  time: {words}"
    for each in found.notes:
        yield f"  {each}"


def changes_table(base: Foresight, rows: Iterable[tuple[str, Foresight, str]]) -> str:
    """(settings, what they come to, what they cost) as a table below each other."""
    cells = [("change", "in all", "saves", "verdict", "time a sample", "costs")]
    for settings, found, costs in rows:
        time = f"{found.step / base.step:.2f}x" if found.step and base.step else ""
        saved = base.total - found.total
        sign = "-" if saved < 0 else ""
        cells.append(
            (settings, format_memory(found.total), sign + format_memory(abs(saved)), found.verdict, time, costs)
        )
    return table(cells)


WIDTH, HEIGHT, EDGE = 960, 480, 60  # of the picture
COLOURS = ("#4269d0", "#ff725c", "#efb118", "#6cc5b0", "#9c6b4e", "#97bbf5", "#a463f2", "#3ca951", "#9498a0")
POINTS = 1200  # of a line of the picture


def picture(timeline: Timeline, limit: int, title: str) -> str:
    """Memory over two steps by part, with the limit as a line: SVG."""
    moments, levels = _levels(timeline)
    top = max(limit, timeline.peak) * 1.05 or 1
    across = (WIDTH - 2 * EDGE) / max(1, len(levels) - 1)

    def y(size: float) -> float:
        return HEIGHT - EDGE - size / top * (HEIGHT - 2 * EDGE)

    below = [0] * len(levels)
    shapes, names = [], []
    for number, name in enumerate(PARTS):
        above = [low + level[number] for low, level in zip(below, levels, strict=True)]
        if above != below:
            upper = " ".join(f"{EDGE + place * across:.1f},{y(size):.1f}" for place, size in enumerate(above))
            lower = " ".join(
                f"{EDGE + place * across:.1f},{y(below[place]):.1f}" for place in range(len(below) - 1, -1, -1)
            )
            shapes.append(f'<polygon points="{upper} {lower}" fill="{COLOURS[number]}"/>')
            names.append((name, COLOURS[number]))
        below = above
    right, at = WIDTH - EDGE, y(limit)
    line = f'<line x1="{EDGE}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#c00" stroke-width="2"/>'
    said = f'<text x="{right}" y="{at - 4:.1f}" text-anchor="end">limit {format_memory(limit)}</text>'
    keys = "".join(
        f'<rect x="{EDGE + 100 * place}" y="{HEIGHT - 24}" width="12" height="12" fill="{colour}"/>'
        f'<text x="{EDGE + 100 * place + 16}" y="{HEIGHT - 14}">{escape(name)}</text>'
        for place, (name, colour) in enumerate(names)
    )
    marks = "".join(
        f'<text x="{EDGE + at * (WIDTH - 2 * EDGE):.1f}" y="{HEIGHT - EDGE + 14}">{escape(name)}</text>'
        for at, name in moments
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    titled = f'{head} font-size="11"><text x="{EDGE}" y="24" font-size="15">{escape(title)}</text>'
    return f"{titled}{''.join(shapes)}{line}{said}{marks}{keys}</svg>\n"


def _levels(timeline: Timeline) -> tuple[list[tuple[float, str]], list[list[int]]]:
    """Where moments begin, as shares of the width; and the bytes of each part at evenly spaced changes."""
    # A steady step, the second of two.
    updates = [at for at, name in timeline.moments if name == "update"]
    begin = next((at for at, name in timeline.moments if name == "forward" and updates and at > updates[0]), 0)
    end = len(timeline.changes)
    every = max(1, (end - begin) // POINTS)
    now, levels = [0] * len(PARTS), list[list[int]]()
    for place, (identity, size) in enumerate(timeline.changes):
        now[timeline.part[identity]] += size or -timeline.sizes[identity]
        if place >= begin and (place - begin) % every == 0:
            levels.append(list(now))
        elif levels and sum(now) > sum(levels[-1]):
            levels[-1] = list(now)  # no peak between two points is lost
    moments = [((at - begin) / max(1, end - begin), name) for at, name in timeline.moments if at >= begin]
    return _apart(moments), levels


def _apart(moments: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Those whose names do not run into the one before."""
    kept: list[tuple[float, str]] = []
    for at, name in moments:
        if not kept or at - kept[-1][0] > 0.07:
            kept.append((at, name))
    return kept
