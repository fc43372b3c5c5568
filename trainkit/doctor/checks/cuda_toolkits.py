"""The CUDA toolkits: whether PATH, CUDA_HOME and LD_LIBRARY_PATH agree on one, and whether it is that of torch."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Host, Target, ok, requirement_level, skipped
from trainkit.machine.versions import release

# Major versions within which DeepSpeed takes any minor one (deepspeed/ops/op_builder/builder.py,
# cuda_minor_mismatch_ok); torch refuses another major and only warns of another minor (torch/utils/cpp_extension.py).
MINORS_MIX = frozenset({10, 11, 12})
# Where packages, runfile and distributions put toolkits (CUDA Installation Guide for Linux; Debian and Arch packages).
PLACES = (
    "usr/local/cuda*",
    "opt/cuda*",
    "usr/lib/cuda*",
    "usr/lib/nvidia-cuda-toolkit",
    "opt/nvidia/hpc_sdk/*/*/cuda/*",
)
_RELEASE = re.compile(r"release (\d+\.\d+)(?:, V([\d.]+))?")
_RUNTIME = re.compile(r"libcudart\.so\.(\d+(?:\.\d+)*)$")
ASK_SECONDS = 5.0


def agreement(host: Host, target: Target) -> list[Finding]:
    """Toolkits that do not answer, settings that disagree or lead nowhere, else the list."""
    toolkits, found = find_toolkits(host), list(_absent(host))
    chosen = picks(host, toolkits)
    if not toolkits and not chosen:
        return found or [skipped("no CUDA toolkit is installed")]
    build = host.facts.torch
    listed = (*(each.label for each in toolkits), *(each.label for each in chosen))
    if build and not build.cuda:
        return found or [ok(f"{len(toolkits)} installed; {build.label}, uses none", *listed)]
    newest = next((each for each in reversed(toolkits) if has_headers(each.home)), None)
    right = fitting(toolkits, build.cuda) if build and build.cuda else newest
    fix = exports(host, right) if right else ()
    level = requirement_level(target)
    for toolkit in toolkits:
        if not toolkit.version:
            look = f"{toolkit.root}/bin/nvcc --version      # should print its release"
            what = f"nvcc of {toolkit.root} does not print its version"
            found.append(Finding("warning", what, (toolkit.why,), (look,)))
    if (pick := torch_pick(host, toolkits)) and pick.toolkit is None:
        what = f"torch would look for a CUDA toolkit by {pick.by} and find none"
        found.append(Finding(level, what, (pick.label,), fix or ("unset CUDA_HOME CUDA_PATH",)))
    elif pick and not has_headers(pick.folder):
        what = f"torch would compile with the toolkit in {pick.folder}, which has no CUDA headers"
        evidence = (pick.label, f"missing: {pick.folder}/include/cuda_runtime.h")
        found.append(Finding(level, what, evidence, fix))
    if len({each.version for each in chosen if each.version}) > 1:
        names = " and ".join((", ".join(each.by for each in chosen[:-1]), chosen[-1].by))
        found.append(Finding(level, f"{names} pick different CUDA toolkits", listed, fix))
    if len(toolkits) == 1:
        return found or [ok(toolkits[0].label, *listed)]
    return found or [Finding("note", f"{len(toolkits)} toolkits are installed", listed, fix)]


def _absent(host: Host) -> Iterator[Finding]:
    """Folders that programs are told to load from and that are not there. NVIDIA's images name two, so it is a note."""
    searched = [each for each in host.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each]
    if absent := [each for each in searched if not Path(each).is_dir()]:
        kept = shlex.quote(os.pathsep.join(each for each in searched if each not in absent))
        fix = f"export LD_LIBRARY_PATH={kept}      # or correct them"
        yield Finding("note", "LD_LIBRARY_PATH names folders that are not there", tuple(absent), (fix,))


def version(host: Host, target: Target) -> Finding:
    """The same version, one that will do, or one that torch or DeepSpeed refuses."""
    build, level = host.facts.torch, requirement_level(target)
    if build is None:
        return skipped("torch is not installed")
    if not build.cuda:
        return skipped(f"{build.label}: no CUDA extension is compiled")
    cuda, toolkits = build.cuda, find_toolkits(host)
    right = fitting(toolkits, cuda)
    exact = right is not None and (right.version == cuda or release(cuda)[0] in MINORS_MIX)
    fix: tuple[str, ...] = (  # as the CUDA Installation Guide for Linux and conda's nvidia channel name the packages
        f"sudo apt-get install cuda-toolkit-{cuda.replace('.', '-')}      # from NVIDIA's repository",
        f"conda install -c nvidia cuda-toolkit={cuda}      # without root",
    )
    fix = exports(host, right) if right is not None and exact else fix
    pick = torch_pick(host, toolkits)
    if pick is None or pick.toolkit is None:
        what = "no CUDA toolkit is found, so no CUDA extension can be compiled (DeepSpeed's ops, apex)"
        return Finding(level, what, (build.label,), fix)
    if not pick.version:
        return skipped(f"nvcc of {pick.toolkit.root} does not print its version")
    toolkit, evidence = pick.toolkit.version, (build.label, pick.label)
    ours, theirs = release(toolkit)[:2], release(cuda)[:2]
    if ours == theirs:
        return ok(f"both are CUDA {cuda}", *evidence)
    if ours[0] != theirs[0]:
        what = f"torch was built with CUDA {cuda} and refuses to build with toolkit {toolkit}"
        return Finding(level, what, evidence, fix)
    if ours[0] in MINORS_MIX:
        return ok(f"CUDA {toolkit} builds extensions for torch's {cuda} (same major version)", *evidence)
    what = f"torch only warns of toolkit {toolkit} beside its CUDA {cuda}, but DeepSpeed refuses it"
    return Finding(level, what, evidence, (*fix, "export DS_SKIP_CUDA_CHECK=1      # at your own risk, instead"))


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder with bin/nvcc. version: ``12.8``, empty where nvcc does not say; why: then, what it said instead."""

    root: Path
    version: str
    why: str = ""
    also: tuple[Path, ...] = ()  # other names of the same folder

    @property
    def names(self) -> tuple[Path, ...]:
        """All names of the folder, its own first."""
        return (self.root, *self.also)

    @property
    def home(self) -> Path:
        """The name under which extensions can be compiled against it; its own where none will do."""
        return next((name for name in self.names if has_headers(name)), self.root)

    @property
    def label(self) -> str:
        """For people."""
        names = f" (also {', '.join(map(str, self.also))})" if self.also else ""
        return f"CUDA {self.version or 'of unknown version'}: {self.root}{names}"


@dataclass(frozen=True, slots=True)
class Pick:
    """Which toolkit a setting leads to.

    by: the setting; value: its value; folder: the toolkit's folder as torch would write it, links not followed.
    toolkit: None where there is none.
    """

    by: str
    value: str
    folder: Path
    toolkit: Toolkit | None = None
    version: str = ""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.by} picks {self.value}" + (f" (CUDA {self.version})" if self.version else " (no toolkit there)")


def has_headers(folder: Path) -> bool:
    """Whether extensions can be compiled against the toolkit in a folder."""
    return any((folder / name / "cuda_runtime.h").is_file() for name in ("include", "targets/x86_64-linux/include"))


def find_toolkits(host: Host) -> tuple[Toolkit, ...]:
    """Every toolkit in the usual places, on PATH and in CUDA_HOME, oldest first, each once whatever its names."""
    named = (host.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"))
    candidates = (
        *(folder for pattern in PLACES for folder in sorted(host.root.glob(pattern))),
        *(Path(value) for value in named if value),
        *(compiler.parent.parent for compiler in host.every("nvcc")),
    )
    names: dict[Path, list[Path]] = {}
    for folder in dict.fromkeys(candidates):
        compiler = folder / "bin" / "nvcc"
        if compiler.is_file() and os.access(compiler, os.X_OK):
            names.setdefault(Path(os.path.realpath(compiler)), []).append(folder)
    found = []
    for compiler, folders in names.items():
        # Its own folder comes first among the names: links to it may be changed to another.
        home = compiler.parent.parent
        root = home if home in folders or (home / "bin" / "nvcc").exists() else folders[0]
        done = host.run((str(root / "bin" / "nvcc"), "--version"), ASK_SECONDS)
        match = _RELEASE.search(done.output)
        also = tuple(folder for folder in folders if folder != root)
        found.append(Toolkit(root, match[1], "", also) if match else Toolkit(root, "", done.said, also))
    return tuple(sorted(found, key=lambda toolkit: (release(toolkit.version), str(toolkit.root))))


def picks(host: Host, toolkits: tuple[Toolkit, ...]) -> tuple[Pick, ...]:
    """What PATH, CUDA_HOME, CUDA_PATH and LD_LIBRARY_PATH each lead to; what is not set is left out."""
    found = []
    if compiler := host.which("nvcc"):
        found.append(_pick("PATH", compiler.parent.parent, toolkits, str(compiler)))
    named = ((name, host.environ.get(name, "")) for name in ("CUDA_HOME", "CUDA_PATH"))
    found += [_pick(name, Path(value), toolkits, value) for name, value in named if value]
    searched = filter(None, host.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    # The longest name is the library itself, with its version; the others are links to it.
    runtimes = (
        max(Path(each).glob("libcudart.so.*"), key=lambda path: len(path.name), default=None) for each in searched
    )
    if library := next(filter(None, runtimes), None):
        real = Path(os.path.realpath(library))
        match = _RUNTIME.search(real.name) or _RUNTIME.search(library.name)
        version = ".".join(match[1].split(".")[:2]) if match else ""
        inside = (each for each in toolkits for name in each.names if Path(os.path.realpath(name)) in real.parents)
        owner = next(inside, None)
        found.append(Pick("LD_LIBRARY_PATH", str(library), library.parent, owner, owner.version if owner else version))
    return tuple(found)


def torch_pick(host: Host, toolkits: tuple[Toolkit, ...]) -> Pick | None:
    """The toolkit that torch builds extensions with, in its order (torch/utils/cpp_extension.py, _find_cuda_home)."""
    found = {pick.by: pick for pick in picks(host, toolkits)}
    # LD_LIBRARY_PATH is what programs load, and has no say in what is compiled.
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        if name in found:
            return found[name]
    usual = host.under("/usr/local/cuda")
    return _pick("nothing set, so torch", usual, toolkits, str(usual)) if usual.exists() else None


def _pick(by: str, folder: Path, toolkits: tuple[Toolkit, ...], value: str) -> Pick:
    same = (
        each for each in toolkits if folder in each.names or os.path.realpath(folder) == os.path.realpath(each.root)
    )
    toolkit = next(same, None)
    return Pick(by, value, folder, toolkit, toolkit.version if toolkit else "")


def exports(host: Host, toolkit: Toolkit) -> tuple[str, ...]:
    """The lines that pick a toolkit in a shell, without those in force; the variables' values are kept behind it."""
    root, home = shlex.quote(str(toolkit.home)), toolkit.home
    libraries = next((name for name in ("lib64", "lib") if (home / name).is_dir()), "lib64")
    searched = host.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    lines = {
        f"export CUDA_HOME={root}": host.environ.get("CUDA_HOME") == str(home),
        f"export PATH={root}/bin:$PATH": host.which("nvcc") == home / "bin" / "nvcc",
        f"export LD_LIBRARY_PATH={root}/{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}": (
            searched[0] == str(home / libraries)
        ),
    }
    return tuple(line for line, in_force in lines.items() if not in_force)


def fitting(toolkits: tuple[Toolkit, ...], cuda: str) -> Toolkit | None:
    """The toolkit that fits a torch built with a CUDA version: the same one, else the nearest of the same major."""
    usable = [each for each in toolkits if each.version and has_headers(each.home)]
    same = [each for each in usable if each.version == cuda]
    major = [each for each in usable if release(each.version)[:1] == release(cuda)[:1]]
    return next(reversed(same or major), None)


TOOLKITS = Check("toolkits", "CUDA toolkits", 10.0, agreement, needs="compiles_cuda")
TOOLKIT_VERSION = Check("toolkit-version", "CUDA of torch and toolkit", 10.0, version, needs="compiles_cuda")
