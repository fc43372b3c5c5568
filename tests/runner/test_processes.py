"""Which processes are signalled and seen: the one that is meant, and no other that has its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit.runner.supervisor.processes import (
    ProcessId,
    descendants,
    memory_kills,
    module_of,
    send_signal,
    signal_holder,
    spawn,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

Start = Callable[..., ProcessId]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python with a script or a module, and words behind it; none outlives the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def wait(name: str = "another", *words: str, inherit: int | None = None) -> ProcessId:
        script = tmp_path / name
        script.write_text("print(flush=True); input()")
        argv = [sys.executable, str(script), *words]
        kept = () if inherit is None else (inherit,)
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=kept)
        begun.append(process)
        assert process.stdout is not None and process.stdout.readline()  # it is past its exec
        found = ProcessId.of(process.pid)
        assert found is not None
        return found

    yield wait
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock"
    path.touch()
    return path


def ended_by(process: ProcessId) -> int:
    """The signal that has ended a child, which one waits for."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT).si_status  # type: ignore[union-attr]


def test_the_holder_of_a_run_is_signalled_by_its_words_or_its_lock(start: Start, lock: Path) -> None:
    by_words = start("trainkit", "/runs/a")
    assert signal_holder(by_words, str(lock), "/runs/a", signal.SIGTERM)
    with lock.open() as held:
        by_lock = start("trainkit", inherit=held.fileno())
    assert signal_holder(by_lock, str(lock), "/runs/a", signal.SIGTERM)
    assert [ended_by(by_words), ended_by(by_lock)] == [signal.SIGTERM] * 2
    assert not signal_holder(by_words, str(lock), "/runs/a", signal.SIGTERM)


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("python -P -m trainkit run r.yaml", "trainkit"),
        ("python3.11 -u -X dev -W ignore -m trainkit.runner.rank --attempt /a", "trainkit.runner.rank"),
        ("python -Xdev -Wignore -OO --check-hash-based-pycs always -IPm trainkit", "trainkit"),
        ("python -mtrainkit run", "trainkit"),
        ("python /venv/bin/trainkit run r.yaml", "trainkit"),  # the console script, whose first line names python
        ("python -c import_time --logdir /home/me/trainkit/runs/a -m trainkit", ""),
        ("python -Ic import_time -m trainkit", ""),
        ("python -m tensorboard.main --logdir /trainkit", "tensorboard.main"),
        ("python train.py -m trainkit", "train.py"),
        ("python -W /trainkit -", ""),
        ("tail -f /runs/trainkit/log -- /trainkit", ""),
        ("srun -n2 python -m trainkit job node /a", ""),
        ("ls /home/me/trainkit /runs/a", ""),
        ("", ""),
    ],
)
def test_what_python_runs_is_known_by_its_command_line(line: str, module: str) -> None:
    assert module_of(line.split()) == module


@pytest.mark.parametrize("what", ["another start", "another boot", "another run", "no trainkit", "another user"])
def test_a_process_that_is_not_the_one_meant_is_not_signalled(
    start: Start, lock: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    process = start("another" if what == "no trainkit" else "trainkit", "/runs/a", "/home/trainkit", "-m", "trainkit")
    recorded = {
        "another start": process._replace(started="1"),
        "another boot": process._replace(boot="before"),
    }.get(what, process)
    if what == "another user":
        monkeypatch.setattr(os, "geteuid", lambda: Path(f"/proc/{process.pid}").stat().st_uid + 4711)
    run_dir = "/runs/b" if what == "another run" else "/runs/a"
    assert not signal_holder(recorded, str(lock), run_dir, signal.SIGTERM)
    assert process.runs


def test_a_number_that_stands_for_more_than_a_process_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _number: sent.append(pid))
    send_signal([0, -1, 1, -77, 77], signal.SIGTERM)
    assert sent == [77]


def test_what_has_ended_and_is_not_waited_for_is_no_descendant(start: Start) -> None:
    process = start()
    assert process.pid in descendants(os.getpid())
    os.kill(process.pid, signal.SIGKILL)
    assert ended_by(process) == signal.SIGKILL
    assert process.pid not in descendants(os.getpid())
    assert not process.runs


def test_a_child_ignores_the_signals_that_it_is_told_to_and_no_other() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # which exec would pass on
    reader, writer = os.pipe()
    try:
        pid = spawn(("grep", "SigIgn", "/proc/self/status"), {"PATH": os.environ["PATH"]}, (0, writer, writer),
                    ignore=(signal.SIGUSR1,))  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as said:
            ignored = int(said.read().split()[1], 16)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ignored == 1 << (signal.SIGUSR1 - 1)


@pytest.mark.parametrize(
    ("content", "count"),
    [("nr_free_pages 12\noom_kill 3\noom_kill_other 9\n", 3), ("nr_free_pages 12\n", 0), ("", 0), (None, 0)],
)
def test_kills_for_want_of_memory_are_counted_as_the_kernel_does(
    tmp_path: Path, content: str | None, count: int
) -> None:
    """The campaign `faults` shows that they are reported: a kill here would be seen by other tests of this machine."""
    if content is not None:
        (tmp_path / "vmstat").write_text(content)
    assert memory_kills(str(tmp_path / "vmstat")) == count
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert memory_kills() >= int(counters.get("oom_kill", 0))
