"""What workers get from commands as typed and from the plans of their imports, by the tools' own code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the recipe means and the installed transformers 5 does not read any more, each with a remark in the recipe: the
# class to wrap as a flag, plain replicas in words of --fsdp, and FSDP files whose keys are of its first version.
NO_LONGER_READ = {"README.md#9", *(f"guide-lines.md#{number}" for number in (14, 15, 16, 18, 19, 20))}


def compare(folder: Path, home: Path) -> tuple[dict[str, list[str]], int]:
    """The differences by place, and how many commands were compared."""
    pytest.importorskip("transformers")
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "compare"), str(folder)],
        cwd=ROOT,
        env={**os.environ, "HOME": str(home), "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    last = re.search(r"^(\d+) commands compared, (\d+) differ$", done.stdout, re.MULTILINE)
    assert last, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout[: last.start()].splitlines():
        place, _, what = line.partition("  ")
        found.setdefault(place.removeprefix(f"{folder.name}/"), []).append(what)
    assert (len(found), done.returncode) == (int(last[2]), int(bool(found)))
    return found, int(last[1])


def test_workers_get_the_same_from_a_command_and_from_the_plan_of_its_import(tmp_path: Path) -> None:
    found, compared = compare(ROOT / "tests" / "corpus", tmp_path)
    assert found.keys() == NO_LONGER_READ, found
    said = [each for differences in found.values() for each in differences]
    assert all(re.match(r"\[.*?\] plugin\.|ValueError: `fsdp=no_shard`", each) for each in said), found
    assert compared > 50


def test_the_comparison_sees_what_a_plan_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "train.py").write_text("import torch\n")
    (folder / "go.sh").write_text("export NODE_RANK=3\ndeepspeed --num_gpus 1 train.py --lr 1\n")
    found, compared = compare(folder, tmp_path)
    lines = [f"[{value}] variable NODE_RANK: 3 -> None" for value in (None, "1", "two words")]
    assert (found, compared) == ({"go.sh": lines}, 1)
