"""How fast the disk of the run root takes data: a checkpoint stops training for as long as it is written."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from trainkit.doctor.checks.disk_space import existing, usable
from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.units import MIB, in_words
from trainkit.doctor.verdict import Verdict, ok, skipped

TITLE = "write speed"
LIMIT = 8.0
FAST = False

BLOCK, MOST, SECONDS = 4 * MIB, 64 * MIB, 2.0
SLOW = 30 * MIB  # bytes a second: 10 GB of checkpoint would take more than 5 minutes
SPARE = 1024 * MIB  # a disk with less room than this is not filled further


def needs(aim: Aim) -> str:
    """Every run writes."""
    return ""


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Write, force to the disk and remove at most 64 MiB."""
    folder = existing(surroundings.folder / aim.output_root)
    if not usable(folder) or surroundings.space(folder).free < SPARE:
        return [skipped(f"{folder} has no room for a trial")]
    size, seconds = measured(folder)
    evidence = f"{in_words(size)} written and synced in {seconds:.2f} s in {folder}"
    if size / seconds < SLOW:
        fix = "trainkit run RECIPE output.root=/a/local/disk      # or checkpoint.asynchronous=true"
        return [Verdict("warning", f"slow: {in_words(int(size / seconds))}/s", (evidence,), (fix,))]
    return [ok(f"{in_words(int(size / seconds))}/s at the run root", evidence)]


def measured(folder: Path, seconds: float = SECONDS) -> tuple[int, float]:
    """Bytes written and seconds taken, about `seconds` at most. The file has no name, so nothing can stay behind."""
    block = os.urandom(BLOCK)  # zeros would be compressed away by some file systems
    size, begin = 0, time.monotonic()
    with tempfile.TemporaryFile(dir=folder) as file:
        while size < MOST and time.monotonic() - begin < seconds:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            size += BLOCK
    return size, max(time.monotonic() - begin, 1e-6)
