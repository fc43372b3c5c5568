"""One rank of a run that measures its own memory: the bytes of all its tensors, on a CPU, as counted.c counts them.

Writes memory-RANK.json beside the settings: the peaks of the steps from the second on, which are alike, that of the
first, and the processor seconds of each step. With LIMIT in its environment no more bytes are to be had.

Libraries take seconds to import: :class:`Measuring` does it once, in a process that forks for each rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

STEPS = 3
OUT_OF_MEMORY = 9  # exit code: memory was refused for LIMIT


def counting(folder: Path) -> dict[str, str]:
    """What the environment of a counted process has, with the library built into a folder."""
    library = folder / "counted.so"
    if not library.exists():
        source = Path(__file__).with_name("counted.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


def main() -> int:
    """Run the steps, and write what they took."""
    return measure(Path(sys.argv[sys.argv.index("--settings") + 1]))


def measure(path: Path) -> int:
    """The same for a run's settings."""
    import torch

    from trainkit.trainer.loop import batches, optimizer_step
    from trainkit.trainer.settings import World, read_settings
    from trainkit.trainer.setup import assemble

    logging.disable(logging.INFO)
    counted = ctypes.CDLL(None)
    for name in ("now", "peak", "refused"):
        getattr(counted, f"counted_{name}").restype = ctypes.c_size_t
    settings = read_settings(path)
    world, device = World.from_environment(os.environ), torch.device("cpu")
    torch.set_num_threads(1)
    if settings.recipe.strategy.kind.startswith("zero"):
        from trainkit.trainer.parallel.zero import import_deepspeed

        import_deepspeed(device, "error").init_distributed("gloo")
    elif settings.recipe.strategy.kind != "single":
        torch.distributed.init_process_group("gloo")
    base = counted.counted_now()
    counted.counted_reset()
    if limit := os.environ.get("LIMIT"):
        counted.counted_limit(ctypes.c_size_t(int(limit) + base))
    try:
        parts = assemble(settings, world, device)
        steps, peaks, seconds = batches(parts, 0), [], []
        start = counted.counted_peak() - base
        for number in range(int(os.environ.get("STEPS", STEPS))):
            gc.collect()
            batch = next(steps)
            counted.counted_reset()
            began = time.process_time()
            optimizer_step(parts, number, batch, max(1, batch.counted))
            seconds.append(time.process_time() - began)
            peaks.append(counted.counted_peak() - base)
    except Exception:
        if counted.counted_refused():
            return OUT_OF_MEMORY
        raise
    finally:
        counted.counted_limit(ctypes.c_size_t(-1))
    found = {"peaks": peaks[1:], "first": peaks[0], "start": start, "seconds": seconds}
    (settings.run_dir / f"memory-{world.rank}.json").write_text(json.dumps(found))
    if settings.recipe.strategy.kind != "single":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


def _rank(path: Path, environ: Mapping[str, str]) -> None:
    """A rank in a process that was forked for it."""
    os.environ.update(environ)
    log = os.open(path.parent / f"rank-{environ['RANK']}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = measure(path)
    sys.stdout.flush()
    os._exit(code)


class Measuring:
    """A context in which runs are measured, each rank in a process of its own. preload: modules to import before."""

    def __init__(self, *preload: str) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._preload = ["torch", "transformers", "trainkit.trainer.setup", "trainkit.trainer.loop", *preload]

    def __enter__(self) -> Measuring:
        self.folder = Path(tempfile.mkdtemp())
        places = (str(ROOT), str(ROOT / "scripts/bench"), os.environ.get("PYTHONPATH"))
        forced = {**counting(self.folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                  "PYTHONPATH": os.pathsep.join(filter(None, places))}  # fmt: skip
        before = {name: os.environ.get(name) for name in forced}
        os.environ.update(forced)
        self._context.set_forkserver_preload(self._preload)
        forkserver.ensure_running()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, settings: Path, environments: Sequence[Mapping[str, str]], timeout: float = 240.0
    ) -> list[dict[str, Any]] | None:
        """What each rank took; None where LIMIT was too little. environments: of each. RuntimeError if one fails."""
        ranks = [self._context.Process(target=_rank, args=(settings, dict(each))) for each in environments]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout
        while (left := [rank for rank in ranks if rank.exitcode is None]) and time.monotonic() < deadline:
            wait([rank.sentinel for rank in left], 1.0)
            if any(rank.exitcode for rank in ranks):  # the others wait for it in vain
                break
        for rank in ranks:
            if rank.exitcode is None:
                rank.join(2.0)
                rank.kill()
            rank.join()
        codes = [rank.exitcode for rank in ranks]
        if OUT_OF_MEMORY in codes:
            return None
        if any(codes):
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(settings.parent.glob("rank-*.log")))
            raise RuntimeError(f"exit codes {codes}\n{logs}")
        return [json.loads(path.read_text()) for path in sorted(settings.parent.glob("memory-*.json"))]


if __name__ == "__main__":
    sys.exit(main())
