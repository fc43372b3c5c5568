"""Metrics as JSON lines, always, and the reporters that a recipe asks for besides."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainkit.errors import TrainingError

log = logging.getLogger("trainkit.trainer")
Record = Mapping[str, Any]


class Reporter(Protocol):
    """Receives every metrics record of the main rank."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class JsonLines:
    """`metrics.jsonl`: one object a line, in the file at once, appended to on a restart.

    A full disk costs lines and a warning, not the run.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._torn = self._warned = False

    def write(self, record: Record) -> None:
        """Append one line. What is no finite number becomes null, for which alone JSON has a word."""
        line = json.dumps({name: finite(value) for name, value in record.items()}, allow_nan=False)
        left = whole = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            while left:
                left = left[self._file.write(left) :]
            self._torn = False
        except OSError as error:
            self._torn = self._torn or len(left) < len(whole)
            if not self._warned:
                log.warning("%s cannot be written, the run goes on without it: %s", self._path, error.strerror)
            self._warned = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(value: Any) -> Any:
    """The value; None for a float that is infinite or no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """Scalars for TensorBoard, under `<run directory>/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            message = "logging.report_to asks for tensorboard, which is not installed"
            raise TrainingError(message, hint="pip install 'trainkit[report]'") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add each number of the record as a scalar."""
        for name, value in record.items():
            if "step" in record and name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the writer."""
        self._writer.close()


def _weights_and_biases(run_dir: Path) -> Reporter:
    from trainkit.trainer.metrics.weights_and_biases import WeightsAndBiases

    return WeightsAndBiases(run_dir)


REPORTERS: Mapping[str, Callable[[Path], Reporter]] = {
    "tensorboard": lambda run_dir: TensorBoard(run_dir / "tensorboard"),
    "wandb": _weights_and_biases,
}


class Metrics:
    """All reporters of the main rank as one; on every other rank it has none."""

    def __init__(self, run_dir: Path, report_to: Sequence[str], *, main: bool) -> None:
        self._reporters: list[Reporter] = []
        if main:
            self._reporters = [JsonLines(run_dir / "metrics.jsonl"), *(REPORTERS[name](run_dir) for name in report_to)]

    def write(self, record: Record) -> None:
        """Hand one record to every reporter."""
        for reporter in self._reporters:
            reporter.write(record)

    def close(self) -> None:
        """Close every reporter."""
        for reporter in self._reporters:
            reporter.close()
