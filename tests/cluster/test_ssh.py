"""`trainkit submit` on machines without a scheduler: started over ssh, left to the machines, found from any of them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import LOGIN, Machines
from ssh import Ssh, lacking

from trainkit.files import read_json
from trainkit.runner.rundir.layout import RunLayout
from trainkit.schedulers.jobs.records import is_being_started

PATIENCE = 240.0  # seconds: for a machine that does much else
GRACE = 3
MOMENTS = 7  # of a start
# Trains nothing and imports nothing: says where each rank is, and waits for what it is told.
PROGRAM = """
import glob, os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
def note(name):
    open(f"{name}-{rank}", "w").close()
if what == "secret":
    value = os.environ["SECRET"]
    lines = [open(path, "rb").read() for path in glob.glob("/proc/[0-9]*/cmdline")]
    print("commands", len(lines) > 2, "with the value", sum(value.encode() in line for line in lines))
    print("length", len(value), "input", os.read(0, 1))
print("rank", rank, "of", os.environ["WORLD_SIZE"], "on", os.uname().nodename, flush=True)
if what == "fail" and rank == "1":
    sys.exit(7)
if what == "wait":
    signal.signal(signal.SIGUSR1, lambda *_: note("saved"))
    signal.signal(signal.SIGTERM, lambda *_: (note("ended"), sys.exit(143)))
    note("here")
    until = time.monotonic() + 300
    while time.monotonic() < until and not os.path.exists("go"):
        time.sleep(0.1)
    print("went on", flush=True)
"""
RECIPE = """
version: 1
name: r
program: {{kind: torch, script: program.py, args: [{what}]}}
strategy: {{kind: ddp}}
devices: {{type: cpu}}
nodes: {{processes_per_node: 1}}
launcher: {{grace_seconds: {grace}}}
cluster: {{kind: ssh, hosts: [{hosts}], options: [-F, {config}]}}
"""


@dataclass(frozen=True)
class Place:
    """Machines with an sshd, and a folder that they share."""

    ssh: Ssh
    folder: Path

    def write(self, what: str, hosts: str = "tk1, tk2") -> None:
        """The recipe and the program."""
        (self.folder / "program.py").write_text(PROGRAM)
        text = RECIPE.format(what=what, hosts=hosts, config=self.ssh.config, grace=GRACE)
        (self.folder / "r.yaml").write_text(text)

    def start(self, *words: str, on: str = LOGIN, **variables: str) -> subprocess.Popen[str]:
        """A trainkit on a machine, by default on the login machine."""
        command = (sys.executable, "-P", "-m", "trainkit", *words)
        return subprocess.Popen(
            self.ssh.machines.argv(on, command, self.folder),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def trainkit(self, *words: str, on: str = LOGIN, **variables: str) -> tuple[int, str, str]:
        """Its exit code, output and errors."""
        process = self.start(*words, on=on, **variables)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def until(self, condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
        """Wait for something."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, what
            time.sleep(0.05)

    def there(self, *names: str) -> bool:
        """Whether files are in the folder."""
        return all((self.folder / name).exists() for name in names)

    def left(self, *machines: str) -> list[str]:
        """Commands on these machines that are of a run in the folder, by where they run."""
        found = []
        for name in machines:
            shown = 'tr "\\0" " " <"$each/cmdline"'
            look = f'for each in /proc/[0-9]*; do [ "$(readlink "$each/cwd")" != "$0" ] || {shown}; done; :'
            argv = self.ssh.machines.argv(name, ["sh", "-c", look, str(self.folder)], "/")
            found += [subprocess.run(argv, capture_output=True, text=True, check=True).stdout]
        return list(filter(None, found))

    def submit(self) -> None:
        """Submit the recipe; once this returns nothing of it is left on the login machine, and the run goes on."""
        code, out, err = self.trainkit("submit", "r.yaml")
        assert code == 0, out + err
        (run,) = self.runs
        told = f"`trainkit logs {run.name[-6:]} -f` follows it, `trainkit cancel {run.name[-6:]}` ends it"
        assert out.splitlines() == [f"run directory: {run}", told]
        assert not self.left(LOGIN)
        self.until(lambda: self.there("here-0", "here-1"), "both ranks")

    @property
    def state(self) -> str:
        """What `status` says first."""
        return self.trainkit("status", "r")[1].splitlines()[0]

    @property
    def runs(self) -> list[Path]:
        """The run directories."""
        return sorted((self.folder / "runs" / "r").glob("*"))


def submitter(place: Place) -> int:
    """The process that submits, by its number outside of the login machine."""
    found = subprocess.run(["pgrep", "-f", "^[^ ]*python.* submit r.yaml"], capture_output=True, text=True, check=True)
    (pid,) = [pid for pid in found.stdout.split() if Path(f"/proc/{pid}/cwd").readlink() == place.folder]
    return int(pid)


@pytest.fixture(scope="module")
def ssh() -> Iterator[Ssh]:
    """Four machines tk1 to tk4, and tk0, where trainkit is started."""
    if why := lacking():
        pytest.skip(f"machines with an sshd {why} (apt-get install openssh-server openssh-client iproute2)")
    with tempfile.TemporaryDirectory(prefix="trainkit-ssh-", dir="/tmp") as folder:
        machines = Machines(Path(folder) / "machines")
        try:
            machines.up(4, tied=True)
            started = Ssh(machines, Path(folder) / "ssh")
            started.up()
            yield started
        finally:
            machines.down()


@pytest.fixture
def place(ssh: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The machines, for one test."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TRAINKIT_"))]:
        monkeypatch.delenv(name)
    return Place(ssh, tmp_path)


@pytest.fixture(scope="module", autouse=True)
def meanwhile(ssh: Ssh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Runs that take long only because somebody waits, while the other tests run.

    pulled: a machine that loses its power under a run. hidden: one that does not see the run directory. failed: a rank.
    """
    places = {name: Place(ssh, tmp_path_factory.mktemp(name)) for name in ("pulled", "hidden", "failed")}
    places["pulled"].write("wait", "tk3, tk4")
    processes = {"pulled": places["pulled"].start("submit", "r.yaml", "--wait")}
    places["hidden"].write("wait")
    hide = ssh.machines.argv("tk2", ["mount", "-t", "tmpfs", "none", str(places["hidden"].folder)])
    subprocess.run(hide, check=True)
    processes["hidden"] = places["hidden"].start("submit", "r.yaml")
    places["pulled"].until(lambda: places["pulled"].there("here-0", "here-1"), "both ranks")
    ssh.machines.down("tk4")
    places["failed"].write("fail", "tk3, tk1")
    processes["failed"] = places["failed"].start("submit", "r.yaml", "--follow")
    yield processes
    for process in processes.values():
        process.kill()


def test_one_run_on_two_machines_with_a_secret_that_stands_nowhere(place: Place) -> None:
    place.write("secret")
    with (place.folder / "r.yaml").open("a") as file:
        file.write("env_from: [SECRET]\n")
    value = "three words\nand 'quotes' 73519"
    code, out, err = place.trainkit("submit", "r.yaml", "--follow", SECRET=value)
    assert code == 0, out + err
    (run,) = place.runs
    shown = [line for line in out.splitlines() if line.startswith(("commands", "length", "rank"))]
    assert shown == ["commands True with the value 0", f"length {len(value)} input b''", "rank 0 of 2 on tk1"]
    assert "rank 1 of 2 on tk2" in (run / "attempts" / "1" / "logs" / "rank-1.out").read_text()
    files = [path for path in place.folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if b"73519" in path.read_bytes()]
    assert "73519" not in out + err
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all", 5)
    assert place.state.startswith("done, exit code 0")


def test_a_run_goes_on_without_what_has_submitted_it_and_obeys_the_login_machine(place: Place) -> None:
    place.write("wait")
    place.submit()
    (run,) = place.runs
    _, out, err = place.trainkit("status", "r", "--json")
    assert json.loads(out)["state"] == "running", err
    assert json.loads(out)["nodes"] == "tk1,tk2"
    leader = str(read_json(run / "status.json")["pids"]["trainkit"])
    ask = place.ssh.machines.argv("tk1", ["ps", "-o", "sid=,tty=", "-p", leader], "/")
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split() == [leader, "?"]
    assert place.trainkit("attach", "r", "--node", "1", "--", "hostname")[1] == "tk2\n"
    code, out, err = place.trainkit("checkpoint", "r")
    assert code == 0, out + err
    code, out, err = place.trainkit("dump", "r")
    assert code == 0, out + err
    place.until(lambda: place.there("saved-0", "saved-1"), "a signal to both ranks")
    followed = place.start("logs", "r", "-f")
    code, out, err = place.trainkit("cancel", "r")
    assert code == 0, out + err
    out, err = followed.communicate(timeout=PATIENCE)
    assert followed.returncode == 143, out + err
    assert "rank 0 of 2 on tk1\n" in out
    assert place.there("ended-0", "ended-1")
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all", 5)
    assert place.state.startswith("cancelled, exit code 143")


@pytest.mark.parametrize("machine", ["tk1", "tk2"])
def test_a_run_ends_from_each_of_its_machines(place: Place, machine: str) -> None:
    place.write("wait")
    place.submit()
    (run,) = place.runs
    assert place.trainkit("status", run.name[-6:], on=machine)[1].startswith("running")
    code, out, err = place.trainkit("cancel", run.name[-6:], "--now", on=machine)
    assert code == 0, out + err
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all")
    assert place.state.startswith("cancelled, exit code 130")


def test_who_follows_a_run_may_be_killed_and_it_ends_well(place: Place) -> None:
    place.write("wait")
    process = place.start("submit", "r.yaml", "--follow")
    place.until(lambda: place.there("here-0", "here-1"), "both ranks")
    (run,) = place.runs
    place.until(lambda: is_being_started(RunLayout(run)) is False, "that it is left to its machines")
    process.kill()
    os.kill(submitter(place), signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert place.state.startswith("running")
    (place.folder / "go").touch()
    code, out, err = place.trainkit("logs", "r", "-f")
    assert code == 0, out + err
    assert "went on\n" in out
    assert f"Run directory  {run}\n" in out
    assert place.state.startswith("done, exit code 0")
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all", 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_submits_may_be_ended_before_the_run_has_begun_and_nothing_waits(place: Place, number: int) -> None:
    place.write("wait")
    setup = "cluster.setup=['[ \"$1\" = 0 ] || { touch late; while [ ! -e go ]; do sleep 0.1; done; }']"
    process = place.start("submit", "r.yaml", setup)
    place.until(lambda: place.there("late") and len(place.left("tk1", "tk2")) == 2, "both nodes")
    os.kill(submitter(place), number)
    if number == signal.SIGKILL:
        (place.folder / "go").touch()
    _, err = process.communicate(timeout=PATIENCE)
    (place.folder / "go").touch()
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all")
    if number == signal.SIGKILL:
        assert place.state.startswith("lost")
    else:
        assert (process.returncode, "SIGINT came before the run began" in err) == (4, True), err
        assert not place.runs


@pytest.mark.parametrize("what", ["Ctrl-C", "a cut"])
def test_at_any_moment_of_the_start_a_run_begins_on_all_machines_or_on_none(place: Place, what: str) -> None:
    """Ctrl-C, or the end of every ssh, from the roll call to the moment when the run is left to its machines."""
    place.write("wait")
    codes: list[int] = []
    whole = 0.0  # seconds from the connections to the end of what submits
    for part in range(MOMENTS + 1):
        for name in ("here-0", "here-1", "ended-0", "ended-1"):
            (place.folder / name).unlink(missing_ok=True)
        runs = place.runs
        process = place.start("submit", "r.yaml")
        place.until(lambda: len(connections(place)) == 2, "both connections")
        begins, pids = time.monotonic(), [submitter(place)] if what == "Ctrl-C" else connections(place)
        if part:
            time.sleep(whole * (0.4 + 0.6 * part / MOMENTS))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT if what == "Ctrl-C" else signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
        whole = whole or time.monotonic() - begins
        codes.append(process.returncode)
        new = [run for run in place.runs if run not in runs]
        told = "` ends it" in out  # the run was left to its machines, whatever came after
        assert told or process.returncode, out + err
        if told and "the connection was lost" not in err:
            place.until(lambda: place.there("here-0", "here-1"), "both ranks")
            assert place.state.startswith("running"), err
        if told:
            place.trainkit("cancel", new[0].name[-6:], "--now")
        place.until(lambda: not place.left("tk1", "tk2"), "the end of all")
        assert not new or not place.state.startswith(("running", "starting")), err
    assert codes[0] == 0
    assert any(codes), codes


def connections(place: Place) -> list[int]:
    """The ssh processes by which the nodes of a run in the folder are being started."""
    mine = []
    for pid in subprocess.run(["pgrep", "-x", "ssh"], capture_output=True, text=True, check=False).stdout.split():
        with contextlib.suppress(OSError):
            process = Path("/proc", pid)
            words = (process / "cmdline").read_bytes().split(b"\0")
            if (process / "cwd").readlink() == place.folder and b"-G" not in words:
                mine.append(int(pid))
    return mine


def test_a_node_that_is_killed_ends_the_others(place: Place) -> None:
    place.write("wait")
    place.submit()
    found = place.ssh.machines.argv("tk2", ["pgrep", "-f", f"job node {place.runs[0]}"], "/")
    (pid,) = subprocess.run(found, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(place.ssh.machines.argv("tk2", ["kill", "-9", pid], "/"), check=True)
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all")
    assert place.there("ended-0", "ended-1")
    assert place.state.startswith("failed")
    assert "node 1 (tk2)" in place.trainkit("logs", "r")[1]


def test_what_a_node_refuses_is_said_where_it_is_submitted(place: Place) -> None:
    place.write("wait")
    (place.folder / "there").mkdir()
    (place.folder / "program.py").rename(place.folder / "there" / "program.py")
    hide = place.ssh.machines.argv("tk2", ["mount", "-t", "tmpfs", "none", str(place.folder / "there")])
    subprocess.run(hide, check=True)
    try:
        code, _, err = place.trainkit("submit", "r.yaml", "program.script=there/program.py")
        assert code == 4, err
        assert "node 1 (tk2) cannot run the plan" in err
        assert "program.py" in err
        place.until(lambda: not place.left("tk1", "tk2"), "the end of all", 5)
        assert place.trainkit("status", "r")[1].startswith("node unfit, exit code 4")
    finally:
        subprocess.run(place.ssh.machines.argv("tk2", ["umount", str(place.folder / "there")]), check=True)


@pytest.mark.parametrize(
    ("hosts", "setting", "said"),
    [
        ("tk1, nowhere", "", "nowhere: ssh: Could not resolve hostname nowhere"),
        ("tk1, tk2", "cluster.options+=[-oUserKnownHostsFile=/dev/null]", "Host key verification failed"),
        ("tk1, tk2", "cluster.python=/nowhere/python", "cluster.python names the interpreter there"),
        ("tk1, tk2", "'cluster.setup=[cd /, nosuch]'", "cluster.setup line 2 failed with exit code 127: nosuch"),
        ("tk1, tk2", "cluster.workdir=/nowhere", "/nowhere: No such file or directory"),
        ("tk1, tk2, tk1", "", "cluster.hosts names tk1 twice"),
        ("tk1, nobody@tk2", "", "ssh-copy-id nobody@tk2"),
    ],
)
def test_a_host_that_cannot_be_used_is_named_and_nothing_starts(
    place: Place, hosts: str, setting: str, said: str
) -> None:
    place.write("wait", hosts)
    code, _, err = place.trainkit("submit", "r.yaml", *shlex.split(setting))
    assert code == (2 if "twice" in said else 4), err
    assert said in err
    assert not place.runs
    place.until(lambda: not place.left("tk1", "tk2"), "the end of all", 5)


def test_a_machine_without_the_run_directory_is_named(meanwhile: dict[str, subprocess.Popen[str]]) -> None:
    _, err = meanwhile["hidden"].communicate(timeout=PATIENCE)
    assert meanwhile["hidden"].returncode == 4, err
    assert "error: tk2: it does not see /" in err


def test_the_code_of_the_rank_that_failed_is_the_runs(meanwhile: dict[str, subprocess.Popen[str]]) -> None:
    out, err = meanwhile["failed"].communicate(timeout=PATIENCE)
    assert meanwhile["failed"].returncode == 7, out + err
    assert "rank 1 (tk1) exited with code 7" in out


def test_a_machine_that_is_gone_is_named(meanwhile: dict[str, subprocess.Popen[str]]) -> None:
    out, err = meanwhile["pulled"].communicate(timeout=PATIENCE)
    assert meanwhile["pulled"].returncode == 137, out + err
    root = Path(out.splitlines()[0].removeprefix("run directory: "))
    assert "node 1 (tk4) was lost" in read_json(root / "status.json")["why"]
