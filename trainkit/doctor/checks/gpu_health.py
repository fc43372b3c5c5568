"""Whether the cards are well: memory errors, clocks held down, processes that others or earlier runs left on them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.units import GIB, in_words
from trainkit.doctor.verdict import Verdict, ok, skipped
from trainkit.machine.facts import Gpu, GpuProcess
from trainkit.text import counted

TITLE = "GPU health"
LIMIT = 2.0
FAST = True

MUCH = GIB  # of a card's memory in a process that is not ours


def needs(aim: Aim) -> str:
    """Only of those that are used."""
    return "" if aim.cuda else "the plan uses no CUDA card"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """What is wrong with each card that the plan uses, or with any."""
    wanted = set(aim.plan.topology.groups[0].devices) if aim.plan else None
    cards = [gpu for gpu in surroundings.facts.gpus if wanted is None or _names(gpu) & wanted]
    if not cards:
        return [skipped("there is no card here")]
    found = [verdict for gpu in cards for verdict in (*_memory(gpu), *_clocks(gpu), *_processes(gpu))]
    return found or [ok(f"{counted(len(cards), 'card')} without errors, throttling or other processes")]


def _names(gpu: Gpu) -> set[str]:
    """What a plan may call the card, or a part of it."""
    return {gpu.uuid, str(gpu.index), *(instance.uuid for instance in gpu.instances)}


def _label(gpu: Gpu) -> str:
    return f"card {gpu.index} ({gpu.name})"


def _memory(gpu: Gpu) -> Iterator[Verdict]:
    evidence = (gpu.uuid, gpu.pci_bus_id) if gpu.pci_bus_id else (gpu.uuid,)
    reset = f"sudo nvidia-smi --gpu-reset -i {gpu.index}      # with no process on it; else reboot"
    if gpu.pending_repair:
        what = f"{_label(gpu)} waits for a reset to take bad memory out of use"
        yield Verdict("warning", what, evidence, (reset,))
    elif gpu.ecc_errors:
        what = f"{_label(gpu)} has had {gpu.ecc_errors} uncorrectable memory errors since the driver was loaded"
        look = f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu.index}      # if they go on, have the card replaced"
        yield Verdict("warning", what, evidence, (look, reset))


def _clocks(gpu: Gpu) -> Iterator[Verdict]:
    if gpu.throttling:
        what = f"the clock of {_label(gpu)} is held down: {', '.join(gpu.throttling)}"
        look = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {gpu.index}"
        yield Verdict("warning", what, tuple(_figures(gpu)), (look,))
    elif gpu.power_limit and gpu.power_default and gpu.power_limit < gpu.power_default:
        what = f"{_label(gpu)} is limited to {gpu.power_limit:.0f} W of {gpu.power_default:.0f} W"
        raised = f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}      # if nobody set it on purpose"
        yield Verdict("note", what, tuple(_figures(gpu)), (raised,))
    if gpu.compute_mode == "prohibited":
        fix = f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
        yield Verdict("problem", f"{_label(gpu)} is set to take no processes", ("compute mode: prohibited",), (fix,))


def _figures(gpu: Gpu) -> Iterator[str]:
    if gpu.clock is not None and gpu.clock_limit is not None:
        yield f"clock {gpu.clock} of {gpu.clock_limit} MHz"
    if gpu.temperature is not None:
        yield f"{gpu.temperature} degrees Celsius"
    if gpu.power is not None and gpu.power_limit is not None:
        yield f"{gpu.power:.0f} of {gpu.power_limit:.0f} W"


def _processes(gpu: Gpu) -> Iterator[Verdict]:
    """Those that compute; a desktop that draws needs little. A split card has processes on parts that are not ours."""
    if gpu.mig:
        return
    others = [each for each in gpu.processes if not each.graphics]
    if others:
        what = f"{len(others)} process{'es' if len(others) > 1 else ''} on {_label(gpu)} already"
        stop = f"kill {' '.join(str(each.pid) for each in others)}      # if they are yours and nobody waits for them"
        yield Verdict("warning", what, tuple(_described(each) for each in others), (stop,))
    elif not gpu.processes and gpu.memory_total - gpu.memory_free > max(MUCH, gpu.memory_total // 20):
        taken = gpu.memory_total - gpu.memory_free
        what = f"{in_words(taken)} of {_label(gpu)} are taken, and no process shows itself"
        fix = f"sudo fuser -v /dev/nvidia{gpu.index}      # from outside the container: it sees processes of others"
        yield Verdict("warning", what, (f"{in_words(gpu.memory_free)} of {in_words(gpu.memory_total)} free",), (fix,))


def _described(process: GpuProcess) -> str:
    memory = f", {in_words(process.memory)}" if process.memory is not None else ""
    return f"pid {process.pid} {process.user or 'of somebody'}{memory}: {process.command or 'command not shown'}"
