"""Trains on two gloo ranks for ever, and hangs in the ways that its folder's files ask for."""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def asked(name):
    return (folder / name).exists()


def load(rank):
    while rank == 1 and asked("sleep"):
        time.sleep(0.05)
    if rank == 1 and asked("pipe"):
        (folder / "pipe").read_bytes()  # of a FIFO that nobody writes
    if asked("slow"):
        time.sleep(1.2)
    return torch.ones(2, 4)


def spin():
    while True:
        sum(range(1000))


def main():
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), torch.nn.Linear(4, 1)
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), 0
    while True:
        if rank == 0 and asked("spin"):  # as whoever waits for a card does
            (folder / "spin").unlink()
            threading.Thread(target=spin, daemon=True).start()
        model(load(rank)).sum().backward()
        for parameter in model.parameters():
            if not (rank == 1 and asked("skip")):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 1 and asked("skip"):
            dist.barrier()
        step += 1
        if rank == 0:
            (folder / "steps").write_text(str(step))
        time.sleep(0.01)
        if asked("leave") and step % 100 == 0:
            leave(rank)


def leave(rank):
    """Rank 1 ends, with somebody left who keeps its connections; rank 0 waits for it."""
    if rank == 1 and os.fork() == 0:
        os.setsid()
        time.sleep(600)
    elif rank == 1:
        os._exit(0)


main()
