"""`trainkit env` and `trainkit facts`: this machine for a bug report, and as JSON that `plan --on` reads elsewhere."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import __version__
from trainkit.cli.options import Json
from trainkit.text import GIB, table

if TYPE_CHECKING:
    from trainkit.machine.facts import Facts, Gpu

Sections = dict[str, dict[str, str]]
# Variables that change a launch: their names, or how these begin.
LAUNCH_VARIABLES = (
    "ACCELERATE_", "BNB_", "CC", "CONDA_PREFIX", "CUBLAS_", "CUDA_", "CUDNN_", "CXX", "DEEPSPEED_", "DS_", "FSDP_",
    "GLOO_", "GPU_", "HF_", "HIP_", "KMP_", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MASTER_", "MKL_", "NCCL_",
    "NVIDIA_", "OMP_", "PET_", "PYTHONPATH", "PYTORCH_", "RANK", "ROCM_", "ROCR_", "SLURM_", "TMPDIR", "TOKENIZERS_",
    "TORCH", "TRAINKIT", "TRANSFORMERS_", "TRITON_", "UCX_", "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
_WHOLE = frozenset({"CC", "CXX", "RANK"})
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def env(as_json: Json = False) -> None:
    """Show versions, cards, cores, memory, scheduler and the variables that change a launch. Secrets are masked.

    Example: trainkit env
    """
    from trainkit.machine.probe import probe

    sections = report(probe(), dict(os.environ))
    sys.stdout.write(json.dumps(sections, indent=2) + "\n" if as_json else render(sections))


def facts() -> None:
    """Print the facts of this machine as JSON: cards, cores, memory, versions, the scheduler's allocation.

    Example: trainkit facts > FACTS.json

    Example: trainkit plan ddp --on FACTS.json
    """
    from trainkit.machine.probe import probe

    sys.stdout.write(json.dumps(probe().to_json(), indent=2) + "\n")


def report(facts: Facts, environ: Mapping[str, str]) -> Sections:
    """Everything, by section; secret values are masked."""
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
            "cores": f"{facts.cpu_cores} to be used, {facts.cpu_total or '?'} in all{limit}",
            "memory": f"{facts.memory_total / GIB:.1f} GiB{available}",
            "NUMA nodes": str(len(facts.numa) or "?"),
        },
        "cards": {f"card {gpu.index}": _card(gpu) for gpu in facts.gpus} or {"none": without},
        "scheduler": {"job": f"{job.scheduler} {job.job}", **job.variables} if job else {},
        "environment": {name: shown(name, environ[name]) for name in sorted(environ) if changes_launch(name)},
        "not found out": {name: note for name, note in facts.notes.items() if name not in {"nvidia", "amd"}},
    }
    if facts.driver:
        sections["cards"] |= {"driver": f"{facts.driver}, runs CUDA up to {facts.cuda_driver}"}
    if facts.nccl:
        sections["packages"] |= {"nccl": facts.nccl}
    return {title: rows for title, rows in sections.items() if rows}


def render(sections: Sections) -> str:
    """Plain text, one line a value, to be pasted as it is."""
    text = ""
    for title, rows in sections.items():
        # A value with a line break or a control character is shown escaped.
        values = (
            each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in rows.values()
        )
        text += f"{title}:\n" + table((f"  {name}", value) for name, value in zip(rows, values, strict=True))
    return text


def changes_launch(name: str) -> bool:
    """Whether a variable changes a launch."""
    return any(name == known if known in _WHOLE else name.startswith(known) for known in LAUNCH_VARIABLES)


def shown(name: str, value: str) -> str:
    """The value as others may see it."""
    from trainkit.recipe.layers.secrets import is_secret_name, mask, mask_line

    return mask(value) if is_secret_name(name) else _IN_URL.sub("***@", mask_line(value))


def _card(gpu: Gpu) -> str:
    major, minor = gpu.compute_capability
    split = f", split by MIG into {len(gpu.instances)}" if gpu.mig else ""
    memory = f"{gpu.memory_total / GIB:.1f} GiB, {gpu.memory_free / GIB:.1f} free"
    limits = ((gpu.power_limit, "W at most"), (gpu.clock_limit, "MHz at most"))
    bounds = "".join(f", {limit:.0f} {unit}" for limit, unit in limits if limit)
    place = f", {gpu.pci_bus_id}" if gpu.pci_bus_id else ""
    return f"{gpu.name}, {memory}, compute capability {major}.{minor}{split}{bounds}, {gpu.uuid}{place}"
