"""What a plan sees of the data and the tokenizer without torch, transformers or pyarrow: the heads of their files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.data.chats import ChatError, require_all_learned, require_answer
from trainkit.data.files import HEAD, TABLES, check_shard, chosen_files, ending, head_rows, json_of
from trainkit.data.formats import FORMATS, Chat, RowFormat, content_of, recognised
from trainkit.data.seen import SeenData, SeenModel, SeenTokenizer
from trainkit.errors import TrainingError
from trainkit.files import cache_folder
from trainkit.hub.splits import RowSelection
from trainkit.recipe.schema import DatasetData, HfModel, Recipe
from trainkit.recipe.schema.data import BYTES
from trainkit.tasks import task_of

_MOST = 1 << 28  # bytes of the head of a safetensors file
ROWS_LOOKED_AT = 200


def look(recipe: Recipe, absolute: Callable[[str], str], environ: Mapping[str, str]) -> SeenData:
    """What there is of a recipe's data on this machine. absolute: from the working folder. environ: the caller's."""
    if recipe.program.kind != "builtin":
        return SeenData()
    data = recipe.data
    known: dict[str, Any] = {"tokenizer": _tokenizer(recipe, absolute), "model": _model(recipe, absolute)}
    if not isinstance(data, DatasetData) or data.mix:
        return SeenData(**known)
    named = [data.path] if isinstance(data.path, str) else data.path
    paths = [Path(absolute(each)) for each in named]
    if not all(path.exists() for path in paths):
        return SeenData(**known)
    try:
        selection = RowSelection(data.subset, data.split, data.validation_split)
        parts = [chosen_files(path, selection) for path in paths]
        files, held_out = ([file for part in parts for file in part[which]] for which in (0, 1))
        if data.validation_path is None and (prepared := _prepared(recipe, files, held_out, environ)):
            return replace(prepared, **known)
        form, rows, whole = _format(files, data, task_of(recipe))
    except TrainingError as error:
        return SeenData(fault=(str(error), "; ".join(error.hints)), **known)
    except OSError as error:
        return SeenData(fault=(f"data.path: {error.strerror or error}", "make it readable"), **known)
    size = sum(file.stat().st_size for file in files)
    most = data.max_rows or math.inf
    if most < 1:
        most = max(1, round(most * rows)) if whole and len(files) == 1 else math.inf
    count = int(min(rows, most)) if rows >= most or (whole and len(files) == 1) else None
    return SeenData(form, None, count, len(files), size, **known)


def _prepared(
    recipe: Recipe, files: Sequence[Path], held_out: Sequence[Path], environ: Mapping[str, str]
) -> SeenData | None:
    """What an earlier preparation has found out; None without one."""
    root = getattr(recipe.data, "cache", None) or cache_folder(environ, "prepared")
    if root is None or not Path(root, "contents").is_dir():  # before NumPy is loaded for it
        return None
    try:
        from trainkit.data.prepare import known_already
    except ImportError:
        return None
    found = known_already(recipe, files, held_out, environ)
    if found is None:
        return None
    meta = found.tokens.meta
    format_ = next(each for each in FORMATS if each.name == meta["form"]["name"])
    size = sum(file.stat().st_size for file in files)
    length = found.view.sequence_length
    return SeenData(RowFormat(format_, meta["form"]["columns"]), None, meta["rows"], len(files), size, length=length)


def _format(files: Sequence[Path], data: DatasetData, task: str) -> tuple[RowFormat | None, int, bool]:
    """The format of the first file's rows, how many of them were looked at, and whether that are all.

    TrainingError for rows that the task cannot learn from.
    """
    first = next(iter(files), None)
    if first is None or ending(first) in TABLES:
        return None, 0, False
    check_shard(first)
    with first.open("rb") as file:
        head = file.read(HEAD)
        whole = not file.read(1)
    rows = head_rows(str(first), head, whole=whole)
    if not rows:
        return None, 0, False
    form = recognised(tuple(rows[0].fields), data.columns, task, where=rows[0].place)
    for row in rows[:ROWS_LOOKED_AT]:
        if not (data.skip_empty and row.blank(form.columns[role] for role in form.format.needs)):
            content = content_of(row, form, chats=True)
            if isinstance(content, Chat):
                try:
                    (require_all_learned if data.train_on_prompts else require_answer)(content.messages)
                except ChatError as error:
                    raise row.wrong(str(error)) from error
    return form, len(rows), whole


def _tokenizer(recipe: Recipe, absolute: Callable[[str], str]) -> SeenTokenizer | None:
    named = getattr(recipe.data, "tokenizer", None)
    if recipe.data.kind not in ("text", "dataset"):
        return None
    if named in (None, BYTES):
        return SeenTokenizer(BYTES, 256, None if not isinstance(recipe.model, HfModel) else recipe.model.path is None)
    model = recipe.model.path if isinstance(recipe.model, HfModel) else None
    own: bool | None = None
    if model is not None:
        own = model == named
        if not own:
            one, other = (tokenizer_content(Path(absolute(each))) for each in (named, model))
            own = one == other if one and other else None
    return SeenTokenizer(named, tokenizer_size(Path(absolute(named))), own)


_FORMATS = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8"}
_OF_BLOCK = re.compile(r"\.\d+\.")


def _model(recipe: Recipe, absolute: Callable[[str], str]) -> SeenModel | None:
    """By the heads of its safetensors (huggingface/safetensors, README: eight bytes of size, then JSON)."""
    if not isinstance(recipe.model, HfModel) or recipe.model.path is None:
        return None
    folder = Path(absolute(recipe.model.path))
    index = json_of(folder / "model.safetensors.index.json").get("weight_map")
    names = sorted({*index.values()}) if isinstance(index, dict) else ["model.safetensors"]
    size = adapters = 0
    formats: Counter[str] = Counter()
    try:
        for name in names:
            with (folder / name).open("rb") as file:
                head = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MOST)))
            for key, tensor in head.items():
                if key == "__metadata__":
                    continue
                values = math.prod(tensor["shape"])
                size += values
                formats[tensor["dtype"]] += values
                if len(tensor["shape"]) == 2 and key.endswith(".weight") and _OF_BLOCK.search(key):
                    adapters += recipe.peft.rank * sum(tensor["shape"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # who loads them says what is wrong
        return None
    most = formats.most_common(1)
    return SeenModel(size, adapters, _FORMATS.get(most[0][0], most[0][0].lower())) if most else None


def tokenizer_content(folder: Path) -> str:
    """What of a tokenizer.json makes ids of texts; empty without one. Templates and settings beside it do not count."""
    found = json_of(folder / "tokenizer.json")
    parts = [found.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")]
    return json.dumps(parts, sort_keys=True) if found else ""


def tokenizer_size(folder: Path) -> int | None:
    """One more than the highest id that a tokenizer.json gives; None without one."""
    found = json_of(folder / "tokenizer.json")
    vocabulary = (found.get("model") or {}).get("vocab") if isinstance(found.get("model"), dict) else None
    try:
        ids = [each["id"] for each in found.get("added_tokens") or ()]
        if isinstance(vocabulary, dict):
            ids += vocabulary.values()
        elif isinstance(vocabulary, list):
            ids.append(len(vocabulary) - 1)
        return max(ids) + 1 if vocabulary else None
    except (TypeError, KeyError, ValueError):
        return None
