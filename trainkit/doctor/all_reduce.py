"""A real all-reduce between two processes: ``python -m trainkit.doctor.all_reduce gloo|nccl SECONDS``.

Writes one JSON object: {fine, seconds, stages}; stages: how far each rank came, for people. Both ranks are forked after
one import of torch, end with this process, and are killed when the time is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from trainkit.runner.supervisor.process_tree import die_with_parent

RANKS = 2
LOOPBACK = "127.0.0.1"
CONNECTED, JOINED, REDUCED = "has reached the store", "has joined the group", "has the right sum"


def main() -> int:
    """Exit code 0 where both ranks have the sum, 1 where not or where the backend is not there."""
    backend, seconds = sys.argv[1], float(sys.argv[2])
    die_with_parent(signal.SIGKILL)
    signal.alarm(int(seconds) + 5)  # whatever holds the waiting below
    if why := unreachable():
        sys.stderr.write(f"{LOOPBACK} does not answer: {why}\n")
        return 1
    import torch.distributed

    dist: Any = torch.distributed  # its stores are in no stub
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        sys.stderr.write(f"this torch has no {backend}\n")
        return 1
    begin = time.monotonic()
    port_reader, port_writer = os.pipe()
    # Forked before the store starts its threads: a fork copies the locks that other threads hold.
    ranks = [start(rank, backend, port_reader, seconds) for rank in range(RANKS)]
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=limit)
    os.write(port_writer, store.port.to_bytes(2, "big") * RANKS)
    stages = follow(ranks, begin + seconds)
    fine = all(stage[-1:] == [REDUCED] for stage in stages)
    sys.stdout.write(json.dumps({"fine": fine, "seconds": time.monotonic() - begin, "stages": stages}) + "\n")
    sys.stdout.flush()
    os._exit(0 if fine else 1)  # a store whose ranks were killed would be waited for


def unreachable() -> str:
    """Why the loopback interface does not answer; empty where it does. torch would try again until time is over."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def start(rank: int, backend: str, port_reader: int, seconds: float) -> tuple[int, int]:
    """Fork a rank; its pid, and the pipe that its reports come through."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        die_with_parent(signal.SIGKILL)
        signal.alarm(int(seconds) + 1)
        os.close(reader)
        code = 1
        try:
            port = int.from_bytes(os.read(port_reader, 2), "big")
            code = take_part(rank, backend, port, seconds, writer)
        except Exception as error:  # noqa: BLE001 - a backend raises anything; the parent reports it
            line = next(iter(str(error).splitlines()), "")
            # gloo begins with the place in its own source
            line = line.partition("] ")[2] if line.startswith("[enforce fail at ") else line
            report(writer, f"failed: {type(error).__name__}: {line}")
        finally:
            os._exit(code)  # the parent's own clean-up is not a rank's business
    os.close(writer)
    return pid, reader


def take_part(rank: int, backend: str, port: int, seconds: float, writer: int) -> int:
    """One rank: join, reduce, compare. Exit code 1 for a wrong sum."""
    import torch.distributed

    dist: Any = torch.distributed
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=limit)
    report(writer, CONNECTED)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)
    report(writer, JOINED)
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    total, expected = float(numbers.sum()), 1024.0 * sum(range(1, RANKS + 1))
    report(writer, REDUCED if total == expected else f"has {total} in place of {expected}")
    return 0 if total == expected else 1


def report(writer: int, stage: str) -> None:
    """Hand a line to the parent."""
    os.write(writer, f"{stage}\n".encode())


def follow(ranks: list[tuple[int, int]], deadline: float) -> list[list[str]]:
    """Read the ranks' reports until both have ended or time is over; then kill them, by pid, and reap them."""
    import select

    reports: dict[int, bytes] = {reader: b"" for _, reader in ranks}
    open_pipes = list(reports)
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for reader in select.select(open_pipes, [], [], left)[0]:
            data = os.read(reader, 4096)
            reports[reader] += data
            if not data:
                open_pipes.remove(reader)
    for pid, reader in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
    return [reports[reader].decode(errors="replace").splitlines() for _, reader in ranks]


if __name__ == "__main__":
    sys.exit(main())
