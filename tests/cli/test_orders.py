"""Commands for a run on this machine, from status to cancel; and what a submission without Slurm says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py, verify: false}
devices: {type: cpu}
launcher: {grace_seconds: 5}
"""
PROGRAM = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: print("saved", flush=True))
print("here", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "trainkit", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_run_here_is_looked_at_asked_to_save_and_ended(folder: Path) -> None:
    argv = [sys.executable, "-P", "-m", "trainkit", "run", "r.yaml"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "here\n"
            assert json.loads(call("status", "--json").stdout)["state"] == "running"
            assert call("checkpoint", "r").returncode == 0
            assert run.stdout.readline() == "saved\n"
            assert call("attach", "--", "echo", "beside").stdout == "beside\n"
            assert call("attach", "--node", "1").returncode == 2
            with subprocess.Popen([*argv[:4], "logs", "-f"], stdout=subprocess.PIPE, text=True) as unread:
                assert unread.stdout is not None
                assert unread.stdout.readline() == "here\n"
                unread.stdout.close()
                assert unread.wait(30) == 141
            with subprocess.Popen([*argv[:4], "logs", "-f"], stdout=subprocess.PIPE, text=True) as logs:
                assert call("cancel").returncode == 0
                assert logs.communicate(timeout=30)[0] == "here\nsaved\n"
                assert logs.returncode == 143
            assert run.wait(30) == 143
        finally:
            run.kill()
    assert call("status").stdout.startswith("cancelled, exit code 143: trainkit received SIGTERM")
    again = call("cancel")
    assert (again.returncode, "is cancelled" in again.stderr) == (2, True)
    assert call("logs", "--all", "--rank", "0").returncode == 2
    for words, said in ((("--rank", "1"), "its only rank is 0"), (("--node", "1"), "its only node is 0"),
                        (("--attempt", "2"), "its only attempt is 1")):  # fmt: skip
        absent = call("logs", *words)
        assert (absent.returncode, said in absent.stderr) == (2, True), absent.stderr
    assert call("logs", "--rank", "0", "--attempt", "1").stdout == "here\nsaved\n"


def test_a_program_that_knows_no_request_for_a_checkpoint_goes_on(folder: Path) -> None:
    text = "import sys, time\nprint('here', flush=True)\ntime.sleep(1)\nprint('still here', flush=True)\n"
    (folder / "program.py").write_text(text + "time.sleep(60)\n")
    argv = [sys.executable, "-P", "-m", "trainkit", "run", "r.yaml"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "here\n"
            asked = call("checkpoint")
            assert (asked.returncode, "which its program may not know" in asked.stdout) == (0, True), asked.stderr
            assert run.stdout.readline() == "still here\n"
            assert call("cancel", "--now").returncode == 0
        finally:
            run.kill()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("submit", "r.yaml"), 2, "--with clusters/slurm"),
        (("submit", "r.yaml", "cluster.kind=slurm"), 4, "`sinfo` answers"),
        (("submit", "r.yaml", "cluster.kind=slurm", 'cluster.sbatch=["--nodes=3"]'), 2, "use nodes.count"),
        (("submit", "r.yaml", "cluster.kind=slurm", "cluster.time=90"), 2, "in quotes"),
        (("submit", "r.yaml", "cluster.kind=slurm", "cluster.machine=8xh1000"), 2, "cluster.machine=8xh1000: error"),
        (("status",), 2, "no runs"),
        (("status", "--", "r"), 2, "takes no arguments after --"),
        (("logs", "nosuch"), 2, "neither a run directory nor a run"),
    ],
)
def test_what_cannot_be_done_is_one_diagnostic(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, says: str
) -> None:
    for name in ("scontrol", "sbatch"):  # a login machine whose controller does not answer
        (folder / name).write_text("#!/bin/sh\necho 'error: Unable to contact slurm controller' >&2; exit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    done = call(*words)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert "bug" not in done.stderr
    assert not (folder / "runs").exists()


def test_what_an_ended_run_in_pods_has_left_can_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is asked here: kubectl finds none, or is not there."""
    monkeypatch.setenv("KUBECONFIG", str(folder / "none"))
    run = folder / "runs" / "r" / "20261123-012042-abcdef"
    run.mkdir(parents=True)
    job = {"scheduler": "kubernetes", "job": "default/jobset/r-20261123-012042-abcdef", "argv": []}
    ended = {"state": "ended", "outcome": "done", "exit_code": 0, "attempt": 1}
    (run / "plan.json").write_text("{}")
    (run / "recipe.yaml").touch()
    (run / "submission.json").write_text(json.dumps(job))
    (run / "status.json").write_text(json.dumps(ended))
    done = call("cancel", "r")
    assert (done.returncode, "kubectl" in done.stderr) == (4, True), done.stderr
    assert json.loads((run / "status.json").read_text()) == ended
