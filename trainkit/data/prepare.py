"""Prepare rows: find their files and their format, make token ids of them in parallel, and keep these by content."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from trainkit.data.chats import ChatError
from trainkit.data.encode import RowEncoder
from trainkit.data.files import (
    COMPRESSED,
    START,
    TABLES,
    RawRow,
    ShardPosition,
    batches_of,
    check_shard,
    chosen_files,
    columns_of,
    ending,
    first_rows,
    json_of,
    left_out,
    reading,
    rows_of,
    values_of,
)
from trainkit.data.formats import RowFormat, packing_of, recognised
from trainkit.data.prepared import (
    FORMAT,
    Prepared,
    Tokens,
    finish,
    known_labels,
    locked,
    read_view,
    read_whole_folder,
    save_array,
    view_of,
)
from trainkit.data.ready import token_ids
from trainkit.data.tokenizer import fingerprint, open_encoder, require_known
from trainkit.errors import TrainingError
from trainkit.files import cache_folder, parse_json, remove_tree, write_json
from trainkit.hub.splits import RowSelection
from trainkit.recipe.schema import DatasetData, HfModel, Recipe
from trainkit.recipe.schema.data import BYTES, Mixed
from trainkit.recipe.schema.model import places_of
from trainkit.tasks import LABELLING, task_of
from trainkit.text import join_names

PIECE = 1 << 22  # bytes of a file that are one task
BATCH = 512  # rows that are one task, of a file that is read from its start
SMALL = 1 << 23  # bytes of all files, up to which starting processes would take longer
MOST_WORKERS = 64
MOST_OF_TEXT = 1024  # tokens, as in transformers' run_clm.py (block_size)
_KEPT_EVERY = 2.0  # seconds between two records of how far a preparation is
_SETTLED = 2.0  # seconds after which a file that is the same size and age has the same content


@dataclass(frozen=True, slots=True)
class RowFiles:
    """The files of one source. held_out: separate files to evaluate on, if any. names: of labels.

    left_out: files of rows beside them that are not read. ends: of files by their number, those to evaluate on last,
    the row before which reading ends.
    """

    asked: Mixed
    files: Sequence[Path]
    held_out: Sequence[Path]
    form: RowFormat
    size: int  # bytes
    names: tuple[str, ...]
    left_out: Sequence[str] = ()
    ends: Mapping[int, int] = field(default_factory=dict)

    @property
    def whole(self) -> list[Path]:
        """The files that are read to their ends."""
        return [path for number, path in enumerate([*self.files, *self.held_out]) if number not in self.ends]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to tell the user of the files."""
        if not self.left_out:
            return ()
        what = f"not read, for other files of the folder are of another format: {join_names(self.left_out)}"
        return (f"{what} (data.path may name all of them)",)


def row_files(asked: Mixed, data: DatasetData, task: str) -> RowFiles:
    """The files of a source, each checked, and the format of their rows. TrainingError names a file or a column."""
    paths = _paths(asked.path)
    parts = [chosen_files(path, RowSelection(asked.subset, asked.split, data.validation_split)) for path in paths]
    files, held_out = ([file for part in parts for file in part[which]] for which in (0, 1))
    if data.validation_path is not None:
        held_out = [file for path in _paths(data.validation_path) for file in chosen_files(path, RowSelection())[0]]
    files, held_out, ends = _within(files, held_out, data.max_rows)
    form = _format(files, {**data.columns, **asked.columns}, task)
    looked_at = [check_shard(path, form.read) for path in (*files, *held_out)]
    label = form.columns.get("label", "")
    names = {names[label] for _, names in looked_at if label in names}
    if len(names) > 1 and not data.labels:
        raise TrainingError(f"data.path: the files of {paths[0]} give labels different names", hint="set data.labels")
    beside = [name for path in paths for name in left_out(path)]
    size = sum(size for size, _ in looked_at)
    return RowFiles(asked, files, held_out, form, size, next(iter(names), ()), beside, ends)


def _within(
    files: Sequence[Path], held_out: Sequence[Path], most: float | None
) -> tuple[list[Path], list[Path], dict[int, int]]:
    """The files with the first rows of each of both, `data.max_rows`, and where these end, as of :class:`RowFiles`."""
    (read, end), (apart, end_apart) = first_rows(files, most), first_rows(held_out, most)
    ends = {len(read) + len(apart) - 1: end_apart, len(read) - 1: end}
    return read, apart, {number: row for number, row in ends.items() if row is not None}


def _paths(named: str | Sequence[str]) -> list[Path]:
    return [Path(each).absolute() for each in ([named] if isinstance(named, str) else named)]


def _format(files: Sequence[Path], given: Mapping[str, str], task: str) -> RowFormat:
    """By the columns of the first file that has a row. TrainingError where the task cannot learn from them."""
    for path in files:
        check_shard(path)
        if present := columns_of(path):
            return recognised(present, given, task, where=f"{path}: its first row")
    raise TrainingError(f"data.path: {', '.join(map(str, files)) or 'nothing'} has no row")


def own_source(data: DatasetData) -> Mixed:
    """`data.path` with its split and subset, as a source of a mixture is written."""
    return Mixed(path=data.path, split=data.split, subset=data.subset)


def row_encoder(recipe: Recipe, form: RowFormat) -> RowEncoder:
    """The encoder of a recipe's rows. TrainingError without a tokenizer, or without a template for chats."""
    data = cast("DatasetData", recipe.data)
    try:
        return RowEncoder.of(data, form, task_of(recipe), open_encoder(data.tokenizer))
    except ChatError as error:
        raise TrainingError(f"data.path: {form.described}: {error}") from error


def prepare(
    recipe: Recipe, run_dir: Path, environ: Mapping[str, str] = os.environ, say: Callable[[str], None] | None = None
) -> tuple[Prepared, RowFiles, RowEncoder, tuple[str, ...]]:
    """The prepared rows of a recipe, made if they are not there. Also their files, the encoder, and names of labels.

    say: is told how far it is. TrainingError names the file and row that cannot be learned from, or the setting.
    """
    data = cast("DatasetData", recipe.data)
    found = row_files(own_source(data), data, task_of(recipe))
    stamps = _stamps(found)
    digest = _digest(found.files, found.held_out, found.ends, recipe, environ)
    encoder = row_encoder(recipe, found.form)
    folder, refusals = data.cache or cache_folder(environ, "prepared"), []
    for root in [*([Path(folder)] if folder else []), run_dir / "prepared"]:
        ready = root / digest
        try:
            tokens = _made_once(found, stamps, encoder, ready, partial(_alone, found, recipe, environ), say=say)
            if tokens is None:
                refusals.append(f"{root}: the written data differs when read back")
                continue
            meta = _with_names_of_today(tokens.meta, [*found.files, *found.held_out])
            tokens = replace(tokens, meta={**meta, "remarks": [*meta["remarks"], *found.remarks]})
            if found.held_out and tokens.meta["training_rows"] == tokens.meta["rows"]:
                what = f"data.path: {', '.join(map(str, found.held_out))} has no row to evaluate on"
                raise TrainingError(what, hint="leave it out, and a share of the rows is held out, or give it rows")
            if not len(tokens.rows):
                what = f"data.path: {found.files[0]} has no row to learn from"
                raise TrainingError(what, hint="check data.skip_empty")
            require_known(meta["highest"], _vocabulary(recipe), meta["where"])
            names, numbers = _numbered(tokens, encoder, found, _head_labels(recipe))
            prepared = view_of(tokens, encoder, asked_view(recipe), numbers)
        except OSError as error:
            refusals.append(f"{root}: {error.strerror or error}")
            continue
        _require_both(prepared, found)
        return prepared, found, encoder, names
    raise TrainingError(f"no folder can hold the prepared data ({'; '.join(refusals)})", hint=_WRITABLE)


def _made_once(
    found: RowFiles,
    stamps: Mapping[Path, tuple[int, int, int]],
    encoder: RowEncoder,
    ready: Path,
    alone: Callable[[], Mapping[Path, str]],
    *,
    say: Callable[[str], None] | None,
) -> Tokens | None:
    """The token ids in a folder, made if they are not there. None where they differ when read back."""
    meta = read_whole_folder(ready)
    if meta is None:
        ready.parent.mkdir(parents=True, exist_ok=True)
        with locked(ready.with_name(f"{ready.name}.lock")):
            meta = read_whole_folder(ready)  # another process may have just made it
            if meta is None:
                if ready.exists():  # damaged on disk
                    remove_tree(ready)
                _build(found, stamps, encoder, ready, alone(), say=say)
        meta = read_whole_folder(ready)
    return None if meta is None else Tokens(ready, meta)


def files_and_cache(recipe: Recipe, environ: Mapping[str, str] = os.environ) -> tuple[list[Path], str | None]:
    """Every file that :func:`prepare` reads, and the folder that keeps what it makes. TrainingError as of that."""
    data = cast("DatasetData", recipe.data)
    found = row_files(own_source(data), data, task_of(recipe))
    return [*found.files, *found.held_out], data.cache or cache_folder(environ, "prepared")


def prepare_files(
    recipe: Recipe,
    files: Sequence[Path],
    environ: Mapping[str, str] = os.environ,
    say: Callable[[str], None] | None = None,
) -> None:
    """Make the token ids of some of a recipe's files, each alone, which :func:`prepare` then takes.

    TrainingError as of that, and where there is no folder to keep them in.
    """
    data = cast("DatasetData", recipe.data)
    found = row_files(own_source(data), data, task_of(recipe))
    # One that is read in part is for the others to read.
    found = replace(found, files=[each for each in files if each in found.whole], held_out=[], ends={})
    stamps, encoder = _stamps(found), row_encoder(recipe, found.form)
    root = data.cache or cache_folder(environ, "prepared")
    for path, digest in _alone(found, recipe, environ).items():
        one = replace(found, files=[path])
        try:
            made = _made_once(one, stamps, encoder, Path(root, digest), dict, say=say) if root else None
        except OSError as error:
            raise TrainingError(f"{root}: {error.strerror or error}", hint=_WRITABLE) from error
        if made is None:
            raise TrainingError(f"{root or 'no cache folder'} does not hold the prepared data", hint=_WRITABLE)


_WRITABLE = "set data.cache to a writable folder"


def _with_names_of_today(meta: Mapping[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """The metadata with places in these files: they may have been called otherwise when their rows were prepared."""
    called = dict(zip(meta["read_from"], map(str, files), strict=True))

    def today(place: str) -> str:
        then = max((name for name in called if place.startswith(f"{name}:")), key=len, default="")
        return f"{called[then]}{place.removeprefix(then)}" if then else place

    labels = [(label, today(place)) for label, place in meta["labels"]]
    return {**meta, "where": today(meta["where"]), "labels": labels}


def prepared_already(recipe: Recipe, run_dir: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether nothing is left to do, as far as that can be told without a tokenizer. TrainingError as of `prepare`."""
    data = cast("DatasetData", recipe.data)
    found = row_files(own_source(data), data, task_of(recipe))
    folder = data.cache or cache_folder(environ, "prepared")
    digest = _digest(found.files, found.held_out, found.ends, recipe, environ)
    ready = Path(folder or run_dir / "prepared") / digest
    meta = read_whole_folder(ready)
    prepared = read_view(Tokens(ready, meta), asked_view(recipe)) if meta is not None else None
    if meta is not None and meta["highest"] >= (_vocabulary(recipe) or math.inf):
        return False
    return prepared is not None and all(_samples_of(prepared, side) for side in ("train", "validation"))


def _samples_of(prepared: Prepared, side: str) -> int:
    part = prepared.side(side)
    return part.window if prepared.view.packing == "dense" else part.samples


def known_already(
    recipe: Recipe, files: Sequence[Path], held_out: Sequence[Path], environ: Mapping[str, str]
) -> Prepared | None:
    """What an earlier preparation has found out, where the files are known to be the same without reading them."""
    data = cast("DatasetData", recipe.data)
    root = data.cache or cache_folder(environ, "prepared")
    if data.max_rows is not None and data.max_rows < 1 and sum(path.stat().st_size for path in files) > SMALL:
        return None  # a share needs every row
    files, held_out, ends = _within(files, held_out, data.max_rows)
    if root is None or not all(
        content_digest(path, Path(root, "contents"), read=False) for path in (*files, *held_out)
    ):
        return None
    ready = Path(root, _digest(files, held_out, ends, recipe, environ))
    meta = read_whole_folder(ready)
    return read_view(Tokens(ready, meta), asked_view(recipe)) if meta is not None else None


def asked_view(recipe: Recipe) -> dict[str, Any]:
    """The settings that decide what of prepared rows are samples."""
    data, settings = cast("DatasetData", recipe.data), model_settings(recipe)
    return {
        "sequence_length": data.sequence_length,
        "target_length": data.target_length,
        "limit": _most_tokens(recipe, settings),
        "packing": packing_of(recipe, str(settings.get("model_type", ""))),
        "validation_fraction": data.validation_fraction,
        "split_seed": data.split_seed,
        "labels": list(data.labels or _head_labels(recipe)),
    }


def model_settings(recipe: Recipe) -> Mapping[str, Any]:
    """What a model's config.json says, with the recipe's own settings in it; {} for one that is not transformers'."""
    model = recipe.model
    if not isinstance(model, HfModel):
        return {}
    if model.path is None:
        return {"model_type": model.architecture, **model.config}
    return {**json_of(Path(model.path, "config.json")), **model.config}


def _vocabulary(recipe: Recipe) -> int | None:
    """How many ids a model of transformers has rows for; None where that is not known."""
    found = model_settings(recipe).get("vocab_size")
    return found if isinstance(found, int) else None


def _most_tokens(recipe: Recipe, settings: Mapping[str, Any]) -> int | None:
    """How many tokens the model can read at once: by its own settings, and by its tokenizer's."""
    folder = getattr(recipe.data, "tokenizer", None) or BYTES
    said = json_of(Path(folder, "tokenizer_config.json")).get("model_max_length") if folder != BYTES else None
    # What a tokenizer does not know it writes as 1e30.
    found = [each for each in (places_of(settings), said) if isinstance(each, int) and 0 < each < 10**9]
    return min(found, default=None)


def text_length(recipe: Recipe) -> int:
    """The tokens of a sample of plain text: as asked, or 1024, or what the model can read if that is less."""
    asked: int | str = recipe.data.sequence_length
    if isinstance(asked, int):
        return asked
    return min(MOST_OF_TEXT, _most_tokens(recipe, model_settings(recipe)) or MOST_OF_TEXT)


def _require_both(prepared: Prepared, found: RowFiles) -> None:
    """TrainingError where nothing is left to train on, or to evaluate on."""
    view = prepared.view
    for side, name, part in (("train", "train", view.train), ("evaluate", "validation", view.validation)):
        if _samples_of(prepared, name):
            continue
        rows = prepared.tokens.meta["rows"]
        what = f"data.path: nothing is left to {side} on: {rows:,} {'row' if rows == 1 else 'rows'} in {found.files[0]}"
        if part.without:
            what += f", {part.without:,} of them with nothing to learn within {view.sequence_length} tokens"
            hint = "give at least one answer a weight of 1"
            if view.lengths.longest > view.sequence_length:
                hint = "raise data.sequence_length: the prompts fill it"
            raise TrainingError(what, hint=hint)
        more = "provide more rows" if 0 not in found.ends else "raise data.max_rows"
        raise TrainingError(what, hint=f"{more}: one to train on and one to evaluate on, or data.validation_path")


def _head_labels(recipe: Recipe) -> tuple[str, ...]:
    """The names of labels that a pretrained classifier has, in the order of their numbers; () without a classifier."""
    names = model_settings(recipe).get("id2label") if task_of(recipe) == LABELLING else None
    try:
        return tuple(str(names[str(number)]) for number in range(len(names))) if names else ()
    except (LookupError, TypeError):
        return ()


def _numbered(
    tokens: Tokens, encoder: RowEncoder, found: RowFiles, of_head: tuple[str, ...]
) -> tuple[tuple[str, ...], Any]:
    """The names of labels, and the number of each row's label. TrainingError for a label without a number.

    of_head: names that a pretrained classifier knows, which hold if they are all those of the data.
    """
    if "label" not in encoder.form.columns:
        return (), None
    kept: Sequence[tuple[int | str, str]] = [(label, place) for label, place in tokens.meta["labels"]]
    of_head = of_head if {label for label, _ in kept} <= {*of_head} else ()
    asked = tuple(encoder.data.labels) or found.names or of_head
    words = next((place for label, place in kept if isinstance(label, str)), None)
    numbers = next(((label, place) for label, place in kept if isinstance(label, int)), None)
    if words is not None and numbers is not None:
        what = f"label {numbers[0]} is a number, but the label of {words} is a name"
        raise TrainingError(f"data.path: {numbers[1]}: {what}", hint="write all labels as numbers, or all as names")
    names, known = known_labels([label for label, _ in kept], asked)
    for label, place in kept:
        if label not in known or (names and known[label] >= len(names)):
            what = f"label {label!r} is not in data.labels: {', '.join(names)}"
            raise TrainingError(
                f"data.path: {place}: {what}", hint="name all labels there, in the order of their numbers"
            )
    return names, np.array([known[label] for label, _ in kept], dtype=np.int64)[tokens.label_of_row]


def _digest(
    files: Sequence[Path],
    held_out: Sequence[Path],
    ends: Mapping[int, int],
    recipe: Recipe,
    environ: Mapping[str, str],
) -> str:
    """A digest of everything that decides the token ids and their order."""
    memory = _memory(recipe, environ)
    contents = [[content_digest(path, memory) for path in each] for each in (files, held_out)]
    described = {**_described(recipe, environ), "files": contents}
    return _named({**described, "ends": sorted(ends.items())} if ends else described)


def _alone(found: RowFiles, recipe: Recipe, environ: Mapping[str, str]) -> dict[Path, str]:
    """The same of each file alone, whose format all files together decide."""
    memory = _memory(recipe, environ)
    described = {**_described(recipe, environ), "form": [found.form.name, dict(found.form.columns)]}
    return {path: _named({**described, "file": content_digest(path, memory)}) for path in found.whole}


def _memory(recipe: Recipe, environ: Mapping[str, str]) -> Path | None:
    folder = cast("DatasetData", recipe.data).cache or cache_folder(environ, "prepared")
    return Path(folder) / "contents" if folder else None


def _named(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _described(recipe: Recipe, environ: Mapping[str, str]) -> dict[str, Any]:
    """What decides the token ids of any files."""
    data = cast("DatasetData", recipe.data)
    bytes_alone, template = data.tokenizer in (None, BYTES), data.chat_template
    if template is not None and Path(template).is_file():
        template = content_digest(Path(template).absolute(), _memory(recipe, environ))
    return {
        "format": FORMAT,
        "columns": data.columns,
        "task": task_of(recipe),
        "tokenizer": BYTES if bytes_alone else fingerprint(Path(str(data.tokenizer))),
        "versions": [] if bytes_alone else _versions(),
        "template": template,
        "prefix": data.prompt_prefix,
        "skip_empty": data.skip_empty,
        **({"train_on_prompts": True} if data.train_on_prompts else {}),  # else as it was before there was that
    }


def _stamps(found: RowFiles) -> dict[Path, tuple[int, int, int]]:
    """What of the files changes when they are written."""
    stamps = {}
    for path in (*found.files, *found.held_out):
        with reading(path):
            status = path.stat()
        stamps[path] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamps


def _versions() -> list[str]:
    from importlib.metadata import version

    return [version(name) for name in ("transformers", "tokenizers")]


def content_digest(path: Path, memory: Path | None, *, read: bool = True) -> str:
    """SHA-256 of a file's content. memory: a folder that remembers it for a file of the same size, age and place.

    read: whether a file that is not remembered is read; else "" stands for it.
    """
    with reading(path):
        status = path.stat()
        # Its inode changes with every write, whatever its time of modification is set to.
        known = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\0{status.st_ino}"
        note = memory / hashlib.sha256(known.encode("utf-8", "surrogateescape")).hexdigest()[:32] if memory else None
        if note is not None:
            try:
                if len(kept := note.read_text()) == 64:
                    return kept
            except OSError:
                pass
        if not read:
            return ""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if note is not None and time.time() - status.st_ctime > _SETTLED and path.stat() == status:
            try:
                note.parent.mkdir(parents=True, exist_ok=True)
                scratch = note.with_name(f".{note.name}.{os.getpid()}")
                scratch.write_text(digest)
                scratch.replace(note)
            except OSError:
                pass  # it is read again the next time
    return digest


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that one process reads: from a position to before another. rows: where they are read already."""

    path: Path
    start: ShardPosition
    stop: ShardPosition | None = None
    rows: Sequence[RawRow] = ()
    file: int = 0  # its number


@dataclass(slots=True)
class Made:
    """What became of a piece."""

    rows: int = 0
    skipped: int = 0
    sizes: array[int] = field(default_factory=lambda: array("q"))  # tokens of each text
    texts: array[int] = field(default_factory=lambda: array("q"))  # texts of each row
    keys: array[int] = field(default_factory=lambda: array("Q"))  # of each row, by content
    labels: list[int | str | None] = field(default_factory=list)  # of each row
    first_of_label: dict[int | str, str] = field(default_factory=dict)  # where each label occurs first
    ids: bytes = b""
    learned: bytes = b""
    highest: int = -1
    where: str = ""
    remarks: tuple[str, ...] = ()
    file: int = 0


def pieces_of(path: Path, columns: Sequence[str]) -> Iterator[Piece]:
    """The parts of a file, in order. columns: as of :func:`rows_of`, for rows that are read here."""
    if ending(path) == ".parquet":
        import pyarrow.parquet

        row = 0
        metadata = pyarrow.parquet.read_metadata(path)
        for group in range(metadata.num_row_groups):
            size = metadata.row_group(group).num_rows
            yield Piece(path, ShardPosition(0, row), ShardPosition(0, row + size))
            row += size
        return
    lines = ending(path) not in TABLES and not path.name.lower().endswith((*COMPRESSED, ".csv", ".tsv"))
    if lines and path.stat().st_size > PIECE and not _begins_otherwise(path):
        yield from _lines_of(path)
        return
    waiting: list[RawRow] = []
    for raw in rows_of(path, columns):
        waiting.append(raw)
        if len(waiting) == BATCH:
            yield Piece(path, waiting[0].position, None, waiting)
            waiting = []
    if waiting:
        yield Piece(path, waiting[0].position, None, waiting)


def _begins_otherwise(path: Path) -> bool:
    """Whether it is not plain JSON lines: an array, or compressed under a name that does not say so."""
    with path.open("rb") as file:
        return not file.read(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")


def _lines_of(path: Path) -> Iterator[Piece]:
    """Parts of a file of JSON lines, each of whole lines, with the number of its first."""
    start, row, lines, offset = 0, 0, 0, 0
    with path.open("rb") as file:
        while block := file.read(PIECE):
            end = block.rfind(b"\n")
            if end < 0:
                offset += len(block)
                continue
            lines += block.count(b"\n")
            stop = ShardPosition(0, lines, offset + end + 1)
            yield Piece(path, ShardPosition(0, row, start), stop)
            start, row = stop.offset, lines
            offset += len(block)
    if start < offset:
        yield Piece(path, ShardPosition(0, row, start), ShardPosition(0, row + 1, offset))


def _before(pieces: Iterator[Piece], end: int | None) -> Iterator[Piece]:
    """The parts of a file up to a row; all of them where that is None."""
    for piece in pieces:
        if end is None:
            yield piece
        elif piece.start.row >= end:
            return
        elif piece.rows:
            yield replace(piece, rows=[raw for raw in piece.rows if raw.position.row < end])
        else:
            assert piece.stop is not None
            yield replace(piece, stop=piece.stop._replace(row=min(piece.stop.row, end)))


def made_of(piece: Piece, encoder: RowEncoder) -> Made:
    """Token ids of a piece. TrainingError names a row."""
    made = Made(file=piece.file)
    ids, learned = array(_code(encoder)), bytearray()
    for encoded in encoder.encoded(raw.row() for raw in _rows(piece, encoder)):
        made.rows += 1
        made.skipped += not encoded.texts
        made.texts.append(len(encoded.texts))
        key = hashlib.blake2b(digest_size=8)
        for text in encoded.texts:
            of_text = array(ids.typecode, text.ids)
            key.update(of_text.tobytes())
            if (highest := max(text.ids)) > made.highest:
                made.highest, made.where = highest, encoded.row.place
            made.sizes.append(len(of_text))
            ids.extend(of_text)
            learned += text.learned
        made.labels.append(encoded.label)
        if encoded.label is not None:
            made.first_of_label.setdefault(encoded.label, encoded.row.place)
        made.keys.append(int.from_bytes(key.digest(), "little"))
    made.ids, made.learned = ids.tobytes(), bytes(learned)
    made.remarks = encoder.template.remarks if encoder.template else ()
    return made


def _from_columns(path: Path, number: int, encoder: RowEncoder, behind: int, end: int | None) -> Iterator[Made]:
    """What becomes of a table of token ids, whose columns are taken as arrays. behind: so many pieces. end: a row.

    Where these are not all sound, rows are read one by one: TrainingError names the one that is not.
    """
    for row, batch in itertools.islice(batches_of(path, encoder.form.sought), behind, None):
        if end is not None and row >= end:
            return
        batch = batch if end is None else batch.slice(0, end - row)  # noqa: PLW2901
        found = token_ids(batch, encoder.form.columns, skip_empty=encoder.data.skip_empty)
        if found is None:
            yield made_of(Piece(path, START, None, list(values_of(path, batch, 0, row)), number), encoder)
            continue
        texts = (found.sizes > 0).astype(np.int64)
        made = Made(file=number, rows=len(texts), skipped=int(len(texts) - texts.sum()), labels=[None] * len(texts))
        made.sizes.frombytes(found.sizes[found.sizes > 0].tobytes())
        made.texts.frombytes(texts.tobytes())
        made.ids, made.learned = found.ids.tobytes(), found.learned.tobytes()
        ends = np.cumsum(found.sizes) * found.ids.itemsize
        for start, stop in itertools.pairwise([0, *ends.tolist()]):
            made.keys.append(int.from_bytes(hashlib.blake2b(made.ids[start:stop], digest_size=8).digest(), "little"))
        if len(found.ids):
            highest = int(found.ids.argmax())
            place = int(np.searchsorted(ends, highest * found.ids.itemsize, side="right"))
            made.highest, made.where = int(found.ids[highest]), RawRow(path, ShardPosition(0, row + place), {}).place
        yield made


def _rows(piece: Piece, encoder: RowEncoder) -> Iterator[RawRow]:
    if piece.rows:
        yield from piece.rows
        return
    yield from rows_of(piece.path, encoder.form.sought, piece.start, piece.stop.row if piece.stop else None)


def _code(encoder: RowEncoder) -> str:
    """Type code of `array` for ids: millions of them are kept."""
    if encoder.form.name in ("ids", "labelled_ids"):
        return "I"
    return "B" if encoder.encoder.size <= 1 << 8 else "H" if encoder.encoder.size <= 1 << 16 else "I"


_of_process: dict[str, RowEncoder] = {}  # in a worker


def _begin_worker(encoder: RowEncoder, parent: int) -> None:
    _of_process["encoder"] = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # threads of the parent's are not in a fork, which would wait for them
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A worker ends with the process that started it, which may be killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _in_worker(piece: Piece) -> Made | TrainingError:
    try:
        return made_of(piece, _of_process["encoder"])
    except TrainingError as error:  # as a value: raised in a worker, it would arrive with its traceback
        return error


def _all_made(pieces: Iterator[Piece], encoder: RowEncoder, size: int) -> Iterator[Made]:
    """What becomes of the pieces, in their order, on all cores of this process where that is worth it."""
    cores = min(MOST_WORKERS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if size <= SMALL or cores == 1:
        yield from (made_of(piece, encoder) for piece in pieces)
        return
    # A fork has the tokenizer already; it is safe here, where no thread but this one runs.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(cores, context, _begin_worker, (encoder, os.getpid())) as pool:
        waiting: deque[Future[Made | TrainingError]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_in_worker, piece))
                if len(waiting) > 2 * cores:
                    yield _sound(waiting.popleft().result())
            while waiting:
                yield _sound(waiting.popleft().result())
        finally:
            pool.shutdown(cancel_futures=True)


def _sound(made: Made | TrainingError) -> Made:
    if isinstance(made, TrainingError):
        raise made
    return made


_PARTS = ("ids", "learned", "sizes", "texts", "keys", "label_of_row")


def _build(
    found: RowFiles,
    stamps: Mapping[Path, tuple[int, int, int]],
    encoder: RowEncoder,
    ready: Path,
    alone: Mapping[Path, str],
    *,
    say: Callable[[str], None] | None,
) -> None:
    """Write the token ids of all files. A preparation that was killed goes on behind the pieces that it has kept.

    stamps: of the files whose content is the key. TrainingError if one has changed since. alone: digests of the files
    that may be prepared by themselves, beside `ready`; those are copied.
    """
    scratch = ready.with_name(f"{ready.name}.part")
    done = _begun(scratch)
    files, began = [*found.files, *found.held_out], time.monotonic()
    labels = {label: number for number, (label, _) in enumerate(done["labels"])}
    first, behind = done["file"], done["pieces"]  # of that file

    def taken(number: int) -> Tokens | None:
        if files[number] not in alone or (number == first and behind):
            return None
        folder = ready.with_name(alone[files[number]])
        meta = read_whole_folder(folder)
        return None if meta is None else Tokens(folder, meta)

    def of_files(numbers: Iterable[int]) -> Iterator[Piece]:
        for number in numbers:
            pieces = _before(pieces_of(files[number], encoder.form.sought), found.ends.get(number))
            left = itertools.islice(pieces, behind if number == first else 0, None)
            yield from (replace(piece, file=number) for piece in left)

    def way_of(each: tuple[int, Tokens | None]) -> str:
        if each[1] is not None:
            return "copied"
        return "columns" if encoder.form.name == "ids" and ending(files[each[0]]) in TABLES else "rows"

    with ExitStack() as stack:
        outs = {name: stack.enter_context((scratch / f"{name}.part").open("ab")) for name in _PARTS}
        kept = began

        def keep_now_and_then() -> None:
            nonlocal kept
            if (now := time.monotonic()) - kept > _KEPT_EVERY:
                kept = now
                _keep(scratch, outs, done)
                if say is not None:
                    say(f"{done['rows']:,} rows in {now - began:.0f} s")

        each_taken = [(number, taken(number)) for number in range(first, len(files))]
        for way, several in itertools.groupby(each_taken, way_of):
            group = list(several)
            if way == "copied":
                for number, tokens in group:
                    assert tokens is not None
                    _count(done, labels, _known_of(tokens, files[number], number), len(found.files))
                    _copy(tokens, outs, labels)
                    done["file"], done["pieces"] = number + 1, 0
                    keep_now_and_then()
                continue
            numbers = [number for number, _ in group]
            if way == "columns":
                parts = (
                    _from_columns(files[each], each, encoder, behind if each == first else 0, found.ends.get(each))
                    for each in numbers
                )
                every: Iterator[Made] = itertools.chain.from_iterable(parts)
            else:
                every = _all_made(of_files(numbers), encoder, sum(files[each].stat().st_size for each in numbers))
            for made in every:
                _count(done, labels, made, len(found.files))
                of_rows = array("i", (-1 if label is None else labels[label] for label in made.labels))
                for name in _PARTS:
                    outs[name].write(of_rows if name == "label_of_row" else getattr(made, name))
                keep_now_and_then()
        _keep(scratch, outs, done)
    for path, stamp in _stamps(found).items():
        if stamp != stamps[path]:
            remove_tree(scratch)
            raise TrainingError(f"data.path: {path} was written while it was read", hint="start again when it is whole")
    _assemble(scratch, ready, {**done, "read_from": list(map(str, files))}, encoder)


def _count(done: dict[str, Any], labels: dict[int | str, int], made: Made, training_files: int) -> None:
    """Add what is known of a piece, or of a file, to what is known of those before it."""
    for label, place in made.first_of_label.items():
        if label not in labels:
            labels[label] = len(labels)
            done["labels"].append((label, place))
    if made.file != done["file"]:
        done["file"], done["pieces"] = made.file, 0
    done["pieces"] += 1
    done["rows"] += made.rows
    done["training_rows"] += made.rows if made.file < training_files else 0
    done["skipped"] += made.skipped
    done["remarks"] = [*dict.fromkeys([*done["remarks"], *made.remarks])]
    if made.highest > done["highest"]:
        done["highest"], done["where"] = made.highest, made.where


def _known_of(tokens: Tokens, path: Path, number: int) -> Made:
    """What is to be counted of a file that is prepared alone."""
    meta = _with_names_of_today(tokens.meta, [path])
    return Made(
        rows=meta["rows"],
        skipped=meta["skipped"],
        first_of_label=dict(meta["labels"]),
        highest=meta["highest"],
        where=meta["where"],
        remarks=tuple(meta["remarks"]),
        file=number,
    )


def _copy(tokens: Tokens, outs: Mapping[str, IO[bytes]], labels: Mapping[int | str, int]) -> None:
    """Append the arrays of a file that is prepared alone, a block at a time. labels: their numbers here."""
    for name in ("ids", "learned", "keys"):
        with (tokens.folder / f"{name}.bin").open("rb") as file:
            shutil.copyfileobj(file, outs[name], PIECE)
    of_label = np.array([*(labels[label] for label, _ in tokens.meta["labels"]), -1], dtype=np.int32)
    rows, step = len(tokens.keys), PIECE >> 3
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        outs["label_of_row"].write(of_label[tokens.label_of_row[start:stop]].tobytes())
        outs["texts"].write(np.diff(np.searchsorted(tokens.rows, np.arange(start, stop + 1))).tobytes())
    for start in range(0, len(tokens.rows), step):
        outs["sizes"].write(np.diff(tokens.starts[start : start + step + 1]).tobytes())


def _begun(scratch: Path) -> dict[str, Any]:
    """How far an earlier preparation came, whose files are cut to what it had recorded."""
    done: dict[str, Any] = {"file": 0, "pieces": 0, "rows": 0, "training_rows": 0, "skipped": 0, "highest": -1,
                            "where": "", "labels": [], "remarks": [],
                            "sizes_of_parts": dict.fromkeys(_PARTS, 0)}  # fmt: skip
    try:
        kept = parse_json((scratch / "done.json").read_bytes())
        for name in _PARTS:
            os.truncate(scratch / f"{name}.part", kept["sizes_of_parts"][name])
            if _end_of(scratch, name) != kept["ends"][name]:
                raise ValueError("the file is not what was recorded of it")
        done = {**done, **kept, "labels": [tuple(each) for each in kept["labels"]]}
    except (OSError, ValueError, KeyError, TypeError):
        if scratch.exists():
            remove_tree(scratch)
        scratch.mkdir()
    return done


def _end_of(scratch: Path, name: str) -> int:
    """A checksum of the last bytes of a part."""
    with (scratch / f"{name}.part").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
        return zlib.crc32(file.read())


def _keep(scratch: Path, outs: Mapping[str, IO[bytes]], done: dict[str, Any]) -> None:
    """Record how far it is, once that is on the disk."""
    for out in outs.values():
        out.flush()
        os.fsync(out.fileno())
    done["sizes_of_parts"] = {name: out.tell() for name, out in outs.items()}
    write_json(scratch / "done.json", {**done, "ends": {name: _end_of(scratch, name) for name in outs}}, indent=None)


_COUNTED = ("rows", "training_rows", "skipped", "highest", "where", "labels", "remarks", "read_from")


def _assemble(scratch: Path, ready: Path, done: Mapping[str, Any], encoder: RowEncoder) -> None:
    """Turn the parts into the arrays of :class:`Tokens`."""
    sizes, texts = (np.fromfile(scratch / f"{name}.part", dtype=np.int64) for name in ("sizes", "texts"))
    arrays: dict[str, Any] = {
        "ids": {"dtype": _KINDS[_code(encoder)], "shape": [int(sizes.sum())]},
        "learned": {"dtype": "bool", "shape": [int(sizes.sum())]},
        "keys": {"dtype": "uint64", "shape": [len(texts)]},
        "label_of_row": {"dtype": "int32", "shape": [len(texts)]},
    }
    for name in arrays:
        (scratch / f"{name}.part").rename(scratch / f"{name}.bin")
    arrays["starts"] = save_array(scratch, "starts", np.concatenate([[0], np.cumsum(sizes)]))
    arrays["rows"] = save_array(scratch, "rows", np.repeat(np.arange(len(texts)), texts))
    for leftover in ("sizes.part", "texts.part", "done.json"):
        (scratch / leftover).unlink()
    kept = {name: done[name] for name in _COUNTED}
    form = {"name": encoder.form.name, "columns": dict(encoder.form.columns)}
    finish(scratch, ready, {**kept, "form": form, "arrays": arrays, "unit": _unit(encoder)})


def _unit(encoder: RowEncoder) -> str:
    return "tokens" if encoder.form.name in ("ids", "labelled_ids") else encoder.encoder.unit


_KINDS = {"B": "uint8", "H": "uint16", "I": "uint32"}  # type codes of `array`, as NumPy calls them
