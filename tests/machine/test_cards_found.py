"""Cards as the real trainkit finds them, on made-up machines: what is told, what is not, and broken drivers."""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import GIGABYTE, Cards, card, stand_in
from trainkit.machine import gpus, host
from trainkit.machine.facts import Facts, Gpu, GpuProcess, TorchBuild
from trainkit.machine.probe import PROBES, answers, probe
from trainkit.runner.report import gpu_watch


@pytest.fixture
def found(trainkit: Trainkit) -> Callable[..., Facts]:
    def find(environ: Mapping[str, str]) -> Facts:
        done = trainkit("env", "facts", environ=environ)
        assert done.returncode == 0, done.stderr
        return Facts.from_json(json.loads(done.stdout))

    return find


@pytest.mark.cli
def test_a_card_is_told_with_all_that_the_driver_knows(found: Callable[..., Facts], cards: Cards) -> None:
    more: dict[str, Any] = {"power": 71.5, "power_limit": 400, "temperature": 41, "use": 93, "throttling": 0x24}
    (gpu,) = found(cards(card(3, **more, ecc_errors=2, pending_repair=1, compute_mode=3))).gpus
    assert (gpu.index, gpu.name, gpu.uuid[:6]) == (0, "NVIDIA A100-SXM4-80GB", "GPU-30")
    assert gpu.pci_bus_id == "00000000:04:00.0"
    assert (gpu.memory_total, gpu.memory_free) == (80 * GIGABYTE, 80 * GIGABYTE - GIGABYTE // 2)
    assert (gpu.cores, gpu.clock_limit, gpu.power, gpu.power_limit, gpu.temperature) == (6912, 1410, 71.5, 400.0, 41)
    assert (gpu.utilization, gpu.throttling, gpu.ecc_errors) == (93, ("power cap", "heat"), 2)
    assert (gpu.pending_repair, gpu.compute_mode, gpu.mig) == (True, "exclusive", False)


@pytest.mark.cli
def test_what_a_card_does_not_tell_is_not_made_up(found: Callable[..., Facts], cards: Cards) -> None:
    bare = {"uuid": "GPU-1", "name": "NVIDIA GB10", "capability": [12, 1]}
    facts = found(cards(bare))
    (gpu,) = facts.gpus
    assert (gpu.memory_total, gpu.utilization, gpu.power, gpu.cores, gpu.pci_bus_id) == (0, None, None, None, "")
    assert (facts.driver, facts.cuda_driver) == ("580.82.07", "13.0")


@pytest.mark.cli
def test_processes_on_a_card_have_an_owner_and_a_command_without_its_secrets(
    found: Callable[..., Facts], cards: Cards
) -> None:
    script = "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script, "\x1b[31m", "--api-key", "hunter2"]) as other:
        try:
            computing = [{"pid": other.pid, "memory": 3 * GIGABYTE}]
            drawing = [{"pid": os.getpid(), "memory": 1}, {"pid": other.pid, "memory": 2}, {"pid": 2**31 - 1}]
            (gpu,) = found(cards(card(0, computing=computing, drawing=drawing))).gpus
        finally:
            other.kill()
    first, second, third = gpu.processes
    told = (other.pid, getpass.getuser(), 3 * GIGABYTE, False)
    assert (first.pid, first.user, first.memory, first.graphics) == told
    assert first.command.endswith("?[31m --api-key ***")
    assert (second.pid, second.graphics) == (os.getpid(), True)
    assert third == GpuProcess(2**31 - 1, graphics=True)


@pytest.mark.cli
def test_parts_of_a_split_card_are_told(found: Callable[..., Facts], cards: Cards) -> None:
    memory = {"total": 10 * GIGABYTE, "free": GIGABYTE, "reserved": GIGABYTE // 4}
    part = {"uuid": "MIG-1", "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", **memory}
    (gpu,) = found(cards(card(0, instances=[part]))).gpus
    assert gpu.mig
    (told,) = gpu.instances
    assert (told.uuid, told.profile, told.memory_total, told.memory_reserved) == (
        "MIG-1", "1g.10gb", 10 * GIGABYTE, GIGABYTE // 4,
    )  # fmt: skip


@pytest.mark.cli
@pytest.mark.parametrize("fails", ["init", "cards"])
def test_a_broken_driver_is_a_fact(found: Callable[..., Facts], cards: Cards, fails: str) -> None:
    facts = found(cards(card(0), fails=fails, message="Driver/library version mismatch"))
    assert facts.gpus == ()
    assert facts.notes["gpus"] == "NVMLError: Driver/library version mismatch"
    assert facts.memory_total > 0


@pytest.mark.cli
def test_a_driver_that_crashes_takes_nothing_with_it(found: Callable[..., Facts], cards: Cards) -> None:
    facts = found(cards(crashes=True))
    assert facts.notes["gpus"] == "the probe crashed (SIGABRT)"
    assert facts.packages


@pytest.mark.cli
def test_a_question_that_hangs_is_given_up_and_the_next_ones_are_asked() -> None:
    def hang() -> Mapping[str, Any]:
        time.sleep(600)
        return {}

    begin = time.monotonic()
    asked = {"first": lambda: {"a": 1}, "hangs": hang, "next": lambda: {"b": 2}}
    told = dict(answers(asked, lambda name: 0.2 if name == "hangs" else 60))
    assert told == {"first": {"a": 1}, "hangs": "no answer within 0.2 s", "next": {"b": 2}}
    assert time.monotonic() - begin < 60


@pytest.mark.cli
def test_a_hanging_driver_costs_its_time_limit(cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cards(hangs=600).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    facts = probe(PROBES, {"gpus": 0.5})
    assert facts.notes["gpus"] == "no answer within 0.5 s"
    assert facts.packages


def test_amd_cards_are_read_from_the_kernel_in_rocms_order(tmp_path: Path) -> None:
    nodes = tmp_path / gpus.TOPOLOGY
    told = {0: "simd_count 0\n", 1: "location_id 25344 domain 0", 2: "location_id 768 domain 0"}
    for number, text in told.items():
        (nodes / str(number)).mkdir(parents=True)
        words = text.split()
        more = "simd_count 304\nunique_id 7211\ngfx_target_version 90402\n" if number else ""
        pairs = "".join(f"{name} {value}\n" for name, value in zip(words[::2], words[1::2], strict=True))
        (nodes / str(number) / "properties").write_text(pairs + more)
    device = tmp_path / host.PCI / "0000:63:00.0"
    device.mkdir(parents=True)
    for name, text in {"mem_info_vram_total": "206141652992", "mem_info_vram_used": "1000", "numa_node": "1"}.items():
        (device / name).write_text(f"{text}\n")
    first, second = gpus.probe_amd(tmp_path)["amd"]
    assert (first.index, first.vendor, first.pci_bus_id, first.numa_node) == (0, "amd", "0000:63:00.0", 1)
    assert (first.memory_total, first.memory_free) == (206141652992, 206141651992)
    assert (first.uuid, first.name, first.compute_capability) == ("GPU-0000000000001c2b", "AMD gfx942", (9, 4))
    assert (second.index, second.pci_bus_id) == (1, "0000:03:00.0")


@pytest.mark.cli
@pytest.mark.parametrize(("hip", "cards_here"), [("6.4.43482", 1), (None, 0)])
def test_amd_cards_count_where_torch_is_built_for_them(hip: str | None, cards_here: int) -> None:
    gpu = Gpu(0, "GPU-1", "AMD Instinct MI300X", 192 * GIGABYTE, 192 * GIGABYTE, (9, 4), vendor="amd")
    build = TorchBuild("2.13.0", hip=hip)
    facts = probe({"torch": lambda: {"torch": build}, "amd": lambda: {"amd": (gpu,)}})
    assert len(facts.gpus) == cards_here
    assert ("amd" in facts.notes) is (hip is None)


@pytest.mark.parametrize("driver", ["dev/nvidiactl", "proc/driver/nvidia/version", "usr/lib/wsl/lib/libnvidia-ml.so.1"])
def test_cards_are_read_from_nvml_where_a_driver_shows_itself(
    tmp_path: Path, cards: Cards, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    fake, bare = (
        stand_in(),
        {"name": "NVIDIA H100", "total": 80 * GIGABYTE, "free": 70 * GIGABYTE, "capability": [9, 0]},
    )
    fake.nvmlDeviceGetUUID = lambda told: told["uuid"].encode()  # as older releases of nvidia-ml-py do
    monkeypatch.setenv("FAKE_NVML", cards({"uuid": "GPU-0", **bare}, {"uuid": "GPU-1", **bare})["FAKE_NVML"])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import would raise
    found = gpus.probe_nvidia(tmp_path)
    assert found["gpus"] == ()
    assert "no NVIDIA driver is loaded" in found["notes"]["nvidia"]
    (tmp_path / driver).parent.mkdir(parents=True)
    (tmp_path / driver).touch()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    first, second = gpus.probe_nvidia(tmp_path)["gpus"]
    assert first == Gpu(0, "GPU-0", "NVIDIA H100", 80 * GIGABYTE, 70 * GIGABYTE, (9, 0))
    assert second.uuid == "GPU-1"
    assert not fake._machine  # it was shut down


def test_what_is_asked_of_nvml_and_its_numbers_are_those_of_the_real_library() -> None:
    """The stand-in has no say in what nvidia-ml-py offers."""
    import inspect
    import re

    import pynvml

    asked = set(re.findall(r"nvml[A-Z]\w+", Path(gpus.__file__).read_text() + Path(gpu_watch.__file__).read_text()))
    assert len(asked) > 20
    assert {name for name in asked if not hasattr(pynvml, name)} == {
        "nvmlClocksEventReasons"
    }  # of the C library's guide
    assert (pynvml.NVML_CLOCK_SM, pynvml.NVML_TEMPERATURE_GPU) == (1, 0)
    assert (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC) == (1, 0)
    assert pynvml.NVML_COMPUTEMODE_PROHIBITED == 2
    assert pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS == 3
    assert pynvml.nvmlClocksThrottleReasonSwPowerCap == 0x04
    assert pynvml.nvmlClocksThrottleReasonHwThermalSlowdown == 0x40
    fake = stand_in()
    for name, function in inspect.getmembers(fake, inspect.isfunction):
        if name.startswith("nvml"):
            parameters = inspect.signature(getattr(pynvml, name)).parameters
            assert len(inspect.signature(function).parameters) == len(parameters), name
