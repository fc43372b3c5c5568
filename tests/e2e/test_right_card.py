"""The real launchers give each rank the physical card that was chosen, compared through what the ranks themselves see.

There is no driver here: NVML is made up, and torch counts the made-up cards (tests/machine/cuda). What is shown is the
way of a choice through trainkit and the launcher's own code into each rank's environment; that CUDA reads the variables
as its guide says is taken from there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import CUDA, GIGABYTE, Cards, card

PROGRAM = """
import json, os, pathlib, sys
names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
seen = {name: os.environ.get(name, "0") for name in names}  # one process without a launcher has no rank
pathlib.Path(sys.argv[1], "seen-" + seen["RANK"]).write_text(json.dumps(seen))
"""
PART = {"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "total": 10 * GIGABYTE, "free": 10 * GIGABYTE}
BUSY: dict[str, Any] = {"computing": [{"pid": os.getpid(), "memory": 30 * GIGABYTE}], "free": 50 * GIGABYTE}
# NVML counts these 0 to 3; CUDA by itself counts the fastest first: 1, 3, 2, 0.
MIXED = (card(0, "T4"), card(1), card(2, "V100"), card(3))
ALIKE = tuple(card(number) for number in range(4))
ONE_BUSY = (card(0, **BUSY), *ALIKE[1:])
SPLIT = (card(0), card(1, instances=[{**PART, "uuid": "MIG-aa"}, {**PART, "uuid": "MIG-bb"}]))


@dataclass(frozen=True)
class Case:
    """machine: cards. chosen: UUIDs in rank order. told: the caller's environment."""

    launcher: str
    machine: tuple[dict[str, Any], ...]
    devices: str
    chosen: tuple[str, ...]
    told: tuple[tuple[str, str], ...] = ()
    strategy: str = "ddp"


def uuids(*numbers: int) -> tuple[str, ...]:
    return tuple(card(number)["uuid"] for number in numbers)


SUBSET = (("CUDA_VISIBLE_DEVICES", "2,3"), ("SLURM_JOB_ID", "17"))
FASTEST = (("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),)
CASES = (
    Case("python", SPLIT, "select: [MIG-b]", ("MIG-bb",), strategy="single"),
    Case("python", ONE_BUSY, "select: free", uuids(1), FASTEST, strategy="single"),
    Case("torchrun", MIXED, "select: [2, 0]", uuids(2, 1), FASTEST),  # an exported order is obeyed
    Case("torchrun", MIXED, "{select: 2, order: fastest}", uuids(1, 3), strategy="zero2"),
    Case("accelerate", MIXED, "select: [GPU-3, GPU-1]", uuids(3, 1)),
    Case("accelerate", ALIKE, "select: all", uuids(2, 3), SUBSET),
    Case("deepspeed", ALIKE, "select: all", uuids(2, 3), SUBSET),
    Case("deepspeed", MIXED, "{select: [GPU-1, GPU-2]}", uuids(1, 2), FASTEST),
)


def physical(seen: dict[str, str], machine: tuple[dict[str, Any], ...]) -> str:
    """The UUID of the card that CUDA makes a rank's own, cuda:LOCAL_RANK, out of what the rank sees."""
    entry = seen["CUDA_VISIBLE_DEVICES"].split(",")[int(seen["LOCAL_RANK"])]
    if not entry.isdecimal():
        every = [part["uuid"] for each in machine for part in (each, *each.get("instances", ()))]
        (uuid,) = (known for known in every if known.startswith(entry))
        return str(uuid)
    by_speed = sorted(machine, key=lambda each: -each["cores"] * each["clock_limit"])
    counted = machine if seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" else by_speed
    return str(counted[int(entry)]["uuid"])


@pytest.mark.e2e
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.launcher} {case.devices}")
def test_each_rank_has_the_chosen_card(tmp_path: Path, trainkit: Trainkit, cards: Cards, case: Case) -> None:
    environ = cards(*case.machine)
    environ["PYTHONPATH"] = f"{CUDA}:{environ['PYTHONPATH']}"
    (tmp_path / "program.py").write_text(PROGRAM)
    devices = case.devices if case.devices.startswith("{") else f"{{{case.devices}}}"
    (tmp_path / "right.yaml").write_text(
        "version: 1\nname: right\nprogram: {kind: torch, script: program.py, args: ['.']}\n"
        f"devices: {devices}\nstrategy: {{kind: {case.strategy}}}\nlauncher: {{kind: {case.launcher}}}\n"
    )
    done = trainkit("run", "right.yaml", environ={**environ, **dict(case.told)})
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((tmp_path / f"seen-{rank}").read_text()) for rank in range(len(case.chosen))]
    assert not (tmp_path / f"seen-{len(case.chosen)}").exists()
    assert tuple(physical(seen, case.machine) for seen in ranks) == case.chosen
    (plan,) = tmp_path.glob("runs/right/*/plan.json")
    assert tuple(each["uuid"] for each in json.loads(plan.read_text())["cards"]) == case.chosen


@pytest.mark.e2e
def test_one_process_sees_every_card_that_was_chosen_in_order(tmp_path: Path, trainkit: Trainkit, cards: Cards) -> None:
    environ = cards(*MIXED)
    environ["PYTHONPATH"] = f"{CUDA}:{environ['PYTHONPATH']}"
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ("program.kind=torch", "program.script=program.py", "devices.select=[2, 0]", "name=right")
    done = trainkit("run", *words, "--", ".", environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (seen,) = (json.loads(path.read_text()) for path in tmp_path.glob("seen-*"))
    assert tuple(seen["CUDA_VISIBLE_DEVICES"].split(",")) == uuids(2, 0)
    (plan,) = tmp_path.glob("runs/right/*/plan.json")
    assert tuple(each["uuid"] for each in json.loads(plan.read_text())["cards"]) == uuids(2, 0)


@pytest.mark.parametrize(
    ("launcher", "machine", "words"),
    [
        ("python", {"fails": "init", "message": "Driver/library version mismatch"}, "version mismatch"),
        ("deepspeed", {"fails": "init", "message": "Driver/library version mismatch"}, "version mismatch"),
        ("torchrun", {}, "0 available: the NVIDIA driver sees no GPU"),
        ("accelerate", {}, "0 available: the NVIDIA driver sees no GPU"),
    ],
)
def test_no_launcher_is_started_where_the_card_is_not_there(
    tmp_path: Path, trainkit: Trainkit, cards: Cards, launcher: str, machine: dict[str, Any], words: str
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "right.yaml").write_text(
        "version: 1\nname: right\nprogram: {kind: torch, script: program.py, args: ['.']}\n"
        f"devices: {{select: 1}}\nlauncher: {{kind: {launcher}}}\n"
    )
    done = trainkit("run", "right.yaml", environ=cards(**machine))
    assert done.returncode == 4
    assert words in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()
    assert not list(tmp_path.glob("seen-*"))
