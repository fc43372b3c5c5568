"""A small sample of the campaign `security`: that it runs, that what it tries holds, and that it can fail."""

from __future__ import annotations

import os
import pickle
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import security_content as hostile
import security_judge as judge
import security_strangers as around
from security_judge import Attack, outcome_of

from tests.loaded_scripts import SCRIPTS, run_script


@pytest.mark.e2e
def test_what_strangers_give_is_data(tmp_path: Path) -> None:
    words = ["--seed", "501", "--cases", "24", "--strategies", "single"]
    words += ["--only", "pickles,checkpoints,recipes,imports,shared folders,hub"]
    done = run_script("campaign/security", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 attacks" in done.stdout and "0 failed" in done.stdout
    assert list(tmp_path.iterdir()) == []  # nothing was found to keep


# What was once believed of a run directory, each with commands that acted on it or broke.
BELIEVED = (
    r"job (-1|0|x) of ssh: (cancel|checkpoint)",
    r"job (--user=root|77,78): (cancel --now|status)",
    r"a job of somebody else: cancel",
    r"(a (command line|program) in the place of ssh.*|an option of ssh .*): attach",
    r"(held by a process|a submitter) of the same user: (cancel|checkpoint)",
    r"a rank with folders: logs --all",
    r"(orders to a file|a wrapper of another user): (dump|cancel)",
    r"a (FIFO|link to a device) in ranks/: (dump|logs --all)",
    r"({}|null|10+) in attempts/2/ranks/rank-1.json: logs --all",
    r"null as plan.json of local: (logs|job node)",
    r"job (default/x/mine|default/jobset/-A) of Kubernetes: (status --json|cancel)",
    r"nobody holds it: ssh: cancel",
)
COMES_UP = ("all of this: ends (told|dumped)", "orders of rank 0 to a file: ends dumped")


@pytest.mark.e2e
@pytest.mark.usefixtures("namespace")
def test_run_directories_reach_nothing_but_themselves(tmp_path: Path) -> None:
    words = ["--seed", "2611", "--cases", "12", "--match", f"^({'|'.join((*BELIEVED, *COMES_UP))})$"]
    words += ["--only", "forged records,living runs,run directories"]
    done = run_script("campaign/security", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {line[8:].strip(): int(line[:7]) for line in done.stdout.splitlines() if line.endswith(" held")}
    assert [*counts.values()] == [37, 3, 12], done.stdout


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.system, (f"touch {self._path}",)


def _unpickles(folder: Path) -> int:
    pickle.loads(pickle.dumps(Harm(folder / "PWNED")))
    return 0


def _marks(folder: Path) -> int:
    (folder / "work/PWNED").touch()
    return 0


def _writes_elsewhere(folder: Path) -> int:
    (folder.parent / "elsewhere").write_text("x")
    return 0


def _follows(folder: Path) -> int:
    (folder / "work/link").symlink_to("../outside/secret.txt")
    return len((folder / "work/link").read_text()) and 0


def _changes(folder: Path) -> int:
    (folder / "outside/secret.txt").unlink()
    return 0


def _connects(folder: Path) -> int:
    socket.socket().connect(("127.0.0.1", 9))
    return 0


def _runs(folder: Path) -> int:
    (folder / "work/payload.py").write_text("1\n")
    exec(compile("1", str(folder / "work/payload.py"), "exec"))
    return 0


def _waits(folder: Path) -> int:
    os.mkfifo(folder / "work/fifo")
    (folder / "work/fifo").read_text()
    return 0


def _fills(folder: Path) -> int:
    return len(bytearray(200_000_000)) and 0


def _says(text: str) -> Callable[[Path], int]:
    def call(folder: Path) -> int:
        os.write(1, text.encode())
        return 0

    return call


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (_unpickles, "forbidden: unpickles posix.system"),
        (_marks, "the payload ran"),
        (_writes_elsewhere, "forbidden: opens"),
        (_follows, "forbidden: opens /outside/secret.txt"),
        (_changes, "forbidden: os.remove /outside/secret.txt"),
        (_connects, "forbidden: socket.connect"),
        (_runs, "forbidden: runs"),
        (_waits, "too slow"),
        (_fills, "too large"),
        (_says("\x1b]52;c;eA==\x07"), "prints U+001B"),
        (_says("a\u202eb"), "prints U+202E"),
        (_says("canary-5f1d0c27-of-the-environment"), "reveals the environment"),
        (lambda folder: 3, "exit code 3"),
        (lambda folder: 2, "held"),
    ],
)
def test_what_is_unsafe_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], int], outcome: str
) -> None:
    monkeypatch.setattr(judge, "WALL", 2 if call is _waits else 20)
    monkeypatch.setattr(judge, "BYTES", 100_000_000)
    found, said = outcome_of(attack(call), tmp_path / "attack")
    assert found.startswith(outcome), (found, said)


def attack(call: Callable[[Path], int], **more: Any) -> Attack:
    return Attack("any", "any", more.pop("prepare", lambda folder: None), call, **more)


def test_a_reader_that_executes_pickles_is_found_by_the_campaigns_own_attacks(tmp_path: Path) -> None:
    found = set()
    for seed in range(15):

        def call(folder: Path, seed: int = seed) -> int:
            try:
                pickle.loads(b"\x80\x04" + hostile.call(random.Random(seed), folder) + b".")
            except Exception:
                return 1
            return 0

        found.add(outcome_of(attack(call), tmp_path / f"{seed}")[0])
    assert len(found - {"held"}) >= 5, found


def test_a_signal_to_a_stranger_is_found_before_it_is_sent(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "100"]) as stranger:
        for name, send in (("kill", os.kill), ("killpg", os.killpg)):
            signals = attack(lambda folder, send=send: send(stranger.pid, 15) or 0, acts=True)  # type: ignore[misc]
            assert outcome_of(signals, tmp_path / name)[0] == f"forbidden: signals {stranger.pid}: 15"
        assert stranger.poll() is None
        stranger.kill()


def _stops_its_own(folder: Path) -> int:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        os.kill(child.pid, 0)
        child.send_signal(9)
    return 0


def _starts(*words: str) -> Callable[[Path], int]:
    return lambda folder: subprocess.run(words, check=False).returncode


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (_stops_its_own, "held"),
        (_starts("scancel", "101"), "held"),
        (_starts("sh", "-c", "exit 0"), "forbidden: starts sh -c exit 0"),
        (_starts("/bin/true"), "forbidden: starts /bin/true"),
        (_marks, "the payload ran"),
        (_changes, "forbidden: os.remove /outside/secret.txt"),
    ],
)
def test_a_command_that_acts_may_ask_schedulers_and_start_no_other_program(
    tmp_path: Path, call: Callable[[Path], int], outcome: str
) -> None:
    def prepare(folder: Path) -> None:
        around.put_stand_ins(folder / "bin", {})

    environ = {"PATH": "{folder}/bin:/usr/bin:/bin"}
    found, said = outcome_of(attack(call, prepare=prepare, environ=environ, acts=True), tmp_path / "attack")
    assert found == outcome, said


def test_what_trainkit_asks_of_schedulers_has_the_shapes_that_the_campaign_knows(tmp_path: Path) -> None:
    from trainkit.recipe.schema import Ssh
    from trainkit.schedulers.base import Job, Query
    from trainkit.schedulers.kubernetes import Kubernetes
    from trainkit.schedulers.registry import SCHEDULERS
    from trainkit.schedulers.slurm import Slurm

    slurm, pods, workload = Slurm(), Kubernetes(), Job("default/jobset/mine-20261125-194728-d13cd6")
    asked: list[Query[Any]] = [slurm.configuration(), slurm.partition(""), slurm.partition("gpu")]
    asked += [pods.state(workload), pods.cancel(workload, now=False), pods.cancel(workload, now=True)]
    asked += [pods.save(workload, ["mine-0"], "/usr/bin/python3")]
    for job in (Job("101"), Job("77_2")):
        asked += [slurm.state(job), slurm.cancel(job, now=True), slurm.number(job.id)]
        asked += [slurm.steps(job.id), slurm.end(job), slurm.save(job, (), ""), slurm.exclude(job, ["tk1"])]
    calls = [each.argv for each in asked] + [pods.logs(workload, 1, follow=True)]
    for kind, of, host in (("slurm", Job("101"), "tk1"), ("kubernetes", workload, "mine-0"), ("ssh", Job("1"), "me@a")):
        argv, _ = SCHEDULERS[kind].attach(of, host, ["words", "x"], terminal=False, section=Ssh, environ={})
        calls.append(argv)
    for argv in calls:
        assert _unfit(tmp_path, argv) == "", argv


@pytest.mark.parametrize(
    "line",
    [
        "scancel -1",
        "scancel 0",
        "scancel --user=root",
        "scancel -uroot",
        "scancel 77,78",
        "scancel 77_[1-9]",
        "scancel 101 102",
        "scontrol show job -o --all",
        "scontrol update JobId=101,102 ExcNodeList=tk1",
        "kubectl delete jobs,pods --all",
        "kubectl get pods -n --all-namespaces -l trainkit/run=mine -o json",
        "ssh -T -oProxyCommand=x -- gpu1 words",
        "ssh -T -- -oProxyCommand=x words",
        "srun --jobid=101 --overlap --nodes=1 --ntasks=1 --nodelist=--uid=0 words",
    ],
)
def test_other_questions_to_schedulers_are_found(tmp_path: Path, line: str) -> None:
    assert _unfit(tmp_path, line.split()).startswith("calls ")


def _unfit(folder: Path, argv: Sequence[str]) -> str:
    """What is wrong with one call of a stand-in, by the stand-in's own account of it."""
    if not (folder / "bin").exists():
        around.put_stand_ins(folder / "bin", {})
    (folder / "bin/calls").write_text("")
    subprocess.run([folder / "bin" / argv[0], *argv[1:]], check=True)
    assert [*around.calls_in(folder / "bin")] == [[*argv]]
    return str(around.unfit_call(folder / "bin"))


STRANGERS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import security_strangers as around
from pathlib import Path
strangers = around.Strangers(Path(sys.argv[2], "strangers"))
print(repr(strangers.harmed()))
for name, number in zip(strangers.pids, (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1)):
    signal.pidfd_send_signal(os.pidfd_open(strangers.pids[name]), number)
    while strangers.pids and not (found := strangers.harmed()):
        pass
    print(found)
os.kill(1, signal.SIGTERM)
print(strangers.harmed())
if os.fork() == 0:
    os.setsid()
    signal.pause()
strangers.sweep()
left = {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()}
print(left == {1, *strangers.pids.values()}, repr(strangers.harmed()))
"""


@pytest.fixture
def namespace() -> list[str]:
    """The words that start a command in namespaces of its own; skips where there are none."""
    if why := around.why_no_namespace():
        pytest.skip(why)
    return ["unshare", *around.SPACES]


def test_any_signal_to_a_stranger_is_noticed_and_nothing_is_left(namespace: list[str], tmp_path: Path) -> None:
    argv = [*namespace, sys.executable, "-c", STRANGERS, str(SCRIPTS / "campaign"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [
        "''",
        "signals a process of the same user: SIGTERM",
        "signals a process of another user: SIGKILL",
        "signals a process of another session: SIGSTOP",
        "signals a process of another trainkit: SIGUSR1",
        "signals the first process: SIGTERM",
        "True ''",
    ], done.stderr
