"""`trainkit gpus`: the cards of this machine, who uses them, and which run holds them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from trainkit.cli.options import Json, On
from trainkit.errors import UsageError
from trainkit.text import GIB, counted

if TYPE_CHECKING:
    from trainkit.machine.facts import Facts, Gpu, GpuProcess, Hold

EVERY_SECONDS = 1.0
NARROWEST, WIDEST = 60, 140  # columns
BAR = 16  # cells of the memory bar


def gpus(
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show them again every second, until Ctrl-C.")] = False,
    machine: On = None,
) -> None:
    """Show the cards: memory, use, processes and their owners, and which trainkit run holds each.

    Without a card it says why. Index and UUID are what devices.select takes.

    Example: trainkit gpus

    Example: trainkit gpus --watch
    """
    if watch and machine is not None:
        raise UsageError("--watch and --on exclude one another", hint="a file or a profile does not change")
    if not watch:
        sys.stdout.write(_page(machine, as_json=as_json))
        return
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        if sys.stdout.isatty() and not as_json:
            _watch_on_terminal()
        while True:
            sys.stdout.write(_page(None, as_json=as_json) + ("" if as_json else "\n"))
            sys.stdout.flush()
            time.sleep(EVERY_SECONDS)


def _page(machine: str | None, *, as_json: bool) -> str:
    from trainkit.cli.machines import machine_facts
    from trainkit.machine.probe import CARD_PROBES, probe

    facts = probe(CARD_PROBES) if machine is None else machine_facts(machine)
    if not as_json:
        return render(facts, min(shutil.get_terminal_size().columns, WIDEST))
    data = facts.to_json()
    names = ("facts_version", "hostname", "gpus", "mps", "driver", "cuda_driver", "notes", "visible_devices")
    return json.dumps({name: data[name] for name in names}) + "\n"


def _watch_on_terminal() -> None:
    """Draw the page over itself."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        while True:
            live.update(Text(_page(None, as_json=False).rstrip("\n")), refresh=True)
            time.sleep(EVERY_SECONDS)


def render(facts: Facts, width: int) -> str:
    """One block a card: what it is and how full, then who holds it and which processes use it. width: columns."""
    machine = facts.origin or facts.hostname
    if not facts.gpus:
        lines = [f"{machine}: no CUDA or ROCm card can be used here"]
        lines += ["  Apple's GPU (MPS) can be used"] if facts.mps else []
        lines += [f"  {facts.notes[name]}" for name in ("gpus", "nvidia", "amd") if name in facts.notes]
        return "".join(f"{line}\n" for line in lines)
    driver = f", driver {facts.driver} (CUDA {facts.cuda_driver})" if facts.driver else ""
    lines = [f"{machine}: {counted(len(facts.gpus), 'card')}{driver}"]
    for gpu in facts.gpus:
        lines += ["", *_card(gpu)]
    lines += [f"note: {name}: {note}" for name, note in facts.notes.items() if name in {"gpus", "amd"}]
    return "".join(f"{_cut(line, max(width, NARROWEST))}\n" for line in lines)


def _card(gpu: Gpu) -> Iterator[str]:
    limit = f" of {gpu.power_limit:.0f}" if gpu.power_limit else ""
    state = (
        "" if gpu.utilization is None else f" · {gpu.utilization} % busy",
        "" if gpu.temperature is None else f" · {gpu.temperature} \N{DEGREE SIGN}C",
        "" if gpu.power is None else f" · {gpu.power:.0f}{limit} W",
    )
    yield f"{gpu.index:>2}  {gpu.name}"
    yield f"    {_memory(gpu.memory_total, gpu.memory_free)}{''.join(state)}"
    yield "    " + "  ".join(name for name in (gpu.uuid, gpu.pci_bus_id) if name)
    if gpu.throttling:
        yield f"    slowed down by: {', '.join(gpu.throttling)}"
    if gpu.ecc_errors:
        yield f"    {gpu.ecc_errors} uncorrectable memory errors"
    if gpu.pending_repair:
        yield "    waits for a reset to take bad memory out of use"
    if gpu.compute_mode != "default":
        yield f"    compute mode: {gpu.compute_mode}"
    yield from _users(gpu.held_by, gpu.processes, idle=not gpu.mig)
    for part in gpu.instances:
        yield f"    MIG {part.profile:<9} {_memory(part.memory_total, part.memory_free)}"
        yield f"      {part.uuid}"
        yield from (f"  {line}" for line in _users(part.held_by, part.processes, idle=True))


def _memory(total: int, free: int) -> str:
    if not total:
        return "memory shared with the machine"
    cells = min(-(-BAR * (total - free) // total), BAR)  # rounded up: what is used at all shows
    bar = "\N{FULL BLOCK}" * cells + "\N{LIGHT SHADE}" * (BAR - cells)
    return f"{bar} {(total - free) / GIB:6.1f} of {total / GIB:.1f} GiB"


def _users(held: Hold | None, processes: Sequence[GpuProcess], *, idle: bool) -> Iterator[str]:
    if held is not None:
        yield f"    held by a trainkit run{'' if held.run else ' that just starts'} (pid {held.pid}, {held.user})"
        if held.run:
            yield f"      {held.run}"
    for each in processes:
        memory = "      ?" if each.memory is None else f"{each.memory / GIB:7.1f}"
        command = each.command or "(not visible from here)"
        draws = " (only draws)" if each.graphics else ""
        yield f"    {each.pid:>8} {each.user:<10} {memory} GiB  {command}{draws}"
    if idle and held is None and not processes:
        yield "    idle"


def _cut(line: str, width: int) -> str:
    """The line within the width. A path alone keeps its end, which says which run it is."""
    if len(line) <= width:
        return line
    path = line.lstrip()
    if path.startswith("/"):
        indent = line[: -len(path)]
        return f"{indent}\N{HORIZONTAL ELLIPSIS}{path[len(indent) + 1 - width :]}"
    return f"{line[: width - 1]}\N{HORIZONTAL ELLIPSIS}"
