"""Bring checkpoints elsewhere during training, by separate processes: to the Hub exported, to other storage whole."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

from trainkit.errors import TrainingError
from trainkit.recipe.schema import TargetModel
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import EXPORT_SUFFIX
from trainkit.text import join_names
from trainkit.trainer.checkpoint.manifest import newest, read_manifest
from trainkit.trainer.settings import Settings

log = logging.getLogger("trainkit.trainer")
EXPORT, UPLOAD, COPY = "trainkit.trainer.checkpoint", "trainkit.hub.push", "trainkit.runner.rundir.elsewhere"
# Not for these processes, which are not ranks. Ranks are offline so that nothing is downloaded unnoticed; if the
# caller were offline, the run would not have started.
NOT_HANDED_ON = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# folder in the repository for checkpoints in their own format
WHOLE = {"checkpoint": "last-checkpoint", "all": "checkpoints"}
NICE = 10  # so that the ranks come first
PATIENCE = 10.0  # seconds for removing the files of an upload


class Uploads(ABC):
    """The uploads of a run to one place, on rank 0: one at a time, of the newest checkpoint unless each is wanted.

    A failed upload is repeated at the end.
    """

    TAKES_RESUMED: ClassVar[bool] = (
        False  # whether a run that trains nothing uploads the checkpoint that it resumes from
    )

    def __init__(self, settings: Settings, place: str, kept: Path, which: Literal["newest", "last", "every"]) -> None:
        """place: where they go, for messages. kept: folder of the files that wait. which: are uploaded."""
        self._recipe, self._run, self.place = settings.recipe, settings.run_dir, place
        self._folder, self._which = kept, which
        # By the names of checkpoints, which sort like their steps.
        self._sources: dict[str, Path] = {}  # their folders
        self._waiting: dict[str, Path] = {}  # copies (by hard links) of those that wait for their upload
        self._tries: dict[str, int] = {}
        self._failures: dict[str, str] = {}  # reasons
        self._done: set[str] = set()
        self._current = ""  # the one that is being uploaded
        self._finishing = self._ended = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        for path in sorted(kept.glob("*")):  # of an earlier attempt
            if which == "every" and path.name.startswith("step-") and path.suffix != EXPORT_SUFFIX:
                self._waiting[path.name] = path
            else:
                remove(path)

    @abstractmethod
    def _upload(self, name: str, kept: Path) -> str:
        """Upload one checkpoint; its address. Raises whatever prevents it."""

    @abstractmethod
    def _commands(self, names: Iterable[str]) -> str:
        """The commands to upload checkpoints by hand."""

    def saved(self, checkpoint: Path) -> None:
        """A checkpoint is complete: queue it, unless only the last one is to be uploaded."""
        if self._which != "last":
            self._take(checkpoint)

    def finish(self, newest: Path) -> None:
        """The last checkpoint is saved: queue it, and the uploads that have failed so far."""
        self._finishing = True
        if newest.name in self._done:
            self._start()
        else:
            self._take(newest)

    def is_busy(self) -> bool:
        """Whether an upload runs or is about to start."""
        return self._thread is not None

    def unfinished(self) -> list[str]:
        """The checkpoints that are being uploaded, or wait for it."""
        with self._lock:
            return sorted(self._waiting)

    def close(self) -> None:
        """Check the uploads. TrainingError for checkpoints that were not uploaded; they stay on disk."""
        failures = dict(self._failures)
        self._tidy()
        if failures:
            reason = list(failures.values())[-1]
            raise TrainingError(
                f"the training is over, and {join_names(sorted(failures))} could not be uploaded to "
                f"{self.place}: {reason}",
                hint=f"they are on disk; to upload them later: {self._commands(failures)}",
            )

    def abandon(self) -> None:
        """The run ends early: log what is not uploaded, and leave it."""
        with self._lock:
            self._ended, thread, child = True, self._thread, self._child
        if child is not None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if thread is not None:
            thread.join(PATIENCE)  # it removes its incomplete files
        last = newest(self._run / "checkpoints")
        left = {*self._waiting, *self._failures}
        if last is not None and last.name not in self._done:
            left.add(last.name)
        if left:
            what = "warning: not uploaded to %s, because the run ends early: %s; to upload later: %s"
            log.warning(what, self.place, join_names(sorted(left)), self._commands(left))
        self._tidy()

    def _source(self, name: str) -> Path:
        return self._sources.get(name, self._run / "checkpoints" / name)

    def _folders(self, names: Iterable[str]) -> dict[str, Path]:
        """Where checkpoints are by now, by their names."""
        folders = {name: self._source(name) for name in sorted(names)}
        return {name: path if path.exists() else self._waiting.get(name, path) for name, path in folders.items()}

    def _tidy(self) -> None:
        """Remove all copies except those that exist nowhere else, or that a restarted run needs."""
        restarts = self._recipe.launcher.max_restarts > 0 or self._recipe.cluster.kind != "none"
        for name, kept in self._waiting.items():
            if not (self._which == "every" and restarts) and self._source(name).exists():
                remove(kept)
        with suppress(OSError):  # it does not exist, or is not empty
            self._folder.rmdir()

    def _take(self, checkpoint: Path) -> None:
        """Keep a checkpoint's files until they are uploaded, even if its folder is removed."""
        name, kept = checkpoint.name, self._folder / checkpoint.name
        with self._lock:
            self._sources[name] = checkpoint
            if self._which != "every":  # older ones need not be uploaded any more
                self._forget({*self._waiting, *self._failures} - {self._current, name})
            self._tries.pop(name, None)
            self._failures.pop(name, None)
            try:
                if name not in self._waiting:
                    keep(checkpoint, kept)
                self._waiting[name] = kept
            except OSError as error:
                self._failures[name] = f"its files cannot be kept for the upload: {error.strerror or error}"
                return
        self._start()

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._failures.pop(name, None)
            if kept := self._waiting.pop(name, None):
                remove(kept)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._work, name="push", daemon=True)
                self._thread.start()

    def _most_tries(self) -> int:
        """Tries for one checkpoint: one more at the end, unless it is first tried at the end."""
        return 2 if self._finishing and self._which != "last" else 1

    def _work(self) -> None:
        while True:
            with self._lock:
                left = [name for name in self._waiting if self._tries.get(name, 0) < self._most_tries()]
                if self._ended or not left:
                    self._thread = None
                    return
                name = self._current = min(left, key=lambda name: (self._tries.get(name, 0), name))
                self._tries[name] = self._tries.get(name, 0) + 1
            failure = self._push(name, self._waiting[name])
            with self._lock:
                self._current = ""
                outdated = {each for each in self._waiting if each <= name and self._which != "every"}
                if failure is None:
                    self._done.add(name)
                    self._forget({name, *outdated})
                elif outdated and max(self._waiting) > name:
                    self._forget(outdated)
                else:
                    self._failures[name] = failure

    def _push(self, name: str, kept: Path) -> str | None:
        """Upload one checkpoint; the error, None if there was none."""
        try:
            address = self._upload(name, kept)
        except Exception as error:  # noqa: BLE001 - nobody else would hear of it, and the end waits for this thread
            is_last = self._finishing and self._tries.get(name, 0) >= self._most_tries()  # `close` reports it
            if not (self._ended or is_last):
                log.warning("warning: %s is not uploaded to %s: %s", name, self.place, error)
            return str(error)
        log.info("uploaded %s to %s: %s", name, self.place, address)
        return None

    def _run_module(self, words: Sequence[str | Path]) -> str:
        """Run one of trainkit's modules; its output. TrainingError with its last line of errors if it fails."""
        environ = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        reading, writing = os.pipe()  # it ends with this process, however that ends
        try:
            with self._lock:
                if self._ended:
                    raise TrainingError("the run ends")
                child = self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", *map(str, words), "--tied"],
                    env=environ, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, errors="replace", start_new_session=True,
                )  # fmt: skip
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child.pid, NICE)
            out, err = child.communicate()
        finally:
            self._child = None
            os.close(reading)
            os.close(writing)
        if child.returncode:
            if child.returncode < 0:
                ended = signal.Signals(-child.returncode)
                killed = "; most likely by the kernel, because memory ran out" if ended == signal.SIGKILL else ""
                raise TrainingError(f"{words[0]} was ended by {ended.name}{killed}")
            said = [line for line in err.splitlines() if line.startswith("error: ")] or err.splitlines() or [""]
            last = said[-1].removeprefix("error: ").removeprefix(f"nothing can be uploaded to {self.place}: ")
            raise TrainingError(last or f"{words[0]} ended with {child.returncode}")
        return out


class HubUploads(Uploads):
    """The uploads to a repository of the Hub: exported weights, and whole checkpoints too if the recipe says so."""

    TAKES_RESUMED = True

    def __init__(self, settings: Settings, repo: str) -> None:
        self._strategy = settings.recipe.checkpoint.push_to_hub.strategy
        which: Mapping[str, Literal["last", "every"]] = {"end": "last", "all": "every"}
        super().__init__(settings, repo, RunLayout(settings.run_dir).pushes, which.get(self._strategy, "newest"))

    def _commands(self, names: Iterable[str]) -> str:
        """The commands to upload by hand: the newest weights, and every checkpoint if the recipe wants all."""
        folders = self._folders(names)
        newest = max(folders)
        words = ["trainkit", "export", str(folders[newest])]
        words += ["--adapter"] if self._recipe.peft.kind == "lora" else []
        words += ["--trust-code"] if isinstance(self._recipe.model, TargetModel) else []
        words += ["--push", self.place, *(["--private"] if self._recipe.checkpoint.push_to_hub.private else [])]
        commands = [shlex.join(words)]
        if whole := WHOLE.get(self._strategy):
            kept = folders if self._strategy == "all" else {newest: folders[newest]}
            commands += [shlex.join(("hf", "upload", self.place, str(kept[name]), f"{whole}/{name}")) for name in kept]
        return "; ".join(commands)

    def _upload(self, name: str, kept: Path) -> str:
        folder, whole = kept.with_name(name + EXPORT_SUFFIX), WHOLE.get(self._strategy)
        upload: list[str | Path] = [UPLOAD, self.place, "--folder", folder]
        upload += ["--message", f"{self._recipe.name}: {name}"]
        if whole:  # another run with more ranks may have left a checkpoint of the same name
            upload += ["--replace", f"{whole}/*" if self._strategy == "checkpoint" else f"{whole}/{name}/*"]
        try:
            remove(folder)  # of an attempt before
            if not any(each > name for each in self._done):  # never replace newer weights
                export: list[str | Path] = [EXPORT, "--checkpoint", kept, "--destination", folder, "--for-hub"]
                adapter = ["--adapter"] if self._recipe.peft.kind == "lora" else []
                self._run_module([*export, "--trust-code", *adapter])
            if whole:
                link_tree(kept, folder / whole / name)
            return self._run_module(upload).strip().rpartition("\n")[2]
        finally:
            remove(folder)


class Copies(Uploads):
    """The copies of whole checkpoints in `checkpoint.copy_to`, of which as many stay there as on this disk."""

    def __init__(self, settings: Settings, address: str) -> None:
        super().__init__(settings, address, RunLayout(settings.run_dir).copies, "newest")

    def _commands(self, names: Iterable[str]) -> str:
        folders = self._folders(names)
        return shlex.join((sys.executable, "-P", "-m", *self._words(folders[max(folders)])))

    def _upload(self, name: str, kept: Path) -> str:
        return self._run_module([*self._words(kept), *self._limits(kept)]).strip()

    def _words(self, checkpoint: Path) -> list[str]:
        return [COPY, "copy", self.place, "--checkpoint", str(checkpoint)]

    def _limits(self, checkpoint: Path) -> list[str]:
        """How many stay there."""
        asked = self._recipe.checkpoint
        best = read_manifest(checkpoint).get("best", {}).get("step") if asked.keep_best else None
        return ["--keep", str(asked.keep), *([] if best is None else ["--spared", str(best)])]


def remove(folder: Path) -> None:
    """Remove files that are no longer needed. Files that cannot be removed only take space."""
    shutil.rmtree(folder, ignore_errors=True)


def keep(checkpoint: Path, kept: Path) -> None:
    """Duplicate a checkpoint's files in another folder, which is complete or does not exist."""
    scratch = kept.with_name(f".{kept.name}")
    try:
        remove(scratch)
        link_tree(checkpoint, scratch)
        scratch.rename(kept)
    finally:
        remove(scratch)


def link_tree(source: Path, target: Path) -> None:
    """Duplicate a folder's files in another one: by hard links, which take no space, or else by copies."""

    def link(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:  # a file system without hard links
            shutil.copyfile(one, other)

    shutil.copytree(source, target, copy_function=link, dirs_exist_ok=True)
