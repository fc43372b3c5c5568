"""Whether the C++ compiler that nvcc would use is one that the CUDA toolkit takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.host_compilers import Bound, ask, bound
from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.toolkits import find_toolkits, torch_pick
from trainkit.doctor.units import built
from trainkit.doctor.verdict import Level, Verdict, ok, skipped

TITLE = "compiler for CUDA"
LIMIT = 10.0
FAST = False

OLDEST_SUGGESTED = 9  # torch's headers are C++17
_WRAPPERS = ("ccache", "sccache")


def needs(aim: Aim) -> str:
    """Only what is compiled for cards goes through nvcc."""
    return "" if aim.anything or aim.compiles_cuda else "the plan compiles nothing for CUDA cards"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Too new, unknown, or fine."""
    build = surroundings.facts.torch
    if build and not build.cuda:
        return [skipped(f"{built(build)}: no CUDA extension is compiled")]
    pick = torch_pick(surroundings, find_toolkits(surroundings))
    if pick is None or pick.toolkit is None:
        return [skipped("no CUDA toolkit would be used")]
    toolkit = pick.toolkit
    by, path = used_compiler(surroundings)
    level: Level = "problem" if aim.compiles_cuda else "warning"
    if path is None:
        install = ("sudo apt-get install gcc g++",)
        return [Verdict(level, f"nvcc finds no C++ compiler by {by}", (toolkit.label,), install)]
    compiler = ask(surroundings, path)
    evidence = (f"{compiler.path}: {compiler.words}", f"picked by {by}", toolkit.label)
    limit = bound(toolkit, compiler.kind) if compiler.kind else None
    if limit is None:
        return [skipped(f"no figure is known for {compiler.words or path} with CUDA {toolkit.version}")]
    if compiler.major <= limit.major:
        fine = f"{compiler.kind} {compiler.version} with CUDA {toolkit.version} (up to {limit.kind} {limit.major})"
        return [ok(fine, *evidence, limit.source)]
    what = (
        f"{compiler.kind} {compiler.version} is too new for CUDA {toolkit.version}, which takes {limit.major} at most"
    )
    fix = tuple(_fix(surroundings, limit, toolkit.root))
    return [Verdict(level, what, (*evidence, f"limit: {limit.source}"), fix)]


def used_compiler(surroundings: Surroundings) -> tuple[str, Path | None]:
    """What decides on nvcc's host compiler, and the program.

    torch hands CC on as -ccbin (torch/utils/cpp_extension.py); else nvcc reads NVCC_CCBIN, then looks for gcc on PATH
    (CUDA compiler driver, --compiler-bindir).
    """
    for name in ("CC", "NVCC_CCBIN"):
        words = [word for word in shlex.split(surroundings.environ.get(name, "")) if word not in _WRAPPERS]
        if words:
            path = Path(words[0])
            return name, path if path.is_absolute() and path.exists() else surroundings.which(words[0])
    return "PATH", surroundings.which("gcc")


def _fix(surroundings: Surroundings, limit: Bound, toolkit: Path) -> Iterator[str]:
    """An older compiler that is here already, else how to get one."""
    plus = {"gcc": "g++", "clang": "clang++"}[limit.kind]
    older = _older(surroundings, limit, plus)
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


def _older(surroundings: Surroundings, limit: Bound, plus: str) -> tuple[Path, Path] | None:
    for major in range(limit.major, OLDEST_SUGGESTED - 1, -1):
        c, cxx = surroundings.which(f"{limit.kind}-{major}"), surroundings.which(f"{plus}-{major}")
        if c and cxx and ask(surroundings, c).major <= limit.major:
            return c, cxx
    return None
