"""Reporters of metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases if a recipe names them."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from trainkit.distribution import install
from trainkit.errors import TrainingError
from trainkit.files import open_regular, parse_json, read_whole

log = logging.getLogger("trainkit.trainer")
Record = Mapping[str, Any]


class Reporter(Protocol):
    """Receives every metrics record of the main rank."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Flush and let go."""


class JsonLines(Reporter):
    """`metrics.jsonl`: one object a line, written immediately, appended to on a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._torn = self._warned = False
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = FileIO(fd, "ab")  # unbuffered: readers see each line immediately, and a killed run loses none
        except OSError as error:  # its name is taken by something else
            self._warn(error)

    def write(self, record: Record) -> None:
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
            log.warning("%s cannot be written, the run continues without it: %s", self._path, error.strerror)
        self._warned = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def finite(value: Any) -> Any:
    """The value; None for an infinite float or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(record: Record) -> dict[str, float]:
    """The numbers of a record that are plotted over the steps; empty for a record without a step."""
    values = record.items() if "step" in record else ()
    return {name: value for name, value in values if name != "step" and isinstance(value, int | float)}


class TensorBoard(Reporter):
    """Scalars for TensorBoard, under `<run directory>/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


# Folders that wandb would otherwise create in the user's home.
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")


class WeightsAndBiases(Reporter):
    """One W&B run per run directory: `wandb sync RUN/wandb/offline-run-…` uploads it later."""

    def __init__(self, run_dir: Path) -> None:
        self._temporary = run_dir / "wandb" / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            os.environ.setdefault(name, str(run_dir / "wandb" / "own"))
        before, tempfile.tempdir = tempfile.tempdir, str(self._temporary)
        try:
            # It creates temporary folders on import and removes them at the interpreter's shutdown, which ranks skip.
            import wandb
        finally:
            tempfile.tempdir = before
        self._wandb: Any = wandb
        recipe = parse_json(read_whole(run_dir / "trainer.json", below=run_dir))["recipe"]
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = self._wandb.init(
            dir=str(run_dir),
            project=os.environ.get("WANDB_PROJECT", recipe["name"]),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            # A restarted run writes a second folder with the same id; syncing merges them.
            id=os.environ.get("WANDB_RUN_ID", run_dir.name),
            resume="allow" if mode == "online" else None,  # offline it is done when the folders are synced
            mode=mode,
            config=recipe,
            # trainkit already logs the rank's output, and the code's location does not belong in the metrics.
            settings=self._wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
            ),
        )

    def write(self, record: Record) -> None:
        if "step" in record:
            self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()
        # Ranks end by os._exit, which skips atexit handlers.
        self._wandb.teardown()  # ends wandb's own process
        shutil.rmtree(self._temporary, ignore_errors=True)


REPORTERS: Mapping[str, Callable[[Path], Reporter]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Metrics(Reporter):
    """All reporters of the main rank as one; empty on every other rank."""

    def __init__(self, run_dir: Path, report_to: Sequence[str], *, main: bool) -> None:
        self._reporters: list[Reporter] = [JsonLines(run_dir / "metrics.jsonl")] if main else []
        for name in report_to if main else ():
            try:
                self._reporters.append(REPORTERS[name](run_dir))
            except ImportError as error:
                what = f"logging.report_to asks for {name}, which is not installed"
                raise TrainingError(what, hint=install(sys.executable, name)) from error

    def write(self, record: Record) -> None:
        for reporter in self._reporters:
            reporter.write(record)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()
