"""A Hugging Face data set in a local folder: as `save_to_disk` writes it, or parquet files, or JSON lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from trainkit.errors import TrainingError
from trainkit.hub.cache import shown
from trainkit.hub.splits import Asked, chosen
from trainkit.recipe.schema import DatasetData, JsonlData, Recipe
from trainkit.recipe.validation.suggestions import nearest
from trainkit.trainer.data.folders import explained, is_saved, refuse_subset, split_files
from trainkit.trainer.data.rows import source_of_rows
from trainkit.trainer.data.shards import Row, holding, json_lines, lacking
from trainkit.trainer.data.source import Source
from trainkit.trainer.data.stream import open_stream
from trainkit.trainer.user_code import first_line

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
        first, second = chosen(splits, Asked(data.subset, data.split, data.validation_split))
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
