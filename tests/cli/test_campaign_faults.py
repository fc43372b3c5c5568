"""A small sample of the campaign `faults`: that it runs, finds nothing in what it tries, and sees what is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loaded_scripts import run_script, script


def campaign(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run_script("campaign/faults", "--workers", "2", "--strategies", "single", *words, cwd=folder)


@pytest.mark.e2e
@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc compiles the calls that fail")
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_a_run_whose_calls_fail_is_as_promised(tmp_path: Path) -> None:
    done = campaign(tmp_path, "--only", "failing call", "--cases", "1", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 cases, 0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


@pytest.mark.e2e
def test_commands_that_cannot_write_are_as_promised(tmp_path: Path) -> None:
    done = campaign(tmp_path, "--only", "commands", "--cases", "2", "--seed", "2")
    if "not made here: " in done.stdout:
        assert done.returncode == 1  # nothing at all was tried
        pytest.skip(done.stdout.splitlines()[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cases, 0 failed" in done.stdout


@pytest.fixture(scope="module")
def faults() -> Any:
    return script("campaign/faults")


@pytest.mark.parametrize(
    ("line", "finds"),
    [
        ("echo no room on $ROOT; exit 4", []),
        ("echo no room on $ROOT; exit 3", ["exit code 3, and not [0, 1, 4]"]),
        ("echo Traceback '(most recent call last)': no room on $ROOT; exit 1",
         ["it says 'Traceback (most recent call last)'"]),
        ("exit 1", ["no word of No space left on device or no room or full", "it names no path"]),
        ("mkdir -p $ROOT/tiny/20260101-000000-abcdef; cd $ROOT/tiny/*; echo '{\"state\": \"lost\"}' > status.json",
         ["status.json says lost, None", "there is no summary.json, and nobody says why"]),
        ("mkdir -p $ROOT/tiny/20260101-000000-abcdef/checkpoints/step-00000002",
         ["/tiny/20260101-000000-abcdef/checkpoints/step-00000002: it has no manifest.json"]),
    ],
)  # fmt: skip
def test_what_is_not_as_promised_is_seen(faults: Any, tmp_path: Path, line: str, finds: list[str]) -> None:
    root = tmp_path / "runs"
    run = faults.Run(root, tmp_path, "single", environ={"ROOT": str(root)}, command=("sh", "-c", line))
    found = faults.after_fault(run, faults.FAULTS["full disk"], run.process.wait(20))
    found += faults.tiny.damaged_checkpoints(run.directory())
    assert [each.removeprefix(str(root)) for each in found] == finds


def test_a_file_of_another_run_that_changed_is_seen(faults: Any, tmp_path: Path) -> None:
    folder, before = faults.bystander(tmp_path)
    assert faults.damaged({folder: before}) == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("more")
    assert faults.damaged({folder: before}) == [f"{folder} was damaged"]
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
