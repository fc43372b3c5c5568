"""Reporters whose runs lie elsewhere, by their own settings and logins: Weights & Biases and trackio.

A run that resumes goes on in the tracker's run that its checkpoint names.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainkit.errors import TrainingError, first_line
from trainkit.files import parse_json, read_whole

log = logging.getLogger("trainkit.trainer")
# Folders that wandb would otherwise create in the user's home. Its settings there are read: WANDB_CONFIG_DIR is theirs.
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")
_REACHED = 30.0  # seconds to wait for a server at the start; WANDB_INIT_TIMEOUT says otherwise
_SENT = 60.0  # seconds to wait at the end until everything is sent
_GONE = 10.0  # seconds to wait for wandb's own process, which in its older releases tries on for hours
# trainkit already logs the rank's output, and the code's location does not belong in the metrics.
_QUIET = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_stats": True,
}
_REFUSED = re.compile(r"\berror:? 4\d\d\b|permission denied", re.IGNORECASE)
_OFFLINE = "set WANDB_MODE=offline to send it later"


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record that are plotted over the steps; empty for a record without a step."""
    values = record.items() if "step" in record else ()
    return {name: value for name, value in values if name != "step" and isinstance(value, int | float)}


def _recipe(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = parse_json(read_whole(run_dir / "trainer.json", below=run_dir))["recipe"]
    return found


class _Tracker:
    """A run of a tracker. id: by which it goes on. address: where it is seen, or the command that shows or sends it.

    A tracker that fails later costs its metrics and a warning, never the training: metrics.jsonl has them all.
    """

    name, id, address = "", "", ""

    def __init__(self) -> None:
        self._run: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        if self._run is not None and "step" in record:
            try:
                self._run.log(numbers(record), step=record["step"])
            except Exception as error:  # noqa: BLE001 - trackers raise any
                log.warning("warning: %s takes no more metrics: %s", self.name, first_line(error))
                self._run = None

    def _end(self, *parts: Callable[[], object], patience: float | None = None) -> bool:
        """Run these, for so long as one may wait for them; whether they came to their end."""

        def end() -> None:
            try:
                for part in parts:
                    part()
            except Exception as error:  # noqa: BLE001 - as above
                log.warning("warning: %s did not end well: %s", self.name, first_line(error))

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(patience or _SENT)
        if thread.is_alive() and patience is None:
            log.warning("warning: %s has not taken all metrics within %.0f s%s", self.name, _SENT, self._rest())
        return not thread.is_alive()

    def _rest(self) -> str:
        return ""


class WeightsAndBiases(_Tracker):
    """A run of Weights & Biases: online where one is logged in, offline where wandb's own settings say so.

    Its files are in the run directory, so that `wandb sync` sends what could not be sent.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, known: str | None) -> None:
        super().__init__()
        self._temporary = run_dir / "wandb" / "tmp"
        self._wandb, settings = _loaded(run_dir)
        recipe = _recipe(run_dir)
        # A restarted run has the same name, and so goes on without a checkpoint, too.
        self.id = settings.run_id or known or run_dir.name
        given: dict[str, Any] = {
            "dir": os.environ.get("WANDB_DIR", str(run_dir)),
            "project": settings.project or recipe["name"],
            "name": settings.run_name or known or run_dir.name,
            "id": self.id,
            "config": recipe,
            "settings": self._wandb.Settings(**_QUIET, init_timeout=_patience(settings)),
        }
        if settings.mode in ("offline", "dryrun", "disabled"):  # what goes on is found when the folders are synced
            self._run = self._wandb.init(**given)
        else:
            self._run = self._online(given, settings.resume or "allow")
        self._sync = ""
        if self._run is None:
            self.address = "none: its server could not be reached"
        elif settings.mode == "disabled":
            self.address = "disabled by WANDB_MODE"
        else:
            self._sync = f"wandb sync {shlex.quote(str(self._run.settings.sync_dir))}"
            self.address = self._run.url or self._sync

    def _online(self, given: Mapping[str, Any], resume: str) -> Any:
        """The run on its server; offline where that cannot be reached, else None. TrainingError if it is refused."""
        errors = self._wandb.errors
        try:
            return self._wandb.init(**given, resume=resume)
        except errors.CommError as error:
            why = first_line(error)
            if isinstance(error, errors.AuthenticationError) or _REFUSED.search(str(error)):
                hint = f"check the login (wandb login), WANDB_ENTITY and WANDB_PROJECT, or {_OFFLINE}"
                raise TrainingError(f"logging.report_to: wandb refuses the run: {why}", hint=hint) from error
            # Its process keeps the id of a run that has not begun.
            if not self._end(self._wandb.teardown, patience=_GONE):
                log.warning("warning: wandb's server cannot be reached, the run goes on without it: %s", why)
                return None
            log.warning("warning: wandb's server cannot be reached, the run goes on offline: %s", why)
            return self._wandb.init(**given, mode="offline")
        except (errors.Error, ValueError) as error:
            what = f"logging.report_to: wandb cannot begin: {first_line(error)}"
            raise TrainingError(what, hint=f"check WANDB_… variables and wandb's settings, or {_OFFLINE}") from error

    @classmethod
    def check(cls, run_dir: Path) -> None:
        """TrainingError where nobody is logged in: wandb would ask, and nobody may be there to answer."""
        wandb, settings = _loaded(run_dir)
        if settings.mode in ("offline", "dryrun", "disabled"):
            return
        if "prompt" in inspect.signature(wandb.login).parameters:
            known = wandb.login(prompt=False, verify=False)
        else:  # older ones
            known = wandb.api.api_key
        if not known:
            what = f"logging.report_to: wandb has no login for {settings.base_url}"
            raise TrainingError(what, hint=f"run wandb login, or set WANDB_API_KEY; or {_OFFLINE}")

    def close(self) -> None:
        failed = int(sys.exc_info()[0] is not None)
        if (run := self._run) is not None:
            # Ranks end by os._exit, which skips atexit handlers: teardown ends wandb's own process.
            self._end(lambda: run.finish(exit_code=failed), self._wandb.teardown)
        else:
            self._end(self._wandb.teardown, patience=_GONE)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _rest(self) -> str:
        return f": {self._sync} sends the rest" if self._sync else ""


def _patience(settings: Any) -> float:
    return float(settings.init_timeout) if "WANDB_INIT_TIMEOUT" in os.environ else _REACHED


def _loaded(run_dir: Path) -> tuple[Any, Any]:
    """The module wandb, and its settings from variables and files. TrainingError for settings that it does not take."""
    temporary = run_dir / "wandb" / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        os.environ.setdefault(name, str(run_dir / "wandb" / "own"))
    before, tempfile.tempdir = tempfile.tempdir, str(temporary)
    try:
        # It creates temporary folders on import and removes them at the interpreter's shutdown, which ranks skip.
        import wandb
    finally:
        tempfile.tempdir = before
    try:
        return wandb, wandb.setup(settings=wandb.Settings(**_QUIET)).settings
    except (wandb.errors.Error, ValueError) as error:
        what = f"logging.report_to: wandb does not take its settings: {' '.join(str(error).split())[:200]}"
        raise TrainingError(what, hint="check WANDB_… variables, and the settings files of wandb") from error


class Trackio(_Tracker):
    """A run of trackio, in its own folder on this machine (TRACKIO_DIR), or where its variables say."""

    name = "trackio"

    def __init__(self, run_dir: Path, known: str | None) -> None:
        super().__init__()
        recipe = _recipe(run_dir)
        self.id, project = known or run_dir.name, recipe["name"]  # it knows runs by their names
        with _unheard():
            import trackio

            try:
                self._run = trackio.init(
                    project=project,
                    name=self.id,
                    resume="allow",
                    config=recipe,
                    embed=False,
                    auto_log_gpu=False,  # cards.jsonl has this
                    auto_log_cpu=False,
                )
            except Exception as error:
                what = f"logging.report_to: trackio cannot begin: {first_line(error)}"
                raise TrainingError(what, hint="check TRACKIO_… variables, or leave trackio out") from error
        self.address = f"trackio show --project {shlex.quote(project)}"

    @classmethod
    def check(cls, run_dir: Path) -> None:
        with _unheard():
            import trackio  # noqa: F401

    def close(self) -> None:
        run = self._run
        with _unheard():
            self._end(*([run.finish] if run else []))


@contextmanager
def _unheard() -> Iterator[None]:
    """Without what a library prints for a person at a notebook."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
