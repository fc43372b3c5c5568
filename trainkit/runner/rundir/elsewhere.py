"""Checkpoints and exports in a folder elsewhere (`checkpoint.copy_to`): list, copy there, fetch from there.

The folder has runs as output.root has them: <address>/<name>/<run>/checkpoints/step-<8 digits>. There, too, a folder
without a manifest is not a checkpoint: the manifest is written last, and removed first. fsspec does the work, with the
credentials that it finds in the environment or in the user's own files.

``python -m trainkit.runner.rundir.elsewhere`` does it in a process of its own.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from trainkit.distribution import install
from trainkit.errors import MachineError, TrainkitError, UsageError, first_line, one_line_each
from trainkit.files import LARGEST, hold_lock, parse_json, publish, read_whole, remove_tree
from trainkit.hub.push import end_with_input
from trainkit.planner.resume import FOLDER, SavedCheckpoint
from trainkit.recipe.address import CREDENTIALS, PACKAGES, scheme
from trainkit.recipe.secrets import mask_values
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import described, named_checkpoint

CONFIGS = ("config.json", "adapter_config.json")  # of an export, by which readers know it
# Of a run, what makes its folder one: `trainkit export` reads the first, and run directories are known by the others.
RUN_FILES = ("trainer.json", "recipe.yaml", "plan.json")
PART = 1 << 25  # bytes that are fetched at once
LOCK = ".fetching"
LONGEST = 400  # characters of a library's reason


class Folder(NamedTuple):
    """A folder elsewhere: its address, fsspec's file system, and its path in that."""

    address: str
    system: Any
    path: str

    def sizes(self, inside: str = "") -> dict[str, int]:
        """The size in bytes of every file in it, by its path from here; empty where there is no such folder."""
        try:
            found = self.system.find(f"{self.path}/{inside}" if inside else self.path, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.path) + 1
        return {path[start:]: int(facts["size"]) for path, facts in found.items()}

    def read(self, name: str) -> bytes:
        """A small file's bytes. FileNotFoundError if there is none."""
        return bytes(self.system.cat_file(f"{self.path}/{name}", end=LARGEST))

    def put(self, source: Path, name: str) -> None:
        """Copy a file there."""
        self.system.put_file(str(source), f"{self.path}/{name}")

    def remove(self, checkpoint: str) -> None:
        """Remove a checkpoint there, its manifest first, so that what is left is none."""
        with suppress(FileNotFoundError):
            self.system.rm_file(f"{self.path}/{checkpoint}/{MANIFEST}")
        with suppress(FileNotFoundError):
            self.system.rm(f"{self.path}/{checkpoint}", recursive=True)


def open_folder(address: str) -> Folder:
    """The folder at an address. MachineError where a package is missing that reads it."""
    try:
        from fsspec.core import url_to_fs

        # Other machines change what is there: nothing is remembered. A folder on a disk is made when it is written to.
        more = {} if scheme(address) not in ("", "file", "local") else {"auto_mkdir": True}
        system, path = url_to_fs(address, use_listings_cache=False, skip_instance_cache=True, **more)
    except ImportError as error:
        package = PACKAGES.get(scheme(address), "fsspec")
        what = f"{package} is not installed, which reads {address}"
        raise MachineError(what, hint=install(sys.executable, package)) from error
    except ValueError as error:
        what = f"{address} is not an address that fsspec can open: {first_line(error)}"
        raise MachineError(what, hint="write it as scheme://…, or as a path") from error
    return Folder(address, system, path.rstrip("/"))


@contextmanager
def explained(what: str, address: str) -> Iterator[None]:
    """Turn whatever a library raises into a MachineError: what cannot be done, and why."""
    try:
        yield
    except (TrainkitError, KeyboardInterrupt):
        raise
    except Exception as error:  # the file systems and their HTTP libraries may raise anything
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"{what}: {error.strerror}", hint="free space, or set output.root to another disk"
            ) from error
        reason = mask_values(" ".join(str(error).split()))[:LONGEST] or type(error).__name__
        package = PACKAGES.get(scheme(address), "")
        variables = ", ".join(CREDENTIALS.get(package, ()))
        hint = f"check the address and the credentials ({variables}, or the provider's own files)"
        raise MachineError(f"{what}: {reason}", hint=hint if variables else "check the address") from error


def copied_checkpoints(address: str, name: str, output_root: str) -> list[SavedCheckpoint]:
    """The checkpoints elsewhere of runs of a name, damaged ones included: newest run first, latest step first.

    Their paths are those that they have on this machine once they are fetched. MachineError if the folder cannot be
    read; one that does not exist yet has none.
    """
    folder = open_folder(address)
    with explained(f"the checkpoints in {address} cannot be listed", address):
        found: dict[tuple[str, str], dict[str, int]] = {}  # the sizes of files by run and checkpoint
        for path, size in folder.sizes(name).items():
            match PurePosixPath(path).relative_to(name).parts:
                case (run, "checkpoints", step, *inside) if inside and FOLDER.match(step):
                    found.setdefault((run, step), {})["/".join(inside)] = size
        saved = []
        for (run, step), sizes in found.items():
            local = Path(output_root).absolute() / name / run / "checkpoints" / step
            try:
                manifest = folder.read(f"{name}/{run}/checkpoints/{step}/{MANIFEST}") if MANIFEST in sizes else None
            except FileNotFoundError:  # removed meanwhile
                manifest = None
            source = f"{address.rstrip('/')}/{name}/{run}/checkpoints/{step}"
            saved.append(described(local, run, manifest, sizes.get, source))
    return sorted(saved, key=lambda each: (each.run, each.step), reverse=True)


def copy_checkpoint(checkpoint: Path, address: str, keep: int = 0, spared: int | None = None) -> str:
    """Copy a complete checkpoint, `<run>/<any folder>/step-<8 digits>`; its address there.

    keep: how many of the run's newest checkpoints stay there; 0 keeps all. spared: the step of another that stays.
    MachineError if it is not there whole in the end; earlier ones stay then.
    """
    run, manifest = checkpoint.parents[1], read_whole(checkpoint / MANIFEST)
    folder, of_run = open_folder(address), f"{run.parent.name}/{run.name}"
    there = f"{of_run}/checkpoints/{checkpoint.name}"
    target = f"{address.rstrip('/')}/{there}"
    with explained(f"nothing can be uploaded to {address}", address):
        sizes = {str(each.relative_to(checkpoint)): each.stat().st_size for each in _files(checkpoint)}
        if folder.sizes(there) != {f"{there}/{name}": size for name, size in sizes.items()} or (
            folder.read(f"{there}/{MANIFEST}") != manifest
        ):
            copy_run_files(run, folder)
            folder.remove(there)  # what a killed attempt has left, or another with more ranks
            for name in (name for name in sizes if name != MANIFEST):
                folder.put(checkpoint / name, f"{there}/{name}")
            arrived = folder.sizes(there)
            wrong = [
                name for name, size in sizes.items() if name != MANIFEST and arrived.get(f"{there}/{name}") != size
            ]
            if wrong:
                raise MachineError(f"{target} is not whole: {', '.join(wrong)} has not arrived", hint="try again")
            folder.put(checkpoint / MANIFEST, f"{there}/{MANIFEST}")
        if keep:
            _remove_older(folder, f"{of_run}/checkpoints", checkpoint.name, keep, spared)
    return target


def copy_export(export: Path, address: str) -> None:
    """Copy an exported model to a folder elsewhere; the files by which readers know it come last.

    MachineError if it is not there whole in the end.
    """
    folder = open_folder(address)
    with explained(f"the export cannot be copied to {address}", address):
        sizes = {str(each.relative_to(export)): each.stat().st_size for each in _files(export)}
        for name in sorted(sizes, key=lambda name: name in CONFIGS):
            folder.put(export / name, name)
        if wrong := sizes.items() - folder.sizes().items():
            raise MachineError(
                f"{address} is not whole: {', '.join(sorted(name for name, _ in wrong))} has not arrived"
            )


def fetch_named(address: str, parent: Path) -> Path:
    """Fetch the checkpoint at an address, with its run's files, below a folder; its path there."""
    *root, name, run, checkpoints, step = address.rstrip("/").split("/")
    if checkpoints != "checkpoints" or not FOLDER.match(step) or not any(root):
        raise UsageError(
            f"{address} is not a checkpoint", hint="write it as <address>/<name>/<run>/checkpoints/step-<8 digits>"
        )
    checkpoint = parent.absolute() / name / run / checkpoints / step
    fetch_checkpoint(checkpoint, "/".join(root))
    return checkpoint


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def copy_run_files(run: Path, folder: Folder) -> None:
    """Copy what makes a run's folder one."""
    for name in RUN_FILES:
        if (run / name).is_file():
            folder.put(run / name, f"{run.parent.name}/{run.name}/{name}")


def _remove_older(folder: Folder, checkpoints: str, newest: str, keep: int, spared: int | None) -> None:
    """Remove the run's older checkpoints, and what is left of incomplete ones."""
    whole: dict[str, bool] = {}
    for path in folder.sizes(checkpoints):
        step, _, name = path[len(checkpoints) + 1 :].partition("/")
        if FOLDER.match(step) and step <= newest:
            whole[step] = whole.get(step, False) or name == MANIFEST
    stay = {*sorted(step for step, has_manifest in whole.items() if has_manifest)[-keep:]}
    stay |= {f"step-{spared:08d}"} if spared is not None else set()
    for step in sorted(whole.keys() - stay):
        folder.remove(f"{checkpoints}/{step}")


def fetch_checkpoint(checkpoint: Path, address: str) -> bool:
    """Fetch `<name>/<run>/checkpoints/step-<8 digits>` to its path below output.root; False if it is there, whole.

    It gets its name once every file matches the manifest. What an attempt before has fetched is not fetched again.
    MachineError if it is not there whole, or cannot be written here.
    """
    if named_checkpoint(str(checkpoint)):  # saved here, or fetched before
        return False
    name, folder, run = "/".join(checkpoint.parts[-4:]), open_folder(address), checkpoint.parents[1]
    source = f"{address.rstrip('/')}/{name}"
    with explained(f"{source} cannot be fetched to {checkpoint}", address):
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        lock = hold_lock(checkpoint.parent / LOCK)  # another node's process may be at it, in a shared folder
        try:
            if named_checkpoint(str(checkpoint)):
                return False
            for each in RUN_FILES:
                if not (run / each).exists():
                    with suppress(FileNotFoundError):
                        publish(run / each, folder.read(f"{'/'.join(checkpoint.parts[-4:-2])}/{each}"), flush=True)
            _fetch_files(folder, name, checkpoint)
        finally:
            os.close(lock)
    return True


def _fetch_files(folder: Folder, name: str, checkpoint: Path) -> None:
    scratch, manifest = checkpoint.with_name(f".fetched-{checkpoint.name}"), folder.read(f"{name}/{MANIFEST}")
    if scratch.exists() and (
        not (scratch / MANIFEST).is_file() or read_whole(scratch / MANIFEST) != manifest
    ):  # of another checkpoint of this name
        remove_tree(scratch)
    scratch.mkdir(exist_ok=True)
    publish(scratch / MANIFEST, manifest)
    for each, facts in parse_json(manifest)["files"].items():
        if ".." in PurePosixPath(each).parts or PurePosixPath(each).is_absolute():
            raise MachineError(f"{folder.address}/{name} is not a checkpoint of trainkit's: it names {each}")
        path = scratch / each
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch_file(folder, f"{name}/{each}", path, int(facts["size"]))
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"]:
                os.fsync(file.fileno())
                continue
        path.unlink()  # so that the next try fetches it anew
        what = f"{folder.address}/{name} is damaged: {each} does not match its manifest"
        raise MachineError(what, hint="remove it there; `auto` takes the newest that is whole and fits")
    if checkpoint.exists():  # without a manifest, or damaged
        remove_tree(checkpoint)
    scratch.rename(checkpoint)


def _fetch_file(folder: Folder, name: str, path: Path, size: int) -> None:
    """Fetch a file, or what is missing of it."""
    with path.open("ab") as file:
        if file.tell() > size:
            file.truncate(0)
        while (start := file.tell()) < size:
            part = folder.system.cat_file(f"{folder.path}/{name}", start=start, end=min(start + PART, size))
            if not part:
                raise MachineError(f"{folder.address}/{name} has {start} of {size} bytes")
            file.write(part)
            file.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Make ready for a run, or copy one checkpoint. Exit code 4 if that fails."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.runner.rundir.elsewhere", description=__doc__)
    parser.add_argument("action", choices=("ready", "copy"))
    parser.add_argument("address", help="the folder elsewhere, as checkpoint.copy_to names it")
    parser.add_argument("--checkpoint", type=Path, help="<output.root>/<name>/<run>/checkpoints/step-<8 digits>")
    parser.add_argument("--run", type=Path, help="ready: the run directory")
    parser.add_argument(
        "--node", type=int, default=0, help="ready: this node's number; the first one alone writes there"
    )
    parser.add_argument("--keep", type=int, default=0, help="copy: how many of the newest stay there; 0 keeps all")
    parser.add_argument("--spared", type=int, help="copy: the step of another that stays there")
    parser.add_argument("--tied", action="store_true", help="end when standard input closes")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if given.tied:
        threading.Thread(target=end_with_input, daemon=True).start()
    checkpoint = given.checkpoint and given.checkpoint.absolute()
    try:
        if given.action == "copy":
            sys.stdout.write(copy_checkpoint(checkpoint, given.address, given.keep, given.spared) + "\n")
        else:
            make_ready(given.address, given.run, checkpoint, given.node)
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(error.exit_code)
    return 0


def make_ready(address: str, run: Path, checkpoint: Path | None, node: int = 0) -> None:
    """Before the ranks start: fetch the checkpoint to resume from, and write the run's first files there.

    MachineError if one of them fails: better now than after the first checkpoint.
    """
    if checkpoint is not None and fetch_checkpoint(checkpoint, address):
        sys.stdout.write(f"fetched {checkpoint}\n")
    if node == 0:
        with explained(f"nothing can be uploaded to {address}", address):
            copy_run_files(run, open_folder(address))


if __name__ == "__main__":
    sys.exit(main())
