"""metrics.jsonl: one object a line, as the built-in trainer writes it, and `trainkit.log` for a loop of one's own.

Standard library only: a user's program imports it in every rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from io import FileIO
from typing import Any

from trainkit.files import PathLike, open_regular

FILE = "metrics.jsonl"
VARIABLE = "TRAINKIT_RECIPE"  # of every program of a run: the recipe's file in the run directory
OURS = ("event", "elapsed", "phases")  # fields that `log` writes itself, or leaves to the built-in trainer


class JsonLines:
    """A file of one object a line, each written immediately, appended to on a restart.

    warn: is told once why nothing can be written; neither that nor a full disk ends a run.
    """

    def __init__(self, path: PathLike, warn: Callable[[str], object]) -> None:
        self._path = path
        self._warn_user = warn
        self._file: FileIO | None = None
        self._torn = self._warned = False
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = FileIO(fd, "ab")  # unbuffered: readers see each line immediately, and a killed run loses none
        except OSError as error:  # its name is taken by something else
            self._warn(error)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; NaN and infinity, which JSON lacks, become null."""
        if self._file is None:
            return
        line = json.dumps({name: finite(value) for name, value in record.items()}, allow_nan=False)
        left = whole = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            while left:  # a write on a nearly full disk may be short
                left = left[self._file.write(left) :]
            self._torn = False
        except OSError as error:  # a full disk loses lines and gives a warning, but does not end the run
            self._torn = self._torn or len(left) < len(whole)
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warn_user(f"{self._path} cannot be written, the run continues without it: {error.strerror}")
        self._warned = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def finite(value: Any) -> Any:
    """The value; None for an infinite float or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _OwnLoop:
    """The metrics of a user's loop in this process. `elapsed` begins, as does `seconds`, with the first call."""

    def __init__(self, path: str) -> None:
        self._lines = JsonLines(path, lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
        self._began = self._latest = time.monotonic()
        self._total: int | None = None
        self._started = False

    def write(self, step: int, total_steps: int | None, values: Mapping[str, int | float]) -> None:
        """One record; before the first one, and where the last step has changed, that of a start."""
        now = time.monotonic()
        if not self._started or (total_steps is not None and total_steps != self._total):
            self._total = total_steps
            start = {"event": "start", "time": time.time() - (now - self._began), "steps": total_steps}
            self._lines.write({**start, "first_step": max(0, step - 1)})
        seconds = {} if not self._started else {"seconds": round(now - self._latest, 6)}
        self._started, self._latest = True, now
        self._lines.write({"step": step, **seconds, **values, "elapsed": round(now - self._began, 6)})


_loops: dict[str, _OwnLoop] = {}  # by path: of one file, but in tests


def log(step: int, *, total_steps: int | None = None, **values: Any) -> None:
    """Add a line to the metrics of the run that this program is in; outside a run nothing happens.

    step: how many steps are done. total_steps: the last one, if it is known, for the time left. values: numbers, or
    tensors of one, by any names; `loss` is the training loss, names that begin with `eval_` belong to an evaluation
    (`eval_loss`, `eval_accuracy`), and `learning_rate`, `samples_per_second`, `tokens_per_second`, `grad_norm` and
    `memory_bytes` are shown as the built-in trainer's.

    Every rank may call it, and rank 0 writes. A tensor is read there, which waits for its GPU.
    Raises TypeError for what is no number, ValueError for a name that trainkit writes itself, in any rank.
    """
    if reserved := [name for name in OURS if name in values]:
        raise ValueError(f"trainkit.log writes {reserved[0]!r} itself: choose another name")
    for name, value in {"step": step, **values}.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number and not hasattr(value, "item"):
            raise TypeError(f"trainkit.log takes numbers, and {name} is {type(value).__name__}: {value!r:.80}")
    recipe = os.environ.get(VARIABLE)
    if not recipe or _rank() != 0:
        return
    path = os.path.join(os.path.dirname(recipe), FILE)  # noqa: PTH118, PTH120 - pathlib takes longer to load
    if (loop := _loops.get(path)) is None:
        loop = _loops[path] = _OwnLoop(path)
    loop.write(int(step), total_steps, {name: _number(value) for name, value in values.items()})


def _number(value: Any) -> int | float:
    """A number of Python's: of a tensor or an array its one value, for which the caller waits."""
    found: int | float = value if isinstance(value, int | float) else value.item()
    return found


def _rank() -> int:
    """By torch.distributed where the program has set that up, else by the launcher's variable."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0
