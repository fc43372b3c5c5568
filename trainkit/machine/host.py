"""Facts of the machine itself: cores, memory, packages, the build of torch, and what a scheduler gave to this job."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainkit.machine.cpu_affinity import core_list
from trainkit.machine.facts import Allocation, NumaNode, TorchBuild, at_least
from trainkit.metrics import METRICS
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.address import PACKAGES as PACKAGES_OF_STORAGE

CGROUPS, PCI = "sys/fs/cgroup", "sys/bus/pci/devices"
# controller, where its groups are, the files of the limit and of what is in use; cgroups of version 2, then 1
MEMORY_LIMITS = (
    ("", CGROUPS, "memory.max", "memory.current"),
    ("memory", f"{CGROUPS}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def probe_host(root: Path = Path("/")) -> Mapping[str, str]:
    """As the kernel gives it; no name service is asked, and no tool is started."""
    named = re.search(r'^PRETTY_NAME="?([^"\n]+)', text(root / "etc/os-release"), re.MULTILINE)
    system = named[1] if named else platform.system()
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]}"
    return {"hostname": socket.gethostname(), "system": system, "kernel": platform.release()}


def probe_mps() -> Mapping[str, bool]:
    """PyTorch can use the GPU of every Mac with Apple silicon, from macOS 12.3 on."""
    # An interpreter under Rosetta reports x86_64, and cannot use MPS.
    silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return {"mps": silicon and at_least(platform.mac_ver()[0], "12.3")}


def probe_cpu(root: Path = Path("/")) -> Mapping[str, Any]:
    """What this process may use: at least one core. root: where /proc and /sys are looked for."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # macOS has none
    total = os.cpu_count()
    cores = len(affinity) or total or 1
    limit, name = _cpu_limit(root), ""
    # Line by line: the kernel makes the file while it is read, core by core.
    with contextlib.suppress(OSError), (root / "proc/cpuinfo").open(errors="replace") as lines:
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu_cores": max(min(cores, cores if limit is None else int(limit)), 1),
        "cpu_total": total,
        "cpu_affinity": tuple(affinity),
        "cpu_limit": limit,
        "cpu_name": name,
    }


def _cpu_limit(root: Path) -> float | None:
    """The tightest limit of the process's own cgroup and of those above it, in cores; None without one."""
    quotas = [text(folder / "cpu.max").split() for folder in cgroups(root, "")]
    for mount in ("cpu", "cpu,cpuacct"):
        groups = cgroups(root, "cpu", f"{CGROUPS}/{mount}")
        quotas += [[text(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")] for folder in groups]
    # microseconds of CPU in each period; `max` and -1 are no limit
    limited = [pair for pair in quotas if len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() and int(pair[1])]
    return min((int(quota) / int(period) for quota, period in limited), default=None)


def probe_numa(root: Path = Path("/")) -> Mapping[str, tuple[NumaNode, ...]]:
    """Which cores are near to which part of the memory, in the order of nodes; none where the system does not say."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node*"):
        if (index := folder.name[4:]).isdigit():
            memory = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
            cores = core_list((folder / "cpulist").read_text())
            found.append(NumaNode(int(index), cores, int(memory[1]) * 1024 if memory else 0))
    return {"numa": tuple(sorted(found, key=lambda node: node.index))}


def probe_memory(root: Path = Path("/")) -> Mapping[str, int | None]:
    """Main memory that this process may use, in bytes: the machine's, or less where a cgroup says so."""
    installed, free = _whole_machine(root)
    # A cgroup of version 1 without a limit says nearly 2**63, which is never the least.
    total = min([installed, *(limit for _, limit, _ in _memory_limits(root))])
    return {"memory_total": total, "memory_available": None if free is None else min(free, total)}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that processes can still take: the system's estimate, or less where a cgroup leaves less.

    What there is in all where the system does not say.
    """
    installed, free = _whole_machine(root)
    left = [installed if free is None else min(installed, free)]
    for folder, limit, in_use in _memory_limits(root):
        # What the kernel holds of files counts as in use, and is given back when asked for.
        statistics = text(folder / "memory.stat").split()
        files = dict(zip(statistics[::2], statistics[1::2], strict=False)).get("inactive_file", "0")
        left.append(max(0, limit - (in_use - int(files))))
    return min(left)


def _whole_machine(root: Path) -> tuple[int, int | None]:
    """What is installed, and what the kernel would give of it without swapping (None where it does not say)."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text(root / "proc/meminfo"), re.MULTILINE)
    return installed, int(found[1]) * 1024 if found else None


def _memory_limits(root: Path) -> list[tuple[Path, int, int]]:
    """(cgroup, its limit, what is in use of it) of every cgroup around this process that has a limit."""
    return [
        (folder, limit, number(folder / usage) or 0)
        for controller, mount, name, usage in MEMORY_LIMITS
        for folder in cgroups(root, controller, mount)
        if (limit := number(folder / name)) is not None
    ]


def text(path: Path) -> str:
    """What a file holds, without white space around it; empty where there is no such file."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The number in a file; None for `max` and for all else that is none, and where there is no such file."""
    content = text(path)
    return int(content) if content.lstrip("-").isdigit() else None


def numa_node(root: Path, bus_id: str) -> int | None:
    """The NUMA node that a PCI device is near to."""
    # The kernel writes a bus's domain with 4 digits, NVML with 8; -1 is for a board that does not say.
    node = number(root / PCI / bus_id.lower()[-12:] / "numa_node")
    return node if node is not None and node >= 0 else None


def cgroups(root: Path, controller: str, mount: str = CGROUPS) -> tuple[Path, ...]:
    """The process's own cgroup and those above it: of the unified hierarchy for an empty controller, else version 1."""
    # Each line is hierarchy:controllers:path, as cgroups(7) says.
    entries = (line.split(":", 2) for line in text(root / "proc/self/cgroup").splitlines())
    group = next((path for _, controllers, path in entries if controller in controllers.split(",")), None)
    if group is None:
        return ()
    top = root / mount  # inside a container the path may not exist, and the mount itself counts
    folder = top / group.strip("/")
    return tuple(path for path in (folder, *folder.parents) if path == top or top in path.parents)


PACKAGES = frozenset((
    *(each.requires.name for each in OPTIMIZERS.values() if each.requires),
    *(each.package for each in METRICS.values() if each.package),
    *PACKAGES_OF_STORAGE.values(),
    "accelerate", "datasets", "deepspeed", "flash-attn", "fsspec", "ninja", "numpy", "nvidia-ml-py", "peft", "pyarrow",
    "safetensors", "tensorboard", "torch", "torch-xla", "trackio", "transformers", "trl", "wandb",
))  # fmt: skip
NCCL = "nvidia-nccl-cu"  # and the CUDA that it is for

# Read from the names of metadata folders: importlib.metadata would take 39 ms to say the same.
# Unambiguous, because installers write a hyphen in a name as an underscore there (PEP 427).
_FOLDER = re.compile(r"^(?P<name>[^-]+)-(?P<version>[^-]+)(?:-[^-]+)*\.(?:dist|egg)-info$")
_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE)


def probe_packages(path: Iterable[str] | None = None) -> Mapping[str, Any]:
    """Version by distribution name. path: folders to look in, first wins; by default those of the interpreter."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in distributions(folder or "."):
            if name in PACKAGES or name.startswith(NCCL):
                found.setdefault(name, version)
    nccl = [found.pop(name) for name in sorted(found) if name.startswith(NCCL)]
    return {"packages": dict(sorted(found.items())), "nccl": nccl[-1] if nccl else ""}


def probe_torch(path: Iterable[str] | None = None) -> Mapping[str, TorchBuild | None]:
    """The build of the first torch on the path, read from its version file: importing torch would take seconds."""
    for folder in sys.path if path is None else path:
        with contextlib.suppress(OSError):
            assigned = dict(_ASSIGNED.findall(Path(folder or ".", "torch", "version.py").read_text()))
            return {"torch": TorchBuild(assigned.get("__version__", ""), assigned.get("cuda"), assigned.get("hip"))}
    return {"torch": None}


def cxx(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The C++ compiler that torch builds with, as words (torch/utils/cpp_extension.py, get_cxx_compiler)."""
    return tuple(shlex.split(environ.get("CXX", ""))) or ("c++",)


def compile_backends() -> tuple[str, ...]:
    """What the installed torch lists, other packages' too; empty where it says nothing. Importing it takes seconds."""
    code = "import torch; print(*torch.compiler.list_backends(exclude_tags=()))"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        argv = (sys.executable, "-P", "-W", "ignore", "-c", code)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        return tuple(done.stdout.splitlines()[-1].split())
    return ()


# Task of `model.task` -> the table of its auto class, in transformers' models/auto/modeling_auto.py.
_TASKS: Mapping[str, str] = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
}
# In the last table, and without a decoder of their own that is given a text: they write about sound.
_OF_SOUND = frozenset({
    "audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo",
    "nemo_speechlm", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime",
})  # fmt: skip
_ENTRY = re.compile(r"""^\s*\(?"([\w.-]+)"[,:]""", re.MULTILINE)


def transformers_architectures(folder: Path | None = None) -> dict[str, tuple[str, ...]]:
    """The types of model that the installed transformers knows, each with the tasks that it has a class for.

    Its tables are read as text, for importing it takes seconds. Empty where it is not installed, or has no such tables.
    folder: of the package.
    """
    if folder is None:
        spec = find_spec("transformers")
        if spec is None or spec.origin is None:
            return {}
        folder = Path(spec.origin).parent
    texts = {}
    for name in ("modeling_auto", "configuration_auto", "auto_mappings"):
        with contextlib.suppress(OSError):
            texts[name] = (folder / "models" / "auto" / f"{name}.py").read_text(encoding="utf-8")
    types = {found for text in texts.values() for found in _entries(text, "CONFIG_MAPPING_NAMES")}
    tasks = {task: _entries(texts.get("modeling_auto", ""), table) for task, table in _TASKS.items()}
    tasks["seq2seq_lm"] -= _OF_SOUND
    return {name: tuple(task for task in _TASKS if name in tasks[task]) for name in sorted(types)}


def _entries(text: str, table: str) -> set[str]:
    """The names in every part of a table: its making, and what is added to it."""
    parts = re.findall(
        rf"^{table}(?: = OrderedDict(?:\[str, str\])?|\.update)\((.*?)^\)", text, re.MULTILINE | re.DOTALL
    )
    inline = re.findall(rf"^{table} = OrderedDict\(\*\*\{{\"([\w.-]+)\"", text, re.MULTILINE)
    return {*_ENTRY.findall("".join(parts)), *inline}


def distributions(folder: str) -> Iterator[tuple[str, str]]:
    """Name and version of what is installed in a folder, by the names of its metadata folders."""
    entries: list[str] = []
    with contextlib.suppress(OSError):  # zip files and folders that are gone are on sys.path too
        entries = os.listdir(folder)  # noqa: PTH208 - names are all that is needed, and a site folder has hundreds
    for match in filter(None, map(_FOLDER.match, entries)):
        yield canonical(match["name"]), match["version"]


def canonical(name: str) -> str:
    """The form in which names of distributions are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# scheduler: the variable that only its jobs have, whether it names the job, and the others that describe the job
SCHEDULERS: Mapping[str, tuple[str, bool, str]] = {
    "slurm": (
        "SLURM_JOB_ID",
        True,
        (
            "SLURM_JOB_NUM_NODES SLURM_NNODES SLURM_NODEID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS "
            "SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_CPUS_ON_NODE SLURM_JOB_GPUS "
            "SLURM_STEP_GPUS SLURM_GPUS_ON_NODE SLURM_GPUS_PER_NODE SLURM_MEM_PER_NODE SLURM_JOB_NODELIST "
            "SLURM_JOB_PARTITION SLURM_RESTART_COUNT SLURMD_NODENAME"
        ),
    ),
    "pbs": (
        "PBS_JOBID",
        True,
        "PBS_NODEFILE PBS_GPUFILE PBS_NODENUM PBS_TASKNUM PBS_NUM_NODES PBS_NUM_PPN PBS_NP PBS_NGPUS PBS_QUEUE NCPUS",
    ),
    "lsf": (
        "LSB_JOBID",
        True,
        "LSB_HOSTS LSB_MCPU_HOSTS LSB_DJOB_NUMPROC LSB_DJOB_HOSTFILE LSB_GPU_REQ LSB_QUEUE LSB_MAX_NUM_PROCESSORS",
    ),
    "kubernetes": ("KUBERNETES_SERVICE_HOST", False, "HOSTNAME JOB_COMPLETION_INDEX NVIDIA_VISIBLE_DEVICES"),
}


def probe_allocations(environ: Mapping[str, str] | None = None) -> Mapping[str, Allocation | None]:
    """The first scheduler whose job this process is part of; a pod that Slurm runs in counts as Slurm's."""
    environ = os.environ if environ is None else environ
    for scheduler, (own, names_job, others) in SCHEDULERS.items():
        if own in environ:
            given = {name: environ[name] for name in sorted([own, *others.split()]) if name in environ}
            return {"allocation": Allocation(scheduler, environ[own] if names_job else "", given)}
    return {"allocation": None}
