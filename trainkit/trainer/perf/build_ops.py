"""Build DeepSpeed ops ahead of a run: ``python -m trainkit.trainer.perf.build_ops --ops shm_comm,cpu_adam``.

Ranks that find an op missing build it at first use, for half a minute and more. Quiet and quick when all is built.
An op of one name is another library on CUDA than on a CPU, and one that is built for some GPUs may not run on others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.errors import MachineError, TrainingError, TrainkitError, one_line_each
from trainkit.machine.host import cxx
from trainkit.runner.supervisor.processes import die_with_parent


class Op(NamedTuple):
    """What DeepSpeed compiles. builder: its class in deepspeed.ops.op_builder; use: what it is for.

    library: the system library that it is linked with, its package for apt and for dnf.
    """

    builder: str
    use: str = ""
    library: tuple[str, str, str] | None = None


# By the names in a plan.
OPS: Mapping[str, Op] = {
    "shm_comm": Op("ShareMemCommBuilder", "collectives of ranks on the CPU"),
    "cpu_adam": Op("CPUAdamBuilder", "AdamW on the CPU"),
    "async_io": Op("AsyncIOBuilder", "offload to NVMe", ("libaio", "libaio-dev", "libaio-devel")),
    "fused_adam": Op("FusedAdamBuilder", "AdamW on GPUs"),
    "cpu_adagrad": Op("CPUAdagradBuilder"),
    "cpu_lion": Op("CPULionBuilder"),
    "fused_lamb": Op("FusedLambBuilder"),
    "fused_lion": Op("FusedLionBuilder"),
}


YOUNG_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is missing. Exit code 4, and what is missing or what the compiler says, when one cannot be built.

    With --ask build nothing, and write what DeepSpeed says of each as JSON.
    """
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.perf.build_ops", description=__doc__)
    parser.add_argument("--ops", required=True, help=f"comma-separated, of {', '.join(OPS)}")
    parser.add_argument("--ask", action="store_true", help="only say which of them can be built")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that the run trains on")
    parser.add_argument("--capabilities", default="", help="of the GPUs that it uses, comma-separated: 8.0,9.0")
    asked = parser.parse_args(argv)
    names = [name for name in asked.ops.split(",") if name]
    try:
        unknown = [name for name in names if name not in OPS]
        if unknown:
            raise TrainingError(f"no DeepSpeed op is named {', '.join(unknown)}", hint=f"known: {', '.join(OPS)}")
        if asked.ask:
            die_with_parent()
            sys.stdout.write(json.dumps(ask(names)) + "\n")
            return 0
        build_missing(names, asked.device, asked.capabilities.replace(",", ";"))
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
        return int(error.exit_code)
    return 0


def build_missing(names: Iterable[str], device: str = "cpu", capabilities: str = "") -> None:
    """Build each op that no earlier call has built for this with these versions; MachineError when one cannot be.

    capabilities: of the GPUs, as TORCH_CUDA_ARCH_LIST has them (`8.0;9.0`); the variable itself wins, as in ranks.
    """
    if device == "cuda":
        capabilities = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or capabilities
    # Where torch keeps compiled extensions (torch.utils.cpp_extension), without the part that names the build.
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    versions = (sys.version, sysconfig.get_platform(), version("torch"), version("deepspeed"), device, capabilities)
    missing = {}
    for name in names:
        digest = hashlib.sha256(repr((*versions, name)).encode()).hexdigest()[:16]
        marker = folder / "trainkit" / f"{name}-{digest}"  # says which library the op was built to
        known = device == "cpu" or capabilities  # otherwise only the builder knows for which GPUs it is to be
        if not (known and marker.exists() and Path(marker.read_text()).exists()):
            missing[name] = marker
    clear_stale_locks(folder)
    if not missing:
        return  # known without importing torch
    for name, marker in missing.items():
        library = _build(name, device, capabilities)
        marker.parent.mkdir(parents=True, exist_ok=True)
        for other in marker.parent.glob(f"{name}-*"):  # built for something else, to the same place
            if other.read_text() == library:
                other.unlink()
        marker.write_text(library)


def _build(name: str, device: str, capabilities: str) -> str:
    """Build one op and return the path of its library. The builder's output is shown only when it fails."""
    os.environ["DS_ACCELERATOR"] = device
    if device == "cuda":
        import torch  # takes seconds, and what is built already does not need it

        if not torch.cuda.is_available():  # DeepSpeed would build the op without its kernels, and say nothing
            remedy = "see what `trainkit doctor` says of GPUs and driver"
            raise _cannot_be_built(name, "torch sees no CUDA GPU", remedy)
        if capabilities:  # or else DeepSpeed asks the GPUs that it sees
            os.environ["TORCH_CUDA_ARCH_LIST"] = capabilities
    compiler = cxx(os.environ)[0]
    if shutil.which(compiler) is None:
        raise _cannot_be_built(name, f"there is no compiler {compiler}", "install g++, or set CXX")
    with tempfile.TemporaryFile() as output:
        try:
            with _going_to(output.fileno()):
                import deepspeed.ops.op_builder as builders

                op = OPS[name]
                builder: Any = getattr(builders, op.builder)()
                if op.library and not builder.is_compatible():  # which compiles a small trial program
                    library, apt, dnf = op.library
                    remedy = f"apt install {apt}, or dnf install {dnf}; elsewhere set CFLAGS and LDFLAGS"
                    raise _cannot_be_built(name, f"{library} or its headers are not found", remedy)
                module: Any = builder.load(verbose=False)
        except TrainkitError:
            raise
        except Exception as error:  # builders raise whatever their compiler's driver raises
            output.seek(0)
            output_text = output.read().decode(errors="replace")
            raise _cannot_be_built(name, f"{error}\n{output_text}".strip()) from error
    return str(module.__file__)


def ask(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Whether DeepSpeed itself says that it can build each op, and the first line of what else it says."""
    answers = {}
    with tempfile.TemporaryFile() as output, _going_to(output.fileno()):
        import deepspeed.ops.op_builder as builders

        for name in names:
            begin = output.seek(0, os.SEEK_END)
            try:
                compatible, said = bool(getattr(builders, OPS[name].builder)().is_compatible(verbose=True)), ""
            except Exception as error:  # noqa: BLE001 - builders raise whatever their compiler's driver raises
                compatible, said = False, f"{type(error).__name__}: {error}"
            sys.stdout.flush()
            output.seek(begin)
            for line in output.read().decode(errors="replace").splitlines():
                # DeepSpeed colours its remarks, and labels each line of them.
                said = said or re.sub(r"\x1b\[[0-9;]*m", "", line).replace("[WARNING]", "").strip()
            answers[name] = {"compatible": compatible, "said": said}
    return answers


def _cannot_be_built(name: str, why: str, remedy: str = "") -> MachineError:
    return MachineError(f"the DeepSpeed op {name} cannot be built on this machine: {why}", hint=remedy)


@contextlib.contextmanager
def _going_to(descriptor: int) -> Iterator[None]:
    """The output of this process and its compilers goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    # By descriptor: DeepSpeed's trial compilations need a standard error that has one, and take a missing one for a
    # missing library.
    saved = {number: os.dup(number) for number in (1, 2)}
    try:
        for number in saved:
            os.dup2(descriptor, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in saved.items():
            os.dup2(before, number)
            os.close(before)


def clear_stale_locks(folder: Path) -> None:
    """Remove `lock` files that a killed process has left: torch would wait for them for ever, whatever is built."""
    # A living one keeps its lock file open, so one that no process holds open is stale; but a young one may have been
    # made since the processes were looked through. Those of other users cannot be looked into.
    locks = {str(path): _age(path) for path in folder.glob("**/lock")}
    if not locks or not Path("/proc/self/fd").exists():
        return  # there is no list of what is held
    if min(locks.values()) < YOUNG_SECONDS:
        time.sleep(YOUNG_SECONDS)
    held = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            held.add(str(descriptor.readlink()))
    for name in locks.keys() - held:
        path = Path(name)
        with contextlib.suppress(FileNotFoundError):
            if _age(path) >= YOUNG_SECONDS and path.stat().st_uid == os.getuid():
                path.unlink()


def _age(path: Path) -> float:
    """Seconds since the file was made; none for one that is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
