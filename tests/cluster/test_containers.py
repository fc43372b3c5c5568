"""Runs in containers of real engines: what goes in, how they end, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from tests.cluster.engines import Engine, lacking, recipe

# Imports nothing of torch: says where it is, and does as it is told.
PROGRAM = """
import json, os, signal, sys, time
names = ("RANK", "SECRET", "HOME", "HF_HOME", "USER", "LEFT_OUT")
said = {"pid": os.getpid(), "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}
print(json.dumps(said), flush=True)
what = sys.argv[1]
if what == "save":
    signal.signal(signal.SIGUSR1, lambda *_: open("saved", "w").close())
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if what == "clean":
    signal.signal(signal.SIGTERM, lambda *_: (open("cleaned", "w").close(), sys.exit(0)))
open("here", "w").write(str(os.getpid()))  # signals may come from now on
if what == "fail":
    time.sleep(0 if os.environ.get("RANK") == "1" else 60)
    sys.exit(7)
while what != "say" and not os.path.exists("go"):
    time.sleep(0.05)
"""
ALONE = {"launcher": {"kind": "python", "grace_seconds": 1}}


def made(kind: str) -> Iterator[Engine]:
    if why := lacking(kind):
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="tk-box-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        engine = Engine(kind, Path(folder))
        try:
            engine.up()
            yield engine
        finally:
            engine.down()


@pytest.fixture(scope="module")
def podman() -> Iterator[Engine]:
    yield from made("podman")


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    yield from made("docker")


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_runs_on() -> Iterator[None]:
    """A run of a test that has failed is no other test's."""
    yield
    while Started.all:
        each = Started.all.pop()
        if each.process.poll() is None:
            each.process.terminate()
            each.ended()


class Started:
    """`trainkit run` of a program in a container."""

    all: ClassVar[list[Started]] = []

    def __init__(self, engine: Engine, folder: Path, what: str, **more: object) -> None:
        self.engine, self.folder = engine, folder
        (folder / "program.py").write_text(PROGRAM)
        program: dict[str, object] = {"kind": "torch", "script": "program.py", "args": [what]}
        (folder / "r.yaml").write_text(recipe(engine, program, **more))
        self._console = (folder / "console.txt").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainkit", "run", "r.yaml"],
            cwd=folder,
            env={**os.environ, **engine.environ, "HOME": str(folder), "SECRET": "hunter2", "LEFT_OUT": "outside"},
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=self._console,
            start_new_session=True,
        )
        self.all.append(self)

    def here(self) -> int:
        """The pid of the program, when it runs."""
        found = wait_for(lambda: self._text("here") or self.process.poll() is not None, self.said)
        assert found is not True, self.said()
        return int(found)

    def ended(self) -> int:
        code = self.process.wait(timeout=60)
        self._console.close()
        return code

    def said(self) -> str:
        return self._text("console.txt")

    def _text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    @property
    def run(self) -> Path:
        (found,) = (self.folder / "runs" / "box").iterdir()
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "status.json").read_text())
        return found

    def nothing_stays(self, pid: int) -> None:
        wait_for(lambda: not psutil.pid_exists(pid), self.said)
        wait_for(lambda: not self.engine.containers(), self.said)


def wait_for(condition: Callable[[], Any], said: Callable[[], str], seconds: float = 20.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"it did not happen within {seconds:g} s:\n{said()}")


def ended(engine: Engine, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "trainkit", "run", "r.yaml", *words],
        check=False,
        cwd=folder,
        env={**os.environ, **engine.environ, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_of_torchrun_run_inside_and_the_exit_code_is_the_failed_rank_s(engine: Engine, tmp_path: Path) -> None:
    started = Started(
        engine, tmp_path, "fail", strategy={"kind": "ddp"}, env_from=["SECRET"], launcher={"grace_seconds": 3}
    )
    assert started.ended() == 7, started.said()
    assert "rank 1 exited with code 7" in started.said()
    said = json.loads((started.run / "attempts/1/logs/rank-1.out").read_text())
    assert said["SECRET"] == "hunter2" and said["LEFT_OUT"] is None, "only what is named goes in"
    assert said["cwd"] == str(tmp_path) and said["HOME"].endswith("containers/home") and said["USER"]
    wrappers = [json.loads(each.read_text()) for each in (started.run / "attempts/1/ranks").glob("rank-*.json")]
    assert {each["host"] for each in wrappers} == {os.uname().nodename}
    planned = [each for each in started.run.rglob("*") if each.is_file() and not each.name.startswith("rank-")]
    assert not [each for each in planned if b"hunter2" in each.read_bytes()], "no value of a secret is in any file"
    assert {each.stat().st_uid for each in started.run.rglob("*")} == {os.getuid()}
    started.nothing_stays(said["pid"])


def test_ctrl_c_ends_the_program_inside_gently(engine: Engine, tmp_path: Path) -> None:
    started = Started(engine, tmp_path, "clean", **ALONE)
    pid = started.here()
    os.kill(started.process.pid, signal.SIGINT)
    assert started.ended() == 130, started.said()
    assert (tmp_path / "cleaned").exists()
    started.nothing_stays(pid)


def test_a_program_that_ignores_term_is_killed_after_the_grace_time(engine: Engine, tmp_path: Path) -> None:
    started = Started(engine, tmp_path, "stubborn", **ALONE)
    pid = started.here()
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.ended() == 143, started.said()
    started.nothing_stays(pid)


def test_a_checkpoint_request_reaches_the_program_and_the_run_goes_on(engine: Engine, tmp_path: Path) -> None:
    started = Started(engine, tmp_path, "save", **ALONE)
    pid = started.here()
    os.kill(started.process.pid, signal.SIGUSR1)
    wait_for((tmp_path / "saved").exists, started.said)
    (tmp_path / "go").touch()
    assert started.ended() == 0, started.said()
    started.nothing_stays(pid)


@pytest.mark.parametrize("killed", ["trainkit", "guardian", "both", "engine"])
def test_nothing_stays_behind_when_processes_of_the_run_are_killed(engine: Engine, tmp_path: Path, killed: str) -> None:
    started = Started(engine, tmp_path, "wait", **ALONE)
    pid = started.here()
    pids = wait_for(lambda: started.status()["state"] == "running" and started.status()["pids"], started.said)
    victims = {"engine": ["launcher"], "both": ["trainkit", "guardian"]}.get(killed, [killed])
    for name in victims:
        os.kill(pids[name], signal.SIGKILL)
    code = started.ended()
    assert code != 0
    started.nothing_stays(pid)
    if killed != "both":  # who would write it
        assert wait_for(lambda: started.status()["state"] == "ended", started.said)


def test_the_built_in_trainer_trains_inside(podman: Engine, tmp_path: Path) -> None:
    text = tmp_path / "corpus"
    text.mkdir()
    (text / "a.py").write_text("x = 1\n" * 2000)
    small = {
        "strategy": {"kind": "ddp"},
        "batch": {"global": 4},
        "model": {"layers": 1, "heads": 1, "hidden_size": 16},
        "data": {"path": "corpus", "sequence_length": 32},
        "train": {"steps": 3},
    }
    (tmp_path / "r.yaml").write_text(recipe(podman, {"kind": "builtin"}, **small))
    done = ended(podman, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs" / "box").iterdir()
    assert json.loads((run / "result.json").read_text())["steps"] == 3
    assert not podman.containers()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["container.image=localhost/absent:1"], "the image localhost/absent:1 is not on this machine"),
        (["container.packages.torch=2.6.0"], "set the image's versions in the recipe: container.packages: {torch: "),
        (["container.python=/usr/bin/absent"], "could not start the container"),
        (["container.mounts+=/absent:/absent"], "container.mounts names /absent, which does not exist"),
        (["container.user=65534:65534"], "user 65534 of the container may not write to"),
        (["container.caches=/proc/absent"], "the container's caches cannot be kept in /proc/absent"),
    ],
)
def test_what_image_or_machine_lack_is_said_before_the_ranks_start(
    podman: Engine, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text(
        recipe(podman, {"kind": "torch", "script": "program.py", "args": ["say"]}, strategy={"kind": "ddp"})
    )
    done = ended(podman, tmp_path, *words)
    assert done.returncode == 4, done.stdout + done.stderr
    assert said in done.stderr
    assert not (tmp_path / "here").exists() and not podman.containers()


def test_the_plan_s_script_runs_the_same_container(docker: Engine, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text(
        recipe(docker, {"kind": "torch", "script": "program.py", "args": ["say"]}, **ALONE)
    )
    environ = {**os.environ, **docker.environ, "HOME": str(tmp_path)}
    line = f"{sys.executable} -P -m trainkit plan r.yaml --shell > plan.sh && sh plan.sh"
    done = subprocess.run(
        ["sh", "-c", line], check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cwd"] == str(tmp_path)
    assert not docker.containers()
