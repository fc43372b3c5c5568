"""The run's own folder on the disk that ZeRO swaps to: made at the start, gone at the end, never shared by two runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Zero3
from trainkit.trainer.settings import Settings

PREFIX = "trainkit-"


def swap_folder(settings: Settings) -> Path | None:
    """Where this run swaps to; None for a run that does not. Two runs in one folder would read each other's tensors."""
    strategy = settings.recipe.strategy
    if not isinstance(strategy, Zero3) or strategy.nvme_path is None:
        return None
    place = hashlib.sha256(str(settings.run_dir).encode()).hexdigest()[:8]
    return Path(strategy.nvme_path).absolute() / f"{PREFIX}{settings.run_dir.name}-{place}"


@contextlib.contextmanager
def swap_space(settings: Settings) -> Iterator[None]:
    """Hold the folder for this rank; the last rank to leave it removes it, and with it what killed runs have left.

    TrainingError when the folder cannot be made.
    """
    folder = swap_folder(settings)
    if folder is None:
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear_abandoned(folder.parent)
        held = _lock(_lock_file(folder), fcntl.LOCK_SH)
        folder.mkdir(exist_ok=True)
    except OSError as error:
        what = f"strategy.nvme_path: {error.filename or folder} cannot be used: {error.strerror}"
        raise TrainingError(what, hint="name a folder on a local disk that this user may write to") from error
    try:
        yield
    finally:
        os.close(held)
        clear_abandoned(folder.parent)


def clear_abandoned(root: Path) -> None:
    """Remove the swap folders that no living rank holds: the kernel lets go of a lock however its holder ends."""
    for lock_file in root.glob(f"{PREFIX}*.lock"):
        with contextlib.suppress(OSError):  # somebody holds it, has just removed it, or is another user
            held = _lock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink()
            os.close(held)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock(path: Path, operation: int) -> int:
    """Descriptor of the lock file that stands at the path; BlockingIOError if it would have to wait and is not to."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, operation)
            if os.path.samestat(os.fstat(descriptor), path.stat()):  # not removed since it was opened
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
