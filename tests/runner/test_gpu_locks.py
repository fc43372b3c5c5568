"""A run has its cards to itself: locks that die with their holder, and two real runs that choose at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import GIGABYTE, Cards, card, stand_in
from trainkit.errors import MachineError
from trainkit.files import try_lock
from trainkit.launch_plan.model import PlannedGpu
from trainkit.machine.facts import Hold
from trainkit.machine.gpu_locks import GpuLocks, holder, path
from trainkit.runner.report.gpu_watch import GpuWatch

# Says which cards it sees, then waits to be let go.
PROGRAM = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
pathlib.Path(here, f"seen-{os.getpid()}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
deadline = time.monotonic() + 60
while not (here / "go").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""
RECIPE = """\
version: 1
name: taken
program: {kind: torch, script: program.py, args: ["."]}
devices: {select: SELECT}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    file = tmp_path / "taken.yaml"
    file.write_text(RECIPE.replace("SELECT", "free"))
    return file


@pytest.fixture
def started(tmp_path: Path, clean_environment: dict[str, str], recipe: Path) -> Iterator[Any]:
    """Start a real run of the recipe and come back at once."""
    runs: list[subprocess.Popen[str]] = []

    def start(environ: Mapping[str, str], *words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "trainkit", "run", str(recipe), *words]
        run = subprocess.Popen(
            argv,
            cwd=tmp_path,
            env={**clean_environment, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        runs.append(run)
        return run

    yield start
    (tmp_path / "go").touch()
    for run in runs:
        run.communicate(timeout=60)


def seen(folder: Path, amount: int) -> list[str]:
    """What so many programs see, as soon as all of them have said it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = [text for file in folder.glob("seen-*") if (text := file.read_text())]
        if len(told) == amount:
            return sorted(told)
        time.sleep(0.05)
    raise AssertionError(f"{amount} programs should have started: {list(folder.iterdir())}")


def test_runs_that_start_at_the_same_time_never_take_the_same_free_card(
    tmp_path: Path, started: Any, cards: Cards, trainkit: Trainkit, recipe: Path
) -> None:
    environ = cards(*(card(number) for number in range(3)))
    runs = [started(environ) for _ in range(3)]
    uuids = sorted(card(number)["uuid"] for number in range(3))
    assert seen(tmp_path, 3) == uuids
    fourth = trainkit("run", str(recipe), environ=environ)
    assert fourth.returncode == 4
    assert "1 idle GPU is requested, 0 of 3 are free" in fourth.stderr
    assert f"held by the trainkit run {tmp_path}/runs/taken/" in fourth.stderr
    (tmp_path / "go").touch()
    for run in runs:
        assert run.wait(timeout=60) == 0
    assert list((tmp_path / "locks").iterdir()) == []
    again = trainkit("run", str(recipe), environ=environ)
    assert again.returncode == 0, again.stderr


def test_a_killed_run_gives_its_card_back_when_its_ranks_are_gone(
    tmp_path: Path, started: Any, cards: Cards, trainkit: Trainkit, recipe: Path
) -> None:
    environ = cards(card(0))
    first = started(environ)
    seen(tmp_path, 1)
    first.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 60
    while (done := trainkit("run", str(recipe), environ=environ)).returncode == 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("select", ["[0]", "1", "all"])
def test_a_card_that_another_run_has_is_refused_also_by_name(
    tmp_path: Path, started: Any, cards: Cards, trainkit: Trainkit, recipe: Path, select: str
) -> None:
    environ = cards(card(0))
    started(environ)
    seen(tmp_path, 1)
    done = trainkit("run", str(recipe), f"devices.select={select}", environ=environ)
    assert done.returncode == 4
    assert "GPU 0 is busy: held by the trainkit run" in done.stderr


def test_a_run_may_share_a_card_when_the_recipe_says_so(tmp_path: Path, started: Any, cards: Cards) -> None:
    environ = cards(card(0))
    started(environ)
    seen(tmp_path, 1)
    started(environ, "devices.select=[0]", "devices.when_busy=warn")
    assert seen(tmp_path, 2) == [card(0)["uuid"]] * 2


def test_a_card_that_is_lost_between_plan_and_start_is_replaced_and_it_is_said(
    tmp_path: Path, cards: Cards, clean_environment: dict[str, str], recipe: Path
) -> None:
    """The plan is made while the card's lock is free; a hook in the interpreter takes it right after the plan."""
    environ = {**clean_environment, **cards(card(0), card(1))}
    taker = GpuLocks(environ)
    code = """
import os, sys
from trainkit.runner import execute
from trainkit.machine.gpu_locks import GpuLocks
other = GpuLocks(os.environ)
class Late(GpuLocks):
    def take(self, uuids, *, shared=False):
        if not other.fds:
            other.take(uuids[:1])
            other.sign("bob", "/runs/other")
        return super().take(uuids, shared=shared)
execute.GpuLocks = Late
from trainkit.__main__ import main
sys.argv = ["trainkit", "run", sys.argv[1]]
main()
"""
    (tmp_path / "go").touch()
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe)],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert "GPU 0 (NVIDIA A100-SXM4-80GB) has just been locked by the run /runs/other (bob); choosing again" in text
    assert f"now: GPU 1 ({card(1)['uuid']})" in text
    assert seen(tmp_path, 1) == [card(1)["uuid"]]
    (plan,) = tmp_path.glob("runs/taken/*/plan.json")
    assert [each["index"] for each in json.loads(plan.read_text())["cards"]] == [1]
    assert taker.fds == []


def test_a_lock_says_who_holds_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path / "locks")}
    first, second = GpuLocks(environ), GpuLocks(environ)
    assert first.take(["GPU-b", "GPU-a"]) is None
    first.sign("ada", "/runs/a")
    held = holder("GPU-a", environ)
    assert held is not None
    assert (held.pid, held.user, held.run) == (os.getpid(), "ada", "/runs/a")
    assert second.take(["GPU-b", "GPU-0"]) == "GPU-b"  # it has taken GPU-0 by then
    assert second.fds == []
    assert holder("GPU-0", environ) is None
    first.release()
    assert holder("GPU-a", environ) is None
    assert list((tmp_path / "locks").iterdir()) == []
    assert second.take(["GPU-b"]) is None
    second.release()


@pytest.mark.parametrize(
    "content", ["", "null", "[]", '{"pid": 1e30, "user": "a", "run": "b"}', '{"pid": 7}', "[" * (1 << 16)]
)
def test_a_lock_that_says_nothing_sensible_is_a_holders_all_the_same(tmp_path: Path, content: str) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path / "locks")}
    cards = GpuLocks(environ)
    assert cards.take(["GPU-1"]) is None
    try:
        Path(path("GPU-1", environ)).write_text(content)
        assert holder("GPU-1", environ) == Hold(0, "", "")
    finally:
        cards.release()


def test_who_only_looks_is_not_taken_for_a_holder(tmp_path: Path) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path)}
    with Path(path("GPU-a", environ)).open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)  # as another `trainkit env gpus` does for an instant
        assert holder("GPU-a", environ) is None


def test_the_lock_of_a_file_that_its_holder_has_just_removed_takes_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path)}
    lock, tried = Path(path("GPU-a", environ)), list[int]()

    def released_meanwhile(fd: int) -> bool:
        if not tried:
            lock.unlink()
        tried.append(fd)
        return try_lock(fd)

    monkeypatch.setattr("trainkit.machine.gpu_locks.try_lock", released_meanwhile)
    locks = GpuLocks(environ)
    assert locks.take(["GPU-a"]) is None
    assert os.path.samestat(os.fstat(locks.fds[0]), lock.stat())  # the one at which others look
    locks.release()


def test_all_runs_take_their_cards_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else of two that want the same ones each may have one, and neither both."""
    taken: list[str] = []
    monkeypatch.setattr(GpuLocks, "_lock", lambda self, name: not taken.append(Path(name).name))  # type: ignore[func-returns-value]
    GpuLocks({"TRAINKIT_CARD_LOCKS": str(tmp_path)}).take(["GPU-b", "GPU-a", "GPU-c", "GPU-a"])
    assert taken == ["GPU-a", "GPU-b", "GPU-c"]


def test_a_killed_holders_name_does_not_stand_behind_the_new_one(tmp_path: Path) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path)}
    Path(path("GPU-a", environ)).write_text(json.dumps({"pid": 1, "user": "ada", "run": "/a" * 500}))
    locks = GpuLocks(environ)
    assert locks.take(["GPU-a"]) is None
    locks.sign("bob", "/b")
    held = holder("GPU-a", environ)
    assert held is not None
    assert (held.user, held.run) == ("bob", "/b")
    locks.release()


def test_the_folder_of_locks_is_for_all_users_and_links_in_it_are_not_followed(tmp_path: Path) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path / "locks")}
    locks = GpuLocks(environ)
    locks.take(["GPU-a"])
    assert (tmp_path / "locks").stat().st_mode & 0o7777 == 0o1777
    assert Path(path("GPU-a", environ)).stat().st_mode & 0o777 == 0o666
    locks.release()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    Path(path("GPU-b", environ)).symlink_to(victim)
    with pytest.raises(Exception, match="lock of a GPU"):
        locks.take(["GPU-b"])
    assert victim.read_text() == "precious"


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, str]:
    """A folder of locks in which the names of three cards stand for other things."""
    locks = tmp_path / "locks"
    locks.mkdir()
    (tmp_path / "victim").write_text("precious")
    os.mkfifo(locks / "GPU-fifo")
    (locks / "GPU-hard").hardlink_to(tmp_path / "victim")
    (locks / "GPU-soft").symlink_to(tmp_path / "victim")
    return {"TRAINKIT_CARD_LOCKS": str(locks)}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("uuid", ["GPU-fifo", "GPU-hard", "GPU-soft"])
def test_what_is_planted_in_the_place_of_a_lock_is_neither_written_to_nor_waited_for(
    tmp_path: Path, planted: dict[str, str], uuid: str
) -> None:
    locks = GpuLocks(planted)
    with pytest.raises(MachineError, match=f"lock of a GPU cannot be made: .*{uuid}"):
        locks.take([uuid])
    locks.sign("ada", "/runs/a")
    assert holder(uuid, planted) is None
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_link_made_between_open_and_lock_is_not_written_through(
    tmp_path: Path, planted: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second name appears only after the file was opened and found to have a single one."""
    lock = Path(path("GPU-late", planted))
    lock.write_text("")
    before = fcntl.flock

    def link_then_lock(fd: int, operation: int) -> None:
        if not (tmp_path / "second").exists():
            (tmp_path / "second").hardlink_to(lock)
        before(fd, operation)

    monkeypatch.setattr(fcntl, "flock", link_then_lock)
    locks = GpuLocks(planted)
    with pytest.raises(MachineError, match="single name"):
        locks.take(["GPU-late"])
    assert locks.fds == []


def test_a_held_card_is_told_although_its_lock_has_a_second_name(tmp_path: Path, planted: dict[str, str]) -> None:
    locks = GpuLocks(planted)
    assert locks.take(["GPU-a"]) is None
    locks.sign("ada", "/runs/a")
    (tmp_path / "second").hardlink_to(path("GPU-a", planted))
    held = holder("GPU-a", planted)
    assert held is not None
    assert held.user == "ada"
    locks.release()


def test_a_uuid_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    environ = {"TRAINKIT_CARD_LOCKS": str(tmp_path)}
    assert Path(path("../../etc/x", environ)).parent == tmp_path


def test_what_the_cards_do_is_written_down_during_a_run(
    tmp_path: Path, cards: Cards, trainkit: Trainkit, recipe: Path
) -> None:
    environ = cards(card(0, use=37, free=79 * GIGABYTE + 700 * 2**20), card(1, use=5))
    (tmp_path / "go").touch()
    done = trainkit("run", str(recipe), "devices.select=[0]", environ=environ)
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/taken/*")
    lines = [json.loads(line) for line in (run / "cards.jsonl").read_text().splitlines()]
    used = 80 * GIGABYTE - 79 * GIGABYTE - 700 * 2**20
    told = {"local_rank": 0, "uuid": card(0)["uuid"], "memory_bytes": used, "utilization": 37}
    assert lines[0]["cards"] == [told]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["gpu_memory_occupied"] == {card(0)["uuid"]: used}
    assert summary["gpu_utilization"] == {card(0)["uuid"]: 37.0}
    assert f"37 %  {card(0)['uuid']}" in done.stdout + done.stderr


def test_without_cards_nothing_is_sampled(tmp_path: Path, trainkit: Trainkit, recipe: Path) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "program.py").write_text("pass")
    done = trainkit("run", str(recipe), "devices.select=auto", "devices.type=cpu")
    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/taken/*")
    assert not (run / "cards.jsonl").exists()
    assert json.loads((run / "summary.json").read_text())["gpu_utilization"] is None


def test_what_the_plan_warns_of_is_said_before_the_start(
    tmp_path: Path, cards: Cards, trainkit: Trainkit, recipe: Path
) -> None:
    (tmp_path / "go").touch()
    environ = cards(card(0, "T4"), card(1))
    done = trainkit("run", str(recipe), "devices.select=1", "devices.order=pci", environ=environ)
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.index("warning: GPU 0 (Tesla T4) is slower than GPU 1") < text.index("run directory:")


def test_a_driver_that_hangs_during_a_run_does_not_hold_it_up(
    tmp_path: Path, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cards(card(0), hangs=600).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    watch = GpuWatch([PlannedGpu(0, card(0)["uuid"], "A100")], tmp_path / "cards.jsonl")
    begin = time.monotonic()
    watch.start()
    watch.close()
    assert time.monotonic() - begin < 60
    assert watch.peak == {}
    assert not (tmp_path / "cards.jsonl").exists()


def test_what_a_part_of_a_card_does_not_tell_is_null(
    tmp_path: Path, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"uuid": "MIG-a", "name": "part", "total": 10 * GIGABYTE, "free": 4 * GIGABYTE}
    for name, value in cards(card(0, instances=[part])).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    watch = GpuWatch([PlannedGpu(0, "MIG-a", "part"), PlannedGpu(1, "GPU-gone", "gone")], tmp_path / "cards.jsonl")
    assert watch.open()
    told = {"local_rank": 0, "uuid": "MIG-a", "memory_bytes": 6 * GIGABYTE, "utilization": None}
    assert watch.sample() == [told]
    assert (dict(watch.peak), dict(watch.utilization)) == ({"MIG-a": 6 * GIGABYTE}, {})


def test_what_the_driver_keeps_for_itself_is_not_counted_as_occupied(
    tmp_path: Path, cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: tuple[dict[str, Any], ...] = ({"reserved": GIGABYTE}, {})
    told = [card(number, free=77 * GIGABYTE, **more) for number, more in enumerate(kept)]
    for name, value in cards(*told).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    watch = GpuWatch([PlannedGpu(0, each["uuid"], "A100") for each in told], tmp_path / "cards.jsonl")
    assert watch.open()
    # a driver before 510 does not keep it apart
    assert [each["memory_bytes"] for each in watch.sample()] == [2 * GIGABYTE, 3 * GIGABYTE]
