"""Whether the cards are well: memory errors, clocks held down, processes that others or earlier runs left on them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.doctor.check import Check, Finding, ok, skipped, without_cuda
from trainkit.doctor.host import Host, Target
from trainkit.machine.facts import Gpu, GpuProcess
from trainkit.text import GIB, counted, format_size

MUCH = GIB  # of a card's memory in a process that is not ours


def run(host: Host, target: Target) -> list[Finding]:
    """What is wrong with each card that the plan uses, or with any."""
    wanted = set(target.plan.topology.groups[0].devices) if target.plan else None
    cards = [gpu for gpu in host.facts.gpus if wanted is None or _names(gpu) & wanted]
    if not cards:
        return [skipped("there is no card here")]
    found = [finding for gpu in cards for finding in (*_memory(gpu), *_clocks(gpu), *_processes(gpu))]
    return found or [ok(f"{counted(len(cards), 'card')} without errors, throttling or other processes")]


def _names(gpu: Gpu) -> set[str]:
    """What a plan may call the card, or a part of it."""
    return {gpu.uuid, str(gpu.index), *(instance.uuid for instance in gpu.instances)}


def _label(gpu: Gpu) -> str:
    return f"card {gpu.index} ({gpu.name})"


def _memory(gpu: Gpu) -> Iterator[Finding]:
    evidence = (gpu.uuid, gpu.pci_bus_id) if gpu.pci_bus_id else (gpu.uuid,)
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}      # with no process on it; else reboot"
    if gpu.pending_repair:
        what = f"{_label(gpu)} waits for a reset to take bad memory out of use"
        yield Finding("warning", what, evidence, (reset,))
    elif gpu.ecc_errors:
        what = f"{_label(gpu)} has had {gpu.ecc_errors} uncorrectable memory errors since the driver was loaded"
        look = f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu.index}      # if they go on, have the card replaced"
        yield Finding("warning", what, evidence, (look, reset))


def _clocks(gpu: Gpu) -> Iterator[Finding]:
    if gpu.throttling:
        what = f"the clock of {_label(gpu)} is held down: {', '.join(gpu.throttling)}"
        look = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {gpu.index}"
        yield Finding("warning", what, tuple(_figures(gpu)), (look,))
    elif gpu.power_limit and gpu.power_default and gpu.power_limit < gpu.power_default:
        what = f"{_label(gpu)} is limited to {gpu.power_limit:.0f} W of {gpu.power_default:.0f} W"
        raised = f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}      # if nobody set it on purpose"
        yield Finding("note", what, tuple(_figures(gpu)), (raised,))
    if gpu.compute_mode == "prohibited":
        fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        yield Finding("problem", f"{_label(gpu)} is set to take no processes", ("compute mode: prohibited",), (fix,))


def _figures(gpu: Gpu) -> Iterator[str]:
    if gpu.clock is not None and gpu.clock_limit is not None:
        yield f"clock {gpu.clock} of {gpu.clock_limit} MHz"
    if gpu.temperature is not None:
        yield f"{gpu.temperature} degrees Celsius"
    if gpu.power is not None and gpu.power_limit is not None:
        yield f"{gpu.power:.0f} of {gpu.power_limit:.0f} W"


def _processes(gpu: Gpu) -> Iterator[Finding]:
    """Those that compute; a desktop that draws needs little. A split card has processes on parts that are not ours."""
    if gpu.mig:
        return
    others = [each for each in gpu.processes if not each.graphics]
    if others:
        what = f"{len(others)} process{'es' if len(others) > 1 else ''} on {_label(gpu)} already"
        stop = f"kill {' '.join(str(each.pid) for each in others)}      # if they are yours and nobody waits for them"
        yield Finding("warning", what, tuple(_described(each) for each in others), (stop,))
    elif not gpu.processes and gpu.memory_total - gpu.memory_free > max(MUCH, gpu.memory_total // 20):
        taken = gpu.memory_total - gpu.memory_free
        what = f"{format_size(taken)} of {_label(gpu)} are taken, and no process shows itself"
        fix = f"sudo fuser -v /dev/nvidia{gpu.index}      # from outside the container: it sees processes of others"
        yield Finding(
            "warning", what, (f"{format_size(gpu.memory_free)} of {format_size(gpu.memory_total)} free",), (fix,)
        )


def _described(process: GpuProcess) -> str:
    memory = f", {format_size(process.memory)}" if process.memory is not None else ""
    return f"pid {process.pid} {process.user or 'of somebody'}{memory}: {process.command or 'command not shown'}"


GPU_HEALTH = Check("gpu-health", "GPU health", 2.0, run, without_cuda, fast=True)
