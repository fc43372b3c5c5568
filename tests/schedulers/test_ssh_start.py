"""`trainkit submit` with a stand-in for ssh, on this machine alone: what is left to itself, what is tied until then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Trainkit

pytestmark = pytest.mark.cli
PATIENCE = 240.0  # seconds: for a machine that does much else
# Starts what it is given in a session of its own, as sshd does, which outlives it.
SSH = """#!/bin/sh
case " $* " in *" -G "*) echo "hostname 127.0.0.1"; exit;; esac
for last; do :; done
exec 3<&0
setsid sh -c "$last" <&3 3<&- &
exec 3<&- </dev/null
wait $!
"""
PROGRAM = """
import os, time
print("began", flush=True)
open("here", "w").close()
until = time.monotonic() + 240
while time.monotonic() < until and not os.path.exists("go"):
    time.sleep(0.05)
print("went on", flush=True)
"""
RECIPE = """
version: 1
name: r
program: {kind: torch, script: program.py}
devices: {type: cpu}
cluster: {kind: ssh, hosts: [gpu1]}
"""


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o700)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return {"PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"}


def test_a_submitted_run_goes_on_by_itself_and_is_cancelled(
    tmp_path: Path, environ: dict[str, str], trainkit: Trainkit
) -> None:
    done = trainkit("submit", "r.yaml", environ=environ)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/r/*")
    assert done.stdout.splitlines()[0] == f"run directory: {run}"
    assert f"`trainkit cancel {run.name[-6:]}` ends it" in done.stdout
    until((tmp_path / "here").exists, "the rank")
    leader = json.loads((run / "status.json").read_text())["pids"]["trainkit"]
    assert os.getsid(leader) == leader
    assert Path(f"/proc/{leader}/fd/1").readlink() == run / "job.out"
    assert not [each for each in Path(f"/proc/{leader}/fd").iterdir() if each.readlink().name.startswith("pipe:")]
    assert json.loads(trainkit("status", "r", "--json").stdout)["state"] == "running"
    done = trainkit("cancel", "r", environ=environ)
    assert done.returncode == 0, done.stderr
    until(lambda: not Path(f"/proc/{leader}").exists(), "the end")
    assert trainkit("status", "r").stdout.startswith("cancelled, exit code 143")


def test_the_output_of_a_submitted_run_is_followed_to_its_end(
    tmp_path: Path, environ: dict[str, str], trainkit: Trainkit
) -> None:
    (tmp_path / "go").touch()
    done = trainkit("submit", "r.yaml", "--follow", environ=environ)
    assert done.returncode == 0, done.stderr
    assert "began\nwent on\n" in done.stdout
    (run,) = tmp_path.glob("runs/r/*")
    assert f"Run directory  {run}\n" in done.stdout


def test_a_run_ends_with_what_submits_it_until_it_has_begun(
    tmp_path: Path, environ: dict[str, str], clean_environment: dict[str, str]
) -> None:
    setup = "cluster.setup=['echo $$ >late; while [ ! -e go ]; do sleep 0.05; done']"
    words = [sys.executable, "-P", "-m", "trainkit", "submit", "r.yaml", setup]
    submitter = subprocess.Popen(words, cwd=tmp_path, env={**clean_environment, **environ}, start_new_session=True)
    until(lambda: (tmp_path / "late").exists() and (tmp_path / "late").read_text().endswith("\n"), "the node")
    node = int((tmp_path / "late").read_text())
    submitter.send_signal(signal.SIGKILL)
    submitter.wait()
    (tmp_path / "go").touch()
    until(lambda: not Path(f"/proc/{node}").exists(), "the end of the node")
    assert not (tmp_path / "here").exists()
