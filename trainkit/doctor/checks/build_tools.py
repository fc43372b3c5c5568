"""What compiling takes besides CUDA: a C++ compiler, ninja, Python's headers, libaio; what DeepSpeed can build."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.doctor.check import Check, Finding, Host, Level, Target, ok, requirement_level, skipped

ASK_SECONDS = 10.0
OPS_LIMIT = 16.0
# The ops that trainkit's plans build, and what for.
USES: Mapping[str, str] = {
    "async_io": "offload to NVMe",
    "cpu_adam": "AdamW on the CPU",
    "shm_comm": "collectives of ranks on the CPU",
    "fused_adam": "AdamW on cards",
}
ANYWHERE = ("async_io", "cpu_adam")  # the others exist for one kind of device only
INSTALL_LIBAIO = "sudo apt-get install libaio-dev      # dnf: libaio-devel"
# What DeepSpeed's async_io is checked with by DeepSpeed itself (ops/op_builder/async_io.py): a call that must link.
LIBAIO = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
PLAIN = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"


def build_tools(host: Host, target: Target) -> list[Finding]:
    """Each tool that is missing or does not work, else their list."""
    if not (target.anything or target.ops or target.compiles):
        return [skipped("the plan builds nothing")]
    level = requirement_level(target)
    offloads = target.anything or "async_io" in target.ops
    compiler = list(_compiler(host, level))
    found, header = [*compiler], host.headers / "Python.h"
    if not header.is_file():
        version = ".".join(host.facts.python.split(".")[:2])
        fix = f"sudo apt-get install python{version}-dev      # dnf: python{version}-devel"
        found.append(Finding(level, "the headers of this interpreter are missing", (f"missing: {header}",), (fix,)))
    if target.anything or target.ops:
        found += _ninja(host, level)
    if not compiler and offloads and (why := trial(host, LIBAIO, "-laio")):
        flags = "CFLAGS=-I$CONDA_PREFIX/include LDFLAGS=-L$CONDA_PREFIX/lib"
        conda = f"conda install -c conda-forge libaio && export {flags}"
        what = "libaio cannot be linked, which offload to NVMe requires"
        found.append(Finding(level, what, (why,), (INSTALL_LIBAIO, conda)))
    more = ", ninja and libaio" if offloads else " and ninja" if target.ops else ""
    return found or [ok(f"a C++ compiler, Python's headers{more} work")]


def cxx(host: Host) -> tuple[str, ...]:
    """The compiler that torch builds with (torch/utils/cpp_extension.py, get_cxx_compiler)."""
    return tuple(shlex.split(host.environ.get("CXX", ""))) or ("c++",)


def _compiler(host: Host, level: Level) -> Iterator[Finding]:
    name = cxx(host)[0]
    by = "CXX" if host.environ.get("CXX") else "PATH"
    path = Path(name) if os.path.isabs(name) else host.which(name)  # noqa: PTH117 - a name or a path
    if path is None or not path.exists():
        fix = ["sudo apt-get install g++      # or: conda install -c conda-forge gxx"]
        if by == "CXX":
            fix.insert(0, "unset CXX      # or set it to a compiler that is there")
        yield Finding(level, f"there is no C++ compiler: {name} is not found by {by}", _path(host), tuple(fix))
    elif why := trial(host, PLAIN):
        reinstall = "sudo apt-get install --reinstall g++ libstdc++-dev"
        yield Finding(level, f"{path} cannot build a one-line program", (why,), (reinstall,))


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


def _ninja(host: Host, level: Level) -> Iterator[Finding]:
    """torch starts `ninja` by PATH; pip puts it beside the interpreter, which need not be on PATH."""
    beside = Path(host.facts.executable).parent / "ninja"
    if host.which("ninja") is not None:
        done = host.run(("ninja", "--version"), ASK_SECONDS)
        if not done.fine:
            reinstall = f"{host.pip} install --force-reinstall ninja"
            yield Finding(level, "ninja is installed and does not work", (done.said,), (reinstall,))
    elif beside.exists():
        what = "ninja is installed beside the interpreter, but its folder is not on PATH, where torch looks for it"
        fix = f"export PATH={shlex.quote(str(beside.parent))}:$PATH      # or activate the environment"
        yield Finding(level, what, (str(beside), *_path(host)), (fix,))
    else:
        what = "ninja is not installed; extensions are built with it"
        yield Finding(level, what, _path(host), (f"{host.pip} install ninja",))


def deepspeed_ops(host: Host, target: Target) -> Iterator[Finding]:
    """What DeepSpeed cannot build, each op for itself; what it can, together."""
    if not (target.anything or target.ops):  # only some offloads compile any
        yield skipped("the plan compiles none of DeepSpeed's ops")
        return
    version = host.facts.packages.get("deepspeed")
    if version is None:
        yield skipped("DeepSpeed is not installed")
        return
    level, environ = requirement_level(target), dict(host.environ)
    if target.plan is not None and not target.cuda:
        environ["DS_ACCELERATOR"] = "cpu"  # as the plan sets it
    program = (host.facts.executable, "-P", "-m", "trainkit.doctor.ask_deepspeed", *(target.ops or ANYWHERE))
    done = host.run(program, OPS_LIMIT - 1, environ=environ)
    if not done.fine:
        look = f"{host.python} -c 'import deepspeed'"
        yield Finding(level, f"DeepSpeed {version} cannot be imported", (done.said,), (look,))
        return
    answers = json.loads(done.output)
    names = {op: f"{op} ({USES[op]})" if op in USES else op for op in answers}
    if fine := [names[op] for op, answer in answers.items() if answer["compatible"]]:
        yield ok(f"DeepSpeed {version} can build {', '.join(fine)}; compiled before the first run that needs it")
    for op, answer in answers.items():
        if not answer["compatible"]:
            report = "ds_report      # DeepSpeed's own account"
            fix = (INSTALL_LIBAIO, report) if op == "async_io" else (report,)
            evidence = (answer["said"],) if answer["said"] else ()
            yield Finding(level, f"DeepSpeed {version} cannot build {names[op]}", evidence, fix)


BUILD_TOOLS = Check("build-tools", "build tools", 15.0, build_tools)
DEEPSPEED_OPS = Check("deepspeed-ops", "DeepSpeed ops", OPS_LIMIT, deepspeed_ops)
