"""Attacks by damaged and forged run directories on every command that reads them, and on a run that is going on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import security_content as hostile
import security_strangers as around
from cases import ROOT, changed
from security_judge import GRIDS, PAYLOAD, SURFACES, Attack, command

import trainkit

ROWS, RANDOM, LIVING = "forged records", "run directories", "living runs"
OURS = (ROWS, RANDOM, LIVING)
NAME, JOB, STRANGE_JOB = "mine", "101", "4711"
ZERO = "/dev/zero"
HUGE = 10**30
FIRST = "that is the first"  # process of the namespace, as the names of strangers go on
PROCESSES = ("of the same user", "of another user", "of another session", "of another trainkit", FIRST)


@dataclass
class RunLab:
    """Real run directories by kind; and what stands around them."""

    runs: Mapping[str, Path] = field(default_factory=dict)
    strangers: Any = None
    users: tuple[int, ...] = (0,)


LAB = RunLab()  # which the campaign makes at its start

_SCRIPT = "import time\nprint('hello', flush=True)\ntime.sleep({seconds})\n"
_STEPS = f"from torch.optim.optimizer import Optimizer\n{_SCRIPT}Optimizer().step()\n"
# As much of torch as lets a program's optimizer be seen: the real one takes seconds to load.
_TORCH = """hooks = []
register_optimizer_step_pre_hook = hooks.append
class Optimizer:
    param_groups = []
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
_RECIPE = """version: 1
name: mine
program: {{kind: torch, script: train.py}}
strategy: {{kind: ddp}}
devices: {{type: cpu}}
nodes: {{count: 2, processes_per_node: 1}}
output: {{root: {root}}}
cluster: {{kind: {cluster}}}
"""
_CLUSTERS = {
    "slurm": "slurm",
    "kubernetes": "kubernetes, image: x, volumes: ['runs:/data'], python: /usr/bin/python3",
    "ssh": "ssh, hosts: [me@gpu1, gpu2]",
}
_JOB_LINE = (
    "JobId=101 JobName=mine UserId={user}(0) GroupId=root(0) Priority=1 Requeue=1 Restarts=0 BatchFlag=1 "
    "ExitCode=0:0 RunTime=00:01:00 JobState={state} Reason=None SubmitTime=2026-11-25T18:00:00 "
    "EndTime=2026-11-25T19:00:00 NodeList=tk[1-2] NumNodes=2 WorkDir={work} Command={run}/job.sh StdOut={run}/job.out\n"
)
_WORKLOAD = "jobset.jobset.x-k8s.io/mine"
_PODS = '{"items": [{"kind": "JobSet", "metadata": {"name": "mine"}, "spec": {}, "status": {}}, {"kind": "Pod", '
_PODS += '"metadata": {"name": "mine-0", "labels": {}}, "spec": {}, "status": {"phase": "Running"}}]}\n'


def made_runs(folder: Path, strangers: around.Strangers) -> RunLab:
    """Run directories as trainkit makes them: a local run, and submitted ones whose schedulers are stand-ins."""
    said = {"sbatch": JOB, "scontrol": "KillWait = 30 sec", "kubectl": _WORKLOAD, "ssh": "hostname gpu1\nport 22"}
    around.put_stand_ins(folder / "bin", {name: (f"{text}\n", 0) for name, text in said.items()})
    starts = {"local": ["run", f"name={NAME}", "train.py"]}
    starts |= {kind: ["submit", f"{kind}.yaml"] for kind in _CLUSTERS}
    children = [_child(folder / kind, folder / "bin", kind, words) for kind, words in starts.items()]
    for kind, pid in zip(starts, children, strict=True):
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"the run of {kind} could not be made:\n{(folder / kind / 'said').read_text()}")
    runs = {kind: next((folder / kind / "runs" / NAME).iterdir()) for kind in starts}
    for kind in ("nodes", "array"):
        runs[kind] = Path(shutil.copytree(runs["slurm"], folder / kind / "runs" / NAME / runs["slurm"].name))
    _finish(runs)
    seen = all(around.closed(Path(file)) is None for file in (trainkit.__file__, os.__file__, sys.executable))
    return RunLab(runs, strangers, (0, 0, 0, around.OTHER_USER) if seen else (0,))


def _child(folder: Path, tools: Path, kind: str, words: Sequence[str]) -> int:
    folder.mkdir()
    (folder / "train.py").write_text(_SCRIPT.format(seconds=0.1))
    if kind in _CLUSTERS:
        text = _RECIPE.format(cluster=_CLUSTERS[kind], root="/data/runs" if kind == "kubernetes" else "runs")
        (folder / f"{kind}.yaml").write_text(text)
    if pid := os.fork():
        return pid
    code = 70
    try:
        out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
        os.environ["TRAINKIT_CARD_LOCKS"] = os.environ["HOME"] = str(folder)
        from trainkit.schedulers.jobs import ssh_nodes

        ssh_nodes.addresses = lambda *_: ["gpu1", "gpu2"]  # type: ignore[assignment]
        ssh_nodes.SshStart = lambda *_: SimpleNamespace(run=lambda _: 0)  # type: ignore[assignment,misc]  # all but the nodes
        code = command(*words)(folder)
    finally:
        os._exit(code)


def _finish(runs: Mapping[str, Path]) -> None:
    """What a cluster's nodes would have written, by what writes it there."""
    from trainkit.metrics_file import JsonLines
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.runner.rundir.records import Pids, RankRecord, write_record
    from trainkit.schedulers.jobs.records import Attempt, Submission, update_status, write_attempt, write_submission

    write_submission(RunLayout(runs["array"]), Submission("slurm", "77_2", ("sbatch",)))
    (runs["nodes"] / "submission.json").unlink()
    for kind, root in runs.items():
        layout, host = RunLayout(root), os.uname().nodename
        for number in (1, 2):
            attempt = layout.attempt(number)
            for each in (attempt.logs, attempt.ranks, attempt.nodes, attempt.shown):
                each.mkdir(parents=True, exist_ok=True)
            if kind == "nodes":
                (attempt.ranks / "node-1").mkdir(exist_ok=True)
            write_attempt(layout, Attempt(number, JOB, number - 1, host, 1.7e9, number))
            for rank in range(2):
                known: dict[str, Any] = {"started": 1.7e9, "ended": 1.7e9 + 9, "exit_code": 0}
                known["node"] = rank if kind == "nodes" else 0
                write_record(str(attempt.root), RankRecord(rank, 0, host, 2**22, 2**22, **known))
                for stream in ("out", "err"):
                    attempt.log(rank, stream).write_text(f"rank {rank} says {stream}\n")
            attempt.launcher_log.write_text("launched\n")
        (layout.attempt(2).nodes / "1.json").write_text(json.dumps({"state": "ended", "exit_code": 0}) + "\n")
        for step in range(1, 4):
            JsonLines(layout.metrics, print).write({"step": step, "loss": 1.0 / step})
        if kind != "local":
            update_status(layout, state="running", host=host, attempt=2, exit_code=None, pids=Pids())


Forge = Callable[[Path, Path], None]  # of a run directory, and the attack's folder


@dataclass(frozen=True)
class Row:
    """What is wrong with a run directory. living: whether its locks are held; job: its number is another's."""

    title: str
    kind: str
    forge: Forge
    living: bool = True
    job: str = JOB


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**_read(path), **fields}))


def _called(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Fields whose values are there by now: those that are functions get the attack's folder."""
    return {name: each(folder) if callable(each) else each for name, each in fields.items()}


def _submission(**fields: Any) -> Forge:
    return lambda run, folder: edit(run / "submission.json", **_called(fields, folder))


def _status(**fields: Any) -> Forge:
    return lambda run, _: edit(run / "status.json", **{"state": "running", "exit_code": None, **fields})


def _pids(name: str) -> Forge:
    return lambda run, folder: _status(**identity(stranger(name)(run)))(run, folder)


def identity(pid: Any) -> dict[str, Any]:
    """What a record says of the process that holds a run, true but for whose process it is."""
    known = {"started": dict.fromkeys(("trainkit", "guardian"), around.started(pid)), "boot": around.boot()}
    return {"host": os.uname().nodename, "pids": {**dict.fromkeys(("trainkit", "guardian", "launcher"), pid), **known}}


def _submitter(name: str) -> Forge:
    def forge(run: Path, _: Path) -> None:
        number = stranger(name)(run)
        process = {"pid": number, "started": around.started(number), "boot": around.boot()}
        edit(run / "submission.json", job=str(number), host=os.uname().nodename, process=process)

    return forge


def program(folder: Path) -> Path:
    """A program that leaves its mark, and lies outside the run."""
    path = folder / "outside" / "program"
    if not path.exists():
        path.write_text(f"#!/bin/sh\ntouch {folder}/PWNED\n")
        path.chmod(0o755)
    return path


def _job(**fields: Any) -> Forge:
    def forge(run: Path, folder: Path) -> None:
        edit(run / "plan.json", job={**_read(run / "plan.json")["job"], **_called(fields, folder)})

    return forge


def _record(place: int = 1, **fields: Any) -> Forge:
    """A rank's record with fields that are forged, in the place of that rank's or beside it."""

    def forge(run: Path, folder: Path) -> None:
        known = _called(fields, folder)
        for attempt in sorted(run.glob("attempts/*"), key=lambda path: path.name)[-1:]:
            base = json.loads(next((attempt / "ranks").glob("rank-*.json")).read_text())
            forged = {**base, "host": os.uname().nodename, "ended": None, "exit_code": None, "node": 0, **known}
            if isinstance(number := known.get("wrapper_pid"), int):
                forged["wrapper_started"] = around.started(number)
            _put(attempt / "ranks" / f"rank-{place}.json", json.dumps(forged))

    return forge


def _put(path: Path, content: str) -> None:
    scratch = path.with_name(f".{path.name}.forged")
    scratch.write_text(content)
    scratch.replace(path)


def stranger(name: str) -> Callable[[Path], int]:
    """The number of a stranger, when it is asked for."""
    return lambda _: int(LAB.strangers.pids.get(name, 1))


def rendezvous(folder: Path) -> str:
    """A rendezvous that leads from shared memory to a folder outside, whose name has to end in _1."""
    Path("/dev/shm/deepspeed_allreduce_buffer_0_x").mkdir(exist_ok=True)
    victim = folder / "outside/victim"
    for kept in (folder / "outside/victim_1/kept.txt", folder / "outside/victim_0/kept.txt"):
        if not kept.exists():
            kept.parent.mkdir()
            kept.write_text("kept")
    return f"x/../../..{victim}"


def rank_with_folders(folder: Path) -> str:
    """The same in the place of a rank's number."""
    rendezvous(folder)
    Path("/dev/shm/deepspeed_allreduce_buffer_0_r_x").mkdir(exist_ok=True)
    return f"x/../../..{folder}/outside/victim_1"


def orders(folder: Path) -> str:
    """The path of a file outside, in the place of a pipe."""
    path = folder / "outside" / "orders.txt"
    if not path.exists():
        path.write_text("what stood here before, and has to stay")
    return str(path)


def page(folder: Path) -> str:
    """The page of a program that says how far it is, made up but for the program's number."""
    from trainkit.heartbeat import HEAD, MAGIC, PAGE

    record = next(folder.glob(_FIRST_RANK))
    number = _read(record)["pid"]
    path = record.with_name("page")
    path.write_bytes(HEAD.pack(MAGIC, number, 0, 0, time.monotonic()).ljust(PAGE, b"\0"))
    return str(path)


def _text(name: str, content: str) -> Forge:
    def forge(run: Path, _: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(content)

    return forge


def _again(name: str, content: str) -> Forge:
    """The same, and again as soon as something else has its place; with the token of who asks for a dump."""

    def go_on(run: Path) -> None:
        path, order = run / name, run / "attempts/1/orders/dump"
        while True:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                _put(path, content.replace("TOKEN", order.read_text() if "TOKEN" in content else ""))
            time.sleep(0.02)

    return lambda run, _: threading.Thread(target=go_on, args=(run,), daemon=True).start()


def _nested(run: Path, _: Path) -> None:
    """Records of ranks, at each depth that is read into memory before reading gives up."""
    for depth in range(900, 1000):
        content = f'{{"rank": {"[" * depth}{"]" * depth}, "local_rank": 0, "host": "", "wrapper_pid": 1}}'
        _put(run / f"{_ALIVE}/rank-{depth}.json", content)


def _planted(name: str, kind: str) -> Forge:
    def forge(run: Path, folder: Path) -> None:
        path = run / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        hostile.PLANTED[kind](path, folder / "outside")

    return forge


def _numbers(name: str) -> Forge:
    def forge(run: Path, _: Path) -> None:
        edit(run / name, **{key: HUGE for key, value in _read(run / name).items() if isinstance(value, int | float)})

    return forge


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


_RANKS = "attempts/2/ranks"
_RECORDS = {
    "submission.json": "slurm", "attempts/2/attempt.json": "slurm", "status.json": "slurm",
    f"{_RANKS}/rank-1.json": "local", "asked.json": "slurm", "summary.json": "local", "attempts/2/paces.json": "local",
    "result.json": "local", "expected.json": "local", "attempts/2/shown/rank-0.json": "local",
    "attempts/2/dumps/asked.json": "local",
}  # fmt: skip
_NUMBERED = ("submission.json", "attempts/2/attempt.json", "status.json", f"{_RANKS}/rank-1.json", "summary.json")
# The table of what was once trusted, line by line; and what is its like.
_SSH_JOBS = ("-1", "0", "1", "-2", "", "x", "1e3", " 2")
_SLURM_JOBS = ("-1", "0", "", "101 102", "101;x", "٣", "101\n102", "77_[1-9]", "101_-1")
_WORKLOADS = ("mine", "a/b", "a/b/c/d", "default/jobset/-A", "--all/jobset/mine", "default/x/mine", "//", "-/-/-")
_TRAINKITS: tuple[Any, ...] = (-1, 0, 1, True, "1", HUGE, None)
_HOSTS: tuple[Any, ...] = ("-oProxyCommand=touch PWNED", "-F/x", {}, HUGE)
_FILES = ("a FIFO", "a link to a device", "a device", "a socket", "10 GB of nothing", "a link to another file")
_CONTENTS = ("{}", "[]", '"text"', "null", "1" + "0" * 30)
TABLE: tuple[Row, ...] = (
    *(Row(f"job {job} of ssh", "ssh", _submission(job=job)) for job in _SSH_JOBS),
    *(Row(f"job {job}", "slurm", _submission(job=job)) for job in ("--user=root", "-uroot", "77,78", *_SLURM_JOBS)),
    Row("a job of somebody else", "slurm", _submission(job=STRANGE_JOB), job=STRANGE_JOB),
    Row("a command line in the place of ssh's", "ssh", _submission(argv=lambda to: ["sh", "-c", f"touch {to}/PWNED"])),
    Row("a program in the place of ssh", "ssh", _submission(argv=lambda to: [str(program(to)), "-T"])),
    Row("an option of ssh that starts a program", "ssh",
        _submission(argv=lambda to: ["ssh", f"-oProxyCommand={program(to)}", "-T"])),
    Row("a program in the place of srun", "slurm", _job(step=lambda folder: [str(program(folder))])),
    *(Row(f"host {host!r}", "ssh", _job(hosts=[host, host])) for host in _HOSTS),
    *(Row(f"a submitter {name}", "ssh", _submitter(name)) for name in PROCESSES),
    *(Row(f"held by a process {name}", "local", _pids(name)) for name in PROCESSES),
    *(Row(f"trainkit is process {pid}", "local", _status(pids={"trainkit": pid})) for pid in _TRAINKITS),
    Row("a rendezvous with folders", "local", _record(rendezvous=rendezvous)),
    Row("a rank with folders", "local", _record(rendezvous="r", rank=rank_with_folders)),
    Row("a rank that is a huge number", "local", _record(rank=HUGE)),
    Row("orders to a file", "local", _record(orders=orders)),
    Row("a heartbeat that is endless", "local", _record(heartbeat=ZERO)),
    *(Row(f"a wrapper {name}", "local", _record(wrapper_pid=stranger(name))) for name in PROCESSES),
    *(Row(f"{kind} in ranks/", "local", _planted(f"{_RANKS}/rank-1.json", kind)) for kind in _FILES),
    *(
        Row(f"{content[:9]} in {name}", kind, _text(name, content))
        for name, kind in _RECORDS.items()
        for content in _CONTENTS
    ),
    *(Row(f"huge numbers in {name}", kind, _numbers(name)) for name, kind in _RECORDS.items() if name in _NUMBERED),
    *(Row(f"null as plan.json of {kind}", kind, _text("plan.json", "null")) for kind in ("local", "slurm", "ssh")),
    *(Row(f"job {job} of Kubernetes", "kubernetes", _submission(job=job)) for job in _WORKLOADS),
    *(Row(f"nobody holds it: {kind}", kind, lambda *_: None, living=False) for kind in ("local", "ssh", "nodes")),
    *(
        Row(f"{name} is {kind}", "local", _planted(name, kind), living=False)
        for name in (".lock", "status.json")
        for kind in ("a FIFO", "a link to another file", "a folder", "a socket")
    ),
)  # fmt: skip


def _commands(run: str) -> dict[str, list[str]]:
    """Every command that reads a run directory, as it is told of one."""
    words = ("--", "words", "x")
    job = ["job", "node", run]
    return {
        "status": ["status", run],
        "status --json": ["status", run, "--json"],
        "status of a name": ["status", NAME],
        "status of a job": ["status", JOB],
        "logs": ["logs", run],
        "logs --all": ["logs", run, "--all"],
        "logs --rank": ["logs", run, "--rank", "1"],
        "logs --node": ["logs", run, "--node", "1", "--attempt", "2"],
        "cancel": ["cancel", run],
        "cancel --now": ["cancel", run, "--now"],
        "checkpoint": ["checkpoint", run],
        "attach": ["attach", run, *words],
        "attach --node": ["attach", run, "--node", "1", *words],
        "dump": ["dump", run],
        "runs list": ["runs", "list"],
        "runs list --json": ["runs", "list", "--json"],
        "runs show": ["runs", "show", run],
        "runs show --json": ["runs", "show", run, "--json"],
        "runs prune": ["runs", "prune", "--yes", "--keep", "0"],
        "export": ["export", run, "made"],
        "plan": ["plan", run],
        "plan --diff": ["plan", "again.yaml", "--diff", run],
        "check": ["check", run],
        "explain": ["explain", run, "name"],
        "resume auto": ["plan", "again.yaml", "checkpoint.resume=auto"],
        "submit": ["submit", run, "--dry-run"],
        "job batch": ["job", "batch", run],
        "job node": job,
        "job node --held": [*job, "--held", "--node", "0", "--hosts", "a,b"],
        "job resume": ["job", "resume", f"{run}/recipe.yaml"],
    }


COMMANDS = tuple(_commands("x"))
_OUTPUT = ("logs", "attach", "job", "dump")  # show what programs have said


def _attack(row: Row, name: str, user: int, *, owner: int = 0, only_read: bool = False, answer: int = 0) -> Attack:
    """A row and a command. user: who calls; owner: of the files. answer: which of the scheduler's."""
    real = LAB.runs[row.kind]
    mounted: list[Path] = []
    before: list[tuple[str, bytes]] = []

    def prepare(folder: Path) -> None:
        folder.chmod(0o755)
        run, other = folder / "work/runs" / NAME / real.name, folder / "work/runs/other" / real.name
        shutil.copytree(real, run)
        other.mkdir(parents=True)
        for each in ("plan.json", "recipe.yaml", "status.json"):
            shutil.copy(LAB.runs["local"] / each, other)
        edit(other / "status.json", state="running", exit_code=None, outcome=None)
        (folder / "work/train.py").write_text(_SCRIPT.format(seconds=0))
        (folder / "work/again.yaml").write_text(
            _RECIPE.format(cluster="none", root="runs").replace("count: 2", "count: 1")
        )
        (folder / f"work/{PAYLOAD}.py").write_text("raise SystemExit('executed')\n")
        around.put_stand_ins(folder / "bin", _answers(answer, run, row.job))
        locks = [other / ".lock"]
        if row.living and row.kind in ("local", "nodes"):
            locks.append(run / ".lock")
            edit(run / "status.json", state="running", exit_code=None, outcome=None)
        if row.living and row.kind == "ssh":
            locks.append(run / "submitter.lock")
        row.forge(run, folder)
        for above, names, files in os.walk(folder):
            for each in (above, *(os.path.join(above, n) for n in (*names, *files))):  # noqa: PTH118
                if not each.startswith(str(folder / "bin")):
                    inside = each.startswith(str(run))
                    os.chown(each, owner if inside else user, -1, follow_symlinks=False)
        around.hold(locks)
        before.extend(_seen(other))
        if only_read:
            subprocess.run(["mount", "--bind", run, run], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)
            mounted.append(run)

    def call(folder: Path) -> int:
        words = _commands(f"runs/{NAME}/{real.name}")[name]
        _hurry()
        if user:
            around.become(user)
        try:
            return command(*words)(folder)
        except SystemExit as leaving:  # of a node that cannot begin
            return leaving.code if isinstance(leaving.code, int) else 70

    def after(folder: Path) -> str:
        wrong = LAB.strangers.harmed()
        LAB.strangers.sweep()
        for each in mounted:
            subprocess.run(["umount", each], check=True)
        shared = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("deepspeed")]
        for path in Path("/dev/shm").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        other = folder / "work/runs/other" / real.name
        wrong = wrong or around.unfit_call(folder / "bin", (STRANGE_JOB,))
        wrong = wrong or ("" if other.is_dir() else "removes a living run")
        wrong = wrong or ("" if _seen(other) == before else "changes another run")
        return wrong or (f"leaves {shared[0]}" if shared else "")

    environ = {"PATH": "{folder}/bin:/usr/bin:/bin", "TRAINKIT_CARD_LOCKS": "{folder}/tmp"}
    if name == "job batch":
        environ |= {"SLURM_JOB_ID": JOB}
    title = f"{row.title}: {name}" + (f", called by {user}, of {owner}" if user or owner else "")
    raw = name.startswith(_OUTPUT)
    codes = (-15, 127, 130, 137, 143) if name.startswith("job") else ()
    return Attack("", title, prepare, call, environ, raw=raw, acts=True, codes=codes, wall=20, after=after)


def _seen(run: Path) -> list[tuple[str, bytes]]:
    """Names and contents of a run that nobody may change."""
    return [(str(path), path.read_bytes() if path.is_file() else b"") for path in sorted(run.rglob("*"))]


def _hurry() -> None:
    """Times that are made for machines and people, cut short: what waits has to end within an attack."""
    from trainkit.cli.commands import runs as dump
    from trainkit.schedulers.jobs import job_script, ssh_nodes

    dump.ANSWER_SECONDS = 2.5
    job_script.KILL_SECONDS = job_script.LINGER_SECONDS = ssh_nodes.SEE_SECONDS = 0.3


def _answers(which: int, run: Path, job: str) -> dict[str, tuple[str, int]]:
    """What the stand-ins say: of a job of this run that runs, or waits; of one that is none; or nonsense."""
    mine = _JOB_LINE.format(user="root", state=("RUNNING", "PENDING")[which % 2], work=run.parents[2], run=run)
    if job != JOB:
        mine = _JOB_LINE.format(user="alice", state="RUNNING", work="/home/alice", run="/home/alice/runs/x")
        mine = mine.replace("JobId=101 JobName=mine", f"JobId={job} JobName=other")
    said, code = [
        (mine, 0),
        (mine, 0),
        ("slurm_load_jobs error: Invalid job id specified\n", 1),
        (mine.replace("Restarts=0", "Restarts=(null)"), 0),
        ("\x1b]52;c;eA==\x07" * 9, 0),
        ("", 0),
    ][which]
    pods = (_PODS, 0) if which < 4 else ("[]", 0)
    script = ("jobset.jobset.x-k8s.io/mine\n", 0) if which == 2 else pods
    return {"scontrol": (said, code), "sbatch": (f"{JOB}\n", 0), "kubectl": script}


def _rows() -> Iterator[Attack]:
    """Each row with each command."""
    return (replace(_attack(row, name, 0), surface=ROWS) for row in TABLE for name in COMMANDS)


ODD: tuple[Any, ...] = (
    {}, [], "", "text", None, True, False, float("nan"), float("inf"), HUGE, -HUGE, -1, 0, 1, 2, 2**31, 2**63, 1e308,
    "x" * 300_000, "\x1b]52;c;eA==\x07", "\x9b2J", "a\u202eb", "a\nb", "../../../etc/passwd", "/etc/passwd", "..", ".",
    "\0", "a\0b", "--user=root", "-1", "77,78", "$(touch PWNED)", "`touch PWNED`", "-oProxyCommand=touch PWNED",
    ["sh", "-c", "touch PWNED"], [[[]]], {"": {}}, ["x"] * 5000, {"kind": []}, "\ud800", "slurm", "ssh", "kubernetes",
)  # fmt: skip
_PLACES = (
    "submission.json", "status.json", "plan.json", "recipe.yaml", "summary.json", "metrics.jsonl", "asked.json",
    "env.txt", "job.out", "job.sh", ".lock", "submitter.lock", "result.json", "code.json", "attempts/2/attempt.json",
    "attempts/1/attempt.json", f"{_RANKS}/rank-0.json", f"{_RANKS}/rank-1.json", f"{_RANKS}/node-1/rank-1.json",
    "attempts/2/nodes/1.json", "attempts/2/logs/rank-0.out", "attempts/2/logs/launcher.log", "attempts/2/paces.json",
    "attempts/2/dumps/asked.json", "attempts/2/orders/dump", "attempts/2/shown/rank-0.json", "run.token", "pushes/x",
    "attempts/2/shown/steps-rank-0.json", "attempts/2/dumps/rank-0.flight.json", "attempts/2/.flight-0.json",
    "expected.json",
    "checkpoints/step-00000003/manifest.json", "attempts/2", "attempts/2/ranks", "attempts", "checkpoints", "exports",
)  # fmt: skip
_NAMES = (
    "attempts/99999999999999999999999", "attempts/-1", "attempts/٣", "attempts/0", f"{_RANKS}/rank--1.json",
    f"{_RANKS}/rank-x.json", f"{_RANKS}/node-x", "attempts/3", "checkpoints/step-99999999", "checkpoints/.tmp-step-1",
)  # fmt: skip


def _damage(draw: random.Random, run: Path, folder: Path) -> None:
    path, what = run / draw.choice(_PLACES), draw.random()
    whole = path.is_file() and not path.is_symlink() and path.stat().st_size < 10**6
    if what < 0.45 and whole and path.suffix in (".json", ".jsonl"):
        _fields(draw, path, folder)
    elif what < 0.6 and whole:
        content = path.read_bytes()
        cut = content[: draw.randrange(len(content) + 1)]
        path.write_bytes(draw.choice((cut, hostile.flipped(draw, content), content + cut)))
    elif what < 0.72:
        _replace(draw, path)
    elif what < 0.9:
        _plant(draw, path, folder / "outside")
    elif what < 0.95:
        _plant(draw, run / draw.choice(_NAMES), folder / "outside")
    elif not path.is_symlink() and path.exists():
        path.chmod(0)


def _fields(draw: random.Random, path: Path, folder: Path) -> None:
    """Other values in a record: of other kinds, or ones that lead to strangers."""
    strange: list[Any] = [*ODD, *LAB.strangers.pids.values(), str(LAB.strangers.pids["of the same user"])]
    strange += [str(program(folder)), [str(program(folder))], orders(folder), ZERO, rendezvous(folder)]
    with contextlib.suppress(ValueError, RecursionError):  # it was damaged before
        known = json.loads(path.read_text())
        if path.name == "submission.json" and draw.random() < 0.5:
            known[draw.choice(list(known))] = draw.choice(strange)
        elif path.name.startswith("rank-") and draw.random() < 0.5:
            name = draw.choice(
                ("wrapper_pid", "pid", "rank", "local_rank", "orders", "heartbeat", "rendezvous", "ended")
            )
            known |= {"ended": None, name: draw.choice(strange)}
        elif path.name == "status.json" and draw.random() < 0.5:
            number = draw.choice([*LAB.strangers.pids.values(), *ODD[:18]])
            known |= {"state": draw.choice(("starting", "running", "queued", "requeued")), **identity(number)}
        else:
            known = changed(draw, known, strange)
        path.write_bytes(json.dumps(known).encode("utf-8", "surrogatepass"))


def _replace(draw: random.Random, path: Path) -> None:
    """Another content as a whole."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    odd = (b"null", b"[]", b"{}", b"", b'"text"', b"1" + b"0" * 30, draw.randbytes(3000), b"NaN", b"\xff\xfe{}")
    big = (b"[" * 1_000_000, b'{"a":' * 100_000, b" " * 40_000_000, b"[" + b"[]," * 10_000_000 + b"[]]")
    path.unlink(missing_ok=True)
    path.write_bytes(draw.choice(odd if draw.random() < 0.85 else big))


def _plant(draw: random.Random, path: Path, outside: Path) -> None:
    """What is no file, or leads elsewhere."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    hostile.plant(draw, path, outside)


def _random(draw: random.Random) -> Attack:
    """A damaged directory, and a drawn command."""
    seed, kind, name = draw.random(), draw.choice(tuple(LAB.runs)), draw.choice(COMMANDS)

    def forge(run: Path, folder: Path) -> None:
        inner = random.Random(seed)
        for _ in range(inner.choice((1, 1, 1, 2, 3))):
            with contextlib.suppress(OSError):  # what it would change is a FIFO by now, or below a file
                _damage(inner, run, folder)

    user, owner = draw.choice(LAB.users), draw.choice((0, 0, 0, around.OTHER_USER))
    row = Row(f"a damaged run of {kind}", kind, forge, living=draw.random() < 0.6)
    return _attack(row, name, user, owner=owner, only_read=draw.random() < 0.06, answer=draw.randrange(6))


# Records that come up in ranks/ while a run goes on. exit codes: of a run that ends by itself.
_ALIVE, _DEEP = "attempts/1/ranks", "[" * 100_000
_FIRST_RANK = f"work/runs/*/*/{_ALIVE}/rank-0.json"
# What programs and guardians leave in an attempt, or read there: the name, and contents that it cannot have.
_SHOWN, _FLIGHT, _ANSWER = (
    "attempts/1/shown/rank-0.json",
    "attempts/1/dumps/rank-0.flight.json",
    "attempts/1/dumps/asked.json",
)
_LEFT: dict[str, tuple[str, ...]] = {
    "expected.json": ("[1]", '{"strategy": 5, "world_size": "x", "dtype": [], "device": {}, "arguments": 7}'),
    _SHOWN: ('{"differences": 5}', '{"strategy": []}', '{"output_dir": "a\\u0000b"}'),
    "attempts/1/shown/rank-x.json": ('{"strategy": "x", "differences": []}',),
    "attempts/1/shown/steps-rank-0.json": ('{"steps": "x", "seconds": []}',),
    _FLIGHT: ('{"groups": {"a": 1}}', '{"groups": {"a": {"waiting": [[1]]}}}'),
    "attempts/1/.flight-0.json": ('{"groups": {"a": 1}}',),
    "attempts/1/paces.json": ('{"x": 5}', '{"0": ["a", NaN, "x"]}'),
    "result.json": ('{"steps": 5, "memory": 5, "final_loss": [], "profile": 5}', '{"not_finite": 5, "corpus": 5}'),
    _ANSWER: tuple(
        f'{{"asked": "TOKEN", "line": "", "ranks": {ranks}, "missing": {missing}}}'
        for ranks, missing in (
            ('[{"rank": 0, "seconds": "x"}]', "[]"), ('[{"rank": 0, "phase": 99}]', "[]"),
            ('[{"rank": 0, "host": 5}]', "[]"), ("[]", "5"), ("5", "[]"), ("[{}]", "null"),
        )
    ),
}  # fmt: skip
_PARTS = (*_LEFT, *(f"{name}.part" for name in (_SHOWN, _FLIGHT, "attempts/1/shown/steps-rank-0.json")))


def _everything(run: Path, folder: Path) -> None:
    """Much of this at once, in the places of ranks that the run has not."""
    for number, name in enumerate(PROCESSES, 1):
        _record(number, rank=number, wrapper_pid=stranger(name), pid=stranger(name), orders=orders)(run, folder)
    _record(10, rank=10, rendezvous=rendezvous, heartbeat=ZERO)(run, folder)
    _record(11, rank=rank_with_folders, rendezvous="r")(run, folder)
    for number, content in enumerate((*_CONTENTS, _DEEP), 20):
        _text(f"{_ALIVE}/rank-{number}.json", content)(run, folder)
    for number, kind in enumerate((*_FILES, "a folder"), 30):
        _planted(f"{_ALIVE}/rank-{number}.json", kind)(run, folder)
    _nested(run, folder)
    for name in _PARTS:
        if name in _LEFT:
            _again(name, _LEFT[name][0])(run, folder)
        else:
            _planted(name, "a link to another file")(run, folder)


LIVE: tuple[tuple[str, Callable[[Path, Path], None]], ...] = (
    ("a rendezvous with folders", _record(rendezvous=rendezvous, rank=1)),
    ("a rendezvous with folders of rank 0", _record(0, rendezvous=rendezvous)),
    ("a rank with folders", _record(rendezvous="r", rank=rank_with_folders)),
    ("an ended rank with a rendezvous", _record(rendezvous=rendezvous, rank=1, ended=1.0, exit_code=0)),
    ("orders to a file", _record(orders=orders, rank=1, wrapper_pid=stranger("of the same user"))),
    ("orders of rank 0 to a file", _record(0, orders=orders, heartbeat=page)),
    ("a heartbeat that is endless", _record(rank=1, heartbeat=ZERO, wrapper_pid=stranger("of the same user"))),
    ("a heartbeat of rank 0 that is endless", _record(0, heartbeat=ZERO)),
    ("a rank that is a huge number", _record(rank=HUGE)),
    ("a rank below 0", _record(rank=-1)),
    *((f"a wrapper {name}", _record(rank=1, wrapper_pid=stranger(name), pid=stranger(name))) for name in PROCESSES),
    *((f"a program {name} of rank 0", _record(0, pid=stranger(name))) for name in PROCESSES),
    *((f"a wrapper {pid}", _record(rank=1, wrapper_pid=pid, pid=pid)) for pid in (*_TRAINKITS, [])),
    *((f"a rank {rank} whose wrapper has ended", _record(rank=rank, wrapper_pid=2**22 - 1)) for rank in (1, 10**6)),
    ("a rank 1 that has failed", _record(rank=1, wrapper_pid=2**22 - 1, ended=1.0, exit_code=1)),
    *((f"{content[:9]} as a record", _text(f"{_ALIVE}/rank-1.json", content)) for content in _CONTENTS),
    *((f"{content[:9]} as a record", _text(f"{_ALIVE}/rank-1.json", content)) for content in ('{"rank": 1}', _DEEP)),
    *((f"{kind} in ranks/", _planted(f"{_ALIVE}/rank-1.json", kind)) for kind in (*_FILES, "a folder")),
    ("numbers that are none", _record(rank=1, node=HUGE, local_rank=HUGE, started="x", clock={}, exit_code=[])),
    ("an order that is a FIFO", _planted("attempts/1/orders/dump", "a FIFO")),
    ("an order that is a link", _planted("attempts/1/orders/dump", "a link to another file")),
    ("dumps that lead out", _planted("attempts/1/dumps", "a link to a folder")),
    ("a status of somebody else", _text("status.json", "[]")),
    ("records of ranks that are nested at every depth", _nested),
    *((f"{kind} as {name}", _planted(name, kind)) for name in _PARTS for kind in _FILES[:2]),
    *((f"a link to another file as {name}", _planted(name, "a link to another file")) for name in _PARTS),
    *((f"{content} as {name}", _again(name, content)) for name, contents in _LEFT.items() for content in contents),
    ("all of this", _everything),
)
ENDS = ("by itself", "told", "dumped")


def _living(title: str, forge: Forge, end: str) -> Attack:
    """A run of a small program in whose directory something comes up; it ends by itself, is told to, or is dumped."""

    def prepare(folder: Path) -> None:
        (folder / "work/train.py").write_text(_STEPS.format(seconds={"told": 30, "dumped": 3}.get(end, 0.9)))
        (folder / "work/torch/optim").mkdir(parents=True)
        for name in ("__init__.py", "optim/__init__.py", "optim/optimizer.py"):
            (folder / "work/torch" / name).write_text(_TORCH if name.endswith("r.py") else "")
        program(folder), orders(folder), rendezvous(folder)

    def call(folder: Path) -> int:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-P", "-m", "trainkit", "run", "launcher.grace_seconds=2", "train.py"]
        out = (folder / "tmp/run.txt").open("wb")
        run = subprocess.Popen(words, cwd=folder / "work", env=environ, stdout=out, stderr=out)
        try:
            until = time.monotonic() + 20
            while not (found := [each for each in folder.glob(_FIRST_RANK) if _read(each)["pid"]]):
                if time.monotonic() > until or run.poll() is not None:
                    return run.wait() or 70
                time.sleep(0.01)
            root = found[0].parents[3]
            forge(root, folder)
            time.sleep(0.25)  # for the guardian to have looked
            if end == "told":
                run.terminate()
            elif end == "dumped":
                _hurry()
                command("dump", str(root))(folder)
            code = run.wait(25)
        except subprocess.TimeoutExpired:
            sys.stderr.write("\nforbidden: the run does not end\n")
            return 91
        finally:
            sys.stderr.write((folder / "tmp/run.txt").read_text(errors="replace"))
            sys.stderr.flush()
        if code != (143 if end == "told" else 0):
            sys.stderr.write(f"\nforbidden: the run ends with {code}\n")
            return 91
        return 0

    def after(folder: Path) -> str:
        wrong = LAB.strangers.harmed()
        LAB.strangers.sweep()
        for path in Path("/dev/shm").iterdir():
            shutil.rmtree(path, ignore_errors=True)
        return str(wrong)

    environ = {"TRAINKIT_CARD_LOCKS": "{folder}/tmp"}
    return Attack(LIVING, f"{title}: ends {end}", prepare, call, environ, starts=True, raw=True, wall=60, after=after)


SURFACES |= {RANDOM: _random}
GRIDS |= {ROWS: _rows, LIVING: lambda: (_living(title, forge, end) for title, forge in LIVE for end in ENDS)}
