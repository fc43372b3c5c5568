"""What building extensions and compiled code takes besides CUDA: a C++ compiler, ninja, Python's headers, libaio."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.verdict import Level, Verdict, ok

TITLE = "build tools"
LIMIT = 15.0
FAST = False

ASK_SECONDS = 10.0
# What DeepSpeed's async_io is checked with by DeepSpeed itself (ops/op_builder/async_io.py): a call that must link.
LIBAIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
PLAIN = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


def needs(aim: Aim) -> str:
    """DeepSpeed's ops and torch.compile build; nothing else does."""
    return "" if aim.anything or aim.ops or aim.compiles else "the plan builds nothing"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Each tool that is missing or does not work, else their list."""
    level: Level = "warning" if aim.anything else "problem"
    compiler = _compiler(surroundings, level)
    found = [*compiler, *_headers(surroundings, level)]
    if aim.anything or aim.ops:
        found += _ninja(surroundings, level)
    if not compiler and (aim.anything or "async_io" in aim.ops):
        found += _libaio(surroundings, level)
    return found or [ok("a C++ compiler, Python's headers" + _also(aim) + " work")]


def _also(aim: Aim) -> str:
    return ", ninja and libaio" if aim.anything or "async_io" in aim.ops else " and ninja" if aim.ops else ""


def cxx(surroundings: Surroundings) -> tuple[str, ...]:
    """The compiler that torch builds with (torch/utils/cpp_extension.py, get_cxx_compiler)."""
    return tuple(shlex.split(surroundings.environ.get("CXX", ""))) or ("c++",)


def _compiler(surroundings: Surroundings, level: Level) -> list[Verdict]:
    words = cxx(surroundings)
    by = "CXX" if surroundings.environ.get("CXX") else "PATH"
    path = Path(words[0]) if os.path.isabs(words[0]) else surroundings.which(words[0])  # noqa: PTH117 - a word, not a path
    if path is None or not path.exists():
        fix = ["sudo apt-get install g++      # or: conda install -c conda-forge gxx"]
        if by == "CXX":
            fix.insert(0, "unset CXX      # or set it to a compiler that is there")
        return [
            Verdict(
                level, f"there is no C++ compiler: {words[0]} is not found by {by}", _path(surroundings), tuple(fix)
            )
        ]
    why = trial(surroundings, PLAIN)
    if why:
        what = f"{path} cannot build a program of one line"
        return [Verdict(level, what, (why,), ("sudo apt-get install --reinstall g++ libstdc++-dev",))]
    return []


def _path(surroundings: Surroundings) -> tuple[str, ...]:
    return (f"PATH={surroundings.environ.get('PATH', '')}",)


def trial(surroundings: Surroundings, source: str, *libraries: str) -> str:
    """Compile and link a program with the flags of the environment; what the compiler said if it fails."""
    environ = surroundings.environ
    with tempfile.TemporaryDirectory(prefix="trainkit-doctor-", dir=environ.get("TMPDIR")) as folder:
        program = Path(folder, "trial.cpp")
        program.write_text(source)
        flags = (*shlex.split(environ.get("CFLAGS", "")), str(program), "-o", str(Path(folder, "trial")))
        argv = (*cxx(surroundings), *flags, *shlex.split(environ.get("LDFLAGS", "")), *libraries)
        done = surroundings.run(argv, ASK_SECONDS)
    if done.fine:
        return ""
    errors = (line for line in done.errors.splitlines() if "error" in line or "cannot find" in line)
    return next(errors, done.said)


def _libaio(surroundings: Surroundings, level: Level) -> Iterator[Verdict]:
    why = trial(surroundings, LIBAIO, "-laio")
    if why:
        fix = (
            "sudo apt-get install libaio-dev      # dnf: libaio-devel",
            "conda install -c conda-forge libaio && export CFLAGS=-I$CONDA_PREFIX/include LDFLAGS=-L$CONDA_PREFIX/lib",
        )
        yield Verdict(level, "libaio cannot be built with, which offload to NVMe needs", (why,), fix)


def _headers(surroundings: Surroundings, level: Level) -> Iterator[Verdict]:
    header = surroundings.headers / "Python.h"
    if not header.is_file():
        version = ".".join(surroundings.facts.python.split(".")[:2])
        fix = (f"sudo apt-get install python{version}-dev      # dnf: python{version}-devel",)
        yield Verdict(level, "the headers of this interpreter are missing", (f"missing: {header}",), fix)


def _ninja(surroundings: Surroundings, level: Level) -> Iterator[Verdict]:
    """torch starts `ninja` by PATH; pip puts it beside the interpreter, which need not be on PATH."""
    if surroundings.which("ninja") is not None:
        done = surroundings.run(("ninja", "--version"), ASK_SECONDS)
        if not done.fine:
            reinstall = f"{shlex.quote(surroundings.facts.executable)} -m pip install --force-reinstall ninja"
            yield Verdict(level, "ninja is there and does not work", (done.said,), (reinstall,))
        return
    beside = Path(surroundings.facts.executable).parent / "ninja"
    if beside.exists():
        what = "ninja is installed beside the interpreter, but its folder is not on PATH, where torch looks for it"
        fix = f"export PATH={shlex.quote(str(beside.parent))}:$PATH      # or activate the environment"
        yield Verdict(level, what, (str(beside), *_path(surroundings)), (fix,))
        return
    fix = f"{shlex.quote(surroundings.facts.executable)} -m pip install ninja"
    yield Verdict(level, "ninja is not installed; extensions are built with it", _path(surroundings), (fix,))
