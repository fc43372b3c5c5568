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

from trainkit.machine import gpus, host
from trainkit.machine.facts import Facts, Gpu
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


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "100000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            1,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n1:name=systemd:/y\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({}, None),
    ],
)
def test_cores_are_limited_by_affinity_and_by_cgroups_of_both_kinds(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    affinity = len(os.sched_getaffinity(0))
    assert host.probe_cpu(write(tmp_path, files))["cpu_cores"] == (affinity if limit is None else min(limit, affinity))


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "1048576\n"},
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": "1048576\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
        },
        {"proc/self/cgroup": "4:memory:/docker\n", "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "1048576\n"},
    ],
)
def test_memory_is_limited_by_cgroups_of_both_kinds(tmp_path: Path, files: dict[str, str]) -> None:
    assert host.probe_memory(write(tmp_path, files))["memory_total"] == 1048576


def test_an_unlimited_cgroup_leaves_the_machines_memory(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert host.probe_memory(write(tmp_path, files)) == host.probe_memory(tmp_path / "nothing")


class FakeNvml(SimpleNamespace):
    """NVML with two cards, as nvidia-ml-py shows it; older releases give bytes."""

    stopped = False
    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None:
        self.stopped = True

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIGABYTE, free=70 * GIGABYTE)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return b"GPU-0" if handle == 0 else "GPU-1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"


@pytest.mark.parametrize("driver", ["dev/nvidiactl", "proc/driver/nvidia/version", "usr/lib/wsl/lib/libnvidia-ml.so.1"])
def test_cards_are_read_from_nvml_where_a_driver_shows_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    found = gpus.probe_nvidia(write(tmp_path, {driver: ""}))["gpus"]
    assert found[0] == Gpu(0, "GPU-0", "NVIDIA H100", 80 * GIGABYTE, 70 * GIGABYTE, (9, 0))
    assert [gpu.uuid for gpu in found] == ["GPU-0", "GPU-1"]
    assert fake.stopped


def test_without_a_driver_nvml_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import would raise
    found = gpus.probe_nvidia(tmp_path)
    assert found["gpus"] == ()
    assert "no NVIDIA driver is loaded" in found["notes"]["nvidia"]


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
    first = write(
        tmp_path / "first", {"torch-2.13.0+cpu.dist-info/METADATA": "", "torch_other-9.dist-info/METADATA": ""}
    )
    second = write(
        tmp_path / "second",
        {
            "torch-1.0.dist-info/METADATA": "",
            "nvidia_ml_py-13.0.dist-info/METADATA": "",
            "DeepSpeed-0.19.8-py3.11.egg-info/PKG-INFO": "",
            "unwanted-1.0.dist-info/METADATA": "",
        },
    )
    found = host.probe_packages([str(first), str(tmp_path / "missing"), str(second)])["packages"]
    assert found == {"deepspeed": "0.19.8", "nvidia-ml-py": "13.0", "torch": "2.13.0+cpu"}


def test_the_installed_versions_are_those_of_the_metadata() -> None:
    from importlib.metadata import version

    for name, found in host.probe_packages()["packages"].items():
        assert version(name) == found
