"""Facts of a machine: of this one, and of made-up ones under a temporary root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.machine import host
from trainkit.machine.facts import Facts
from trainkit.machine.probe import PROBES, probe

GIGABYTE = 1024**3


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.mark.cli
def test_this_machine_has_facts_that_survive_json() -> None:
    facts = probe()
    assert facts.executable == sys.executable
    assert 1 <= facts.cpu_cores <= len(os.sched_getaffinity(0))
    assert facts.memory_total > GIGABYTE // 4
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.cli
def test_a_probe_that_fails_is_a_note_and_the_others_are_heard() -> None:
    def broken() -> Mapping[str, Any]:
        raise RuntimeError("driver not loaded")

    facts = probe({**PROBES, "gpus": broken, "cpu": broken})
    assert facts.notes == {"gpus": "RuntimeError: driver not loaded", "cpu": "RuntimeError: driver not loaded"}
    assert (facts.gpus, facts.cpu_cores) == ((), 1)
    assert facts.memory_total > 0


def test_the_callers_allocation_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert probe({}).visible_devices is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert probe({}).visible_devices == "2,3"


@pytest.mark.cli
def test_probing_imports_neither_torch_nor_the_slow_metadata_reader() -> None:
    code = "import sys; from trainkit.machine.probe import probe; probe(); print(*sys.modules)"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "importlib.metadata", "numpy"} & set(done.stdout.split())


QUOTA, PERIOD = "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/job\n", {"sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "100000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ("3:cpu,cpuacct:/docker/x\n1:name=systemd:/y\n", {QUOTA: "100000\n", PERIOD: "100000\n"}, 1),
        ("3:cpu:/\n", {QUOTA: "-1\n", PERIOD: "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_cores_are_limited_by_affinity_and_by_cgroups_of_both_kinds(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    affinity = len(os.sched_getaffinity(0))
    root = write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert host.probe_cpu(root)["cpu_cores"] == (affinity if limit is None else min(limit, affinity))


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/job\n", {"job/memory.max": "1048576\n"}),
        ("0::/job/step\n", {"job/memory.max": "1048576\n", "job/step/memory.max": "max\n"}),
        ("4:memory:/docker\n", {"memory/docker/memory.limit_in_bytes": "1048576\n"}),
    ],
)
def test_memory_is_limited_by_cgroups_of_both_kinds(tmp_path: Path, groups: str, files: dict[str, str]) -> None:
    write(tmp_path / "sys/fs/cgroup", files)
    assert host.probe_memory(write(tmp_path, {"proc/self/cgroup": groups}))["memory_total"] == 1048576


def test_an_unlimited_cgroup_leaves_the_machines_memory(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert host.probe_memory(write(tmp_path, files)) == host.probe_memory(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("system", "processor", "version", "has"),
    [
        ("darwin", "arm64", "14.5", True),
        ("darwin", "arm64", "12.2.1", False),
        ("darwin", "x86_64", "14.5", False),
        ("linux", "arm64", "", False),
    ],
)
def test_mps_is_apple_silicon_with_a_recent_system(
    monkeypatch: pytest.MonkeyPatch, system: str, processor: str, version: str, has: bool
) -> None:
    monkeypatch.setattr(host, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(
        host, "platform", SimpleNamespace(machine=lambda: processor, mac_ver=lambda: (version, ("", "", ""), processor))
    )
    assert host.probe_mps() == {"mps": has}


def test_versions_are_those_that_an_import_would_find(tmp_path: Path) -> None:
    folders = {
        "first": ("torch-2.13.0+cpu.dist-info", "torch_other-9.dist-info"),
        "missing": (),
        "second": (
            "torch-1.0.dist-info", "nvidia_ml_py-13.0.dist-info", "DeepSpeed-0.19.8-py3.11.egg-info",
            "unwanted-1.0.dist-info",
        ),
    }  # fmt: skip
    for folder, names in folders.items():
        write(tmp_path / folder, {f"{name}/METADATA": "" for name in names})
    found = host.probe_packages([str(tmp_path / folder) for folder in folders])["packages"]
    assert found == {"deepspeed": "0.19.8", "nvidia-ml-py": "13.0", "torch": "2.13.0+cpu"}


def test_the_installed_versions_are_those_of_the_metadata() -> None:
    from importlib.metadata import version

    for name, found in host.probe_packages()["packages"].items():
        assert version(name) == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", ("13.0", None)),
        ("__version__ = '2.9.1'\ncuda = None\nhip = '6.4'\n", (None, "6.4")),
    ],
)
def test_what_torch_was_built_for_is_read_without_importing_it(
    tmp_path: Path, text: str, told: tuple[str | None, str | None]
) -> None:
    build = host.probe_torch([str(write(tmp_path, {"torch/version.py": text}))])["torch"]
    assert build is not None
    assert (build.cuda, build.hip) == told


def test_numa_nodes_have_their_cores_and_memory(tmp_path: Path) -> None:
    for number, cores in enumerate(("0-1,4", "2-3")):
        meminfo = f"Node {number} MemTotal:       1024 kB\n"
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        write(folder, {"cpulist": f"{cores}\n", "meminfo": meminfo})
    found = [(node.index, node.cpus, node.memory_total) for node in host.probe_numa(tmp_path)["numa"]]
    assert found == [(0, (0, 1, 4), 1 << 20), (1, (2, 3), 1 << 20)]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "SLURM_JWT": "s3cret"}, ("slurm", "7", "SLURM_JOB_GPUS")),
        ({"PBS_JOBID": "8.host", "PBS_NGPUS": "2"}, ("pbs", "8.host", "PBS_NGPUS")),
        ({"LSB_JOBID": "9", "LSB_GPU_REQ": "num=2"}, ("lsf", "9", "LSB_GPU_REQ")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "pod-1"}, ("kubernetes", "", "HOSTNAME")),
    ],
)
def test_the_schedulers_allocation_is_a_fact(environ: dict[str, str], told: tuple[str, str, str]) -> None:
    allocation = host.probe_allocations(environ)["allocation"]
    assert allocation is not None
    assert (allocation.scheduler, allocation.job) == told[:2]
    assert told[2] in allocation.variables
    assert "SLURM_JWT" not in allocation.variables


def test_without_a_scheduler_there_is_no_allocation() -> None:
    assert host.probe_allocations({"PATH": "/bin"}) == {"allocation": None}
