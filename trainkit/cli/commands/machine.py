"""`trainkit env` and its parts: a report for bugs, this machine's GPUs and who uses them, and its facts as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from trainkit import __version__
from trainkit.cli.options import Command, CommandGroup, Json, On, refuse_arguments
from trainkit.errors import UsageError
from trainkit.text import GIB, pluralize, table

if TYPE_CHECKING:
    from trainkit.machine.facts import Facts, Gpu, GpuProcess, Hold

EVERY_SECONDS = 1.0
NARROWEST, WIDEST = 60, 140  # columns
BAR = 16  # cells of the memory bar
Sections = dict[str, dict[str, str]]
# Variables that change a launch: how their names begin, and whole names.
LAUNCH_VARIABLES = (
    "ACCELERATE_", "BNB_", "CONDA_PREFIX", "CUBLAS_", "CUDA_", "CUDNN_", "DEEPSPEED_", "DS_", "FSDP_", "GLOO_", "GPU_",
    "HF_", "HIP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MASTER_", "MKL_", "NCCL_", "NVIDIA_", "OMP_",
    "PET_", "PYTHONPATH", "PYTORCH_", "ROCM_", "ROCR_", "SLURM_", "TMPDIR", "TOKENIZERS_", "TORCH", "TRAINKIT",
    "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
_WHOLE = frozenset({"CC", "CXX", "RANK"})
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


app = typer.Typer(name="env", cls=CommandGroup, add_completion=False)


@app.callback(invoke_without_command=True)
def env(context: typer.Context, as_json: Json = False) -> None:
    """Show versions, GPUs, cores, memory, scheduler and the variables that affect a launch. Secrets are masked.

    Example: trainkit env

    Example: trainkit env gpus
    """
    if part := context.invoked_subcommand:
        if as_json:
            raise UsageError("--json stands in front of a part", hint=f"trainkit env {part} --json")
        return
    from trainkit.machine.probe import probe

    refuse_arguments(context)
    sections = report(probe(), dict(os.environ))
    sys.stdout.write(json.dumps(sections, indent=2) + "\n" if as_json else render_report(sections))


@app.command("gpus", cls=Command)
def gpus(
    as_json: Json = False,
    watch: Annotated[bool, Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    machine: On = None,
) -> None:
    """Show the GPUs: memory, utilization, processes and their owners, and which trainkit run holds each.

    Without a GPU it says why. devices.select accepts index and UUID.

    Example: trainkit env gpus

    Example: trainkit env gpus --watch
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
        return render_cards(facts, min(shutil.get_terminal_size().columns, WIDEST))
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


def render_cards(facts: Facts, width: int) -> str:
    """One block per GPU: what it is and how full, then who holds it and which processes use it. width: columns."""
    machine = facts.origin or facts.hostname
    if not facts.gpus:
        lines = [f"{machine}: no CUDA or ROCm GPU can be used here"]
        lines += ["  Apple's GPU (MPS) can be used"] if facts.mps else []
        lines += [f"  {facts.notes[name]}" for name in ("gpus", "nvidia", "amd") if name in facts.notes]
        return "".join(f"{line}\n" for line in lines)
    driver = f", driver {facts.driver} (CUDA {facts.cuda_driver})" if facts.driver else ""
    lines = [f"{machine}: {pluralize(len(facts.gpus), 'GPU')}{driver}"]
    for gpu in facts.gpus:
        lines += ["", *_card_lines(gpu)]
    lines += [f"note: {name}: {note}" for name, note in facts.notes.items() if name in {"gpus", "amd"}]
    return "".join(f"{_cut(line, max(width, NARROWEST))}\n" for line in lines)


def _card_lines(gpu: Gpu) -> Iterator[str]:
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
        yield "    needs a reset to retire bad memory"
    if gpu.compute_mode != "default":
        yield f"    compute mode: {gpu.compute_mode}"
    yield from _users(gpu.held_by, gpu.processes, idle=not gpu.mig)
    yield from _next(gpu.wanted_by)
    for part in gpu.instances:
        yield f"    MIG {part.profile:<9} {_memory(part.memory_total, part.memory_free)}"
        yield f"      {part.uuid}"
        yield from (f"  {line}" for line in _users(part.held_by, part.processes, idle=True))
        yield from (f"  {line}" for line in _next(part.wanted_by))


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
        draws = " (graphics only)" if each.graphics else ""
        yield f"    {each.pid:>8} {each.user:<10} {memory} GiB  {command}{draws}"
    if idle and held is None and not processes:
        yield "    idle"


def _next(wanted: Hold | None) -> Iterator[str]:
    if wanted is not None:
        yield f"    next for the trainkit run {wanted.run}, which waits (pid {wanted.pid}, {wanted.user})"


def _cut(line: str, width: int) -> str:
    """The line within the width. A path alone keeps its end, which says which run it is."""
    if len(line) <= width:
        return line
    path = line.lstrip()
    if path.startswith("/"):
        indent = line[: -len(path)]
        return f"{indent}\N{HORIZONTAL ELLIPSIS}{path[len(indent) + 1 - width :]}"
    return f"{line[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


@app.command("facts", cls=Command)
def facts() -> None:
    """Print the facts of this machine as JSON: GPUs, cores, memory, versions, the scheduler's allocation.

    Example: trainkit env facts > FACTS.json

    Example: trainkit plan ddp --on FACTS.json
    """
    from trainkit.machine.probe import probe

    sys.stdout.write(json.dumps(probe().to_json(), indent=2) + "\n")


def report(facts: Facts, environ: Mapping[str, str]) -> Sections:
    """Everything, by section; secret values are masked."""
    from trainkit.recipe.secrets import is_secret_name, mask, mask_line

    build = facts.torch
    limit = "" if facts.cpu_limit is None else f", {facts.cpu_limit:g} by the control group"
    available = "" if facts.memory_available is None else f", {facts.memory_available / GIB:.1f} available"
    job = facts.allocation
    reasons = [facts.notes[name] for name in ("gpus", "nvidia", "amd") if name in facts.notes]
    without = "Apple's GPU (MPS)" if facts.mps else "; ".join(reasons) or "no driver"
    sections: Sections = {
        "trainkit": {
            "version": __version__,
            "installed in": str(Path(__file__).resolve().parents[2]),
            "python": f"{facts.python}, {facts.executable}",
            "system": f"{facts.system}, kernel {facts.kernel}, {facts.machine}",
        },
        "packages": {**facts.packages, "torch was built for": build.built_for if build else "(torch is not installed)"},
        "processor": {
            "name": facts.cpu_name or "?",
            "cores": f"{facts.cpu_cores} usable, {facts.cpu_total or '?'} in total{limit}",
            "memory": f"{facts.memory_total / GIB:.1f} GiB{available}",
            "NUMA nodes": str(len(facts.numa) or "?"),
        },
        "cards": {f"GPU {gpu.index}": _card(gpu) for gpu in facts.gpus} or {"none": without},
        "scheduler": {"job": f"{job.scheduler} {job.job}", **job.variables} if job else {},
        "environment": {
            name: mask(value) if is_secret_name(name) else _IN_URL.sub("***@", mask_line(value))
            for name, value in sorted(environ.items())
            if name in _WHOLE or name.startswith(LAUNCH_VARIABLES)
        },
        "unknown": {name: note for name, note in facts.notes.items() if name not in {"nvidia", "amd"}},
    }
    if facts.driver:
        sections["cards"] |= {"driver": f"{facts.driver}, runs CUDA up to {facts.cuda_driver}"}
    if facts.nccl:
        sections["packages"] |= {"nccl": facts.nccl}
    return {title: rows for title, rows in sections.items() if rows}


def render_report(sections: Sections) -> str:
    """Plain text, one line a value, to be pasted as it is."""
    text = ""
    for title, rows in sections.items():
        # A value with a line break or a control character is shown escaped.
        values = (
            each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in rows.values()
        )
        text += f"{title}:\n" + table((f"  {name}", value) for name, value in zip(rows, values, strict=True))
    return text


def _card(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    split = f", split by MIG into {len(gpu.instances)}" if gpu.mig else ""
    memory = f"{gpu.memory_total / GIB:.1f} GiB, {gpu.memory_free / GIB:.1f} free"
    limits = ((gpu.power_limit, "W at most"), (gpu.clock_limit, "MHz at most"))
    bounds = "".join(f", {limit:.0f} {unit}" for limit, unit in limits if limit)
    place = f", {gpu.pci_bus_id}" if gpu.pci_bus_id else ""
    return f"{gpu.name}, {memory}, compute capability {major}.{minor}{split}{bounds}, {gpu.uuid}{place}"
