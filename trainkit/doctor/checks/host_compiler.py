"""Whether the C++ compiler that nvcc would use is one that the CUDA toolkit accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.doctor.check import NO_CUDA_BUILDS, Check, Finding, Host, Level, Target, ok, requirement_level, skipped
from trainkit.doctor.checks.cuda_toolkits import Toolkit, find_toolkits, torch_pick

SOURCE = "https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#host-compiler-support-policy"

# CUDA version -> newest major version of gcc and of clang. The guide's policy: nvcc looks at the major version alone.
# Where the guide of a first release says less than the header of a later update, this is what nvcc enforces.
NEWEST: Mapping[str, tuple[int, int]] = {
    "11.0": (9, 9), "11.1": (10, 10), "11.2": (10, 11), "11.3": (10, 11), "11.4": (11, 12),
    "11.5": (11, 12), "11.6": (11, 13), "11.7": (11, 13), "11.8": (11, 14),
    "12.0": (12, 14), "12.1": (12, 15), "12.2": (12, 16), "12.3": (12, 16), "12.4": (13, 17),
    "12.5": (13, 17), "12.6": (13, 18), "12.8": (14, 19), "12.9": (14, 19),
    "13.0": (15, 20),
}  # fmt: skip

_GNU = re.compile(r"#if\s+__GNUC__\s*>\s*(\d+)")
_CLANG = re.compile(r"#if\s+\(__clang_major__\s*>=\s*(\d+)\)")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")
ASK_SECONDS = 5.0
OLDEST_SUGGESTED = 9  # torch's headers are C++17
_WRAPPERS = ("ccache", "sccache")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C or C++ compiler. kind: gcc, clang, or empty where it is not known; label: the first line of its --version."""

    path: Path
    kind: str
    version: str
    label: str

    @property
    def major(self) -> int:
        """Major version, 0 where unknown."""
        head = self.version.partition(".")[0]
        return int(head) if head.isdigit() else 0


def ask(host: Host, path: Path) -> Compiler:
    """What a compiler says of itself."""
    done = host.run((str(path), "--version"), ASK_SECONDS)
    line = done.output.strip().splitlines()[0] if done.fine and done.output.strip() else done.said
    gcc = done.fine and ("GCC" in line or "Free Software" in done.output)
    kind = "clang" if "clang" in line else "gcc" if gcc else ""
    found = [match.group() for match in _VERSION.finditer(line)]
    # gcc names its version last, behind that of the distribution's package; clang directly behind its name
    version = found[0 if kind == "clang" else -1] if found else ""
    return Compiler(path, kind if version else "", version, line)


def newest(toolkit: Toolkit, kind: str) -> tuple[int, str]:
    """The newest major version that a toolkit accepts, and the source; 0 where it is not known.

    The toolkit's own header is what nvcc enforces; NVIDIA's table is for toolkits without it.
    """
    header = toolkit.root / "include" / "crt" / "host_config.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if kind == "gcc" and (match := _GNU.search(text)):
        return int(match[1]), str(header)
    if kind == "clang" and (match := _CLANG.search(text)):
        return int(match[1]) - 1, str(header)
    if kind and toolkit.version in NEWEST:
        return NEWEST[toolkit.version][0 if kind == "gcc" else 1], SOURCE
    return 0, ""


def run(host: Host, target: Target) -> Iterator[Finding]:
    """Too new, unknown, or fine."""
    build = host.facts.torch
    pick = torch_pick(host, find_toolkits(host)) if target.compiles_cuda else None
    if not target.compiles_cuda:
        yield NO_CUDA_BUILDS
    elif build and not build.cuda:
        yield skipped(f"{build.label}: no CUDA extension is compiled")
    elif pick is None or pick.toolkit is None:
        yield skipped("no CUDA toolkit would be used")
    else:
        yield _judged(host, pick.toolkit, requirement_level(target))


def _judged(host: Host, toolkit: Toolkit, level: Level) -> Finding:
    by, path = used_compiler(host)
    if path is None:
        install = ("sudo apt-get install gcc g++",)
        return Finding(level, f"nvcc finds no C++ compiler by {by}", (toolkit.label,), install)
    compiler = ask(host, path)
    kind, cuda = compiler.kind, toolkit.version
    limit, source = newest(toolkit, kind)
    evidence = (f"{path}: {compiler.label}", f"picked by {by}", toolkit.label)
    if not limit:
        return skipped(f"no figure is known for {compiler.label or path} with CUDA {cuda}")
    if compiler.major <= limit:
        return ok(f"{kind} {compiler.version} with CUDA {cuda} (up to {kind} {limit})", *evidence, source)
    what = f"{kind} {compiler.version} is too new for CUDA {cuda}, which accepts {limit} at most"
    return Finding(level, what, (*evidence, f"limit: {source}"), _fix(host, kind, limit, toolkit.root))


def used_compiler(host: Host) -> tuple[str, Path | None]:
    """What decides on nvcc's host compiler, and the program.

    torch hands CC on as -ccbin (torch/utils/cpp_extension.py); else nvcc reads NVCC_CCBIN, then looks for gcc on PATH
    (CUDA compiler driver, --compiler-bindir).
    """
    for name in ("CC", "NVCC_CCBIN"):
        argv = [word for word in shlex.split(host.environ.get(name, "")) if word not in _WRAPPERS]
        if argv:
            path = Path(argv[0])
            return name, path if path.is_absolute() and path.exists() else host.which(argv[0])
    return "PATH", host.which("gcc")


def _fix(host: Host, kind: str, limit: int, toolkit: Path) -> tuple[str, ...]:
    """An older compiler that is here already, else how to get one."""
    plus = {"gcc": "g++", "clang": "clang++"}[kind]
    for major in range(limit, OLDEST_SUGGESTED - 1, -1):
        older, older_plus = host.which(f"{kind}-{major}"), host.which(f"{plus}-{major}")
        if older and older_plus and ask(host, older).major <= limit:
            c, cxx, bin_folder = (shlex.quote(str(path)) for path in (older, older_plus, toolkit / "bin"))
            links = f"sudo ln -s {c} {bin_folder}/{kind} && sudo ln -s {cxx} {bin_folder}/{plus}"
            return f"export CC={c} CXX={cxx}", f"{links}      # or for every user"
    install = f"sudo apt-get install gcc-{limit} g++-{limit}      # conda: install -c conda-forge gxx_linux-64={limit}"
    return install, f"export CC=gcc-{limit} CXX=g++-{limit}"


HOST_COMPILER = Check("host-compiler", "compiler for CUDA", 10.0, run)
