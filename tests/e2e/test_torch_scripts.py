"""An unedited loop on plain torch: the same losses under every launcher, however it is started, and its words exact."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).parent / "programs" / "ddp_loop.py"
WORDS = ["two words", 'it\'s "so"', "two\nlines", "ünï ☃", "$HOME", "${local_rank}", "", "--"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the loop as a script, as a module of a package, and behind a shell script."""
    shutil.copy(PROGRAM, tmp_path / "loop.py")
    (tmp_path / "own").mkdir()
    shutil.copy(PROGRAM, tmp_path / "own" / "loop.py")
    shell = tmp_path / "train it.sh"
    shell.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} loop.py "$@"\n')
    shell.chmod(0o755)
    return tmp_path


def report(trainkit: Trainkit, folder: Path, name: str, target: str, launcher: str) -> dict[str, Any]:
    """What rank 0 of the loop says of one run, whose strategy was looked at."""
    settings = ("program.kind=torch", target, "program.verify=true", f"launcher.kind={launcher}", f"name={name}")
    presets = ("--with", "strategy/ddp", "--with", "devices/cpu")
    done = trainkit("run", *settings, *presets, "--", f"{name}.json", *WORDS, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "as planned, seen in 2 ranks: ddp, cpu" in done.stderr
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_losses_and_words_are_the_same_under_every_launcher_and_way_to_start(trainkit: Trainkit, folder: Path) -> None:
    first = report(trainkit, folder, "first", "program.script=loop.py", "torchrun")
    assert first["words"] == WORDS
    assert len(first["losses"]) == 8
    assert first["losses"][-1] < first["losses"][0]
    assert report(trainkit, folder, "second", "program.module=own.loop", "accelerate") == first
    assert report(trainkit, folder, "third", "program.script=train it.sh", "deepspeed") == first


def test_a_file_that_may_not_be_executed_is_said_to_be_one(trainkit: Trainkit, folder: Path) -> None:
    (folder / "train it.sh").chmod(0o644)
    done = trainkit("run", "program.kind=torch", "program.script=train it.sh", "--with=devices/cpu")
    assert done.returncode == 126
    assert "cannot start ./train it.sh: Permission denied" in done.stderr
    assert "chmod +x" in done.stderr
