"""Reporters of metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases where a recipe names them."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

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
    """`metrics.jsonl`: one object a line, in the file at once, appended to on a restart."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._torn = self._warned = False
        try:
            fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._file = FileIO(fd, "ab")  # unbuffered: a reader sees each line at once, and a killed run loses none
        except OSError as error:  # something else has its name
            self._warn(error)

    def write(self, record: Record) -> None:
        """Append one line; NaN and infinity become null, for JSON has no word for them."""
        if self._file is None:
            return
        line = json.dumps({name: finite(value) for name, value in record.items()}, allow_nan=False)
        left = whole = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            while left:  # a write on a nearly full disk may be short
                left = left[self._file.write(left) :]
            self._torn = False
        except OSError as error:  # a full disk costs lines and a warning, not the run
            self._torn = self._torn or len(left) < len(whole)
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("%s cannot be written, the run goes on without it: %s", self._path, error.strerror)
        self._warned = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def finite(value: Any) -> Any:
    """The value; None for a float that is infinite or no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(record: Record) -> dict[str, float]:
    """What of a record is drawn over the steps; nothing of one that has no step."""
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


# Where wandb would keep things of its own in the user's home.
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")


class WeightsAndBiases(Reporter):
    """One run of theirs for a run directory: `wandb sync RUN/wandb/offline-run-…` uploads it later."""

    def __init__(self, run_dir: Path) -> None:
        self._temporary = run_dir / "wandb" / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            os.environ.setdefault(name, str(run_dir / "wandb" / "own"))
        before, tempfile.tempdir = tempfile.tempdir, str(self._temporary)
        try:
            # It makes temporary folders when it is imported, and removes them in a tear-down that ranks do without.
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
            # A run that is started again writes a second folder under the same id, which syncing puts together.
            id=os.environ.get("WANDB_RUN_ID", run_dir.name),
            resume="allow" if mode == "online" else None,  # offline it is done when the folders are synced
            mode=mode,
            config=recipe,
            # trainkit keeps the rank's output, and where the code lies is no part of a run's metrics.
            settings=self._wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
            ),
        )

    def write(self, record: Record) -> None:
        if "step" in record:
            self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()
        # Ranks end by os._exit, which runs no handler of atexit.
        self._wandb.teardown()  # ends wandb's own process
        shutil.rmtree(self._temporary, ignore_errors=True)


REPORTERS: Mapping[str, Callable[[Path], Reporter]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Metrics(Reporter):
    """All reporters of the main rank as one; on every other rank it has none."""

    def __init__(self, run_dir: Path, report_to: Sequence[str], *, main: bool) -> None:
        self._reporters: list[Reporter] = [JsonLines(run_dir / "metrics.jsonl")] if main else []
        for name in report_to if main else ():
            try:
                self._reporters.append(REPORTERS[name](run_dir))
            except ImportError as error:
                what = f"logging.report_to asks for {name}, which is not installed"
                raise TrainingError(what, hint="pip install 'trainkit[report]'") from error

    def write(self, record: Record) -> None:
        for reporter in self._reporters:
            reporter.write(record)

    def close(self) -> None:
        for reporter in self._reporters:
            reporter.close()
