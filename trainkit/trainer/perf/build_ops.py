"""Build DeepSpeed ops ahead of a run: ``python -m trainkit.trainer.perf.build_ops --ops shm_comm,cpu_adam``.

Ranks that find an op missing build it at first use, for half a minute and more. Quiet and quick when all is built.
An op of one name is another library on CUDA than on a CPU, and one that is built for some GPUs may not run on others.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainkit.errors import MachineError, TrainingError, TrainkitError, in_words

# Op name in a recipe or plan -> class of its builder in deepspeed.ops.op_builder
BUILDERS: Mapping[str, str] = {
    "shm_comm": "ShareMemCommBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "async_io": "AsyncIOBuilder",
    "fused_adam": "FusedAdamBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "cpu_lion": "CPULionBuilder",
    "fused_lamb": "FusedLambBuilder",
    "fused_lion": "FusedLionBuilder",
}
# Op name -> the system library that it is linked with, and how to get that.
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "async_io": ("libaio", "apt install libaio-dev, or dnf install libaio-devel; elsewhere set CFLAGS and LDFLAGS"),
}
YOUNG_SECONDS = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Build what is missing. Exit code 4, and what is missing or what the compiler says, when one cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.perf.build_ops", description=__doc__)
    parser.add_argument("--ops", required=True, help=f"comma-separated, of {', '.join(BUILDERS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that the run trains on")
    parser.add_argument("--capabilities", default="", help="of the GPUs that it uses, comma-separated: 8.0,9.0")
    asked = parser.parse_args(argv)
    names = [name for name in asked.ops.split(",") if name]
    try:
        unknown = [name for name in names if name not in BUILDERS]
        if unknown:
            raise TrainingError(f"no DeepSpeed op is named {', '.join(unknown)}", hint=f"known: {', '.join(BUILDERS)}")
        build_missing(names, asked.device, asked.capabilities.replace(",", ";"))
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
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
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise _cannot_be_built(name, f"there is no compiler {compiler}", "install g++, or set CXX")
    with tempfile.TemporaryFile() as output:
        try:
            with _going_to(output.fileno()):
                import deepspeed.ops.op_builder as builders

                builder: Any = getattr(builders, BUILDERS[name])()
                if name in LIBRARIES and not builder.is_compatible():  # which compiles a small trial program
                    library, remedy = LIBRARIES[name]
                    raise _cannot_be_built(name, f"{library} or its headers are not found", remedy)
                module: Any = builder.load(verbose=False)
        except TrainkitError:
            raise
        except Exception as error:  # builders raise whatever their compiler's driver raises
            output.seek(0)
            output_text = output.read().decode(errors="replace")
            raise _cannot_be_built(name, f"{error}\n{output_text}".strip()) from error
    return str(module.__file__)


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
