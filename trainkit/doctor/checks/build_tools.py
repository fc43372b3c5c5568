"""What building extensions and compiled code takes besides CUDA: a C++ compiler, ninja, Python's headers, libaio."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Level, ok, requirement_level
from trainkit.doctor.host import Host, Target

ASK_SECONDS = 10.0
# What DeepSpeed's async_io is checked with by DeepSpeed itself (ops/op_builder/async_io.py): a call that must link.
LIBAIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
PLAIN = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


def run(host: Host, target: Target) -> list[Finding]:
    """Each tool that is missing or does not work, else their list."""
    level = requirement_level(target)
    compiler = _compiler(host, level)
    found = [*compiler, *_headers(host, level)]
    if target.anything or target.ops:
        found += _ninja(host, level)
    if not compiler and (target.anything or "async_io" in target.ops):
        found += _libaio(host, level)
    more = ", ninja and libaio" if target.anything or "async_io" in target.ops else " and ninja" if target.ops else ""
    return found or [ok(f"a C++ compiler, Python's headers{more} work")]


def cxx(host: Host) -> tuple[str, ...]:
    """The compiler that torch builds with (torch/utils/cpp_extension.py, get_cxx_compiler)."""
    return tuple(shlex.split(host.environ.get("CXX", ""))) or ("c++",)


def _compiler(host: Host, level: Level) -> list[Finding]:
    name = cxx(host)[0]
    by = "CXX" if host.environ.get("CXX") else "PATH"
    path = Path(name) if os.path.isabs(name) else host.which(name)  # noqa: PTH117 - a word, not a path
    if path is None or not path.exists():
        fix = ["sudo apt-get install g++      # or: conda install -c conda-forge gxx"]
        if by == "CXX":
            fix.insert(0, "unset CXX      # or set it to a compiler that is there")
        what = f"there is no C++ compiler: {name} is not found by {by}"
        return [Finding(level, what, _path(host), tuple(fix))]
    why = trial(host, PLAIN)
    if why:
        what = f"{path} cannot build a one-line program"
        return [Finding(level, what, (why,), ("sudo apt-get install --reinstall g++ libstdc++-dev",))]
    return []


def _path(host: Host) -> tuple[str, ...]:
    return (f"PATH={host.environ.get('PATH', '')}",)


def trial(host: Host, source: str, *libraries: str) -> str:
    """Compile and link a program with the flags of the environment; what the compiler said if it fails."""
    environ = host.environ
    with tempfile.TemporaryDirectory(prefix="trainkit-doctor-", dir=environ.get("TMPDIR")) as folder:
        program = Path(folder, "trial.cpp")
        program.write_text(source)
        flags = (*shlex.split(environ.get("CFLAGS", "")), str(program), "-o", str(Path(folder, "trial")))
        argv = (*cxx(host), *flags, *shlex.split(environ.get("LDFLAGS", "")), *libraries)
        done = host.run(argv, ASK_SECONDS)
    if done.fine:
        return ""
    errors = (line for line in done.errors.splitlines() if "error" in line or "cannot find" in line)
    return next(errors, done.said)


def _libaio(host: Host, level: Level) -> Iterator[Finding]:
    why = trial(host, LIBAIO, "-laio")
    if why:
        fix = (
            "sudo apt-get install libaio-dev      # dnf: libaio-devel",
            "conda install -c conda-forge libaio && export CFLAGS=-I$CONDA_PREFIX/include LDFLAGS=-L$CONDA_PREFIX/lib",
        )
        yield Finding(level, "libaio cannot be linked, which offload to NVMe requires", (why,), fix)


def _headers(host: Host, level: Level) -> Iterator[Finding]:
    header = host.headers / "Python.h"
    if not header.is_file():
        version = ".".join(host.facts.python.split(".")[:2])
        fix = (f"sudo apt-get install python{version}-dev      # dnf: python{version}-devel",)
        yield Finding(level, "the headers of this interpreter are missing", (f"missing: {header}",), fix)


def _ninja(host: Host, level: Level) -> Iterator[Finding]:
    """torch starts `ninja` by PATH; pip puts it beside the interpreter, which need not be on PATH."""
    if host.which("ninja") is not None:
        done = host.run(("ninja", "--version"), ASK_SECONDS)
        if not done.fine:
            reinstall = f"{host.pip} install --force-reinstall ninja"
            yield Finding(level, "ninja is installed and does not work", (done.said,), (reinstall,))
        return
    beside = Path(host.facts.executable).parent / "ninja"
    if beside.exists():
        what = "ninja is installed beside the interpreter, but its folder is not on PATH, where torch looks for it"
        fix = f"export PATH={shlex.quote(str(beside.parent))}:$PATH      # or activate the environment"
        yield Finding(level, what, (str(beside), *_path(host)), (fix,))
        return
    fix = f"{host.pip} install ninja"
    yield Finding(level, "ninja is not installed; extensions are built with it", _path(host), (fix,))


def _unneeded(target: Target) -> str:
    """DeepSpeed's ops and torch.compile build; nothing else does."""
    return "" if target.anything or target.ops or target.compiles else "the plan builds nothing"


BUILD_TOOLS = Check("build-tools", "build tools", 15.0, run, _unneeded)
