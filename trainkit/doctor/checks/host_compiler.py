"""Whether the C++ compiler that nvcc would use is one that the CUDA toolkit accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.doctor.check import Check, Finding, ok, requirement_level, skipped, without_cuda_builds
from trainkit.doctor.checks.cuda_toolkits import Toolkit, find_toolkits, torch_pick
from trainkit.doctor.host import Host, Target

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
    """A C or C++ compiler. kind is empty where its words are not known; major: of its version."""

    path: Path
    kind: str  # gcc | clang | ""
    version: str
    words: str  # the first line that it says of itself

    @property
    def major(self) -> int:
        """Major version, 0 where unknown."""
        head = self.version.split(".", maxsplit=1)[0]
        return int(head) if head.isdigit() else 0


@dataclass(frozen=True, slots=True)
class Bound:
    """The newest compiler that a toolkit accepts, and the source."""

    kind: str
    major: int
    source: str


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


def bound(toolkit: Toolkit, kind: str) -> Bound | None:
    """The toolkit's own header, which nvcc enforces, else NVIDIA's table; None where neither has it."""
    header = toolkit.root / "include" / "crt" / "host_config.h"
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if kind == "gcc" and (match := _GNU.search(text)):
        return Bound(kind, int(match[1]), str(header))
    if kind == "clang" and (match := _CLANG.search(text)):
        return Bound(kind, int(match[1]) - 1, str(header))
    if toolkit.version in NEWEST:
        return Bound(kind, NEWEST[toolkit.version][0 if kind == "gcc" else 1], SOURCE)
    return None


def run(host: Host, target: Target) -> list[Finding]:
    """Too new, unknown, or fine."""
    build = host.facts.torch
    if build and not build.cuda:
        return [skipped(f"{build.label}: no CUDA extension is compiled")]
    pick = torch_pick(host, find_toolkits(host))
    if pick is None or pick.toolkit is None:
        return [skipped("no CUDA toolkit would be used")]
    toolkit = pick.toolkit
    by, path = used_compiler(host)
    level = requirement_level(target)
    if path is None:
        install = ("sudo apt-get install gcc g++",)
        return [Finding(level, f"nvcc finds no C++ compiler by {by}", (toolkit.label,), install)]
    compiler = ask(host, path)
    evidence = (f"{compiler.path}: {compiler.words}", f"picked by {by}", toolkit.label)
    limit = bound(toolkit, compiler.kind) if compiler.kind else None
    if limit is None:
        return [skipped(f"no figure is known for {compiler.words or path} with CUDA {toolkit.version}")]
    if compiler.major <= limit.major:
        fine = f"{compiler.kind} {compiler.version} with CUDA {toolkit.version} (up to {limit.kind} {limit.major})"
        return [ok(fine, *evidence, limit.source)]
    what = (
        f"{compiler.kind} {compiler.version} is too new for CUDA {toolkit.version}, which accepts {limit.major} at most"
    )
    fix = tuple(_fix(host, limit, toolkit.root))
    return [Finding(level, what, (*evidence, f"limit: {limit.source}"), fix)]


def used_compiler(host: Host) -> tuple[str, Path | None]:
    """What decides on nvcc's host compiler, and the program.

    torch hands CC on as -ccbin (torch/utils/cpp_extension.py); else nvcc reads NVCC_CCBIN, then looks for gcc on PATH
    (CUDA compiler driver, --compiler-bindir).
    """
    for name in ("CC", "NVCC_CCBIN"):
        words = [word for word in shlex.split(host.environ.get(name, "")) if word not in _WRAPPERS]
        if words:
            path = Path(words[0])
            return name, path if path.is_absolute() and path.exists() else host.which(words[0])
    return "PATH", host.which("gcc")


def _fix(host: Host, limit: Bound, toolkit: Path) -> Iterator[str]:
    """An older compiler that is here already, else how to get one."""
    plus = {"gcc": "g++", "clang": "clang++"}[limit.kind]
    older = _older(host, limit, plus)
    if older is None:
        major = limit.major
        yield f"sudo apt-get install gcc-{major} g++-{major}      # conda: install -c conda-forge gxx_linux-64={major}"
        yield f"export CC=gcc-{major} CXX=g++-{major}"
        return
    c, cxx = (shlex.quote(str(path)) for path in older)
    bin_folder = shlex.quote(str(toolkit / "bin"))
    name = f"{limit.kind} {plus}".split()
    yield f"export CC={c} CXX={cxx}"
    yield f"sudo ln -s {c} {bin_folder}/{name[0]} && sudo ln -s {cxx} {bin_folder}/{name[1]}      # or for every user"


def _older(host: Host, limit: Bound, plus: str) -> tuple[Path, Path] | None:
    for major in range(limit.major, OLDEST_SUGGESTED - 1, -1):
        c, cxx = host.which(f"{limit.kind}-{major}"), host.which(f"{plus}-{major}")
        if c and cxx and ask(host, c).major <= limit.major:
            return c, cxx
    return None


HOST_COMPILER = Check("host-compiler", "compiler for CUDA", 10.0, run, without_cuda_builds)
