"""Where and how a rank ran out of memory, from the end of its log."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainkit.runner.report.exit_status import KILLED, Verdict
from trainkit.runner.report.progress import last_lines
from trainkit.runner.rundir.layout import AttemptLayout

LINES = 60  # of a log: a traceback through a model is long
_UNITS: Mapping[str, int] = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
# c10/cuda/CUDACachingAllocator.cpp
_ON_GPU = re.compile(rf"out of memory\. Tried to allocate {_SIZE}")
_PARTS: Mapping[str, re.Pattern[str]] = {
    "limit": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unused": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
# c10/core/impl/alloc_cpu.cpp, and what C++ and Python say of the same
_ON_HOST = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes|std::bad_alloc|MemoryError")
# By what a traceback goes through, the innermost last.
_MOMENTS = (
    (r"\bcheckpoint\.py.*\n.*recompute|recompute_fn", "backward"),
    (r"in backward\b|\.backward\(|_engine_run_backward", "backward"),
    (r"optim(?:izer)?[/\\]\w+\.py|in step\b|optimizer\.step\(", "update"),
    (r"in forward\b|_call_impl", "forward"),
)


class Shortage(NamedTuple):
    """Bytes; 0 where the log does not say. rank: None where it is not known which. host: whether it was main memory.

    unused: held by torch's allocator in pieces that no tensor has. moment: of the step; empty where it is not known.
    """

    rank: int | None
    wanted: int = 0
    allocated: int = 0
    unused: int = 0
    free: int = 0
    limit: int = 0
    host: bool = False
    moment: str = ""

    @property
    def splintered(self) -> bool:
        """Whether what is held in unused pieces is more than what was missing."""
        return self.unused > max(0, self.wanted - self.free)


def shortage(verdict: Verdict, attempt: AttemptLayout) -> Shortage | None:
    """How memory ran out, if that is what ended the run."""
    if verdict.exit_code == 0 or verdict.failure not in ("program", "rank"):
        return None
    lines = last_lines(attempt.log(verdict.rank, "err"), LINES) if verdict.rank is not None else []
    found = read(verdict.rank, "\n".join(lines))
    if found is None and (verdict.signal == signal.SIGKILL or verdict.exit_code == KILLED):
        return Shortage(verdict.rank, host=True)  # most likely: the kernel ends the largest process
    return found


def read(rank: int | None, text: str) -> Shortage | None:
    """The shortage that a log's end tells of."""
    moment = next((name for pattern, name in _MOMENTS if re.search(pattern, text)), "")
    if on_gpu := [*_ON_GPU.finditer(text)]:
        rest = text[on_gpu[-1].start() :]
        sizes: Mapping[str, Any] = {
            name: _bytes(found) for name, pattern in _PARTS.items() if (found := pattern.search(rest))
        }
        return Shortage(rank, _bytes(on_gpu[-1]), moment=moment)._replace(**sizes)
    if on_host := [*_ON_HOST.finditer(text)]:
        return Shortage(rank, int(on_host[-1].group(1) or 0), host=True, moment=moment)
    return None


def _bytes(found: re.Match[str]) -> int:
    return int(float(found.group(1)) * _UNITS[found.group(2)])
