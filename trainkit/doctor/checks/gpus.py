"""The GPUs: whether the NVIDIA driver is loaded and new enough for torch, and whether each GPU is healthy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trainkit.distribution import install
from trainkit.doctor.check import Finding, Host, Level, Target, ok, skipped
from trainkit.machine.facts import Gpu, TorchBuild, at_least, release
from trainkit.machine.host import text
from trainkit.text import GIB, format_size, pluralize

# CUDA major version -> oldest driver on Linux that runs all its minor versions, by SOURCE
OLDEST: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
SOURCE = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
VERSION_FILE = "/proc/driver/nvidia/version"
_VERSION = re.compile(r"Kernel Module.*?\s(\d{3}\.\d+(?:\.\d+)?)\s")
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, class of display controllers
MUCH = GIB  # of a GPU's memory in a process that is not ours


def driver(host: Host, target: Target) -> Finding:
    """Missing, not answering, too old, or fine."""
    version, build = driver_version(host), host.facts.torch
    blind = host.facts.notes.get("nvidia")  # why NVML shows no GPU of a loaded driver
    if note := host.facts.notes.get("gpus"):
        # A library that is newer than the loaded module is what an upgrade without a reboot leaves.
        evidence = (f"NVML: {note}", f"kernel module: {version or 'not loaded'}")
        fix = (
            "sudo reboot      # after an upgrade of the driver; `nvidia-smi` must answer",
            "sudo nvidia-smi -pm 1      # where it answers, but only after seconds: keeps the GPUs awake",
        )
        return Finding("problem", "the driver does not answer", evidence, fix)
    if not version:
        return _absent(host)
    if not host.facts.gpus and blind:
        look = "nvidia-smi      # in a container: docker run --gpus all …"
        return Finding("warning", f"driver {version} is loaded, but {blind}", (), (look,))
    return _judged(host, version, build) if build else skipped(f"driver {version}; torch is not installed")


def driver_version(host: Host) -> str:
    """From NVML, else from the kernel module; empty where none is loaded."""
    if host.facts.driver:
        return host.facts.driver
    match = _VERSION.search(text(host.under(VERSION_FILE)))
    return match[1] if match else ""


def _absent(host: Host) -> Finding:
    """The PCI bus shows GPUs without a driver too."""
    cards = []
    for device in sorted(host.root.glob("sys/bus/pci/devices/*")):
        vendor, kind = (text(device / name) for name in ("vendor", "class"))
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            cards.append(f"{device.name}: vendor {vendor}, class {kind}")
    if not cards:
        return skipped("there is no GPU here")
    what = f"{pluralize(len(cards), 'NVIDIA GPU')} on the PCI bus, and no driver is loaded"
    fix = ("sudo modprobe nvidia      # then, if it fails: sudo dmesg | grep -i nvidia", "nvidia-smi")
    return Finding("problem", what, (*cards, f"missing: {host.under(VERSION_FILE)}"), fix)


def _judged(host: Host, driver: str, build: TorchBuild) -> Finding:
    fitting = install(host.facts.executable, "torch")
    evidence = (f"driver {driver}: {host.under(VERSION_FILE)}", build.label)
    if not build.cuda:
        what = f"torch is built for {build.built_for}, so it uses none of the NVIDIA GPUs here"
        fix = [f"{host.pip} uninstall -y torch && {fitting}      # PyPI's Linux builds are for CUDA"]
        return Finding("warning", what, evidence, tuple(fix))
    oldest = OLDEST.get(release(build.cuda)[0])
    if oldest is None:
        return skipped(f"driver {driver}; no figure is known for CUDA {build.cuda}")
    if at_least(driver, oldest):
        return ok(f"{driver} runs CUDA {build.cuda} (from {oldest} on)", *evidence, SOURCE)
    what = f"driver {driver} is too old for torch's CUDA {build.cuda}, which needs {oldest} or newer"
    # NVIDIA's containers and cuda-compat packages bring libraries of a newer driver for data-centre GPUs.
    newer = sorted(host.root.glob("usr/local/cuda*/compat/libcuda.so.*"))[:1]
    compat = tuple(f"may make up for it: {path}" for path in newer)
    level: Level = "warning" if compat else "problem"
    fix = [f"sudo apt-get install nvidia-driver-{oldest.partition('.')[0]} && sudo reboot      # a newer driver"]
    older = max((major for major, version in OLDEST.items() if at_least(driver, version)), default=None)
    if older is not None:
        index = "https://download.pytorch.org/whl/…"
        fix += [f"{fitting} --index-url {index}      # or a build for CUDA {older}"]
    return Finding(level, what, (*evidence, *compat, SOURCE), tuple(fix))


def health(host: Host, target: Target) -> Finding | list[Finding]:
    """What is wrong with each GPU that the plan uses, or with any."""
    cards = list(host.facts.gpus)
    if target.plan:
        used = set(target.plan.topology.groups[0].devices)
        # A plan names a GPU by UUID or index, or a part of it by its own UUID.
        cards = [gpu for gpu in cards if used & {gpu.uuid, str(gpu.index), *(part.uuid for part in gpu.instances)}]
    if not cards:
        return skipped("there is no GPU here")
    found = []
    for gpu in cards:
        label = f"GPU {gpu.index} ({gpu.name})"
        found += [*_memory(gpu, label), *_clocks(gpu, label), *_processes(gpu, label)]
    return found or ok(f"{pluralize(len(cards), 'GPU')} without errors, throttling or other processes")


def _memory(gpu: Gpu, label: str) -> Iterator[Finding]:
    evidence = (gpu.uuid, gpu.pci_bus_id) if gpu.pci_bus_id else (gpu.uuid,)
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}      # with no process on it; else reboot"
    if gpu.pending_repair:
        yield Finding("warning", f"{label} waits for a reset to take bad memory out of use", evidence, (reset,))
    elif gpu.ecc_errors:
        what = f"{label} has had {gpu.ecc_errors} uncorrectable memory errors since the driver was loaded"
        look = f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu.index}      # if they go on, have the GPU replaced"
        yield Finding("warning", what, evidence, (look, reset))


def _clocks(gpu: Gpu, label: str) -> Iterator[Finding]:
    figures = (
        gpu.clock is not None and gpu.clock_limit is not None and f"clock {gpu.clock} of {gpu.clock_limit} MHz",
        gpu.temperature is not None and f"{gpu.temperature} degrees Celsius",
        gpu.power is not None and gpu.power_limit is not None and f"{gpu.power:.0f} of {gpu.power_limit:.0f} W",
    )
    evidence = tuple(each for each in figures if each)
    if gpu.throttling:
        look = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {gpu.index}"
        yield Finding("warning", f"the clock of {label} is throttled: {', '.join(gpu.throttling)}", evidence, (look,))
    elif gpu.power_limit and gpu.power_default and gpu.power_limit < gpu.power_default:
        what = f"{label} is limited to {gpu.power_limit:.0f} W of {gpu.power_default:.0f} W"
        raised = f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}      # unless the limit is on purpose"
        yield Finding("note", what, evidence, (raised,))
    if gpu.compute_mode == "prohibited":
        fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        yield Finding("problem", f"{label} is set to take no processes", ("compute mode: prohibited",), (fix,))


def _processes(gpu: Gpu, label: str) -> Iterator[Finding]:
    """Those that compute; a desktop that draws needs little. A split GPU has processes on parts that are not ours."""
    others = [each for each in gpu.processes if not each.graphics]
    taken = gpu.memory_total - gpu.memory_free - gpu.memory_reserved
    if gpu.mig:
        return
    if others:
        evidence = []
        for each in others:
            memory = f", {format_size(each.memory)}" if each.memory is not None else ""
            user = each.user or "of an unknown user"
            evidence.append(f"pid {each.pid} {user}{memory}: {each.command or 'command not shown'}")
        stop = f"kill {' '.join(str(each.pid) for each in others)}      # if they are yours and no longer needed"
        what = f"{pluralize(len(others), 'process', 'es')} on {label} already"
        yield Finding("warning", what, tuple(evidence), (stop,))
    elif not gpu.processes and taken > max(MUCH, gpu.memory_total // 20):
        free = f"{format_size(gpu.memory_free)} of {format_size(gpu.memory_total)} free"
        what = f"{format_size(taken)} of {label} are in use, and no process is visible"
        fix = f"sudo fuser -v /dev/nvidia{gpu.index}      # from outside the container: it sees processes of others"
        yield Finding("warning", what, (free,), (fix,))
