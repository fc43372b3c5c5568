"""A small sample of the campaign `faults`: that it runs, finds nothing in what it tries, and sees what is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CAMPAIGN = Path(__file__).parents[2] / "scripts" / "campaign"
pytestmark = pytest.mark.torch


def campaign(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The campaign's outcome."""
    argv = [sys.executable, str(CAMPAIGN / "faults"), "--workers", "2", "--strategies", "single", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc compiles the calls that fail")
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
def test_a_run_whose_calls_fail_is_as_promised(tmp_path: Path) -> None:
    done = campaign(tmp_path, "--only", "failing call", "--cases", "1", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 faults, 0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


def test_commands_that_cannot_write_are_as_promised(tmp_path: Path) -> None:
    done = campaign(tmp_path, "--only", "commands", "--cases", "2", "--seed", "2")
    if "not made here: " in done.stdout:
        assert done.returncode == 1  # nothing at all was tried
        pytest.skip(done.stdout.splitlines()[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 faults, 0 failed" in done.stdout


@pytest.fixture
def promises(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The judging module."""
    monkeypatch.syspath_prepend(str(CAMPAIGN))
    import fault_promises

    yield fault_promises
    for name in ("fault_promises", "fault_kinds", "fault_places", "tiny_runs"):
        sys.modules.pop(name, None)


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
def test_what_is_not_as_promised_is_seen(promises: Any, tmp_path: Path, line: str, finds: list[str]) -> None:
    from fault_kinds import FAULTS
    from tiny_runs import Run

    root = tmp_path / "runs"
    run = Run(root, tmp_path, "single", environ={"ROOT": str(root)}, command=("sh", "-c", line))
    code = run.process.wait(20)
    found = promises.after_fault(run, FAULTS["full disk"], code)
    found += promises.damaged_checkpoints(run.directory())
    assert [each.removeprefix(str(root)) for each in found] == finds


def test_a_file_of_another_run_that_changed_is_seen(promises: Any, tmp_path: Path) -> None:
    folder, before = promises.bystander(tmp_path)
    assert promises.of_files({folder: before}) == []
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("more")
    assert promises.of_files({folder: before}) == [f"{folder} was damaged"]
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]
