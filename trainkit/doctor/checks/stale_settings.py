"""Settings left in the environment and in files of the home folder that silently change a launch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from trainkit.doctor.check import Finding, Host, Level, Target, ok
from trainkit.planner.env import LEAKS
from trainkit.recipe.secrets import MASK, is_secret_name, mask_values


@dataclass(frozen=True, slots=True)
class Stray:
    """Variables that no plan removes. pattern: a name, or a prefix that ends in `*`; the first row that fits counts.

    harmless: values that change nothing. on: only runs on `cuda`, or of `several` ranks, are changed.
    """

    pattern: str
    level: Level
    effect: str
    harmless: tuple[str, ...] = ()
    on: Literal["any", "cuda", "several"] = "any"


STRAYS: tuple[Stray, ...] = (
    Stray("CUDA_VISIBLE_DEVICES", "note", "trainkit selects GPUs only among these", on="cuda"),
    Stray("CUDA_DEVICE_ORDER", "note", "GPUs are counted so, where no recipe sets devices.order", on="cuda"),
    Stray("CUDA_LAUNCH_BLOCKING", "warning", "every kernel is waited for: training is much slower", ("0",), "cuda"),
    Stray("NVIDIA_TF32_OVERRIDE", "warning", "it overrules precision.tf32", on="cuda"),
    Stray("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "warning", "it overrules precision.tf32", on="cuda"),
    Stray("OMP_NUM_THREADS", "note", "the plan sets its own number of threads per rank; this is not used"),
    Stray("OMP_*", "note", "it changes how each rank's threads are placed"),
    Stray("KMP_*", "note", "it changes how each rank's threads are placed"),
    Stray("MKL_*", "note", "it changes how each rank computes on the CPU"),
    Stray("NCCL_DEBUG*", "note", "NCCL writes a log", on="cuda"),
    Stray("NCCL_*", "warning", "it changes how GPUs talk to each other", on="cuda"),
    Stray("GLOO_*", "warning", "it changes how ranks talk to each other over the network", on="several"),
    Stray("TORCH_NCCL_*", "warning", "it changes how PyTorch watches over NCCL", on="cuda"),
    Stray("TORCH_DISTRIBUTED_DEBUG", "warning", "collectives are checked: training is slower", ("OFF",), "several"),
    Stray("TORCH_EXTENSIONS_DIR", "note", "compiled extensions are kept there"),
    Stray("TORCH_CUDA_ARCH_LIST", "note", "extensions are compiled for these GPUs alone", on="cuda"),
    Stray("TORCHDYNAMO_DISABLE", "warning", "torch.compile does nothing", ("0",)),
    Stray("TORCH_COMPILE_DISABLE", "warning", "torch.compile does nothing", ("0",)),
    Stray("TORCHINDUCTOR_*", "note", "it changes how torch.compile compiles"),
    Stray("TORCH_*", "note", "PyTorch may read it in each rank"),
    Stray("PYTORCH_*", "note", "PyTorch may read it in each rank"),
    Stray("DS_SKIP_CUDA_CHECK", "warning", "DeepSpeed builds with a toolkit that does not fit torch", ("0",), "cuda"),
    Stray("DS_*", "note", "DeepSpeed may read it"),
    Stray("LD_PRELOAD", "note", "these libraries are loaded into every rank"),
    Stray("PYTHONPATH", "note", "packages in these folders hide installed ones of the same name"),
    Stray("TRAINKIT__*", "note", "it sets a key of every recipe; `trainkit explain` shows which"),
)
# The plan sets these from the caller's values or in their place, and reports them in any case.
OWN = frozenset({"CUDA_VISIBLE_DEVICES"})


def settings(host: Host, target: Target) -> list[Finding]:
    """What the plan keeps out (named, harmless here), what it lets through, and files that launchers read unasked."""
    found = [*_leaks(host, target), *_strays(host, target), *_files(host, target)]
    return found or [ok("nothing in the environment or the home folder changes a launch")]


def _shown(name: str, value: str) -> str:
    shown = MASK if is_secret_name(name) else mask_values(value)
    return f"{name}={shown if MASK in shown else shlex.quote(shown if len(shown) <= 60 else shown[:57] + '...')}"


def _leaks(host: Host, target: Target) -> Iterator[Finding]:
    """Variables that no plan hands on, unless the recipe sets or takes them itself."""
    taken = set(target.recipe.env) | set(target.recipe.env_from) if target.recipe else set()
    for pattern, effect in LEAKS.items():
        names = [name for name in sorted(host.environ) if fnmatchcase(name, pattern) and name not in taken]
        if names:
            what = f"{', '.join(names)}: {effect}; trainkit does not hand {'it' if len(names) == 1 else 'them'} on"
            evidence = tuple(_shown(name, host.environ[name]) for name in names)
            yield Finding("note", what, evidence, (f"unset {' '.join(names)}      # for launches by hand",))


def _strays(host: Host, target: Target) -> Iterator[Finding]:
    """One finding for each row that fits; variables that the plan sets or takes are left out."""
    decided: set[str] = set()
    if target.plan:
        decided = {name for name, _ in target.plan.environment.set} | set(target.plan.environment.take)
    affected = {"any": True, "cuda": target.cuda, "several": target.ranks > 1}
    met: dict[Stray, list[str]] = {}
    for name, value in sorted(host.environ.items()):
        row = next((row for row in STRAYS if fnmatchcase(name, row.pattern)), None)
        leaks = any(fnmatchcase(name, pattern) for pattern in LEAKS)
        if row and affected[row.on] and value not in row.harmless and name not in decided - OWN and not leaks:
            met.setdefault(row, []).append(name)
    for row, names in met.items():
        evidence = tuple(_shown(name, host.environ[name]) for name in names)
        keep = f"      # or, if you need it, in the recipe: env_from: [{', '.join(names)}]"
        fix = f"unset {' '.join(names)}{keep if row.level == 'warning' else ''}"
        yield Finding(row.level, f"{', '.join(names)}: {row.effect}", evidence, (fix,))


def _files(host: Host, target: Target) -> Iterator[Finding]:
    """Of the working folder, the home folder, its caches, and /etc."""
    # The names that accelerate takes as its default (accelerate, commands/config/config_args.py).
    cache = Path(host.environ.get("XDG_CACHE_HOME") or host.home / ".cache")
    accelerate = Path(host.environ.get("HF_HOME") or cache / "huggingface", "accelerate")
    exported = host.environ.get("DS_ENV_FILE", ".deepspeed_env")
    by_accelerate = "`accelerate launch` by hand reads this file unasked; trainkit always names its own"
    by_deepspeed = "`deepspeed` by hand exports what it holds to other nodes; trainkit's plans do not read it"
    read = dict.fromkeys((accelerate / f"default_config.{ending}" for ending in ("yaml", "json")), by_accelerate)
    read |= dict.fromkeys((host.home / exported, host.folder / exported), by_deepspeed)
    for path, what in read.items():
        if path.is_file():
            quoted = shlex.quote(str(path))
            yield Finding("note", what, (str(path),), (f"mv {quoted} {quoted}.off      # unless you need it",))
    for path in (host.home / ".nccl.conf", host.under("/etc/nccl.conf")):
        if target.cuda and path.is_file():
            what = "NCCL reads it in every rank, and trainkit cannot keep it out"
            yield Finding("warning", what, (str(path),), (f"cat {shlex.quote(str(path))}      # still needed?",))
