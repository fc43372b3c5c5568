"""Checkpoints on their way to the Hub, behind the training: exported and uploaded by processes of their own."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.errors import TrainingError
from trainkit.stamps import CHECKPOINT
from trainkit.text import listed
from trainkit.trainer.checkpoint.manifest import newest
from trainkit.trainer.distributed import sum_over_ranks
from trainkit.trainer.settings import Settings

if TYPE_CHECKING:
    from trainkit.trainer.callbacks import Progress
    from trainkit.trainer.setup import Parts
    from trainkit.trainer.signals import Requests

log = logging.getLogger("trainkit.trainer")
FOLDER = "pushes"  # in the run directory: checkpoints whose upload is not over, by hard links
EXPORT, UPLOAD = "trainkit.trainer.checkpoint.export", "trainkit.hub.push"
# A rank's own, which is none of these processes'. Offline is what the ranks' libraries are, for nothing is downloaded
# in silence; where the caller was, the run would not have begun.
NOT_HANDED_ON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
WHOLE = {"checkpoint": "last-checkpoint", "all": "checkpoints"}  # folder of the repository with checkpoints as they are
NICE = 10  # the ranks come first
POLL = 0.2  # seconds


class Pushes:
    """The uploads of a run, on rank 0: one at a time, of the newest checkpoint unless the recipe asks for all.

    What fails is tried again with the next checkpoint, and at the end.
    """

    def __init__(self, settings: Settings, repo: str) -> None:
        self._recipe, self._run, self._repo = settings.recipe, settings.run_dir, repo
        self._strategy = settings.recipe.checkpoint.push_to_hub.strategy
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._waiting: dict[str, Path] = {}  # by the checkpoint's name
        self._failures: dict[str, str] = {}  # of those, the reasons
        self._done: set[str] = set()
        self._current = ""  # the one that is being uploaded
        self._ended = False

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is whole: take it, unless the end alone is asked for."""
        if self._strategy != "end":
            self._take(checkpoint)

    def finish(self, newest: Path | None) -> None:
        """The last checkpoint is saved: see that it is uploaded, and what has failed so far. newest: of this run."""
        if newest is not None and newest.name not in self._done:
            self._take(newest)
        self._start(again=True)

    def is_busy(self) -> bool:
        """Whether something is being uploaded, or about to be."""
        return self._thread is not None

    def close(self) -> None:
        """Account for what was to be uploaded. TrainingError for what was not, which stays on the disk."""
        if not self._failures:
            shutil.rmtree(self._run / FOLDER, ignore_errors=True)
            return
        name, reason = next(reversed(self._failures.items()))
        raise TrainingError(
            f"the training is over, and {listed(list(self._failures))} could not be uploaded: {reason}",
            hint=f"it is on the disk: {self._later(name)}",
        )

    def abandon(self, newest: Path | None = None) -> None:
        """The run ends before its time: say what is not uploaded, and leave it. newest: its last checkpoint."""
        with self._lock:
            self._ended, left, child = True, list(self._waiting), self._child
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if newest is not None and newest.name not in (*self._done, *left):
            left.append(newest.name)
        if left:
            what = "warning: %s is not uploaded to %s, for the run ends before its time; later: %s"
            log.warning(what, listed(left), self._repo, self._later(left[-1]))

    def _later(self, name: str) -> str:
        """What uploads a checkpoint by hand."""
        there = self._run / "checkpoints" / name
        folder = there if there.exists() else self._waiting.get(name, there)
        return f"trainkit export {folder} --push {self._repo}"

    def _take(self, checkpoint: Path) -> None:
        """Keep a checkpoint's files until they are uploaded, whatever becomes of its folder."""
        name, kept = checkpoint.name, self._run / FOLDER / checkpoint.name
        with self._lock:
            if name in self._waiting:
                return
            if self._strategy != "all":  # what is older is not asked for any more
                for older in [each for each in self._waiting if each != self._current]:
                    self._forget(older)
            shutil.rmtree(kept, ignore_errors=True)  # of an attempt before
            try:
                link_tree(checkpoint, kept)
            except OSError as error:
                self._failures[name] = f"its files cannot be kept for that: {error}"
                return
            self._waiting[name] = kept
        self._start(again=False)

    def _forget(self, name: str) -> None:
        shutil.rmtree(self._waiting.pop(name))
        self._failures.pop(name, None)

    def _start(self, *, again: bool) -> None:
        """Upload what waits; `again`: and what has failed."""
        with self._lock:
            if again:
                self._failures = {name: why for name, why in self._failures.items() if name not in self._waiting}
            if self._thread is None and self._waiting.keys() - self._failures.keys():
                self._thread = threading.Thread(target=self._work, name="push", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                # Names sort as the steps do.
                self._current = min(self._waiting.keys() - self._failures.keys(), default="")
                if self._ended or not self._current:
                    self._thread = None
                    return
            name = self._current
            failure = self._push(name, self._waiting[name])
            with self._lock:
                self._current = ""
                if failure is not None:
                    self._failures[name] = failure
                    continue
                self._done.add(name)
                self._forget(name)

    def _push(self, name: str, kept: Path) -> str | None:
        """Export and upload one checkpoint; what went wrong, None if nothing did."""
        folder = self._run / FOLDER / f"{name}-export"
        shutil.rmtree(folder, ignore_errors=True)
        adapter = ["--adapter"] if self._recipe.peft.kind == "lora" else []
        export: list[str | Path] = [
            EXPORT,
            "--checkpoint",
            kept,
            "--destination",
            folder,
            "--for-hub",
            "--trust-code",
            *adapter,
        ]
        whole = WHOLE.get(self._strategy)
        message = f"{self._recipe.name}: {name}"
        upload: list[str | Path] = [UPLOAD, self._repo, "--folder", folder, "--message", message]
        if self._strategy == "checkpoint":
            upload += ["--replace", f"{whole}/*"]
        try:
            self._run_module(export)
            if whole:
                link_tree(kept, folder / whole / name)
            commit = self._run_module(upload).strip().rpartition("\n")[2]
        except (OSError, TrainingError) as error:
            if not self._ended:
                log.warning("warning: %s is not uploaded to %s: %s", name, self._repo, error)
            return str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        log.info("uploaded %s to %s: %s", name, self._repo, commit)
        return None

    def _run_module(self, words: Sequence[str | Path]) -> str:
        """Run one of trainkit's modules; its output. TrainingError with the last that it says where it fails."""
        environ = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", *map(str, words)],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        with self._lock:
            self._child = child
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, NICE)
        out, err = child.communicate()
        with self._lock:
            self._child = None
        if child.returncode:
            said = [line for line in err.splitlines() if line.startswith("error: ")] or err.splitlines() or [""]
            raise TrainingError(said[-1].removeprefix("error: ") or f"{words[0]} ended with {child.returncode}")
        return out


def link_tree(source: Path, target: Path) -> None:
    """The files of a folder in another one: by hard links, which take no room, or copies where there are none."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # a file system without them
            shutil.copyfile(one, other)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)


def finish_pushes(parts: Parts, progress: Progress, requests: Requests) -> signal.Signals | None:
    """Wait on all ranks until rank 0 has uploaded what the recipe asks for; the signal that ended the waiting.

    TrainingError for what could not be uploaded.
    """
    pushes, root, stop = parts.checkpoints.pushes, parts.checkpoints.root, progress.stopped_by
    if parts.settings.recipe.checkpoint.push_to_hub.repo is None:
        return stop
    last = newest(root) if root is not None and pushes is not None else None
    if pushes is not None and stop is None:
        if last is None and progress.step > progress.first:
            raise TrainingError("nothing can be uploaded to the Hub: the run has saved no checkpoint")
        pushes.finish(last)
    while stop is None:
        # In short steps: a collective that waits has an end, and signals are seen by all ranks.
        busy, *votes = sum_over_ranks([int(pushes is not None and pushes.is_busy()), *requests.votes()], parts.world)
        if not busy:
            break
        stop, _ = requests.settle(votes)
        parts.stamps.enter(CHECKPOINT)
        time.sleep(POLL)
    if pushes is not None:
        pushes.close() if stop is None else pushes.abandon(last)
    return stop
