"""Whether the NVIDIA driver is loaded, and new enough for the CUDA that torch was built with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Level, ok, skipped, without_cuda
from trainkit.doctor.host import Host, Target
from trainkit.machine.facts import TorchBuild
from trainkit.machine.versions import at_least, release

# CUDA major version -> oldest driver on Linux that runs all its minor versions
# (https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html)
OLDEST: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
VERSION_FILE = "/proc/driver/nvidia/version"
_VERSION = re.compile(r"Kernel Module.*?\s(\d{3}\.\d+(?:\.\d+)?)\s")
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, class of display controllers


def run(host: Host, target: Target) -> list[Finding]:
    """Missing, not answering, too old, or fine."""
    driver, build = driver_version(host), host.facts.torch
    note = host.facts.notes.get("gpus")
    if note:
        return [_silent(note, driver)]
    if not driver:
        return list(_absent(host))
    if not host.facts.gpus and (blind := host.facts.notes.get("nvidia")):
        fix = "nvidia-smi      # in a container: docker run --gpus all …"
        return [Finding("warning", f"driver {driver} is loaded, but {blind}", (), (fix,))]
    if build is None:
        return [skipped(f"driver {driver}; torch is not installed")]
    return list(_judged(host, driver, build))


def driver_version(host: Host) -> str:
    """As NVML tells it, else the kernel module; empty where none is loaded."""
    if host.facts.driver:
        return host.facts.driver
    try:
        match = _VERSION.search(host.under(VERSION_FILE).read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def _absent(host: Host) -> Iterator[Finding]:
    cards = list(_cards_on_the_bus(host))
    if not cards:
        yield skipped("there is no card here")
        return
    what = f"{len(cards)} NVIDIA card{'s' if len(cards) > 1 else ''} on the PCI bus, and no driver is loaded"
    fix = ("sudo modprobe nvidia      # then, if it fails: sudo dmesg | grep -i nvidia", "nvidia-smi")
    yield Finding("problem", what, (*cards, f"missing: {host.under(VERSION_FILE)}"), fix)


def _cards_on_the_bus(host: Host) -> Iterator[str]:
    for device in sorted(host.root.glob("sys/bus/pci/devices/*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:  # it has just gone
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            yield f"{device.name}: vendor {vendor}, class {kind}"


def _silent(note: str, driver: str) -> Finding:
    """NVML's words. A library that is newer than the loaded module is what an upgrade without a reboot leaves."""
    evidence = (f"NVML: {note}", f"kernel module: {driver or 'not loaded'}")
    fix = (
        "sudo reboot      # after an upgrade of the driver; `nvidia-smi` must answer",
        "sudo nvidia-smi -pm 1      # where it answers, but only after seconds: cards stay awake then",
    )
    return Finding("problem", "the driver does not answer", evidence, fix)


def _judged(host: Host, driver: str, build: TorchBuild) -> Iterator[Finding]:
    pip = host.pip
    evidence = (f"driver {driver}: {host.under(VERSION_FILE)}", build.label)
    if not build.cuda:
        what = f"torch is built for {build.built_for}, so it uses none of the NVIDIA cards here"
        fix = f"{pip} uninstall -y torch && {pip} install torch      # PyPI's Linux builds are for CUDA"
        yield Finding("warning", what, evidence, (fix,))
        return
    oldest = OLDEST.get(release(build.cuda)[0])
    if oldest is None:
        yield skipped(f"driver {driver}; no figure is known for CUDA {build.cuda}")
    elif at_least(driver, oldest):
        yield ok(f"{driver} runs CUDA {build.cuda} (from {oldest} on)", *evidence, SOURCE)
    else:
        what = f"driver {driver} is too old for torch's CUDA {build.cuda}, which needs {oldest} or newer"
        compat = tuple(f"may make up for it: {path}" for path in _forward_compatible(host))
        level: Level = "warning" if compat else "problem"
        yield Finding(level, what, (*evidence, *compat, SOURCE), tuple(_newer(driver, oldest, pip)))


def _forward_compatible(host: Host) -> list[Path]:
    """Libraries of a newer driver that NVIDIA's containers and cuda-compat packages bring for data-centre cards."""
    return sorted(host.root.glob("usr/local/cuda*/compat/libcuda.so.*"))[:1]


def _newer(driver: str, oldest: str, pip: str) -> Iterator[str]:
    yield f"sudo apt-get install nvidia-driver-{oldest.split('.', maxsplit=1)[0]} && sudo reboot      # a newer driver"
    older = max((major for major, version in OLDEST.items() if at_least(driver, version)), default=None)
    if older is not None:
        yield f"{pip} install torch --index-url https://download.pytorch.org/whl/…      # or a build for CUDA {older}"


DRIVER = Check("driver", "NVIDIA driver", 4.0, run, without_cuda, fast=True)
