"""Places in line for GPUs: who came first, whose each GPU is, and what is left of a process that was killed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from trainkit.errors import MachineError
from trainkit.files import try_lock
from trainkit.machine.facts import Hold
from trainkit.machine.gpu_locks import Signature
from trainkit.machine.gpu_queue import Ticket, first_for, line

Take = Callable[..., Ticket]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"TRAINKIT_CARD_LOCKS": str(tmp_path / "locks")}


@pytest.fixture
def take(environ: dict[str, str]) -> Iterator[Take]:
    """A ticket of a run with a name."""

    def made(name: str, among: str, amount: int = 1) -> Ticket:
        ticket = Ticket(environ, amount, among, Signature(os.getpid(), "ada", name))
        held.append(ticket)
        return ticket

    held: list[Ticket] = []
    yield made
    for ticket in held:
        if ticket.number in [each.number for each in line(environ)]:
            ticket.release()


def names(waiting: Sequence[object]) -> list[str]:
    return [each.run for each in waiting]  # type: ignore[attr-defined]


def test_who_comes_first_is_first(take: Take, environ: dict[str, str]) -> None:
    first, second, third = take("a", "wxyz", 4), take("b", "x"), take("c", "yz")
    assert names(line(environ)) == ["a", "b", "c"]
    assert [names(each.before()) for each in (first, second, third)] == [[], ["a"], ["a", "b"]]
    first.release()
    assert [names(each.before()) for each in (second, third)] == [[], ["b"]]
    assert names(third.before()) == ["b"]
    second.release()
    assert third.before() == []
    third.release()
    assert list(Path(environ["TRAINKIT_CARD_LOCKS"]).iterdir()) == []


def test_a_card_belongs_to_the_first_who_may_take_it(take: Take, environ: dict[str, str]) -> None:
    for name, among in (("a", "x"), ("b", "xy"), ("c", "z")):
        take(name, among)
    of = first_for(line(environ))
    assert {uuid: hold.run for uuid, hold in of.items()} == {"x": "a", "y": "b", "z": "c"}
    assert of["x"] == Hold(os.getpid(), "ada", "a")


def test_a_later_ticket_comes_behind_although_earlier_ones_have_left(take: Take, environ: dict[str, str]) -> None:
    first, second = take("a", "x"), take("b", "x")
    first.release()
    third = take("c", "x")
    assert names(line(environ)) == ["b", "c"]
    second.release()
    assert third.before() == []


def killed_holder(environ: dict[str, str]) -> None:
    """A process that takes a ticket and is killed."""
    pid = os.fork()
    if pid == 0:
        Ticket(environ, 1, "x", Signature(os.getpid(), "bob", "killed"))
        os.kill(os.getpid(), 9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9


@pytest.mark.cli
def test_the_place_of_a_killed_process_is_gone_and_its_file_goes_with_the_next_run(
    take: Take, environ: dict[str, str]
) -> None:
    first = take("a", "x")
    killed_holder(environ)
    folder = Path(environ["TRAINKIT_CARD_LOCKS"])
    assert sorted(each.name for each in folder.iterdir()) == ["ticket-1", "ticket-2"]
    assert names(line(environ)) == ["a"]
    second = take("b", "x")
    assert names(second.before()) == ["a"]
    assert len(list(folder.iterdir())) == 2
    first.release()
    assert second.before() == []


@pytest.mark.cli
def test_a_stopped_process_is_passed_over_until_it_goes_on(take: Take, environ: dict[str, str]) -> None:
    pid = os.fork()
    if pid == 0:
        Ticket(environ, 1, "x", Signature(os.getpid(), "bob", "suspended"))
        os.kill(os.getpid(), signal.SIGSTOP)
        signal.pause()
    try:
        os.waitpid(pid, os.WUNTRACED)
        assert line(environ) == ()
        second = take("a", "x")
        assert second.before() == []
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, os.WCONTINUED)
        assert names(line(environ)) == ["suspended", "a"]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert second.before() == []


def test_a_ticket_that_is_removed_before_it_is_locked_is_made_anew(
    take: Take, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another run of the same user, which takes it for that of a killed process."""
    done = list[int]()

    def removed_meanwhile(fd: int) -> bool:
        if not done:
            Path(environ["TRAINKIT_CARD_LOCKS"], "ticket-1").unlink()
        done.append(fd)
        return try_lock(fd)

    monkeypatch.setattr("trainkit.machine.gpu_queue.try_lock", removed_meanwhile)
    ticket = take("a", "x")
    assert ticket.number == 2
    assert names(line(environ)) == ["a"]


def test_who_only_looks_is_not_taken_for_a_holder(take: Take, environ: dict[str, str]) -> None:
    content = {"pid": 7, "user": "ada", "run": "a", "amount": 1, "among": ["x"]}
    left = Path(environ["TRAINKIT_CARD_LOCKS"], "ticket-1")  # of a killed process
    left.parent.mkdir()
    left.write_text(json.dumps(content))
    with left.open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        assert line(environ) == ()


@pytest.mark.parametrize(
    "content", ["", "null", "[]", '{"pid": 7}', '{"pid": 1e30, "user": "", "run": "", "amount": 1, "among": []}']
)
def test_a_held_ticket_that_says_nothing_sensible_is_none(environ: dict[str, str], content: str, take: Take) -> None:
    folder = Path(environ["TRAINKIT_CARD_LOCKS"])
    folder.mkdir()
    with (folder / "ticket-3").open("w") as strange:
        strange.write(content)
        strange.flush()
        fcntl.flock(strange, fcntl.LOCK_EX)
        assert line(environ) == ()
        assert take("a", "x").before() == []


def test_what_is_planted_in_the_place_of_a_ticket_is_left_alone(
    tmp_path: Path, environ: dict[str, str], take: Take
) -> None:
    folder, victim = Path(environ["TRAINKIT_CARD_LOCKS"]), tmp_path / "victim"
    folder.mkdir()
    victim.write_text("precious")
    (folder / "ticket-1").symlink_to(victim)
    os.mkfifo(folder / "ticket-2")
    (folder / "ticket-3").mkdir()
    ticket = take("a", "x")
    assert ticket.number == 4
    assert victim.read_text() == "precious"
    assert names(line(environ)) == ["a"]


def test_all_users_may_read_a_ticket_and_only_its_owner_writes(take: Take, environ: dict[str, str]) -> None:
    before = os.umask(0o077)
    try:
        take("a", "x")
    finally:
        os.umask(before)
    folder = Path(environ["TRAINKIT_CARD_LOCKS"])
    assert folder.stat().st_mode & 0o7777 == 0o1777
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    assert json.loads(file.read_text()) == {
        "pid": os.getpid(), "user": "ada", "run": "a", "amount": 1, "among": ["x"],
    }  # fmt: skip


def test_a_folder_that_takes_no_ticket_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"no place in the line for GPUs can be taken: .*file"):
        Ticket({"TRAINKIT_CARD_LOCKS": str(tmp_path / "file")}, 1, "x", Signature(1, "ada", "a"))
