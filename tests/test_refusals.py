"""What the system refuses is told from bugs, and named."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from trainkit.errors import HINTS, MEMORY, refusal


@pytest.mark.parametrize("number", sorted(HINTS))
def test_an_error_of_the_machine_is_named_with_its_path(number: int) -> None:
    found = refusal(OSError(number, os.strerror(number), "runs/x"))
    assert found is not None
    assert found == (f"the system refuses: {os.strerror(number)}: runs/x", HINTS[number])


@pytest.mark.parametrize(
    ("error", "says", "hint"),
    [
        (MemoryError(), "memory cannot be allocated", MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
         "memory cannot be allocated", MEMORY),
        (ImportError("x.so: failed to map segment from shared object"), "memory cannot be allocated", MEMORY),
        (RuntimeError("can't start new thread"), "no more threads may be started", HINTS[errno.EAGAIN]),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that"),
         "shared memory (/dev/shm) is full", "enlarge /dev/shm"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer"),
         "another rank ended", "see the other ranks' logs"),
    ],
)  # fmt: skip
def test_what_libraries_make_of_it_is_recognised(error: Exception, says: str, hint: str) -> None:
    found = refusal(error)
    assert found is not None
    assert found[0].startswith(says)
    assert found[1].startswith(hint)


@pytest.mark.parametrize(
    "error",
    [ValueError("No space left on device"), OSError(errno.ENOENT, "No such file"), RuntimeError("shape mismatch"),
     ImportError("No module named x")],
)  # fmt: skip
def test_anything_else_is_not(error: Exception) -> None:
    assert refusal(error) is None


def test_an_error_of_pythons_own_is_one_of_memory_where_that_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    error = SystemError("error return without exception set")
    for limit, what in ((600 << 20, f"memory cannot be allocated ({error})"), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = refusal(error)
        assert (found and found[0]) == what
