"""What a user sees of a running run: the main rank's output and the progress, from files that are followed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainkit.decode import LARGEST, finite, whole
from trainkit.files import open_regular, parse_json, read_end
from trainkit.heartbeat import PHASES
from trainkit.metrics import PREFIX
from trainkit.runner.report.console import Stream, Terminal
from trainkit.runner.rundir.layout import AttemptLayout
from trainkit.runner.watch.heartbeats import Heartbeats, RankBeat
from trainkit.text import format_duration, format_measure, format_memory, format_rate, format_size

CHUNK = 1 << 18
PREPARING_SECONDS = 1.0  # between two lines of a preparation's output where there is no live line
STARTING_SECONDS = 1.0  # after which the live line says that a run is being started
AT_ONCE = 64  # chunks of output read before other events are handled
TAIL_BYTES = 1 << 16
LONGEST_LINE = 1 << 22  # bytes of a record; trainkit writes none as long
BAR = 12  # characters
WITH_BAR = 120  # columns, from which on a bar is drawn: in narrower terminals it would come and go with the other parts
NEWEST = 0.1  # weight of the latest pace in the smoothed pace
RECENT = 50  # lines of steps that show how fast a run is


class Tail:
    """Follows one file from its beginning, or an offset; the file need not exist yet.

    kept: whether the file stays open between reads, which is impossible with thousands of ranks.
    """

    def __init__(self, path: Path, begin: int = 0, *, kept: bool = True) -> None:
        self._path = path
        self._kept = kept
        self._begin = begin
        self._file: Any = None
        self._rest = b""
        self.refusal = ""  # why it could not be read

    def read(self) -> bytes:
        """The next bytes, at most 256 KiB; empty if there is nothing new, or it cannot be read now."""
        try:
            if not self._kept and os.lstat(self._path).st_size == self._begin:
                return b""
            if self._file is None:
                self._file = os.fdopen(open_regular(self._path), "rb", buffering=0)
                self._file.seek(self._begin)
            data: bytes = self._file.read(CHUNK)
        except FileNotFoundError:
            return b""
        except OSError as error:  # a failing disk must not end the run
            self.refusal = f"{self._path} cannot be read: {error.strerror}"
            return b""
        if not self._kept:
            self._begin += len(data)
            self.close()
        return data

    def records(self) -> Iterator[dict[str, Any]]:
        """The complete objects of a JSON-lines file.

        An incomplete last line is kept for later, an invalid line is skipped. A line that is too long ends the reading.
        """
        while data := self.read():
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LONGEST_LINE:
                self._rest, self.refusal = b"", f"{self._path} has a line of more than {format_size(LONGEST_LINE)}"
                return
            for line in lines:
                with contextlib.suppress(ValueError):  # an incomplete line that a restarted writer has appended to
                    record = parse_json(line)
                    if isinstance(record, dict):
                        yield record

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, by its metrics and its main rank's heartbeat. Times are seconds; seen: by a monotonic clock.

    step: the latest one that is done; logged: the latest one with a line in the metrics, which is `latest`.
    evaluation: loss and metrics of the latest evaluation. evaluates_every, saves_every: in steps, 0 for never.
    phase: what the main rank does now, as in trainkit/heartbeat.py; empty where there is no heartbeat.
    """

    total: int | None = None
    step: int = 0
    logged: int = 0
    latest: Mapping[str, Any] | None = None
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    evaluates_every: int = 0
    saves_every: int = 0
    evaluation_seconds: float = 0.0  # of the latest evaluation
    seconds_per_step: float | None = None  # smoothed: the first records count equally, each later one a tenth
    paces: int = 0  # records from which it was computed
    seen: float = 0.0
    phase: str = ""

    def take(self, record: Mapping[str, Any], now: float) -> Progress:
        """After one more record of metrics.jsonl."""
        if record.get("event") == "start":
            first, evaluates, saves = (
                whole(record.get(name)) or 0 for name in ("first_step", "evaluates_every", "saves_every")
            )
            known = replace(self, total=whole(record.get("steps")), step=first, logged=first)
            return replace(known, evaluates_every=evaluates, saves_every=saves)
        step = whole(record.get("step"))
        if step is None:
            return self
        if found := evaluation_of(record):
            took = finite(record.get(f"{PREFIX}seconds"), LARGEST) or 0.0
            return replace(self, evaluation=found, evaluation_seconds=took)
        if "loss" not in record:
            return self
        # Whole steps between two records: a run may log every n-th.
        steps, seconds = step - self.logged, finite(record.get("seconds"), LARGEST)
        pace, paces = self.seconds_per_step, self.paces
        if self.latest and steps > 0 and seconds is not None:
            before, paces = pace or 0.0, paces + 1
            pace = before + (seconds / steps - before) * max(1 / paces, NEWEST)
        done = max(step, self.step)
        return replace(self, step=done, logged=step, latest=record, seen=now, seconds_per_step=pace, paces=paces)

    def beat(self, beat: RankBeat, now: float) -> Progress:
        """As the main rank's heartbeat says, which is ahead of the metrics."""
        known = replace(self, phase=PHASES[beat.state.phase])
        if beat.state.step <= self.step:
            return known
        pace = self.seconds_per_step if self.paces else beat.seconds_per_step
        return replace(known, step=beat.state.step, seen=now, seconds_per_step=pace)

    def remaining(self, now: float) -> float | None:
        """Seconds to the end at the latest pace, with the evaluations before it; None if unknown."""
        if self.total is None or self.seconds_per_step is None:
            return None
        evaluations = 0
        if self.evaluates_every:
            evaluations = -(-self.total // self.evaluates_every) - self.step // self.evaluates_every
        steps = (self.total - self.step) * self.seconds_per_step
        return max(0.0, steps + evaluations * self.evaluation_seconds - (now - self.seen))

    @property
    def position(self) -> str:
        """``step 20/300``, or ``step 20`` where the last one is unknown."""
        return f"step {self.step}/{self.total}" if self.total else f"step {self.step}"

    @property
    def following(self) -> str:
        """What the run does now beside its steps, or does next: ``evaluating``, ``evaluation at step 200``."""
        if self.phase in NOW:
            return NOW[self.phase]
        if self.total is None:
            return ""
        events = (("evaluation", self.evaluates_every), ("checkpoint", self.saves_every))
        due = {what: min(self.total, (self.step // every + 1) * every) for what, every in events if every}
        first = min(due.values(), default=self.total)
        what = " and ".join(name for name, step in due.items() if step == first)
        return f"{what} at step {first}" if what and self.step < first else ""


# Phases beside the steps, as the live line calls them.
NOW: Mapping[str, str] = {"start": "starting", "evaluation": "evaluating", "checkpoint": "saving"}


def read_progress(metrics: Path) -> Progress:
    """The progress by a run's metrics so far; of those of the steps only the latest are parsed."""
    progress = Progress()
    for line in _latest_lines(metrics):
        with contextlib.suppress(ValueError):  # torn
            record = parse_json(line)
            progress = progress.take(record, 0.0) if isinstance(record, dict) else progress
    return progress


def _latest_lines(metrics: Path) -> Iterator[bytes]:
    """All starts and evaluations, and the latest steps before each start and before the end."""
    recent = deque[bytes](maxlen=RECENT)
    with contextlib.suppress(OSError), os.fdopen(open_regular(metrics), "rb") as file:
        while len(line := file.readline(LONGEST_LINE)) not in (0, LONGEST_LINE):
            if b'"eval_loss"' in line:
                yield line
                continue
            recent.append(line)
            if b'"event"' in line:  # it goes back behind these steps
                yield from recent
                recent.clear()
    yield from recent


class Relay:
    """Shows the main rank's output, from its pseudo-terminal if it has one, and the run's progress.

    metrics: None for a node that does not show them. is_ours: the program is the built-in trainer, which says nothing
    while it starts, so that the live line may.
    """

    def __init__(self, metrics: Path | None, logs: AttemptLayout, console: Terminal, *, is_ours: bool = False) -> None:
        self.progress = Progress()
        self._begun = time.monotonic()
        self._starts = is_ours and metrics is not None
        self.shown_rank: int | None = None
        self._console = console
        self._logs = logs
        self._tails: dict[Stream, Tail] = {}
        self._preparing: Tail | None = None
        # The metrics of an earlier attempt are skipped.
        self._metrics = Tail(metrics, metrics.stat().st_size if metrics.exists() else 0) if metrics else None
        self._heartbeats = Heartbeats(logs, {0}) if metrics else None
        self._prepared_said = time.monotonic()
        self._unsaid = ""

    def follow_logs(self, rank: int, streams: Iterable[Stream]) -> None:
        """Show the logs of this rank from their beginning."""
        self.shown_rank = rank
        self._tails = {stream: Tail(self._logs.log(rank, stream)) for stream in streams}

    def follow_preparation(self) -> None:
        """Show the output of the commands before the ranks."""
        self._preparing = self._preparing or Tail(self._logs.preparation_output)

    def pass_on(self, fd: int) -> int | None:
        """Show output of the pseudo-terminal; the number of bytes, None when its other side is closed."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: the other side is closed
            return None
        self.shown_rank = 0
        self._console.program("out", data)
        return len(data) or None

    def turn(self, most: int | None = AT_ONCE) -> None:
        """Show new output. most: chunks of it, None for all."""
        self._show_preparation()
        for stream, tail in self._tails.items():
            for data in islice(iter(tail.read, b""), most):
                self._console.program(stream, data)
        for record in self._metrics.records() if self._metrics else ():
            self.progress = self.progress.take(record, time.monotonic())
            if line := plain_line(self.progress, record):
                if self._draw():
                    self._unsaid = line
                else:
                    self._console.say(line)
        for beat in self._heartbeats.read().values() if self._heartbeats else ():
            self.progress = self.progress.beat(beat, time.monotonic())
        # A program of the user's own that has the terminal to itself is not written into.
        if self.progress.total is not None or (self._tails and self.progress.step):
            self._draw()
        elif self._starts and (waited := time.monotonic() - self._begun) >= STARTING_SECONDS:
            self._console.live(lambda _: f"starting, {format_duration(waited)}")

    def finish(self) -> None:
        self._starts = False
        self.turn(None)
        if self._unsaid:
            self._console.say(self._unsaid)  # the live line will be erased
        for tail in filter(None, (*self._tails.values(), self._metrics)):
            if tail.refusal:
                self._console.say(tail.refusal)
            tail.close()
        if self._heartbeats:
            self._heartbeats.close()

    def _show_preparation(self) -> None:
        lines = self._preparing.read().decode("utf-8", "replace").splitlines() if self._preparing else []
        if lines and not self._console.live(lambda width: lines[-1][: width - 1]):
            now = time.monotonic()
            if now - self._prepared_said >= PREPARING_SECONDS:
                self._prepared_said = now
                self._console.say(lines[-1])

    def _draw(self) -> bool:
        now = time.monotonic()
        return self._console.live(lambda width: live_line(self.progress, now, width))


def live_line(progress: Progress, now: float, width: int) -> str:
    """The line for a terminal of this width. In a narrow one the bar is dropped, and the parts wrap into more rows."""
    remaining = progress.remaining(now)
    left = [f"{format_duration(remaining)} left"] if remaining is not None else []
    loss, *rest = _parts(progress.latest) if progress.latest else [""]
    parts = [part for part in (progress.position, loss, *left, *rest, progress.following) if part]
    if progress.total and width >= WITH_BAR:
        filled = min(BAR, BAR * progress.step // progress.total)
        whole = f"[{'#' * filled}{'.' * (BAR - filled)}] {'  '.join(parts)}"
        if len(whole) < width:
            return whole
    rows = [""]
    for part in parts:
        joined = f"{rows[-1]}  {part}" if rows[-1] else part
        if len(joined) < width or not rows[-1]:
            rows[-1] = joined
        else:
            rows.append(part)
    return "\n".join(row[: max(0, width - 1)] for row in rows)


def plain_line(progress: Progress, record: Mapping[str, Any]) -> str:
    """The line for a log, from one record; empty for a record without progress."""
    step = whole(record.get("step"))
    if step is None:
        return ""
    head = f"step {step}/{progress.total}" if progress.total else f"step {step}"
    if measured := evaluation_of(record):
        return f"{head}  evaluation {'  '.join(f'{name} {_number(value)}' for name, value in measured.items())}"
    return "  ".join([head, *_parts(record)]) if "loss" in record else ""


def evaluation_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Loss and metrics of the record of an evaluation, by their names; empty for any other."""
    if f"{PREFIX}loss" not in record:
        return {}
    found = {name.removeprefix(PREFIX): value for name, value in record.items() if name.startswith(PREFIX)}
    found.pop("seconds", None)
    return found


def _parts(record: Mapping[str, Any]) -> list[str]:
    """Loss, rate and memory."""
    parts = [f"loss {_number(record['loss'])}"] if "loss" in record else []
    unit = next((unit for unit in ("tokens", "samples") if record.get(f"{unit}_per_second")), None)
    if unit is not None:
        parts.append(f"{format_rate(record[f'{unit}_per_second'])} {unit}/s")
    if record.get("memory_bytes"):
        parts.append(format_memory(record["memory_bytes"]))
    return parts


def _number(value: object) -> str:
    """Four decimals; metrics have null for infinity and NaN."""
    return format_measure(value) if isinstance(value, int | float) else "not finite"


def last_lines(path: Path, count: int | None = None) -> list[str]:
    """The end of a text file, at most 64 KiB and so many lines; empty if it is missing.

    Of a line that was overwritten, as by a progress bar, only the last text counts.
    """
    text = read_end(path, TAIL_BYTES).decode("utf-8", "replace").rstrip()
    painted = [re.split(r"\r+", line.rstrip("\r")) for line in text.split("\n")] if text else []
    lines = [next((part for part in reversed(parts) if part.strip()), "") for parts in painted]
    return lines if count is None else lines[-count:]
