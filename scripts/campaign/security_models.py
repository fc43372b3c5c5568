"""Attacks by folders of models, tokenizers and adapters, as the Hub has them."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import security_content as hostile
import security_surfaces as attacks
from security_judge import WROTE, Attack
from security_surfaces import SURFACES, answered

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
        shutil.copytree(attacks.LAB.adapters if what == "adapters" else attacks.LAB.model, given)
        _hostile_folder(draw, given, folder)
        if cache:  # the Hub's cache: snapshots of links to blobs
            blobs = folder / "work/blobs"
            blobs.mkdir()
            for number, path in enumerate(
                sorted(each for each in given.iterdir() if each.is_file() and not each.is_symlink())
            ):
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
    further: dict[str, Any] = draw.choice(
        (
            {},
            {"model_type": "custom"},
            {"tokenizer_class": "Custom"},
            {"custom_pipelines": {"x": {"impl": "custom.Custom"}}},
        )
    )
    path.write_text(json.dumps({**_parsed(path), "auto_map": auto_map, **further}))


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


def _build(folder: Path) -> None:
    from trainkit.recipe.schema import Recipe
    from trainkit.trainer.models.hf import build_hf

    build_hf(
        Recipe.model_validate(
            {
                "model": {"kind": "hf", "path": str(folder / "work/given")},
                "data": {"kind": "random", "sequence_length": 8},
            }
        )
    )


def _tokenize(folder: Path) -> None:
    from trainkit.trainer.data.encoding import ChatError, open_encoder

    encoder = open_encoder(str(folder / "work/given"))
    encoder.plain("the cat sat")
    try:
        encoder.chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except ChatError:
        return


def _adapt(folder: Path) -> None:
    from trainkit.recipe.schema import Recipe
    from trainkit.trainer.models.adapters import add_adapters, load_adapters
    from trainkit.trainer.models.hf import build_hf

    recipe = Recipe.model_validate(
        {
            "model": {"kind": "hf", "path": str(attacks.LAB.model)},
            "data": {"kind": "random", "sequence_length": 8},
            "peft": {"kind": "lora", "rank": 2},
        }
    )
    model = build_hf(recipe)
    add_adapters(model, recipe.peft)
    load_adapters(model, folder / "work/given")


_READERS: Mapping[str, Callable[[Path], None]] = {"model": _build, "tokenizer": _tokenize, "adapters": _adapt}


SURFACES["hub"] = _hub
