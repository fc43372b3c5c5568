"""Joins collectives on two gloo ranks for ever, without an optimizer, and stops as its folder's files say."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])


def asked(name):
    return (folder / name).exists()


def rest():
    """Wait without using a processor, as for a network."""
    while asked("sleep"):
        time.sleep(0.05)


dist.init_process_group("gloo")
rank, total, rounds = dist.get_rank(), torch.ones(1), 0
while True:
    if rank == 1:
        rest()
    dist.all_reduce(total)
    total /= 2
    rounds += 1
    if rank == 0:
        (folder / "steps").write_text(str(rounds))
    while rank == 0 and asked("compute"):  # as the rank that evaluates for all
        sum(range(100_000))
    time.sleep(0.01)
