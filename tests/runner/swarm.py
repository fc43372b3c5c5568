"""Runs that wait for made-up cards, many at once: `python swarm.py FOLDER RUNS SEED`, in the environment of the cards.

Each of them waits as `trainkit run` does, with a plan made by hand that chooses anew, and then has its cards for an
instant, of which a lock says if another one has them, too. Some are killed, before their turn or after it. Prints the
runs that ended well, those that were killed, and what went wrong.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from handmade_plans import make_plan

from trainkit.launch_plan.model import GpuWait, Plan, Planned, PlannedGpu, Provenance
from trainkit.machine.probe import CARD_PROBES, probe
from trainkit.machine.selection import is_idle, take_when_idle
from trainkit.runner.report.console import Terminal
from trainkit.runner.request import RunRequest
from trainkit.runner.waiting import wait_for_gpus

BELOW = 1 << 30


def planned(folder: Path, amount: int, ticket: int | None) -> RunRequest:
    """A plan for the cards as they are now."""
    gpus = probe(CARD_PROBES, ticket=ticket).gpus
    chosen = take_when_idle(amount, gpus, BELOW).cards
    ready = all(is_idle(gpu, BELOW) for gpu in chosen)
    plan: Plan = replace(
        make_plan((sys.executable, "-c", ""), str(folder / "runs")),
        cards=tuple(PlannedGpu(gpu.index, gpu.uuid, gpu.name) for gpu in chosen),
        waits=GpuWait(amount, tuple(gpu.uuid for gpu in gpus), BELOW, ready),
    )
    return RunRequest(
        Planned(plan, Provenance({}, {})), "version: 1\n", "", dict(os.environ),
        again=lambda number: planned(folder, amount, number),
    )  # fmt: skip


def have(folder: Path, number: int, amount: int) -> None:
    """Wait, and have the cards for a moment."""
    os.dup2(os.open(folder / f"said-{number}", os.O_WRONLY | os.O_CREAT), 2)
    with ExitStack() as until_begun:
        request, cards, _ = wait_for_gpus(planned(folder, amount, None), Terminal({}), lambda *_: None, until_begun)
    uuids = [card.uuid for card in request.planned.plan.cards]
    used = [os.open(folder / f"used-{uuid}", os.O_RDWR | os.O_CREAT) for uuid in uuids]
    for fd in used:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError where another run is on the card
    (folder / f"began-{number}").write_text(f"{time.monotonic()}")
    time.sleep(0.02)
    for fd in used:
        os.close(fd)
    cards.release()


def main() -> None:
    """Start all of them, kill some, wait for the others."""
    folder, runs, chance = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    pids: dict[int, int] = {}
    killed = set[int]()
    for number in range(runs):
        amount = 4 if number % 7 == 3 else 1
        pid = os.fork()
        if pid == 0:
            have(folder, number, amount)
            os._exit(0)
        pids[pid] = number
        if chance.random() < 0.3:
            victim = chance.choice([*pids])
            time.sleep(chance.random() * 0.03)
            os.kill(victim, signal.SIGKILL)  # one that has ended is a child that nobody has waited for
            killed.add(pids[victim])
    codes = {number: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, number in pids.items()}
    print(json.dumps({
        "well": [number for number, code in codes.items() if code == 0],
        "killed": [number for number, code in codes.items() if code == -signal.SIGKILL],
        "wrong": {number: code for number, code in codes.items() if code not in (0, -signal.SIGKILL)},
        "aimed": sorted(killed),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
