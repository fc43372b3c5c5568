"""Facts as JSON: without loss, of one version, and never taken on trust."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainkit.errors import UsageError
from trainkit.machine.facts import (
    FACTS_VERSION,
    Allocation,
    Facts,
    Gpu,
    GpuProcess,
    Hold,
    MigInstance,
    NumaNode,
    TorchBuild,
)

BUSY = GpuProcess(4711, "ada", "python train.py", 3 << 30)
CARD = Gpu(
    index=0,
    uuid="GPU-0",
    name="NVIDIA A100",
    memory_total=80 << 30,
    memory_free=77 << 30,
    compute_capability=(8, 0),
    pci_bus_id="00000000:07:00.0",
    power=71.5,
    throttling=("power cap",),
    ecc_errors=0,
    mig=True,
    instances=(MigInstance("MIG-1", "1g.10gb", 10 << 30, 9 << 30, (BUSY,), Hold(1, "ada", "/runs/a")),),
    processes=(BUSY, GpuProcess(1, memory=None, graphics=True)),
    held_by=Hold(4711, "ada", "/runs/b"),
)
FULL = Facts(
    platform="linux",
    machine="x86_64",
    hostname="node1",
    python="3.11.7",
    executable="/usr/bin/python3",
    cpu_cores=8,
    memory_total=64 << 30,
    gpus=(CARD,),
    packages={"torch": "2.13.0"},
    notes={"gpus": "slow"},
    visible_devices="",
    numa=(NumaNode(0, (0, 1), 1 << 30),),
    torch=TorchBuild("2.13.0+cu130", cuda="13.0"),
    cpu_limit=1.5,
    allocation=Allocation("slurm", "17", {"SLURM_JOB_ID": "17"}),
)


def stored(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(FULL.to_json()))
    return {**data, **changes}


def test_every_fact_comes_back_from_json_as_it_was() -> None:
    assert Facts.from_json(stored()) == FULL


def test_what_older_facts_lack_has_its_default() -> None:
    data = stored()
    del data["numa"], data["gpus"][0]["throttling"]
    assert Facts.from_json(data).numa == ()
    assert Facts.from_json(data).gpus[0].throttling == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no facts_version"),
        ("text", "no facts_version"),
        ({}, "no facts_version"),
        (stored(facts_version=99), "version 99, and this trainkit reads version 1"),
        (stored(facts_version="1"), "version '1'"),
        (stored(cpu_cores="many"), "`cpu_cores` must be a whole number, not 'many'"),
        (stored(cpu_cores=True), "`cpu_cores` must be a whole number, not True"),
        (stored(cpu_cores=10**40), "`cpu_cores` must be a whole number"),
        (stored(cpu_limit=float("inf")), "`cpu_limit` must be a number"),
        (stored(cpu_limit=float("nan")), "`cpu_limit` must be a number"),
        (stored(gpus={}), "`gpus` must be a list"),
        (stored(gpus=[3]), "`gpus.0` must be a mapping"),
        (stored(gpus=[{}]), "`gpus.0.index` is missing"),
        (
            stored(gpus=[{**stored()["gpus"][0], "compute_capability": [8]}]),
            "compute_capability` must be a list of 2",
        ),
        (stored(gpus=[{**stored()["gpus"][0], "vendor": "acme"}]), "`gpus.0.vendor` must be one of nvidia, amd"),
        (stored(packages={"torch": 2}), "`packages.torch` must be a text"),
        (stored(colour="red"), "unknown key `colour`"),
        (stored(hostname=None), "`hostname` must be a text"),
    ],
)
def test_what_is_not_the_facts_of_a_machine_is_refused_by_name(data: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Facts.from_json(data)
    assert words in caught.value.diagnostics[0].what
    assert caught.value.diagnostics[0].hint


def test_the_version_stands_in_the_file() -> None:
    assert stored()["facts_version"] == FACTS_VERSION
