"""Metrics as JSON lines, always, and the reporters that a recipe asks for besides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainkit.errors import TrainingError

Record = Mapping[str, Any]


class Reporter(Protocol):
    """Receives every metrics record of the main rank."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class JsonLines:
    """`metrics.jsonl`: one object a line, flushed at once, appended to on a restart."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Append one line."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard, under `<run directory>/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            message = "logging.report_to asks for tensorboard, which is not installed"
            raise TrainingError(message, hint="pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, record: Record) -> None:
        """Add each number of the record as a scalar."""
        for name, value in record.items():
            if "step" in record and name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close the writer."""
        self._writer.close()


REPORTERS: Mapping[str, Callable[[Path], Reporter]] = {
    "tensorboard": lambda run_dir: TensorBoard(run_dir / "tensorboard")
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
