"""Attacks by pickles and whole checkpoints, which are exported and resumed from."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import security_content as hostile
import security_surfaces as attacks
from security_judge import WROTE, Attack
from security_surfaces import SURFACES, answered


def _pickle(draw: random.Random) -> Attack:
    from trainkit.trainer.checkpoint.safe_loading import unpickled

    run = attacks.LAB.runs["single"]
    metadata = next(run.glob("checkpoints/*/state/.metadata")).read_bytes()

    def read(folder: Path) -> int:
        from pickle import UnpicklingError

        before = _classes()
        for _ in range(20):
            try:
                unpickled(hostile.pickled(draw, metadata, folder))
            except UnpicklingError:
                continue
        if _classes() != before:
            raise AssertionError("a class or a function is another than before")
        return 0

    return Attack("", "20 pickles", lambda _: None, read)


def _classes() -> list[Any]:
    """Attributes of what a pickle may name."""
    import importlib

    found = []
    for place in hostile.ALLOWED:
        module, name = place.split(" ")
        try:
            value = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError:  # as numpy 2 calls it, or numpy 1
            continue
        found.append({key: id(each) for key, each in getattr(value, "__dict__", {}).items()})
    return found


def _checkpoint(draw: random.Random) -> Attack:
    strategy = draw.choice(tuple(attacks.LAB.runs))

    def prepare(folder: Path) -> None:
        run = folder / "work/runs/given" / attacks.LAB.runs[strategy].name
        shutil.copytree(attacks.LAB.runs[strategy], run)
        checkpoint = next(run.glob("checkpoints/step-*"))
        harms = [draw.choice(_IN_A_CHECKPOINT) for _ in range(draw.randrange(1, 3))]
        # What is planted comes last: nothing here reads or writes what it is.
        for harm in sorted(harms, key=lambda harm: harm is _with_plant):
            harm(draw, checkpoint, folder)
        _sign(checkpoint, draw)

    attack = Attack("", "", prepare, _exported if strategy != "single" or draw.random() < 0.5 else _resumed)
    attack.title = f"{strategy}: {attack.call.__name__}"
    return attack


def _sign(checkpoint: Path, draw: random.Random) -> None:
    """Make the manifest true again, mostly: who makes a checkpoint makes its checksums."""
    from trainkit.runner.rundir.listing import checksum
    from trainkit.trainer.checkpoint.manifest import described_files
    from trainkit.trainer.settings import World

    path = checkpoint / "manifest.json"
    if draw.random() < 0.05 or path.is_symlink() or not path.is_file() or path.stat().st_size > 10**7:
        return
    try:
        manifest = json.loads(path.read_bytes())
        small = [
            each
            for each in checkpoint.rglob("*")
            if not each.is_symlink() and each.is_file() and each.stat().st_size < 10**9
        ]
        manifest["files"] = {
            **manifest["files"],
            **described_files(checkpoint, World(), [each for each in small if each != path]),
        }
        manifest.pop("checksum", None)
        path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return


def _some_file(draw: random.Random, checkpoint: Path) -> Path:
    return draw.choice(
        sorted(path for path in checkpoint.rglob("*") if path.is_file() and not path.is_symlink()) or [checkpoint / "x"]
    )


def _with_pickle(draw: random.Random, checkpoint: Path, folder: Path) -> str:
    path = _some_file(draw, checkpoint)
    if path.name == "x" or path.stat().st_size > 10**8:
        return ""
    content = path.read_bytes()
    if path.suffix == ".distcp":
        return _in_distcp(draw, checkpoint, path, folder)
    if zipfile.is_zipfile(path):
        path.write_bytes(hostile.archive(draw, content, folder))
    elif path.suffix == ".json":
        path.write_bytes(hostile.flipped(draw, content))
    else:
        path.write_bytes(hostile.pickled(draw, content, folder))
    return f"a pickle in {path.name}"


def _in_distcp(draw: random.Random, checkpoint: Path, path: Path, folder: Path) -> str:
    """Another archive behind the shards, which the metadata names for one of them; or a path that leads elsewhere."""
    import pickle

    import torch

    metadata, run = checkpoint / "state/.metadata", checkpoint.parents[1]
    ours = [each / metadata.relative_to(run) for each in attacks.LAB.runs.values() if each.name == run.name]
    if metadata.read_bytes() not in [each.read_bytes() for each in ours]:
        return ""  # it is hostile already
    found = pickle.loads(metadata.read_bytes())  # of our own making
    content, place = path.read_bytes(), draw.choice(list(found.storage_data.values()))
    made = io.BytesIO()
    torch.save({"x": torch.zeros(8)} if draw.random() < 0.5 else torch.zeros(8), made)
    put = hostile.archive(draw, made.getvalue(), folder)
    path.write_bytes(content + put)
    place.offset, place.length = len(content), len(put)
    if draw.random() < 0.2:
        place.relative_path = draw.choice(
            (
                "../../../../../../outside/secret.txt",
                "/dev/zero",
                str(folder / "outside/secret.txt"),
                "../.metadata",
                "",
            )
        )
    if draw.random() < 0.1:
        place.length = draw.choice((-1, 2**62, 0))
    metadata.write_bytes(pickle.dumps(found))
    return "a shard behind the shards"


def _old_generators(draw: random.Random, checkpoint: Path, folder: Path) -> str:
    import random as python

    import numpy
    import torch

    states = {"python": python.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    (checkpoint / "generators-0.pickle").write_bytes(hostile.pickled(draw, pickle.dumps(states, 2), folder))
    return "pickled generators"


def _with_json(draw: random.Random, checkpoint: Path, folder: Path) -> str:
    path = draw.choice(
        (checkpoint / "manifest.json", checkpoint / "generators-0.json", checkpoint.parents[1] / "trainer.json")
    )
    try:
        path.write_bytes(hostile.dumped(draw, json.loads(path.read_bytes())))
    except (OSError, ValueError, RecursionError):
        return ""
    return f"{path.name}"


def _with_code(draw: random.Random, checkpoint: Path, folder: Path) -> str:
    """A run whose recipe names code."""
    path = checkpoint.parents[1] / "trainer.json"
    mark = str(folder / WROTE)
    try:
        content = json.loads(path.read_bytes())
        recipe = content["recipe"]
        targets: tuple[tuple[str, dict[str, Any]], ...] = (
            ("os:system", {"command": f"touch {mark}"}),
            ("os:mkdir", {"path": mark}),
            ("payload:Model", {}),
            ("subprocess:Popen", {"args": ["touch", mark]}),
        )
        target, arguments = draw.choice(targets)
        section, value = draw.choice(
            (
                ("model", {"kind": "target", "target": target, "args": arguments}),
                ("optimizer", {**recipe["optimizer"], "name": target.replace(":", "."), "args": arguments}),
                ("train", {**recipe["train"], "loss": target}),
                ("data", {**recipe["data"], "tokenizer": str(folder / "work")}),
                ("model", {"kind": "hf", "path": str(folder / "work/model")}),
            )
        )
        recipe[section] = value
        path.write_text(json.dumps(content))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    (folder / "work/payload.py").write_text(f"open({mark!r}, 'w')\nModel = print\n")
    return f"{section} names code"


def _with_plant(draw: random.Random, checkpoint: Path, folder: Path) -> str:
    above = checkpoint.parents[1]
    path = draw.choice(
        [
            *sorted(each for each in checkpoint.rglob("*") if not each.is_dir()),
            checkpoint / "state/x.distcp",
            above / "trainer.json",
        ]
    )
    return hostile.plant(draw, path, folder / "outside")


_IN_A_CHECKPOINT: tuple[Callable[[random.Random, Path, Path], str], ...] = (
    _with_pickle,
    _with_pickle,
    _with_pickle,
    _old_generators,
    _with_json,
    _with_code,
    _with_plant,
)


def _exported(folder: Path) -> int:
    from trainkit.trainer.checkpoint.__main__ import main

    checkpoint = next(folder.glob("work/runs/given/*/checkpoints/step-*"))
    return main(["--checkpoint", str(checkpoint), "--destination", str(folder / "work/weights")])


def _resumed(folder: Path) -> int:
    import torch

    from trainkit.trainer.checkpoint.resuming import load
    from trainkit.trainer.settings import World, read_settings
    from trainkit.trainer.setup import assemble

    def resume(_: Path) -> None:
        mine = folder / "work/runs/mine" / attacks.LAB.runs["single"].name  # the recipe is the user's own
        mine.mkdir(parents=True)
        shutil.copy(attacks.LAB.runs["single"] / "trainer.json", mine)
        parts = assemble(read_settings(mine / "trainer.json"), World(), torch.device("cpu"))
        load(
            next(folder.glob("work/runs/given/*/checkpoints/step-*")),
            parts.checkpoints.identity,
            parts.strategy,
            World(),
        )

    return answered(resume)(folder)


SURFACES |= {"pickles": _pickle, "checkpoints": _checkpoint}
