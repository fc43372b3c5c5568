"""The CUDA toolkits of a machine: which there are, which of them each setting picks, and how to pick another."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainkit.doctor.host import Host
from trainkit.machine.versions import release

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


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder with bin/nvcc. version: ``12.8``, empty where nvcc does not say; why: then, what it said instead."""

    root: Path
    version: str
    why: str = ""
    also: tuple[Path, ...] = ()  # other names of the same folder

    @property
    def home(self) -> Path:
        """The name under which extensions can be compiled against it; its own where none will do."""
        return next((name for name in (self.root, *self.also) if has_headers(name)), self.root)

    @property
    def label(self) -> str:
        """For people."""
        names = f" (also {', '.join(map(str, self.also))})" if self.also else ""
        return f"CUDA {self.version or 'of unknown version'}: {self.root}{names}"


@dataclass(frozen=True, slots=True)
class Pick:
    """Which toolkit a setting leads to.

    by: the setting; value: what stands there; folder: the toolkit's folder as torch would write it, links not followed.
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
    names: dict[Path, list[Path]] = {}
    for folder in _candidates(host):
        compiler = folder / "bin" / "nvcc"
        if (
            compiler.is_file()
            and os.access(compiler, os.X_OK)
            and folder not in names.setdefault(compiler.resolve(), [])
        ):
            names[compiler.resolve()].append(folder)
    found = [_toolkit(host, compiler, folders) for compiler, folders in names.items()]
    return tuple(sorted(found, key=lambda toolkit: (release(toolkit.version), str(toolkit.root))))


def _candidates(host: Host) -> Iterator[Path]:
    for pattern in PLACES:
        yield from sorted(host.root.glob(pattern))
    for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if value := host.environ.get(name):
            yield Path(value)
    for compiler in host.every("nvcc"):
        yield compiler.parent.parent


def _toolkit(host: Host, compiler: Path, folders: list[Path]) -> Toolkit:
    """Its own folder comes first among the names: links to it may be changed to another."""
    home = compiler.parent.parent
    root = home if home in folders or (home / "bin" / "nvcc").exists() else folders[0]
    done = host.run((str(root / "bin" / "nvcc"), "--version"), ASK_SECONDS)
    match = _RELEASE.search(done.output)
    version = match[1] if match else ""
    return Toolkit(root, version, "" if match else done.said, tuple(folder for folder in folders if folder != root))


def picks(host: Host, toolkits: tuple[Toolkit, ...]) -> tuple[Pick, ...]:
    """What PATH, CUDA_HOME, CUDA_PATH and LD_LIBRARY_PATH each lead to; what is not set is left out."""
    found = []
    if compiler := host.which("nvcc"):
        found.append(_pick("PATH", compiler.parent.parent, toolkits, str(compiler)))
    named = ((name, host.environ.get(name, "")) for name in ("CUDA_HOME", "CUDA_PATH"))
    found += [_pick(name, Path(value), toolkits, value) for name, value in named if value]
    library = next(_runtimes(host), None)
    if library is not None:
        match = _RUNTIME.search(library.resolve().name) or _RUNTIME.search(library.name)
        version = ".".join(match[1].split(".")[:2]) if match else ""
        owner = next((each for each in toolkits if _within(library, each)), None)
        found.append(Pick("LD_LIBRARY_PATH", str(library), library.parent, owner, owner.version if owner else version))
    return tuple(found)


def torch_pick(host: Host, toolkits: tuple[Toolkit, ...]) -> Pick | None:
    """The toolkit that torch builds extensions with, in its order (torch/utils/cpp_extension.py, _find_cuda_home)."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if value := host.environ.get(name):
            return _pick(name, Path(value), toolkits, value)
    if compiler := host.which("nvcc"):
        return _pick("PATH", compiler.parent.parent, toolkits, str(compiler))
    usual = host.under("/usr/local/cuda")
    return _pick("nothing set, so torch", usual, toolkits, str(usual)) if usual.exists() else None


def _pick(by: str, folder: Path, toolkits: tuple[Toolkit, ...], value: str) -> Pick:
    same = (each for each in toolkits if folder in (each.root, *each.also) or folder.resolve() == each.root.resolve())
    toolkit = next(same, None)
    return Pick(by, value, folder, toolkit, toolkit.version if toolkit else "")


def _runtimes(host: Host) -> Iterator[Path]:
    for folder in host.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if folder:
            yield from sorted(Path(folder).glob("libcudart.so.*"), key=lambda path: -len(path.name))[:1]


def _within(library: Path, toolkit: Toolkit) -> bool:
    real = library.resolve()
    return any(name.resolve() in real.parents for name in (toolkit.root, *toolkit.also))


def exports(toolkit: Toolkit) -> tuple[str, ...]:
    """The lines that pick a toolkit in a shell; what stands in the variables stays behind it."""
    root = shlex.quote(str(toolkit.home))
    libraries = next((name for name in ("lib64", "lib") if (toolkit.home / name).is_dir()), "lib64")
    return (
        f"export CUDA_HOME={root}",
        f"export PATH={root}/bin:$PATH",
        f"export LD_LIBRARY_PATH={root}/{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
    )


def fitting(toolkits: tuple[Toolkit, ...], cuda: str) -> Toolkit | None:
    """The toolkit that fits a torch built with a CUDA version: the same one, else the nearest of the same major."""
    usable = [each for each in toolkits if each.version and has_headers(each.home)]
    same = [each for each in usable if each.version == cuda]
    major = [each for each in usable if release(each.version)[:1] == release(cuda)[:1]]
    return next(reversed(same or major), None)


def install_lines(cuda: str) -> tuple[str, ...]:
    """How to get a toolkit of a version (CUDA Installation Guide for Linux: package names; conda's nvidia channel)."""
    return (
        f"sudo apt-get install cuda-toolkit-{cuda.replace('.', '-')}      # from NVIDIA's repository",
        f"conda install -c nvidia cuda-toolkit={cuda}      # without root",
    )
