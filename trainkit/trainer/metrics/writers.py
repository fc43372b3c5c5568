"""Reporters of metrics: `metrics.jsonl` always, TensorBoard, Weights & Biases and trackio if a recipe names them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainkit.distribution import install
from trainkit.errors import TrainingError
from trainkit.metrics_file import FILE, JsonLines
from trainkit.trainer.metrics.trackers import Trackio, WeightsAndBiases, numbers

log = logging.getLogger("trainkit.trainer")
Record = Mapping[str, Any]


class Reporter(Protocol):
    """Receives every metrics record of the main rank."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class TensorBoard(Reporter):
    """Scalars for TensorBoard, under `<run directory>/tensorboard`."""

    def __init__(self, run_dir: Path, known: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()

    @classmethod
    def check(cls, run_dir: Path) -> None:
        import torch.utils.tensorboard  # noqa: F401


REPORTERS: Mapping[str, type[TensorBoard | WeightsAndBiases | Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def check_reporters(run_dir: Path, report_to: Sequence[str]) -> None:
    """TrainingError for a reporter that is not installed, or that nobody is logged in to."""
    for name in report_to:
        try:
            REPORTERS[name].check(run_dir)
        except ImportError as error:
            what = f"logging.report_to asks for {name}, which is not installed"
            raise TrainingError(what, hint=install(sys.executable, name)) from error


class Metrics(Reporter):
    """All reporters of the main rank as one; empty on every other rank. known: ids of runs to go on in, by reporter."""

    def __init__(
        self, run_dir: Path, report_to: Sequence[str], *, main: bool, known: Mapping[str, str] | None = None
    ) -> None:
        self._reporters: list[Reporter] = [JsonLines(run_dir / FILE, log.warning)] if main else []
        self.runs: dict[str, dict[str, str]] = {}  # id and address of those that lie elsewhere
        check_reporters(run_dir, report_to if main else ())
        for name in report_to if main else ():
            reporter = REPORTERS[name](run_dir, (known or {}).get(name))
            self._reporters.append(reporter)
            if not isinstance(reporter, TensorBoard):
                self.runs[name] = {"id": reporter.id, "address": reporter.address}
                log.info("metrics: %s: %s", name, reporter.address)

    def write(self, record: Record) -> None:
        for reporter in self._reporters:
            reporter.write(record)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()
