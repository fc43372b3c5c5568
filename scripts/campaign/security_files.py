"""Attacks by files of strangers: checkpoints, models, and folders that others may write to."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import security_content as hostile
from cases import ROOT
from security_judge import LAB, SURFACES, WROTE, Attack, answered

# Pickles and whole checkpoints, which are exported and resumed from.


def _pickle(draw: random.Random) -> Attack:
    from trainkit.trainer.checkpoint.safe_loading import unpickled

    run = LAB.runs["single"]
    metadata = next(run.glob("checkpoints/*/state/.metadata")).read_bytes()

    def read(folder: Path) -> int:
        before = _classes()
        for _ in range(20):
            try:
                unpickled(hostile.pickled(draw, metadata, folder))
            except pickle.UnpicklingError:
                continue
        if _classes() != before:
            raise AssertionError("a class or a function is another than before")
        return 0

    return Attack("", "20 pickles", lambda _: None, read)


def _classes() -> list[Any]:
    """Attributes of what a pickle may name."""
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
    strategy = draw.choice(tuple(LAB.runs))

    def prepare(folder: Path) -> None:
        run = folder / "work/runs/given" / LAB.runs[strategy].name
        shutil.copytree(LAB.runs[strategy], run)
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
        small = [each for each in _files(checkpoint) if each != path and each.stat().st_size < 10**9]
        manifest["files"] = {**manifest["files"], **described_files(checkpoint, World(), small)}
        manifest.pop("checksum", None)
        path.write_text(json.dumps({**manifest, "checksum": checksum(manifest)}))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return


def _files(folder: Path) -> list[Path]:
    """What is a file below a folder, and no link."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _with_pickle(draw: random.Random, checkpoint: Path, folder: Path) -> None:
    found = _files(checkpoint)
    path = draw.choice(found) if found else checkpoint
    if not found or path.stat().st_size > 10**8:
        return
    content = path.read_bytes()
    if path.suffix == ".distcp":
        _in_distcp(draw, checkpoint, path, folder)
    elif zipfile.is_zipfile(path):
        path.write_bytes(hostile.archive(draw, content, folder))
    elif path.suffix == ".json":
        path.write_bytes(hostile.flipped(draw, content))
    else:
        path.write_bytes(hostile.pickled(draw, content, folder))


def _in_distcp(draw: random.Random, checkpoint: Path, path: Path, folder: Path) -> None:
    """Another archive behind the shards, which the metadata names for one of them; or a path that leads elsewhere."""
    import torch

    metadata, run = checkpoint / "state/.metadata", checkpoint.parents[1]
    ours = [each / metadata.relative_to(run) for each in LAB.runs.values() if each.name == run.name]
    if metadata.read_bytes() not in [each.read_bytes() for each in ours]:
        return  # it is hostile already
    found = pickle.loads(metadata.read_bytes())  # of our own making
    content, place = path.read_bytes(), draw.choice(list(found.storage_data.values()))
    made = io.BytesIO()
    torch.save({"x": torch.zeros(8)} if draw.random() < 0.5 else torch.zeros(8), made)
    put = hostile.archive(draw, made.getvalue(), folder)
    path.write_bytes(content + put)
    place.offset, place.length = len(content), len(put)
    if draw.random() < 0.2:
        outside = ("../../../../../../outside/secret.txt", str(folder / "outside/secret.txt"))
        place.relative_path = draw.choice((*outside, "/dev/zero", "../.metadata", ""))
    if draw.random() < 0.1:
        place.length = draw.choice((-1, 2**62, 0))
    metadata.write_bytes(pickle.dumps(found))


def _old_generators(draw: random.Random, checkpoint: Path, folder: Path) -> None:
    import numpy
    import torch

    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    (checkpoint / "generators-0.pickle").write_bytes(hostile.pickled(draw, pickle.dumps(states, 2), folder))


def _with_json(draw: random.Random, checkpoint: Path, folder: Path) -> None:
    path = checkpoint / draw.choice(("manifest.json", "generators-0.json", "../../trainer.json"))
    with contextlib.suppress(OSError, ValueError, RecursionError):
        path.write_bytes(hostile.dumped(draw, json.loads(path.read_bytes())))


def _with_code(draw: random.Random, checkpoint: Path, folder: Path) -> None:
    """A run whose recipe names code."""
    path, mark = checkpoint.parents[1] / "trainer.json", str(folder / WROTE)
    targets: tuple[tuple[str, dict[str, Any]], ...] = (
        ("os:system", {"command": f"touch {mark}"}),
        ("os:mkdir", {"path": mark}),
        ("payload:Model", {}),
        ("subprocess:Popen", {"args": ["touch", mark]}),
    )
    target, arguments = draw.choice(targets)
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("model!", {"kind": "target", "target": target, "args": arguments}),
        ("optimizer", {"name": target.replace(":", "."), "args": arguments}),
        ("train", {"loss": target}),
        ("data", {"tokenizer": str(folder / "work")}),
        ("model!", {"kind": "hf", "path": str(folder / "work/model")}),
    )
    section, values = draw.choice(changes)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # it was damaged before
        content = json.loads(path.read_bytes())
        before = {} if section.endswith("!") else content["recipe"][section]
        content["recipe"][section.rstrip("!")] = {**before, **values}
        path.write_text(json.dumps(content))
        (folder / "work/payload.py").write_text(f"open({mark!r}, 'w')\nModel = print\n")


def _with_plant(draw: random.Random, checkpoint: Path, folder: Path) -> None:
    there = sorted(each for each in checkpoint.rglob("*") if not each.is_dir())
    path = draw.choice([*there, checkpoint / "state/x.distcp", checkpoint.parents[1] / "trainer.json"])
    hostile.plant(draw, path, folder / "outside")


_IN_A_CHECKPOINT = (
    _with_pickle, _with_pickle, _with_pickle, _old_generators, _with_json, _with_code, _with_plant,
)  # fmt: skip


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
        mine = folder / "work/runs/mine" / LAB.runs["single"].name  # the recipe is the user's own
        mine.mkdir(parents=True)
        shutil.copy(LAB.runs["single"] / "trainer.json", mine)
        parts = assemble(read_settings(mine / "trainer.json"), World(), torch.device("cpu"))
        given = next(folder.glob("work/runs/given/*/checkpoints/step-*"))
        load(given, parts.checkpoints.identity, parts.strategy, World())

    return answered(resume)(folder)


# Folders of models, tokenizers and adapters, as the Hub has them.

_CODE = (
    "open({mark!r}, 'w')\n"
    "class Custom:\n    def __init__(self, *a, **k): open({mark!r}, 'w')\n    from_pretrained = __init__\n"
)
_TEMPLATES = (
    "{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}",
    "{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}",
    "{{{{ self.__init__.__globals__ }}}}",
    "{{% for i in range(10**9) %}}x{{% endfor %}}",
    "{{{{ lipsum.__globals__['os'].popen('touch {mark}') }}}}",
    "{{% include '{mark}' %}}",
    "{{{{ raise_exception.__globals__ }}}}",
    "{{{{ messages.__class__.__base__ }}}}",
    "\x1b]52;c;eA==\x07{{{{ 1 }}}}",
)


def _hub(draw: random.Random) -> Attack:
    what = draw.choice(tuple(_READERS))
    cache = draw.random() < 0.3

    def prepare(folder: Path) -> None:
        given = folder / "work/given"
        shutil.copytree(LAB.adapters if what == "adapters" else LAB.model, given)
        _hostile_folder(draw, given, folder)
        if cache:  # the Hub's cache: snapshots of links to blobs
            blobs = folder / "work/blobs"
            blobs.mkdir()
            for number, path in enumerate(_files(given)):
                path.rename(blobs / str(number))
                path.symlink_to(f"../blobs/{number}")

    return Attack("", f"{what}{' in a cache' if cache else ''}", prepare, answered(_READERS[what]), named=True)


def _hostile_folder(draw: random.Random, given: Path, folder: Path) -> None:
    """Code, pickles and odd files in a folder that transformers or peft reads."""
    mark = str(folder / WROTE)
    for name in ("modeling_custom.py", "tokenization_custom.py", "custom.py", "payload.py", "configuration_custom.py"):
        (given / name).write_text(_CODE.format(mark=mark))
    configs = sorted(given.glob("*.json"))
    for _ in range(draw.randrange(1, 4)):
        draw.choice(_HARMS)(draw, draw.choice(configs), folder)
    if draw.random() < 0.3:  # last, for nothing here reads or writes what it is
        hostile.plant(draw, draw.choice(sorted(given.iterdir())), folder / "outside")


def _names_code(draw: random.Random, path: Path, _folder: Path) -> None:
    """A configuration whose classes are those of a Python file beside it."""
    kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer")
    pair = draw.random() < 0.5  # a tokenizer may name two: the slow one and the fast one
    auto_map = {kind: ["custom.Custom", None] if pair and kind == kinds[-1] else "custom.Custom" for kind in kinds}
    pipelines = {"custom_pipelines": {"x": {"impl": "custom.Custom"}}}
    further: tuple[dict[str, Any], ...] = ({}, {"model_type": "custom"}, {"tokenizer_class": "Custom"}, pipelines)
    path.write_text(json.dumps({**_parsed(path), "auto_map": auto_map, **draw.choice(further)}))


def _templates(draw: random.Random, path: Path, folder: Path) -> None:
    template = draw.choice(_TEMPLATES).format(mark=folder / WROTE)
    path.with_name("chat_template.jinja").write_text(template)
    path.write_text(json.dumps({**_parsed(path), "chat_template": template}))


def _pickles(draw: random.Random, path: Path, folder: Path) -> None:
    """Weights that are a pickle, in the place of safetensors."""
    weights = draw.choice(("pytorch_model.bin", "adapter_model.bin", "training_args.bin"))
    for each in path.parent.glob("*.safetensors"):
        each.unlink()
    path.with_name(weights).write_bytes(hostile.pickled(draw, pickle.dumps({"x": 1}), folder))


def _damages_weights(draw: random.Random, path: Path, _folder: Path) -> None:
    """safetensors whose header has another length, or whose bytes are flipped."""
    for each in path.parent.glob("*.safetensors"):
        content = each.read_bytes()
        lengths = (b"\xff" * 8, (2**40).to_bytes(8, "little"))
        each.write_bytes(draw.choice((*(length + content[8:] for length in lengths), hostile.flipped(draw, content))))


def _forges(draw: random.Random, path: Path, _folder: Path) -> None:
    path.write_bytes(hostile.dumped(draw, _parsed(path)))


_HARMS = (_names_code, _names_code, _templates, _pickles, _damages_weights, _forges)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _built(model: Path) -> Any:
    """The model in a folder, and a recipe for it with adapters."""
    from trainkit.recipe.schema import Recipe
    from trainkit.trainer.models.hf import build_hf

    data = {"kind": "random", "sequence_length": 8}
    sections = {"model": {"kind": "hf", "path": str(model)}, "data": data, "peft": {"kind": "lora", "rank": 2}}
    recipe = Recipe.model_validate(sections)
    return build_hf(recipe), recipe


def _tokenize(folder: Path) -> None:
    from trainkit.data.chats import ChatError, ChatTemplate
    from trainkit.data.tokenizer import Tokenizer, open_encoder

    encoder = open_encoder(str(folder / "work/given"))
    encoder.plain("the cat sat")
    assert isinstance(encoder, Tokenizer)
    with contextlib.suppress(ChatError):
        template = ChatTemplate.of(encoder.inner, None)
        encoder.learned(template.learnable([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))


def _adapt(folder: Path) -> None:
    from trainkit.trainer.models.adapters import add_adapters, load_adapters

    model, recipe = _built(LAB.model)
    add_adapters(model, recipe.peft)
    load_adapters(model, folder / "work/given")


_READERS: Mapping[str, Callable[[Path], object]] = {
    "model": lambda folder: _built(folder / "work/given"),
    "tokenizer": _tokenize,
    "adapters": _adapt,
}


# Run directories of others, and folders that others may write to, also while a run goes on.


def _shared(draw: random.Random) -> Attack:
    what = draw.choice(tuple(_WRITERS))
    seed = draw.random()

    def prepare(folder: Path) -> None:
        inner = random.Random(seed)
        for name in inner.sample(_SHARED_NAMES, inner.randrange(1, 6)):
            path = folder / "work/shared" / name
            if not path.parent.is_symlink() and (path.parent.is_dir() or not path.parent.exists()):
                hostile.plant(inner, path, folder / "outside")

    return Attack("", what, prepare, answered(_WRITERS[what]))


_SHARED_NAMES = (
    "GPU-1", "trainkit-x.lock", "trainkit-x", "status.json", "metrics.jsonl", ".lock", "checkpoints/.tmp-step-00000001",
    "command.sh", "env.txt", "plan.json", "recipe.yaml", "trainkit-run-1.lock", "attempts/1/logs/rank-0.out",
    "cards.jsonl", "weights", ".weights.tmp", "corpus.lock", "cache",
)  # fmt: skip


def _cards(folder: Path) -> None:
    from trainkit.machine.gpu_locks import GpuLocks, holder

    environ = {"TRAINKIT_CARD_LOCKS": str(folder / "work/shared")}
    holder("GPU-1", environ)
    cards = GpuLocks(environ)
    if cards.take(["GPU-1"]) is None:
        cards.sign("me", "a run")
    cards.release()


def _records(folder: Path) -> None:
    from trainkit.files import publish, publish_or_overwrite, read_json, read_json_lines

    shared = folder / "work/shared"
    for name in ("status.json", "env.txt", "command.sh"):
        read_json(shared / name)
        list(read_json_lines(shared / name))
        for write in (publish, publish_or_overwrite):
            with contextlib.suppress(OSError):
                write(shared / name, "{}")


def _run_files(folder: Path) -> None:
    from trainkit.metrics_file import JsonLines
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.runner.rundir.listing import is_running, lock_run

    layout = RunLayout(folder / "work/shared")
    is_running(layout)
    with contextlib.suppress(OSError):
        os.close(lock_run(layout))
        JsonLines(layout.metrics, print).write({"step": 1})


def _swaps(folder: Path) -> None:
    from trainkit.trainer.parallel.swapping import clear_abandoned

    clear_abandoned(folder / "work/shared")


_WRITERS: dict[str, Callable[[Path], None]] = {
    "card locks": _cards,
    "records": _records,
    "run directory": _run_files,
    "swap folder": _swaps,
}


_RECORDS = (
    "status.json", "plan.json", "summary.json", "result.json", "recipe.yaml", "metrics.jsonl", "cards.jsonl",
    "trainer.json", ".lock", "env.txt", "attempts/1/ranks/rank-0.json", "attempts/1/logs/rank-0.out",
    "attempts/1/logs/rank-0.err", "attempts/1/logs/launcher.log", "attempts/1/shown/rank-0.json",
    "checkpoints/step-00000003/manifest.json",
)  # fmt: skip


def _race(draw: random.Random) -> Attack:
    inner = random.Random(draw.random())

    def prepare(folder: Path) -> None:
        (folder / "work/train.py").write_text("import time\nprint('hello')\ntime.sleep(0.3)\n")

    def call(folder: Path) -> int:
        if (racer := os.fork()) == 0:
            try:
                _plant_meanwhile(inner, folder)
            finally:
                os._exit(0)
        argv = [sys.executable, "-P", "-m", "trainkit", "run", "train.py"]
        environ = {**os.environ, "TRAINKIT_CARD_LOCKS": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
        try:
            done = subprocess.run(argv, cwd=folder / "work", env=environ, capture_output=True, timeout=120, check=False)
        finally:
            os.kill(racer, 9)
            os.waitpid(racer, 0)
        os.write(1, done.stdout + done.stderr)
        return done.returncode

    return Attack("", "a run whose directory is changed meanwhile", prepare, call, starts=True, raw=True)


def _plant_meanwhile(draw: random.Random, folder: Path) -> None:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        for run in folder.glob("work/runs/*/*"):
            for path in (run / name for name in draw.sample(_RECORDS, 2)):
                with contextlib.suppress(OSError):
                    if path.parent.is_dir():
                        path.unlink(missing_ok=True)
                        path.symlink_to(folder / "outside" / draw.choice(("secret.txt", "made")))
        time.sleep(0.02)


SURFACES |= {"pickles": _pickle, "checkpoints": _checkpoint, "hub": _hub, "shared folders": _shared, "races": _race}
