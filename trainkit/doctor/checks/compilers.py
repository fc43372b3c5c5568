"""What is compiled here and with what: CUDA toolkits, the compilers that fit them, build tools, DeepSpeed's ops."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.distribution import install
from trainkit.doctor.check import Finding, Host, Level, Target, ok, skipped
from trainkit.machine.facts import release
from trainkit.machine.host import cxx, text

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
_RELEASE = re.compile(r"release (\d+\.\d+)")
_RUNTIME = re.compile(r"libcudart\.so\.(\d+(?:\.\d+)*)$")
VERSION_SECONDS, COMPILE_SECONDS = 5.0, 10.0  # for a compiler to say its version, and to compile a few lines
OPS_LIMIT = 15.0
# The text of a program that uses the C++ library.
PLAIN = "#include <vector>\nint main() { return std::vector<int>(1)[0]; }\n"
GUIDE = "https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#host-compiler-support-policy"
# CUDA version, from the oldest that a torch of ours is built for -> newest major version of gcc and of clang.
# The guide's policy: nvcc looks at the major version alone.
# Where the guide of a first release says less than the header of a later update, this is what nvcc enforces.
NEWEST: Mapping[str, tuple[int, int]] = {
    "11.8": (11, 14),
    "12.0": (12, 14), "12.1": (12, 15), "12.2": (12, 16), "12.3": (12, 16), "12.4": (13, 17),
    "12.5": (13, 17), "12.6": (13, 18), "12.8": (14, 19), "12.9": (14, 19),
    "13.0": (15, 20),
}  # fmt: skip
_GNU = re.compile(r"#if\s+__GNUC__\s*>\s*(\d+)")
_CLANG = re.compile(r"#if\s+\(__clang_major__\s*>=\s*(\d+)\)")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?")
OLDEST_SUGGESTED = 9  # torch's headers are C++17
_WRAPPERS = ("ccache", "sccache")


def toolkits(host: Host, target: Target) -> list[Finding]:
    """Whether PATH, CUDA_HOME and LD_LIBRARY_PATH agree on one toolkit, and whether each toolkit answers."""
    installed, found = find_toolkits(host), list(_absent(host))
    chosen = picks(host, installed)
    if not installed and not chosen:
        return found or [skipped("no CUDA toolkit is installed")]
    build = host.facts.torch
    listed = (*(each.label for each in installed), *(each.label for each in chosen))
    if build and not build.cuda:
        return found or [ok(f"{len(installed)} installed; {build.label}, uses none", *listed)]
    newest = next((each for each in reversed(installed) if has_headers(each.home)), None)
    right = fitting(installed, build.cuda) if build and build.cuda else newest
    fix = exports(host, right) if right else ()
    for toolkit in installed:
        if not toolkit.version:
            look = f"{toolkit.root}/bin/nvcc --version      # should print its release"
            what = f"nvcc of {toolkit.root} does not print its version"
            found.append(Finding("warning", what, (toolkit.why,), (look,)))
    if (pick := torch_pick(host, installed)) and pick.toolkit is None:
        what = f"torch would look for a CUDA toolkit by {pick.by} and find none"
        found.append(Finding(target.required, what, (pick.label,), fix or ("unset CUDA_HOME CUDA_PATH",)))
    elif pick and not has_headers(pick.folder):
        what = f"torch would compile with the toolkit in {pick.folder}, which has no CUDA headers"
        evidence = (pick.label, f"missing: {pick.folder}/include/cuda_runtime.h")
        found.append(Finding(target.required, what, evidence, fix))
    if len({each.version for each in chosen if each.version}) > 1:
        names = " and ".join((", ".join(each.by for each in chosen[:-1]), chosen[-1].by))
        found.append(Finding(target.required, f"{names} pick different CUDA toolkits", listed, fix))
    if len(installed) == 1:
        return found or [ok(installed[0].label, *listed)]
    return found or [Finding("note", f"{len(installed)} toolkits are installed", listed, fix)]


def _absent(host: Host) -> Iterator[Finding]:
    """Folders that programs are told to load from and that are not there. NVIDIA's images name two, so it is a note."""
    searched = [each for each in host.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if each]
    if absent := [each for each in searched if not Path(each).is_dir()]:
        kept = shlex.quote(os.pathsep.join(each for each in searched if each not in absent))
        fix = f"export LD_LIBRARY_PATH={kept}      # or correct them"
        yield Finding("note", "LD_LIBRARY_PATH names folders that are not there", tuple(absent), (fix,))


def toolkit_version(host: Host, target: Target) -> Finding:
    """Whether the toolkit that torch would compile with is of torch's CUDA, or of one that torch and DeepSpeed take."""
    build, level = host.facts.torch, target.required
    if build is None:
        return skipped("torch is not installed")
    if not build.cuda:
        return skipped(f"{build.label}: no CUDA extension is compiled")
    cuda, installed = build.cuda, find_toolkits(host)
    right = fitting(installed, cuda)
    exact = right is not None and (right.version == cuda or release(cuda)[0] in MINORS_MIX)
    fix: tuple[str, ...] = (  # as the CUDA Installation Guide for Linux and conda's nvidia channel name the packages
        f"sudo apt-get install cuda-toolkit-{cuda.replace('.', '-')}      # from NVIDIA's repository",
        f"conda install -c nvidia cuda-toolkit={cuda}      # without root",
    )
    fix = exports(host, right) if right is not None and exact else fix
    pick = torch_pick(host, installed)
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
        return (self.root, *self.also)

    @property
    def home(self) -> Path:
        """The name under which extensions can be compiled against it; its own where none will do."""
        return next((name for name in self.names if has_headers(name)), self.root)

    @property
    def label(self) -> str:
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
        done = host.run((str(root / "bin" / "nvcc"), "--version"), VERSION_SECONDS)
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


def build_tools(host: Host, target: Target) -> list[Finding]:
    """Each tool that is missing or does not work, else their list."""
    found, level, header = list(_compiler(host, target.required)), target.required, host.headers / "Python.h"
    if not header.is_file():
        version = ".".join(host.facts.python.split(".")[:2])
        fix = f"sudo apt-get install python{version}-dev      # dnf: python{version}-devel"
        found.append(Finding(level, "the headers of this interpreter are missing", (f"missing: {header}",), (fix,)))
    if target.builds_ops:
        found += _ninja(host, level)
    ninja = " and ninja" if target.builds_ops else ""
    return found or [ok(f"a C++ compiler, Python's headers{ninja} work")]


def _compiler(host: Host, level: Level) -> Iterator[Finding]:
    name = cxx(host.environ)[0]
    by = "CXX" if host.environ.get("CXX") else "PATH"
    path = Path(name) if os.path.isabs(name) else host.which(name)  # noqa: PTH117 - a name or a path
    if path is None or not path.exists():
        fix = ["sudo apt-get install g++      # or: conda install -c conda-forge gxx"]
        if by == "CXX":
            fix.insert(0, "unset CXX      # or set it to a compiler that is there")
        yield Finding(level, f"there is no C++ compiler: {name} is not found by {by}", _path(host), tuple(fix))
    elif why := trial(host):
        reinstall = "sudo apt-get install --reinstall g++ libstdc++-dev"
        yield Finding(level, f"{path} cannot build a one-line program", (why,), (reinstall,))


def _path(host: Host) -> tuple[str, ...]:
    return (f"PATH={host.environ.get('PATH', '')}",)


def trial(host: Host) -> str:
    """Compile and link a program with the flags of the environment; what the compiler said if it fails."""
    environ = host.environ
    with tempfile.TemporaryDirectory(prefix="trainkit-doctor-", dir=environ.get("TMPDIR")) as folder:
        program = Path(folder, "trial.cpp")
        program.write_text(PLAIN)
        flags = (*shlex.split(environ.get("CFLAGS", "")), str(program), "-o", str(Path(folder, "trial")))
        done = host.run((*cxx(environ), *flags, *shlex.split(environ.get("LDFLAGS", ""))), COMPILE_SECONDS)
    if done.fine:
        return ""
    errors = (line for line in done.errors.splitlines() if "error" in line or "cannot find" in line)
    return next(errors, done.said)


def _ninja(host: Host, level: Level) -> Iterator[Finding]:
    """torch starts `ninja` by PATH; pip puts it beside the interpreter, which need not be on PATH."""
    beside = Path(host.facts.executable).parent / "ninja"
    if host.which("ninja") is not None:
        done = host.run(("ninja", "--version"), COMPILE_SECONDS)
        if not done.fine:
            reinstall = install(host.facts.executable, "--force-reinstall", "ninja")
            yield Finding(level, "ninja is installed and does not work", (done.said,), (reinstall,))
    elif beside.exists():
        what = "ninja is installed beside the interpreter, but its folder is not on PATH, where torch looks for it"
        fix = f"export PATH={shlex.quote(str(beside.parent))}:$PATH      # or activate the environment"
        yield Finding(level, what, (str(beside), *_path(host)), (fix,))
    else:
        what = "ninja is not installed; extensions are built with it"
        yield Finding(level, what, _path(host), (install(host.facts.executable, "ninja"),))


def deepspeed_ops(host: Host, target: Target) -> list[Finding]:
    """What DeepSpeed cannot build, each op for itself; what it can, together."""
    from trainkit.trainer.perf.build_ops import OPS  # with importlib.metadata, which checks before a run do not load

    version = host.facts.packages.get("deepspeed")
    if version is None:
        return [skipped("DeepSpeed is not installed")]
    environ = dict(host.environ)
    if target.plan is not None and not target.cuda:
        environ["DS_ACCELERATOR"] = "cpu"  # as the plan sets it
    ops = target.ops or ("async_io", "cpu_adam")  # the others exist for one kind of device only
    program = ("-P", "-m", "trainkit.trainer.perf.build_ops", "--ask", "--ops", ",".join(ops))
    done = host.run((host.facts.executable, *program), OPS_LIMIT, environ=environ)
    if not done.fine:
        look = f"{host.python} -c 'import deepspeed'"
        return [Finding(target.required, f"DeepSpeed {version} cannot be imported", (done.said,), (look,))]
    found, fine = [], []
    for name, answer in json.loads(done.output).items():
        op = OPS[name]
        named = f"{name} ({op.use})" if op.use else name
        if answer["compatible"]:
            fine.append(named)
            continue
        fix = ["ds_report      # DeepSpeed's own account"]
        if op.library:
            library, apt, dnf = op.library
            flags = "CFLAGS=-I$CONDA_PREFIX/include LDFLAGS=-L$CONDA_PREFIX/lib"
            conda = f"conda install -c conda-forge {library} && export {flags}"
            fix = [f"sudo apt-get install {apt}      # dnf: {dnf}", conda, *fix]
        evidence = (answer["said"],) if answer["said"] else ()
        found.append(Finding(target.required, f"DeepSpeed {version} cannot build {named}", evidence, tuple(fix)))
    builds = f"DeepSpeed {version} can build {', '.join(fine)}; compiled before the first run that needs it"
    return [*([ok(builds)] if fine else []), *found]


def ask(host: Host, path: Path) -> tuple[str, str, str]:
    """What a compiler says of itself: gcc, clang or nothing known; its version; the first line of its --version."""
    done = host.run((str(path), "--version"), VERSION_SECONDS)
    line = done.output.strip().splitlines()[0] if done.fine and done.output.strip() else done.said
    gcc = done.fine and ("GCC" in line or "Free Software" in done.output)
    kind = "clang" if "clang" in line else "gcc" if gcc else ""
    found = [match.group() for match in _VERSION.finditer(line)]
    # gcc names its version last, behind that of the distribution's package; clang directly behind its name
    version = found[0 if kind == "clang" else -1] if found else ""
    return kind if version else "", version, line


def newest(toolkit: Toolkit, kind: str) -> tuple[int, str]:
    """The newest major version that a toolkit accepts, and the source; 0 where it is not known.

    The toolkit's own header is what nvcc enforces; NVIDIA's table is for toolkits without it.
    """
    header = toolkit.root / "include" / "crt" / "host_config.h"
    limits = text(header)
    if kind == "gcc" and (match := _GNU.search(limits)):
        return int(match[1]), str(header)
    if kind == "clang" and (match := _CLANG.search(limits)):
        return int(match[1]) - 1, str(header)
    if kind and toolkit.version in NEWEST:
        return NEWEST[toolkit.version][0 if kind == "gcc" else 1], GUIDE
    return 0, ""


def host_compiler(host: Host, target: Target) -> Finding:
    """Whether the C++ compiler that nvcc would use is too new for the CUDA toolkit, unknown, or fine."""
    build, level = host.facts.torch, target.required
    if build and not build.cuda:
        return skipped(f"{build.label}: no CUDA extension is compiled")
    pick = torch_pick(host, find_toolkits(host))
    if pick is None or pick.toolkit is None:
        return skipped("no CUDA toolkit would be used")
    toolkit = pick.toolkit
    by, path = used_compiler(host)
    if path is None:
        install = ("sudo apt-get install gcc g++",)
        return Finding(level, f"nvcc finds no C++ compiler by {by}", (toolkit.label,), install)
    kind, version, label = ask(host, path)
    cuda, (limit, source) = toolkit.version, newest(toolkit, kind)
    evidence = (f"{path}: {label}", f"picked by {by}", toolkit.label)
    if not limit:
        return skipped(f"no figure is known for {label or path} with CUDA {cuda}")
    if release(version) < (limit + 1,):
        return ok(f"{kind} {version} with CUDA {cuda} (up to {kind} {limit})", *evidence, source)
    what = f"{kind} {version} is too new for CUDA {cuda}, which accepts {limit} at most"
    return Finding(level, what, (*evidence, f"limit: {source}"), _older_compiler(host, kind, limit, toolkit.root))


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


def _older_compiler(host: Host, kind: str, limit: int, toolkit: Path) -> tuple[str, ...]:
    """An older compiler that is here already, else how to get one."""
    plus = {"gcc": "g++", "clang": "clang++"}[kind]
    for major in range(limit, OLDEST_SUGGESTED - 1, -1):
        older, older_plus = host.which(f"{kind}-{major}"), host.which(f"{plus}-{major}")
        if older and older_plus and release(ask(host, older)[1]) < (limit + 1,):
            c, cxx, bin_folder = (shlex.quote(str(path)) for path in (older, older_plus, toolkit / "bin"))
            links = f"sudo ln -s {c} {bin_folder}/{kind} && sudo ln -s {cxx} {bin_folder}/{plus}"
            return f"export CC={c} CXX={cxx}", f"{links}      # or for every user"
    install = f"sudo apt-get install gcc-{limit} g++-{limit}      # conda: install -c conda-forge gxx_linux-64={limit}"
    return install, f"export CC=gcc-{limit} CXX=g++-{limit}"
