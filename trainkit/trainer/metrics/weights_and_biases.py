"""Metrics for Weights & Biases: kept in the run directory, and sent nowhere unless WANDB_MODE says so."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError

# Where wandb would keep things of its own in the user's home.
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")


class WeightsAndBiases:
    """One run of theirs for a run directory: `wandb sync RUN/wandb/offline-run-…` uploads it later.

    A run that is started again after a failure writes a second folder under the same id, which syncing puts together.
    """

    def __init__(self, run_dir: Path) -> None:
        self._temporary = run_dir / "wandb" / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            os.environ.setdefault(name, str(run_dir / "wandb" / "own"))
        self._wandb = self._imported()
        recipe = json.loads((run_dir / "trainer.json").read_text())["recipe"]
        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = self._wandb.init(
            dir=str(run_dir),
            project=os.environ.get("WANDB_PROJECT", recipe["name"]),
            name=os.environ.get("WANDB_NAME", run_dir.name),
            id=os.environ.get("WANDB_RUN_ID", run_dir.name),
            resume="allow" if mode == "online" else None,  # offline it is done when the folders are synced
            mode=mode,
            config=recipe,
            # The rank's output is trainkit's to keep, and the folder of the code is nobody's business.
            settings=self._wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_meta=True, x_disable_stats=True
            ),
        )

    def _imported(self) -> Any:
        """wandb makes temporary folders when it is imported, and removes them in a tear-down that ranks do without."""
        before = tempfile.tempdir
        tempfile.tempdir = str(self._temporary)
        try:
            import wandb
        except ImportError as error:
            message = "logging.report_to asks for wandb, which is not installed"
            raise TrainingError(message, hint="pip install 'trainkit[report]'") from error
        finally:
            tempfile.tempdir = before
        return wandb

    def write(self, record: Mapping[str, Any]) -> None:
        """Log each number of the record at its step."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float) and name != "step"}
        if "step" in record:
            self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Flush, and end wandb's own process."""
        self._run.finish()
        self._wandb.teardown()
        shutil.rmtree(self._temporary, ignore_errors=True)
