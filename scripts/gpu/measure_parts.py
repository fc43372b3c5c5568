"""What measurements share: a plan's parts in this process, the time of their steps, and the card's memory."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvml import used

if TYPE_CHECKING:
    from trainkit.trainer.setup import Parts

MIB = 2**20
Row = dict[str, Any]  # of a table
OF_TORCH = ("PYTORCH_", "CUDA_", "OMP_")  # variables of a plan that torch reads as it starts
BASE = """\
version: 1
name: measured
model: {layers: 2, heads: 2, hidden_size: 32, vocab_size: 512}
data: {kind: random, samples: 4096, low: 0, high: 512, sequence_length: 64}
optimizer: {name: adamw_torch, lr: 3.0e-4, weight_decay: 0.1}
train: {steps: 4, max_grad_norm: 1.0}
logging: {every_steps: 10}
"""


@dataclass(frozen=True)
class Asked:
    """A measurement. which: a size or a part; scratch: a folder that goes with this process."""

    which: str
    device: str
    tiny: bool
    scratch: Path

    @property
    def cuda(self) -> bool:
        """Whether there is a card; else only the measuring itself is tried."""
        return self.device == "cuda"

    def recipe(self, text: str = BASE) -> str:
        """A recipe's file; a gpt on random tokens by itself."""
        path = self.scratch / "measured.yaml"
        path.write_text(text)
        return str(path)


def plan(asked: Asked, words: Sequence[str], name: str) -> Path:
    """trainer.json (and deepspeed.json) of a plan, as `trainkit run` writes them. RuntimeError if it is refused."""
    place = ["devices.when_busy=warn"] if asked.cuda else ["--with", "devices/cpu"]
    argv = [sys.executable, "-m", "trainkit", "plan", *words, *place, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"trainkit plan: exit code {done.returncode}: {done.stderr[-1500:] or done.stdout[-1500:]}")
    found, folder = json.loads(done.stdout), asked.scratch / name
    variables = found["environment"]["set"].items()
    os.environ.update(
        {name: value for name, value in variables if name.startswith(OF_TORCH) and isinstance(value, str)}
    )
    folder.mkdir()
    for path, content in found["files"].items():
        (folder / path).write_text(content)
    return folder / "trainer.json"


def each_built(
    asked: Asked, configurations: Mapping[str, Sequence[str]], work: Callable[[str, Parts], Row], problems: list[str]
) -> list[Row]:
    """What `work` finds of the parts of each configuration; what cannot be planned, built or run becomes a problem."""
    rows = []
    with ThreadPoolExecutor(4) as pool:  # planning is processes of its own
        files = {
            name: pool.submit(plan, asked, words, f"plan-{number}")
            for number, (name, words) in enumerate(configurations.items())
        }
        for name, file in files.items():
            try:
                with parts_of(file.result()) as held:
                    rows.append(work(name, held.pop()))
            except Exception as error:  # noqa: BLE001 - one configuration must not cost the others
                problems.append(f"{name}: {type(error).__name__}: {error}"[:400])
    return rows


@contextlib.contextmanager
def parts_of(file: Path) -> Iterator[list[Parts]]:
    """The assembled parts of a single process, in a list: who takes them out gives their memory back at the end."""
    import torch

    from trainkit.trainer.distributed import device_of, process_group
    from trainkit.trainer.parallel import STRATEGIES
    from trainkit.trainer.settings import World, read_settings
    from trainkit.trainer.setup import assemble

    settings, world = read_settings(file), World()
    device = device_of(settings.device, world)
    forget(device.type)
    tf32, needed = torch.backends.cuda.matmul.allow_tf32, STRATEGIES[settings.recipe.strategy.kind].needs_group
    try:
        with process_group(world, device, needed=needed):
            yield [assemble(settings, world, device)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def forget(device: str) -> None:
    """Give back what a configuration before has left, also one that failed, and count memory anew."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: str) -> None:
    """Wait for the card."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of_step(parts: Parts, count: int, warm: int) -> float:
    """Seconds of one optimizer step, over `count` after `warm`, with the trainer's own step and batches."""
    from trainkit.trainer.loop import batches, optimizer_step

    device, given, began = parts.device.type, batches(parts, 0), 0.0
    for step in range(warm + count):
        if step == warm:
            synchronize(device)
            began = time.perf_counter()
        batch = next(given)
        optimizer_step(parts, step, batch, batch.counted)
    synchronize(device)
    return (time.perf_counter() - began) / count


def occupied(asked: Asked) -> float | None:
    """MiB that are occupied on the card as the driver sees it; None without one."""
    return used(shown_card()) / MIB if asked.cuda else None


def shown_card() -> int | str:
    """The card of this process for NVML: the first that CUDA shows."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0]
    return int(shown or 0) if not shown or shown.isdecimal() else shown


def peaks(asked: Asked, before: float | None) -> dict[str, Any]:
    """Highest memory since the parts were built, in MiB; nothing on a CPU."""
    import torch

    if not asked.cuda:
        return {}
    return {
        "allocated MiB": torch.cuda.max_memory_allocated() / MIB,
        "reserved MiB": torch.cuda.max_memory_reserved() / MIB,
        "NVML MiB": (occupied(asked) or 0.0) - (before or 0.0),
    }
