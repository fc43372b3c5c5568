"""A real all-reduce between two processes: ``python -m trainkit.doctor.all_reduce gloo|nccl SECONDS``.

Writes one JSON object: {fine, seconds, stages}; stages: how far each rank came, for people. Both ranks are forked after
one import of torch, end with this process, and are killed when the time is over.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import Any

from trainkit.runner.supervisor.processes import die_with_parent

RANKS = 2
LOOPBACK = "127.0.0.1"
CONNECTED, JOINED, REDUCED = "has reached the store", "has joined the group", "has the right sum"


def main() -> int:
    """Exit code 0 where both ranks have the sum, 1 where not or where the backend is not there."""
    backend, seconds = sys.argv[1], float(sys.argv[2])
    die_with_parent()
    if why := unreachable():
        sys.stderr.write(f"{LOOPBACK} does not answer: {why}\n")
        return 1
    import torch.distributed

    signal.alarm(int(seconds) + 5)  # whatever holds the waiting below; importing torch takes as long as the disk does
    dist: Any = torch.distributed  # its stores are in no stub
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        sys.stderr.write(f"this torch has no {backend}\n")
        return 1
    begin = time.monotonic()
    fork = multiprocessing.get_context("fork")
    ports = fork.SimpleQueue()
    pipes = [fork.Pipe(duplex=False) for _ in range(RANKS)]
    # Forked before the store starts its threads: a fork copies the locks that other threads hold.
    ranks = [
        fork.Process(target=run_rank, args=(rank, backend, ports, seconds, writer))
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    for _ in ranks:
        ports.put(store.port)
    for process in ranks:
        process.join(max(begin + seconds - time.monotonic(), 0))
        process.kill()
        process.join()
    stages = [[reader.recv() for _ in iter(reader.poll, False)] for reader, _ in pipes]
    fine = all(reports[-1:] == [REDUCED] for reports in stages)
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


def run_rank(rank: int, backend: str, ports: Any, seconds: float, writer: Any) -> None:
    """What a forked process does: its part, or a report of what stopped it."""
    die_with_parent()
    signal.alarm(int(seconds) + 1)
    try:
        take_part(rank, backend, ports.get(), seconds, writer)
    except Exception as error:  # noqa: BLE001 - a backend raises anything; the parent reports it
        line = next(iter(str(error).splitlines()), "")
        # gloo begins with the place in its own source
        line = line.partition("] ")[2] if line.startswith("[enforce fail at ") else line
        writer.send(f"failed: {type(error).__name__}: {line}")
    finally:
        os._exit(0)  # the parent's own clean-up is not a rank's business


def take_part(rank: int, backend: str, port: int, seconds: float, writer: Any) -> None:
    """One rank: join, reduce, compare; each stage is reported when it is reached."""
    import torch.distributed

    dist: Any = torch.distributed
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=limit)
    writer.send(CONNECTED)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)
    writer.send(JOINED)
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    total, expected = float(numbers.sum()), 1024.0 * sum(range(1, RANKS + 1))
    writer.send(REDUCED if total == expected else f"has {total} in place of {expected}")


if __name__ == "__main__":
    sys.exit(main())
