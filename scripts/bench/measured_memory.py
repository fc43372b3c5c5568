"""One rank of a run that measures its own memory: the bytes of all its tensors, on a CPU, as counted.c counts them.

Writes memory-RANK.json beside the settings: the peaks of the steps from the second on, which are all alike, that of the
first, and the processor seconds of each step. With LIMIT in its environment no more bytes are to be had.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

STEPS = 3


def counting(folder: Path) -> dict[str, str]:
    """What the environment of a counted process has, with the library built into a folder."""
    library = folder / "counted.so"
    if not library.exists():
        source = Path(__file__).with_name("counted.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}


def main() -> int:
    """Run the steps, and write what they took."""
    import torch

    from trainkit.trainer.loop import batches, optimizer_step
    from trainkit.trainer.settings import World, read_settings
    from trainkit.trainer.setup import assemble

    logging.disable(logging.INFO)
    counted = ctypes.CDLL(None)
    for name in ("now", "peak", "refused"):
        getattr(counted, f"counted_{name}").restype = ctypes.c_size_t
    if limit := os.environ.get("LIMIT"):
        counted.counted_limit(ctypes.c_size_t(int(limit) + counted.counted_now()))
    settings = read_settings(Path(sys.argv[sys.argv.index("--settings") + 1]))
    world, device = World.from_environment(os.environ), torch.device("cpu")
    torch.set_num_threads(1)
    if settings.recipe.strategy.kind.startswith("zero"):
        from trainkit.trainer.parallel.zero import import_deepspeed

        import_deepspeed(device, "error").init_distributed("gloo")
    elif settings.recipe.strategy.kind != "single":
        torch.distributed.init_process_group("gloo")
    base = counted.counted_now()
    parts = assemble(settings, world, device)
    steps, peaks, seconds = batches(parts, 0), [], []
    start = counted.counted_peak() - base
    for number in range(STEPS):
        gc.collect()
        batch = next(steps)
        counted.counted_reset()
        began = time.process_time()
        optimizer_step(parts, number, batch, max(1, batch.counted))
        seconds.append(time.process_time() - began)
        peaks.append(counted.counted_peak() - base)
    found = {"peak": max(peaks[1:]), "first": peaks[0], "start": start, "seconds": seconds}
    (settings.run_dir / f"memory-{world.rank}.json").write_text(json.dumps(found))
    if settings.recipe.strategy.kind != "single":
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
