"""Run directories: list, read, remove. The state of a run is in schedulers/jobs/run_state.py."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit.errors import MachineError
from trainkit.files import (
    LARGEST,
    RECORD,
    hold_lock,
    is_locked,
    parse_json,
    read_json,
    read_record,
    read_whole,
    remove_file,
    remove_tree,
)
from trainkit.launch_plan.model import Plan, Text, plan_from_json
from trainkit.planner.resume import FOLDER, SavedCheckpoint, written_by_rank
from trainkit.runner.rundir.layout import MANIFEST, RunLayout, subfolders
from trainkit.runner.rundir.records import Status

ID = re.compile("([0-9]{8}-[0-9]{6}-)?[0-9a-f]{6}(-[0-9]+)?")  # of a run, or its short id
EXPORT_SUFFIX = ".export"  # of a folder prepared for an upload
TRAINER_FOLDER = re.compile(r"^checkpoint-(\d+)$")
TRAINER_STATE = "trainer_state.json"  # written by rank 0 after weights and optimizer
# Optimizer state of Trainer, FSDP and DeepSpeed; without it (save_only_model) a run cannot be resumed.
TRAINER_OPTIMIZER = ("optimizer.pt", "optimizer.bin", "optimizer_0", "global_step{step}")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """One run directory. started, ended: seconds since the epoch. rank: the one that failed first. host: of node 0.

    launched: kinds of `program`, `strategy` and `launcher` in the plan. argv: of the program, without the interpreter.
    """

    layout: RunLayout
    started: float | None
    ended: float | None
    summary: Mapping[str, Any]
    rank: int | None = None
    launched: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    host: str = ""

    @property
    def program(self) -> str:
        """A short name: the script, the module, or the built-in trainer; empty if unknown."""
        if self.launched.get("program") == "builtin" or not self.argv:
            return self.launched.get("program", "")
        return " ".join(self.argv[:2]) if self.argv[0] == "-m" else Path(self.argv[0]).name


def list_runs(output_root: str, name: str | None = None) -> list[RunInfo]:
    """The runs under an output folder, oldest first; of one name, if given."""
    root = Path(output_root)
    parents = [root / name] if name else sorted(subfolders(root))
    runs = [read_run(path) for parent in parents for path in subfolders(parent) if is_run(path)]
    return sorted(runs, key=lambda run: run.layout.id)


def runs_of_id(word: str, root: str) -> list[RunInfo]:
    """The runs under a root whose id, or short id, this is."""
    if not ID.fullmatch(word):
        return []
    paths = (path for pattern in (word, f"*-{word}") for path in Path(root).glob(f"*/{pattern}"))
    return [read_run(path) for path in paths if is_run(path)]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory. ValueError for a name that cannot be one."""
    layout = RunLayout(path)
    with contextlib.suppress(OSError):  # another user's: Path.is_file raises without permission
        return layout.plan.is_file() and layout.recipe.is_file()
    return False


def incomplete_runs(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Folders below a root, or itself, that are named as a run's and lack files that make a run directory: these."""
    for path in [root, *(each for parent in subfolders(root) for each in subfolders(parent))]:
        layout = RunLayout(path)
        missing = [each.name for each in (layout.plan, layout.recipe) if not os.path.lexists(each)]
        if missing and ID.fullmatch(path.name) and path.is_dir():
            yield path, missing


def read_run(path: Path) -> RunInfo:
    """Read the files of a run directory. Damaged values count as unknown: one run must not hide all others."""
    layout = RunLayout(path.absolute())
    status = read_status(layout) or Status()
    plan = _of_plan(read_json(layout.plan))
    known = (status.started, status.ended, read_json(layout.summary), status.rank)
    return RunInfo(layout, *known, *plan, host=status.host or "")


def read_plan(layout: RunLayout, *, own: bool = False) -> Plan:
    """The plan of a run. MachineError where there is none, or it cannot be read.

    own: as for `files.read_whole`, where what it says is started.
    """
    try:
        plan = plan_from_json(parse_json(read_whole(layout.plan, RECORD, own=own, below=layout.root)))
        if not plan.commands:
            raise ValueError("it starts nothing")
        return plan
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"{layout.plan} cannot be read: {error}", hint="start its recipe again") from error


def read_status(layout: RunLayout) -> Status | None:
    """status.json; None if it is missing or damaged."""
    return read_record(layout.status, Status, below=layout.root)


def _of_plan(plan: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The `launched` and `argv` of a plan; as much as can be read of a damaged plan, or one of another version."""
    launched = {}
    for name in ("program", "strategy", "launcher"):
        choice = plan.get(name)
        if isinstance(choice, dict) and isinstance(choice.get("kind"), str):
            launched[name] = choice["kind"]
    try:
        command = plan["commands"][0]
        start = command["wrapper"]["first"] + command["wrapper"]["count"]
        words = [str(Text.from_json(word)) for word in command["argv"][start:]]
    except (KeyError, IndexError, TypeError, ValueError):
        return launched, ()
    is_python = len(words) > 1 and Path(words[0]).name.startswith("python")
    return launched, tuple(words[1:] if is_python else words)


def is_running(layout: RunLayout) -> bool | None:
    """Whether trainkit or the guardian of this run lives on this machine; None if unknown."""
    return is_locked(layout.lock)  # either holds it


def lock_run(layout: RunLayout) -> int:
    """Mark the run as running for as long as the returned descriptor is open in any process."""
    return hold_lock(layout.lock)  # the guardian inherits it


def is_linked(layout: RunLayout) -> bool:
    """Whether its path has a link: another user who may write there can make one to any other run."""
    return layout.root.is_symlink() or layout.root.parent.is_symlink()


def disk_use(folders: Sequence[Path]) -> tuple[list[int], int]:
    """Bytes that each of these takes on the disk, and what removing all of them frees.

    Of sparse files only what is written counts. A file with several names counts once in a folder, and is freed only
    if all its names are in these folders. What cannot be looked at counts as nothing.
    """
    names, blocks, sizes = Counter[tuple[int, int]](), dict[tuple[int, int], tuple[int, int]](), list[int]()
    for folder in folders:
        own = set[tuple[int, int]]()
        for path in (folder, *_inside(folder)):
            with contextlib.suppress(OSError):  # it has just been removed
                found = path.lstat()
                file = (found.st_dev, found.st_ino)
                own.add(file)
                names[file] += 1
                blocks[file] = (found.st_blocks * 512, 1 if stat.S_ISDIR(found.st_mode) else found.st_nlink)
        sizes.append(sum(blocks[file][0] for file in own))
    return sizes, sum(size for file, (size, links) in blocks.items() if names[file] >= links)


def _inside(folder: Path) -> Iterator[Path]:
    """Everything below a folder, without following links."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def remove(layout: RunLayout) -> None:
    """Remove a run directory. Raises OSError."""
    folder = layout.root.parent
    remove_file(layout.plan, below=folder)  # first: a half-removed folder must not count as a run
    remove_tree(layout.root, below=folder)


def clear_uploads(run: RunLayout) -> None:
    """Remove what killed uploads and copies have left behind (trainkit/trainer/checkpoint/uploads.py).

    If every checkpoint is to be uploaded, the missing ones stay: the next attempt uploads them.
    """
    try:
        settings = read_json(run.root / "trainer.json")
        uploads_all = settings["recipe"]["checkpoint"]["push_to_hub"]["strategy"] == "all"
    except (KeyError, TypeError):  # incomplete, or of another release
        uploads_all = True
    for folder, keeps in ((run.pushes, uploads_all), (run.copies, False)):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in sorted(folder.glob("*")):
            if not keeps or path.name.startswith(".") or path.suffix == EXPORT_SUFFIX:
                shutil.rmtree(path, ignore_errors=True)
        if not any(folder.glob("*")):
            shutil.rmtree(folder, ignore_errors=True)


def saved_checkpoints(output_root: str, name: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The built-in trainer's under <output_root>/<name>: newest run first, within a run latest step first.

    damaged: include those whose files differ from the manifest.
    """
    return [saved for run in _newest_first(output_root, name) for saved in checkpoints_of(run, damaged=damaged)]


def trainer_checkpoints(output_root: str, name: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """Trainer's under <output_root>/<name>/<run>/output: newest run first, within a run latest step first.

    damaged: has no effect. Trainer's folders have no manifest: one that lacks a file was not finished.
    """
    return [saved for run in _newest_first(output_root, name) for saved in _of_trainer(run)]


def _newest_first(output_root: str, name: str) -> list[RunLayout]:
    return [RunLayout(path) for path in sorted(subfolders(Path(output_root).absolute() / name), reverse=True)]


def checkpoints_of(layout: RunLayout, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The checkpoints of one run, latest step first."""
    inside = [saved for folder in subfolders(layout.checkpoints) for saved in _read(folder, layout.id)]
    kept = [saved for saved in inside if damaged or not saved.damage]
    return sorted(kept, key=lambda saved: saved.step, reverse=True)


def own_checkpoints(layout: RunLayout, program: str) -> list[SavedCheckpoint]:
    """The checkpoints that a kind of program has saved in a run: latest step first, damaged ones included."""
    return _of_trainer(layout) if program == "hf" else checkpoints_of(layout, damaged=True)


def named_checkpoint(path: str, *, damaged: bool = False) -> list[SavedCheckpoint]:
    """The checkpoint at a path, or none."""
    folder = Path(path).absolute()
    found = [replace(saved, path=path) for saved in _read(folder, folder.parent.parent.name)]
    return [saved for saved in found if damaged or not saved.damage]


def checksum(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's entries, stored in it as `checksum` (missing in old releases)."""
    content = {name: value for name, value in manifest.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, run: str) -> list[SavedCheckpoint]:
    """The checkpoint in a folder, if it has the name of one; a folder gets that name when it is complete."""
    if FOLDER.match(folder.name) is None or not folder.is_dir():
        return []

    def size(name: str) -> int | None:
        try:
            return (folder / name).stat().st_size
        except OSError:
            return None

    try:
        manifest = read_whole(folder / MANIFEST)
    except FileNotFoundError:
        manifest = None
    except OSError:
        manifest = b""
    return [described(folder, run, manifest, size)]


def described(
    folder: Path, run: str, manifest: bytes | None, size: Callable[[str], int | None], source: str = ""
) -> SavedCheckpoint:
    """The checkpoint with a manifest, None where it has none, in a folder `step-<8 digits>`.

    size: of its file of a name, in bytes; None where it is missing. source: its address elsewhere.
    """
    damaged = SavedCheckpoint(str(folder), int(folder.name.removeprefix("step-")), "", run, source=source)
    if manifest is None:
        return replace(damaged, damage=f"it has no {MANIFEST}")
    try:
        content = parse_json(manifest)
        if content.get("checksum", checksum(content)) != checksum(content):
            return replace(damaged, damage=f"{MANIFEST} was changed after it was written")
        best = content.get("best", {})
        return replace(
            damaged,
            step=int(content["step"]),
            training_digest=str(content["training_digest"]),
            strategy=str(content["strategy"]),
            world_size=int(content["world_size"]),
            best_step=int(best["step"]) if best.get("value", best.get("loss")) is not None else None,
            by_rank=written_by_rank(content["files"]),
            damage=_damage(size, content["files"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):  # incomplete, or of another program
        return replace(damaged, damage=f"{MANIFEST} cannot be read")


def _damage(size: Callable[[str], int | None], files: Mapping[str, Any]) -> str:
    """The first file that is missing or has the wrong size. Checksums, which take longer, are compared on loading."""
    for name, facts in files.items():
        found = size(name)
        if found is None:
            return f"{name} is missing"
        if found != facts["size"]:
            return f"{name} has {found} of {facts['size']} bytes"
    return ""


def _of_trainer(layout: RunLayout) -> list[SavedCheckpoint]:
    plan = read_json(layout.plan)
    try:
        ranks = sum(group["count"] * group["processes"] for group in plan["topology"]["groups"])
        digest, strategy = str(plan["training_digest"]), str(plan["strategy"]["kind"])
    except (KeyError, TypeError):
        return []  # not a run directory
    found = {
        int(match[1]): path
        for path in (layout.root / "output").glob("checkpoint-*")
        if (match := TRAINER_FOLDER.match(path.name)) and _is_whole(path, int(match[1]), ranks)
    }
    return [
        SavedCheckpoint(str(path), step, digest, layout.id, strategy, ranks)
        for step, path in sorted(found.items(), reverse=True)
    ]


def _is_whole(folder: Path, step: int, ranks: int) -> bool:
    """Whether every rank has written its part; the generators' state is written last."""
    generators = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    has_optimizer = any((folder / name.format(step=step)).exists() for name in TRAINER_OPTIMIZER)
    written = has_optimizer and all((folder / name).exists() for name in generators)
    return written and read_json(folder / TRAINER_STATE, LARGEST).get("global_step") == step
