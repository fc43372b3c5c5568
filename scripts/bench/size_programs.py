"""What `size` measures, as processes of their own: `python size_programs.py save|export|rank …`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
    programs: dict[str, Callable[..., None]] = {"save": save, "export": export, "rank": rank}
    programs[sys.argv[1]](*sys.argv[2:])
