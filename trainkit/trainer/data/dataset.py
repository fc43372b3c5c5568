"""The files of a data set: those of a folder, or of what `save_to_disk` wrote, by split."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from trainkit.errors import TrainingError
from trainkit.files import parse_json
from trainkit.hub.cache import public_name, shown
from trainkit.hub.splits import READ, README, NoSuchPartError, RowSelection, files_by_split, selected_splits
from trainkit.recipe.schema import DatasetData, HfModel, JsonlData, Recipe
from trainkit.recipe.schema.data import Mixed
from trainkit.recipe.schema.model import is_packed
from trainkit.recipe.suggestions import nearest
from trainkit.text import counted, listed
from trainkit.trainer.data.encoding import Encoder, open_encoder
from trainkit.trainer.data.pairs import Lengths, is_writing
from trainkit.trainer.data.rows import Reading, Rows, content_fields, source_of_rows
from trainkit.trainer.data.shards import TABLES, Mark, RawRow, Row, check_shard, holding, json_lines, lacking, rows_of
from trainkit.trainer.data.source import Batch, Labels, Samples, Source, reading
from trainkit.trainer.data.windows import Cut, Files, Form, Place, RowStream, Sample, Windows, samples_of
from trainkit.trainer.randomness import derived_seed
from trainkit.trainer.user_code import first_line


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """TrainingError where a data set has no such subset or split."""
    try:
        yield
    except NoSuchPartError as error:
        raise TrainingError(f"data.{error.key}: {path} {error.what}", hint=error.hint) from error


def split_files(path: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The parquet files of a folder, or else its JSON lines, by split; {} where it has neither."""
    with explained(path), reading(path):
        names = [name for name in _below(path) if name.endswith(READ)]
        readme = (path / README).read_text("utf-8", "replace") if (path / README).is_file() else ""
        found = files_by_split(names, readme, subset)
    return {split: [path / name for name in files] for split, files in found.items()}


def _below(path: Path) -> Iterator[str]:
    """The files below a folder, also behind links, from there. OSError for one that cannot be looked into."""

    def refuse(error: OSError) -> None:
        raise error

    for found, folders, files in os.walk(path, onerror=refuse, followlinks=True):
        real = Path(found).resolve()
        # A link to a folder that it lies in would lead on for ever.
        folders[:] = [each for each in folders if Path(found, each).resolve() not in (real, *real.parents)]
        yield from ((Path(found) / name).relative_to(path).as_posix() for name in files)


def shards_by_split(path: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The files of what a recipe names, by split: a file, a plain folder, or what `save_to_disk` wrote.

    TrainingError where there is no such data.
    """
    if not path.exists():
        raise TrainingError(f"data.path: {path} does not exist", hint="check the path; it starts at the working folder")
    if path.is_file() or is_saved(path):
        refuse_subset(path, subset)
    if path.is_file():
        return {"train": [path]}
    found = _saved(path) or split_files(path, subset)
    if not found:
        raise TrainingError(
            f"data.path: {path} holds no data set: nothing of save_to_disk, no *.parquet and no *.jsonl"
        )
    return found


def refuse_subset(path: Path, subset: str | None) -> None:
    """TrainingError where a subset is asked for of what has none."""
    if subset is not None:
        what = f"data.subset: {path} has no subset {subset!r}"
        raise TrainingError(what, hint="leave data.subset out: it is for what a README.md lists")


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` wrote the folder: a data set, or several as its splits."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _saved(path: Path) -> dict[str, list[Path]]:
    """The Arrow files of a saved data set, by split."""
    if not is_saved(path):
        return {}
    try:
        if (path / "dataset_dict.json").exists():
            names = parse_json((path / "dataset_dict.json").read_bytes())["splits"]
            folders = {str(name): path / str(name) for name in names}
        else:
            folders = {"train": path}
        return {
            name: [folder / str(each["filename"]) for each in _state(folder)["_data_files"]]
            for name, folder in folders.items()
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainingError(f"data.path: {path} is no sound data set: {first_line(error)}") from error


def _state(folder: Path) -> Any:
    return parse_json((folder / "state.json").read_bytes())


_LOOK = 4096  # bytes
_TAIL = 8  # bytes that end a parquet file: the size of the metadata before them, and PAR1
_FORMAT = 1  # of what is told apart by `_identity`: another order of samples is another number
# Settings that decide no sample's number; files and tokenizers count with their content.
_APART = {"path", "tokenizer", "mix", "workers", "persistent_workers", "prefetch_factor", "pin_memory"}


@dataclass(frozen=True, slots=True)
class Opened:
    """One source, looked at: its files, the rows that are held out, and the names of labels that it knows.

    begins: where the rows behind those do, in the files that have them; None where there are no others.
    """

    asked: Mixed
    seed: int
    files: Files
    held_out: Sequence[RawRow]
    begins: Mapping[Path, Mark | None]
    size: int  # bytes
    names: tuple[str, ...]


def open_stream(recipe: Recipe) -> Source:
    """The source of a recipe with `data.streaming`. TrainingError names the file, column or row to blame."""
    data, seed = cast("Rows", recipe.data), recipe.train.seed
    task = recipe.model.task if isinstance(recipe.model, HfModel) else "causal_lm"
    whole = task != "causal_lm"
    pairs = Lengths.of(data) if is_writing(recipe) else None
    packing = is_packed(recipe)
    length = pairs.source + pairs.target if pairs else data.sequence_length
    encoder = open_encoder(data.tokenizer)
    opened = _all_opened(data, seed)
    windows: list[Windows] = []
    held_out: list[Sample] = []
    for each in opened:
        fields = _of_source(data, each.asked)
        limit = data.sequence_length if whole and not packing else None
        reading = Reading(fields, encoder, final=not whole, limit=limit, pairs=pairs)
        cut = Cut(reading, length, int(not whole), packing, data.shuffle_buffer, each.seed)
        windows.append(Windows(each.files, cut))
        held_out += samples_of(each.held_out, cut)
    names = _label_names(data, opened)
    form = Form(length, encoder.padding, whole, data.label_field, names, pairs)
    if not held_out:
        raise _nothing_to_evaluate(data, opened)
    facts = _facts(recipe, opened, encoder)
    stream = RowStream(windows, [each.asked.weight for each in opened], form, seed, str(facts["stream"]))
    return Source(
        Samples(0, stream.batch),
        Samples(len(held_out), partial(_of_held_out, form, held_out)),
        f"a stream of {_described(opened)}",
        facts,
        labels=Labels(-1, "", names) if data.label_field else None,
        encoder=encoder,
        padding=encoder.padding if whole else None,
        stream=stream,
    )


def _of_source(data: Rows, asked: Mixed) -> Rows:
    """How the rows of one source are read."""
    return data.model_copy(update={"field": asked.field or data.field})


def _nothing_to_evaluate(data: Rows, opened: Sequence[Opened]) -> TrainingError:
    """Why no sample comes of the rows that are held out."""
    rows = sum(len(each.held_out) for each in opened)
    if not rows:
        hint = "see whether its files are whole, or set data.validation_split"
        return TrainingError(f"data.path: {_described(opened)} has no row to evaluate on", hint=hint)
    what = f"data.path: {counted(rows, 'row')} held out of {_described(opened)}: nothing of them is to be predicted"
    hint = "raise data.validation_rows, or data.sequence_length where prompts are longer"
    return TrainingError(f"{what} within {data.sequence_length} tokens", hint=hint)


def _facts(recipe: Recipe, opened: Sequence[Opened], encoder: Encoder) -> dict[str, int | float | str]:
    """For the summary."""
    facts: dict[str, int | float | str] = {
        "files": sum(len(each.files.paths) for each in opened),
        "file_bytes": sum(each.size for each in opened),
        "stream": _identity(recipe, opened, encoder.fingerprint),
    }
    return facts if encoder.unit == "bytes" else {**facts, "tokenizer": encoder.fingerprint}


def _of_held_out(form: Form, samples: Sequence[Sample], indices: Sequence[int]) -> Batch:
    return form.batch([samples[index] for index in indices])


def _all_opened(data: Rows, seed: int) -> list[Opened]:
    """Every source that has a weight, each with a seed of its own. TrainingError for one without rows to train on."""
    asked = [each for each in data.mix if each.weight]
    if data.mix:
        found = [_opened(each, data, derived_seed(seed, "source", number)) for number, each in enumerate(asked)]
    else:  # alone it has the seed of data that is not streamed
        alone = Mixed(path=data.path, split=getattr(data, "split", None), subset=getattr(data, "subset", None))
        found = [_opened(alone, data, seed)]
    # What one source holds out of a file is not trained on by another, or where the file is named again.
    begins: dict[Path, Mark | None] = {}
    for path, begin in (pair for each in found for pair in each.begins.items()):
        known = begins.get(path, Mark())
        begins[path] = None if begin is None or known is None else max(begin, known)
    return [_behind_held_out(each, begins) for each in found]


def _behind_held_out(opened: Opened, begins: Mapping[Path, Mark | None]) -> Opened:
    """The same, whose rows to train on begin here. TrainingError where there are none."""
    paths = opened.files.paths
    files = replace(opened.files, begins=[begins.get(path.resolve(), Mark()) for path in paths])
    if next(files.rows(0, Place()), None) is None:
        for raw in opened.held_out:  # what is no row at all is named first
            raw.row()
        rows = len(opened.held_out) if opened.begins else 0
        held = f" beside the {counted(rows, 'row')} held out for evaluation" if rows else ""
        what = f"data.path: {listed([str(path) for path in paths])} has no row to train on{held}"
        raise TrainingError(what, hint="set data.validation_rows lower" if held else "see whether the files are whole")
    return replace(opened, files=files)


def _opened(asked: Mixed, data: Rows, seed: int) -> Opened:
    """The files of a source, each looked at. TrainingError names a file or a column."""
    paths = [Path(each).absolute() for each in ([asked.path] if isinstance(asked.path, str) else asked.path)]
    text = None if data.messages_field or data.tokens_field else asked.field or data.field
    named = (text, data.prompt_field, data.messages_field, data.tokens_field, data.targets_field, data.label_field)
    columns = [name for name in named if name]
    files, held_out_files = paths, list[Path]()
    if odd := [path for path in paths if isinstance(data, JsonlData) and path.suffix in TABLES]:
        raise TrainingError(f"data.path: {odd[0]} is no file of JSON lines", hint="data.kind: dataset reads it")
    if isinstance(data, DatasetData):
        files, held_out_files = _of_split(paths, asked, data.validation_split)
    looked_at = [check_shard(path, columns) for path in (*files, *held_out_files)]
    names = {names[data.label_field] for _, names in looked_at if data.label_field and data.label_field in names}
    if len(names) > 1:
        raise TrainingError(f"data.path: the files of {paths[0]} give labels different names", hint="set data.labels")
    filled = content_fields(_of_source(data, asked)) if data.skip_empty else ()
    rows, begins = _held_out(held_out_files or files, columns, filled, data.validation_rows)
    order = seed if data.shuffle_files and len(files) > 1 else None
    found = Files(files, columns, [Mark()] * len(files), order, filled)
    size, known = sum(size for size, _ in looked_at), next(iter(names), ())
    return Opened(asked, seed, found, rows, {} if held_out_files else begins, size, known)


def _of_split(paths: Sequence[Path], asked: Mixed, second: str | None) -> tuple[list[Path], list[Path]]:
    """The files to train on, and those to evaluate on, which may be none. TrainingError for a missing split."""
    files: list[Path] = []
    held_out: list[Path] = []
    for path in paths:
        splits = shards_by_split(path, asked.subset)
        with explained(path):
            first, other = selected_splits(splits, RowSelection(asked.subset, asked.split, second))
        files += splits[first]
        held_out += splits[other] if other else []
    return files, held_out


def _held_out(
    files: Sequence[Path], columns: Sequence[str], filled: Sequence[str], most: int
) -> tuple[list[RawRow], dict[Path, Mark | None]]:
    """The first rows of a source, and where in each of their files the others begin; None in one without others."""
    rows: list[RawRow] = []
    begins: dict[Path, Mark | None] = {}
    for file in files:
        known = file.resolve()
        if len(rows) == most or known in begins:
            continue
        begins[known] = None
        for mark, raw in rows_of(file, columns, Mark()):
            if len(rows) == most:
                begins[known] = mark
                break
            if not (filled and raw.row().blank(filled)):
                rows.append(raw)
    return rows, begins


def _label_names(data: Rows, opened: Sequence[Opened]) -> tuple[str, ...]:
    """The names of the labels, in order. TrainingError where sources name them differently."""
    if not data.label_field or data.labels:
        return tuple(data.labels)
    if len({each.names for each in opened}) > 1:
        what = "data.mix: the sources give labels different names, or only some of them do"
        raise TrainingError(what, hint="name the labels in data.labels")
    return opened[0].names


def _identity(recipe: Recipe, opened: Sequence[Opened], tokenizer: str) -> str:
    """A digest of all that decides which sample has which number."""
    task = getattr(recipe.model, "task", "causal_lm")
    settings = recipe.data.model_dump(mode="json", exclude=_APART)
    files = [
        [each.asked.weight, each.asked.field, [(file.name, *_look_at(file)) for file in each.files.paths]]
        for each in opened
    ]
    described = json.dumps([_FORMAT, settings, recipe.train.seed, task, tokenizer, files], sort_keys=True)
    return hashlib.sha256(described.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _look_at(file: Path) -> tuple[int, str]:
    """Size in bytes, and a digest of some of the content: a file that was written anew may be as long as before.

    Of parquet the whole foot is looked at: the place, size, lowest and highest value of each part of a column.
    """
    size, found, foot = file.stat().st_size, hashlib.sha256(), 0
    with reading(file), file.open("rb") as content:
        if file.suffix == ".parquet":
            content.seek(size - _TAIL)
            foot = int.from_bytes(content.read(4), "little") + _TAIL
        end = max(0, size - max(_LOOK, foot))
        for place, length in ((0, _LOOK), (size // 2, _LOOK), (end, size - end)):
            content.seek(place)
            found.update(content.read(length))
    return size, found.hexdigest()[:16]


def _described(opened: Sequence[Opened]) -> str:
    """`3 files of 1.2 GB`, or each source with its share."""
    total = sum(each.asked.weight for each in opened)
    parts = []
    for each in opened:
        share = f"{each.asked.weight / total:.1%} " if len(opened) > 1 else ""
        name = each.asked.path if isinstance(each.asked.path, str) else each.asked.path[0]
        parts.append(f"{share}{public_name(name)} ({counted(len(each.files.paths), 'file')}, {each.size:,} bytes)")
    return ", ".join(parts)


_READ = 1000  # rows at a time


@dataclass(frozen=True, slots=True)
class Split:
    """Part of a data set. columns: None where rows may differ. names: of its labels, where it knows them."""

    rows: Callable[[list[str]], Iterator[Row]]
    columns: list[str] | None = None
    names: Callable[[str], tuple[str, ...]] = lambda column: ()


def open_source(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is dataset. TrainingError names the folder, column or row to blame."""
    data = cast("DatasetData", recipe.data)
    if data.streaming:
        return open_stream(recipe)
    path = Path(data.path).absolute()
    if not path.is_dir():
        raise TrainingError(f"data.path: {path} is no folder", hint="take one that save_to_disk makes")
    splits = _splits(path, data.subset)
    text = None if data.messages_field or data.tokens_field else data.field
    named = (text, data.prompt_field, data.messages_field, data.tokens_field, data.targets_field, data.label_field)
    columns = [name for name in named if name]
    with explained(path):
        first, second = selected_splits(splits, RowSelection(data.subset, data.split, data.validation_split))
    train = _with_columns(splits, first, path, columns)
    held_out = _with_columns(splits, second, path, columns) if second else None
    names = train.names(data.label_field) if data.label_field else ()
    return source_of_rows(recipe, train.rows(columns), held_out.rows(columns) if held_out else None, names)


def open_json_lines(recipe: Recipe, run_dir: Path) -> Source:
    """The source of a recipe whose `data.kind` is jsonl. TrainingError names the file and the line to blame."""
    data = cast("JsonlData", recipe.data)
    if data.streaming:
        return open_stream(recipe)
    paths = [data.path] if isinstance(data.path, str) else data.path
    return source_of_rows(recipe, json_lines([Path(path).absolute() for path in paths]))


def _with_columns(splits: Mapping[str, Split], name: str, path: Path, columns: list[str]) -> Split:
    """A split that has these columns."""
    if (known := splits[name].columns) is not None:
        for column in lacking(columns, known):
            close = nearest(column, known)
            hint = f"did you mean {close}? it has {', '.join(known)}" if close else f"it has {', '.join(known)}"
            raise TrainingError(f"data.path: {shown(str(path))} [{name}] has no column {column!r}", hint=hint)
    return splits[name]


def _splits(path: Path, subset: str | None) -> dict[str, Split]:
    if is_saved(path):
        refuse_subset(path, subset)
        datasets = _library()
        try:
            saved = datasets.load_from_disk(str(path))
        except Exception as error:  # Arrow, JSON and the file system raise anything
            raise TrainingError(f"data.path: {shown(str(path))} is no sound data set: {first_line(error)}") from error
        if hasattr(saved, "items"):
            return {name: _of_table(each, f"{path} [{name}]") for name, each in saved.items()}
        return {"train": _of_table(saved, str(path))}
    if files := split_files(path, subset):
        return {name: _of_files(found) for name, found in files.items()}
    raise TrainingError(f"data.path: {path} holds no data set: nothing of save_to_disk, no *.parquet and no *.jsonl")


def _library() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when it is imported
    try:
        import datasets
    except ImportError as error:
        what = f"data.kind: dataset needs the package datasets, which cannot be imported: {first_line(error)}"
        raise TrainingError(what, hint="pip install --upgrade 'trainkit[hf]'") from error
    datasets.disable_progress_bars()
    return datasets


def _of_files(files: list[Path]) -> Split:
    """Split of parquet files, or of JSON lines."""
    return _parquet(files) if files[0].suffix == ".parquet" else Split(lambda columns: json_lines(files))


def _parquet(files: list[Path]) -> Split:
    datasets = _library()
    import pyarrow
    import pyarrow.parquet

    tables = []
    for file in files:
        try:
            tables.append(pyarrow.parquet.read_table(file))
        except (OSError, pyarrow.ArrowException) as error:
            raise TrainingError(f"data.path: {file} is no sound parquet file: {first_line(error)}") from error
    try:
        table = pyarrow.concat_tables(tables)
    except pyarrow.ArrowException as error:
        raise TrainingError(f"data.path: the files of {files[0].parent} have different columns") from error
    where = f"{files[0]} to {files[-1].name}" if len(files) > 1 else str(files[0])
    return _of_table(datasets.Dataset(datasets.table.InMemoryTable(table)), where)


def _of_table(table: Any, where: str) -> Split:
    """Split of a `datasets.Dataset`, read as plain Python values."""

    def rows(columns: list[str]) -> Iterator[Row]:
        number = 0
        columns = holding(columns, table.column_names)
        try:
            for batch in table.with_format(None).select_columns(columns).iter(batch_size=_READ):
                for values in zip(*(batch[name] for name in columns), strict=True):
                    yield Row(f"{where}: row {number}", dict(zip(columns, values, strict=True)))
                    number += 1
        except (OSError, ArithmeticError, ValueError) as error:  # Arrow's own errors are ValueErrors or OSErrors
            raise TrainingError(f"data.path: {where}: row {number} cannot be read: {first_line(error)}") from error

    return Split(
        rows, list(table.column_names), lambda column: tuple(getattr(table.features.get(column), "names", ()) or ())
    )
