"""What `size` measures, as processes of their own: `python size_programs.py PROGRAM …`, one of those at the end."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainkit.recipe.schema import HfModel
from trainkit.runner.rundir.layout import MANIFEST
from trainkit.runner.rundir.listing import checksum
from trainkit.trainer.checkpoint.manifest import described_files
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data
from trainkit.trainer.checkpoint.shards import Shards
from trainkit.trainer.metrics.memory_breakdown import local
from trainkit.trainer.models import skeleton
from trainkit.trainer.models.adapters import add_adapters, base_fingerprint, kept_tensors
from trainkit.trainer.parallel.single_and_ddp import STATE, quiet, write_state
from trainkit.trainer.settings import World, read_settings


def save(run: str) -> None:
    """A checkpoint of zeros for a run's settings, and the base that they name: of pages that take no memory."""
    recipe = read_settings(Path(run, "trainer.json")).recipe
    model, base = skeleton(recipe), ""
    assert isinstance(recipe.model, HfModel)
    inner: Any = model.inner
    if recipe.model.path:
        tensors = {name: each.bfloat16() for name, each in inner.state_dict().items()}
        shards = Shards(Path(recipe.model.path), tensors, 5 * 10**9, {"format": "pt"})
        for name, each in tensors.items():
            shards.write(name, torch.zeros(each.shape, dtype=each.dtype))
        shards.finish()
        sizes = {name: each.shape for name, each in model.state_dict().items()}
        base = base_fingerprint(model, lambda name: torch.zeros(sizes[name]))
        add_adapters(model, recipe.peft)
    state = kept_tensors(model) if recipe.model.path else model.state_dict()
    folder = Path(run, "checkpoints/step-00000001")
    folder.mkdir(parents=True)
    write_state({"model": {name: torch.zeros(each.shape) for name, each in state.items()}}, folder)
    content = {"step": 1, "strategy": "single", "world_size": 1, "training_digest": "parity", "base": base}
    content |= {"folder": str(Path.cwd()), "files": described_files(folder, World())}
    (folder / MANIFEST).write_text(json.dumps({**content, "checksum": checksum(content)}))


def export(checkpoint: str, destination: str, shard_bytes: str) -> None:
    """Import all that an export imports, wait to be looked at, and export."""
    import peft  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    from trainkit.trainer.checkpoint import __main__ as exporter
    from trainkit.trainer.checkpoint import export as _  # noqa: F401

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    words = ["--checkpoint", checkpoint, "--destination", destination, "--dtype", "bf16", "--shard-bytes", shard_bytes]
    sys.exit(exporter.main(words))


def rank(folder: str, what: str) -> None:
    """Save, or load, a model under FSDP with its optimizer as one of the ranks; prints bytes read, and its share."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [nn.Sequential(nn.Linear(768, 3073), nn.Linear(3073, 768)) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(3001, 768), *layers)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if what == "save":
        write_state(state, Path(folder))
    else:
        before = _read_so_far()
        with quiet(), only_data():
            state_dict_loader.load(state, storage_reader=StateReader(Path(folder, STATE)))
        share = sum(each.nbytes for each in _own(state))
        sys.stdout.write(json.dumps([_read_so_far() - before, share]) + "\n")
    dist.destroy_process_group()


def train(*words: str) -> None:
    """The trainer as it is, which then prints the most memory that was ever resident (VmHWM), in bytes."""
    from trainkit.trainer.__main__ import main

    code = main(words)
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    sys.stdout.write(f"{int(found[1]) << 10}\n")
    sys.stdout.flush()
    os._exit(code)


def place(settings_file: str, backend: str) -> None:
    """Import all that a start imports, wait to be looked at, and build and place a Llama as a rank of the trainer does.

    backend: of the process group; `fake` for a rank alone, whose collectives do nothing. Prints, in bytes, what the
    rank has of the weights, the slices that it asked for, and the resident pages of the folder's files at the end.
    Under ZeRO-3 it ends before DeepSpeed's engine, which makes its gradients' and optimizer's memory at once.
    """
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trainkit.lazy import load
    from trainkit.trainer.distributed import device_of
    from trainkit.trainer.parallel import STRATEGIES
    from trainkit.trainer.parallel.zero import import_deepspeed
    from trainkit.trainer.setup import prepared_model

    settings, world = read_settings(Path(settings_file)), World.from_environment(os.environ)
    device, strategy = device_of("cpu", world), STRATEGIES[settings.recipe.strategy.kind]
    load(strategy.place)

    def end(parameters: Iterable[Any]) -> None:
        own = sum(local(getattr(each, "ds_tensor", each)).nbytes for each in parameters)
        with open(1, "w", closefd=False) as output:  # sys.stdout is redirected around DeepSpeed
            output.write(json.dumps([own, CountedFile.asked, CountedFile.resident]) + "\n")
        os._exit(0)

    if settings.deepspeed is not None:
        import_deepspeed(device, "warning").initialize = lambda *, model, **_: end(model.parameters())
    simulated: Any = {"store": FakeStore(), "rank": world.rank, "world_size": world.size} if backend == "fake" else {}
    dist.init_process_group(backend, **simulated)
    transformers.modeling_utils.safe_open = CountedFile
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    model = prepared_model(settings, init_device_mesh("cpu", (world.size,)))
    end(strategy.build(model, settings, world, device).held()["parameters"])


def stall(*words: str) -> None:
    """The trainer, which prints for each checkpoint but the last how long it waits, and how long a memcpy takes.

    Both in seconds; the memcpy is of the same state to memory that is as fresh, the faster of one before and one after.
    The last checkpoint is written without a copy, for no step follows.
    """
    from trainkit.trainer.__main__ import main
    from trainkit.trainer.checkpoint.saving import Checkpoints

    found: list[tuple[float, float]] = []
    save = Checkpoints.save

    def seconds_of(work: Callable[[], object]) -> float:
        dist.barrier()
        begun = time.perf_counter()
        made = work()  # whose memory is freed after the time is taken
        taken = time.perf_counter() - begun
        del made
        return taken

    def timed(self: Checkpoints, step: int, strategy: Any, *, last: bool, **more: Any) -> None:
        if last:
            save(self, step, strategy, last=last, **more)
            return
        self.wait()  # for the checkpoint before, which is no part of this
        held = strategy.held()
        state = [local(each).detach() for part in ("parameters", "optimizer_state") for each in held[part]]

        def memcpy() -> object:
            return [torch.empty_like(each).copy_(each) for each in state]

        before, stopped = seconds_of(memcpy), seconds_of(partial(save, self, step, strategy, last=last, **more))
        self.wait()  # what is written in the meantime would slow down the other
        found.append((stopped, min(before, seconds_of(memcpy))))

    Checkpoints.save = timed  # type: ignore[method-assign,assignment]
    code = main(words)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(code)


class CountedFile:
    """A file of safetensors that counts the bytes of slices that are asked for, and looks at its pages at the end."""

    asked = resident = 0  # bytes, of all files

    def __init__(self, path: str, *given: Any, **more: Any) -> None:
        self._path = path
        self._file: Any = safe_open(path, *given, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        mappings = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        for each in mappings:
            if each.partition("\n")[0].endswith(os.path.realpath(self._path)):
                CountedFile.resident += int(re.findall(r"(?m)^Rss:\s+(\d+) kB", each)[0]) << 10
        self._file.__exit__(*error)

    def get_slice(self, key: str) -> Any:
        return CountedSlice(self._file.get_slice(key))


class CountedSlice:
    def __init__(self, part: Any) -> None:
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self._part[index]
        CountedFile.asked += found.nbytes
        return found


def _read_so_far() -> int:
    """Bytes that this process has read from files."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def _own(state: Any) -> Iterator[torch.Tensor]:
    """What a rank itself holds of a nest of tensors."""
    if isinstance(state, dict):
        for each in state.values():
            yield from _own(each)
    elif isinstance(state, torch.Tensor):
        yield state.to_local() if isinstance(state, DTensor) else state


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    programs: dict[str, Callable[..., None]] = {
        "save": save,
        "export": export,
        "rank": rank,
        "train": train,
        "place": place,
        "stall": stall,
    }
    programs[sys.argv[1]](*sys.argv[2:])
