"""What a killed run held outside its directory is removed, and nothing else; its containers end."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from io import BytesIO
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from trainkit.runner.nodes import control
from trainkit.runner.nodes.control import Control, Neighbour
from trainkit.runner.supervisor import processes
from trainkit.runner.supervisor.cleanup import deepspeed_buffers, end_containers, held_by, kill_group, remove

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and /dev/shm")


@pytest.fixture
def staged() -> Iterator[Path]:
    """A data set that a user has put into shared memory."""
    path = Path("/dev/shm") / f"my-dataset-{uuid.uuid4().hex}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink(missing_ok=True)


HOLDER = """
import mmap, sys
from multiprocessing import resource_tracker
from multiprocessing.connection import Listener
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # as if the tracker had been killed too
listener = Listener(family="AF_UNIX")
with open(sys.argv[1], "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
print(memory.name, listener.address, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_held_is_removed_but_not_the_users_own_files(tmp_path: Path, staged: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(staged)],
        env={**os.environ, "TMPDIR": "/tmp"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdin is not None
    name, address = holder.stdout.readline().split()
    held = held_by([holder.pid])
    assert held == {f"/dev/shm/{name}", str(Path(address).parent)}
    assert remove(held - {str(Path(address).parent)}) == []  # still mapped
    holder.kill()
    holder.communicate(timeout=20)
    assert remove(held) == sorted(held)
    assert not Path("/dev/shm", name).exists()
    assert not Path(address).parent.exists()
    assert staged.exists()


GROUP = """
import os, subprocess, sys
os.setpgid(0, 0)
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=subprocess.PIPE)
sys.stdin.read()
"""


def test_what_is_left_of_a_group_is_killed_and_leaves_nothing(tmp_path: Path, staged: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", GROUP, HOLDER.replace("sys.stdin.read()", "import time; time.sleep(600)"), str(staged)],
        env={**os.environ, "TMPDIR": "/tmp"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    name, address = first.stdout.readline().split()
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # still a zombie: the group's number is taken
    kill_group(first.pid)
    assert not Path("/dev/shm", name).exists()
    assert not Path(address).parent.exists()
    assert staged.exists()
    first.communicate(timeout=20)  # to the end of what the holder has open, too


# Its tracker ends a second later, as on a machine that has no time for it: somebody else still talks to it.
TRACKED = """
import os, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
if os.fork() == 0:
    os.setsid()
    time.sleep(1)
    os._exit(0)
print(memory.name, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("wordless", [0, 3])
def test_a_groups_own_tracker_is_given_the_time_to_clean_up(wordless: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count()

    def opened(path: str, *how: Any, **more: Any) -> Any:
        """In the midst of exec() a process has no words for some reads."""
        file = Path(path).open(*how, **more)  # noqa: SIM115 - it is the caller's
        if path.endswith("/cmdline") and b"resource_tracker" in (words := file.read()):
            file.close()
            return BytesIO(b"" if next(reads) < wordless else words)
        if path.endswith("/cmdline"):
            file.seek(0)
        return file

    monkeypatch.setattr(processes, "open", opened, raising=False)
    first = subprocess.Popen(
        [sys.executable, "-c", TRACKED],
        process_group=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert first.stdout is not None
    name = first.stdout.readline().strip()
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    kill_group(first.pid)
    assert not Path("/dev/shm", name).exists()
    first.communicate(timeout=20)


def test_shared_memory_that_somebody_still_maps_stays() -> None:
    memory = SharedMemory(create=True, size=4096)
    try:
        assert remove([f"/dev/shm/{memory.name}"]) == []
        assert Path("/dev/shm", memory.name).exists()
    finally:
        memory.close()
        memory.unlink()
        resource_tracker.ensure_running()


def test_what_belongs_to_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").touch()
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 4711)
    assert remove([str(tmp_path / "theirs")]) == []
    assert (tmp_path / "theirs").exists()


def test_deepspeed_buffers_are_named_after_user_address_port_and_rank() -> None:
    assert deepspeed_buffers("127.0.0.1_29500", [0, 1]) == [
        f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_29500_{rank}" for rank in (0, 1)
    ]


NAMES = ("trainkit-r-1", "trainkit-r-1-prepare")
DENIED = "Error response from daemon: cannot remove container trainkit-r-1: permission denied"
ABSENT = "Error: No such container: {}"  # docker 20.10; newer ones end with 0


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([ABSENT.format(NAMES[0]), ABSENT.format(NAMES[1])], False),
        ([NAMES[0], ABSENT.format(NAMES[1])], False),
        (["removal of container trainkit-r-1 is already in progress", ABSENT.format(NAMES[1])], False),
        ([DENIED, ABSENT.format(NAMES[1])], True),
        ([DENIED], True),
        ([], True),
    ],
)
def test_a_container_that_stays_is_told_from_one_that_is_gone(lines: list[str], left: bool) -> None:
    script = "".join(f"echo '{line}'\n" for line in lines) + "exit 1"
    said = end_containers(("sh", "-c", script, *NAMES), os.environ)
    assert (DENIED in said or "exit code 1" in said) == left, said
    assert bool(said) == left


def test_an_engine_that_is_not_there_is_named() -> None:
    assert end_containers(("/absent/docker", "rm", *NAMES), os.environ).startswith("/absent/docker cannot be started")
    assert end_containers((), os.environ) == ""


def test_other_nodes_hear_of_this_one_while_its_engine_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BEAT_SECONDS", 0.2)
    near, far = socket.socketpair()
    own = Control(1, {0: Neighbour(0, "tk0", near.detach())}, selectors.DefaultSelector(), grace=1.0)
    assert end_containers(("sleep", "1"), os.environ, own.turn) == ""
    far.setblocking(False)
    assert far.recv(4096).count(b'{"beat": true}') > 2
    far.close()
