"""The rows of one file from any place on, a few at a time, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from trainkit.errors import TrainingError
from trainkit.recipe.suggestions import nearest
from trainkit.trainer.data.source import reading
from trainkit.trainer.user_code import first_line

# How files begin that are no JSON lines, whatever their names: what they are, and what to do.
_NO_LINES = {
    b"PAR1": ("a parquet file", "give it a name that ends in .parquet, under data.kind: dataset"),
    b"\x1f\x8b": ("compressed (gzip)", "unpack it with gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed (zstd)", "unpack it with unzstd"),
    b"BZh": ("compressed (bzip2)", "unpack it with bunzip2"),
    b"\xfd7zX": ("compressed (xz)", "unpack it with unxz"),
    b"PK\x03\x04": ("a zip archive", "unpack it with unzip"),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"[": ("a JSON array", "write each of its objects into a line of its own: jq -c '.[]'"),
}
TABLES = (".parquet", ".arrow")  # how the names of files end that are no JSON lines
_MISSING = object()
_NOTHING: tuple[Any, ...] = (None, "", [])
_READ = 128  # rows at a time: they are held whole, whatever their columns


class Row(NamedTuple):
    """One row of a data set. place: file and line, or folder and number."""

    place: str
    fields: dict[str, Any]

    def wrong(self, what: str, hint: str = "") -> TrainingError:
        """An error that names this row; without another hint, with the fields that it has."""
        names = ", ".join(self.fields) or "no field"
        return TrainingError(f"data.path: {self.place}: {what}", hint=hint or f"the row has {names}")

    def blank(self, fields: Iterable[str]) -> bool:
        """Whether one of these fields is null, or a text or a list without anything."""
        return any(_listed_mappings(self._found(field)) in _NOTHING for field in fields)

    def text(self, field: str) -> str:
        """The text of a field. TrainingError when there is none."""
        return cast("str", self._given(field, str, "text"))

    def items(self, field: str) -> Sequence[Any]:
        """The list in a field. TrainingError when there is none."""
        return cast("list[Any]", self._given(field, list, "list"))

    def label(self, field: str) -> int | str:
        """The label in a field, a number from 0 on or a name. TrainingError when there is none."""
        found = self._given(field, object)
        if isinstance(found, bool) or not isinstance(found, int | str) or found == "":
            raise self.wrong(f"field {field!r} is no label: expected a whole number or a name, not {found!r}")
        if isinstance(found, int) and found < 0:
            raise self.wrong(f"field {field!r} has label {found}, and labels begin at 0")
        return found

    def ids(self, field: str) -> Sequence[int]:
        """The whole numbers in a field. TrainingError when there is anything else."""
        found = self.items(field)
        if not {int}.issuperset(map(type, found)):  # three times as fast as a look at each
            odd = next(each for each in found if type(each) is not int)
            raise self.wrong(f"field {field!r} holds {odd!r}: expected whole numbers")
        return found

    def _given(self, field: str, kind: type, term: str = "") -> Any:
        """What a field holds, of this kind and not empty."""
        found = self._found(field)
        if found is _MISSING:
            raise self.wrong(f"field {field!r} is missing")
        found = _listed_mappings(found) if kind is list else found
        if kind is not object and not (isinstance(found, kind) and found):
            hint = "data.skip_empty=true passes over such rows" if found in _NOTHING else ""
            what = "empty" if found == kind() else f"no {term} but {_kind(found)}"
            raise self.wrong(f"field {field!r} is {what}", hint)
        return found

    def _found(self, field: str) -> Any:
        """What a field holds, where it is there."""
        found: Any = self.fields
        for name in (field,) if field in self.fields else field.split("."):
            if not isinstance(found, dict) or name not in found:
                return _MISSING
            found = found[name]
        return found


def _kind(value: Any) -> str:
    """What a value is, in JSON's terms where it has them."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (dict, "an object"))
    other = "null" if value is None else type(value).__name__
    return next((term for kind, term in kinds if isinstance(value, kind)), other)


def _listed_mappings(value: Any) -> Any:
    """A list of mappings where an older data set holds a mapping of lists."""
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        lengths = {len(each) for each in value.values()}
        if len(lengths) == 1:
            return [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    return value


def json_lines(paths: Sequence[Path]) -> Iterator[Row]:
    """The objects in the lines of some files; blank lines are skipped. TrainingError for a line that is none."""
    for path in paths:
        with reading(path), path.open("rb") as lines:
            _refuse_others(path, lines.peek(4))
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield json_row(line, f"{path}:{number}")


def _refuse_others(path: Path, head: bytes) -> None:
    """TrainingError where a file's first bytes are those of another format."""
    for beginning, (kind, hint) in _NO_LINES.items():
        if head.startswith(beginning):
            raise TrainingError(f"data.path: {path} is {kind} and no JSON lines", hint=hint)


def json_row(line: bytes, place: str) -> Row:
    """The object in a line. TrainingError where there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
        raise TrainingError(f"data.path: {place} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TrainingError(f"data.path: {place} is not an object in braces")
    return Row(place, found)


class Mark(NamedTuple):
    """A place in a file: before a row, counted from 0 (of JSON lines: a line), and its byte where lines have one."""

    row: int = 0
    offset: int = 0


class RawRow(NamedTuple):
    """A row as it was read: a line that is still to be parsed, or values by field. place: for messages."""

    place: str
    content: bytes | dict[str, Any]

    def row(self) -> Row:
        """The row. TrainingError for a line that holds none."""
        return json_row(self.content, self.place) if isinstance(self.content, bytes) else Row(self.place, self.content)


def check_shard(path: Path, columns: Sequence[str]) -> tuple[int, dict[str, tuple[str, ...]]]:
    """Its size in bytes and the names of its labels by column, where it knows them.

    Reads no more than a file's head or foot. TrainingError for a file that is none, or has not these columns.
    """
    if path.is_dir():
        raise TrainingError(f"data.path: {path} is a folder", hint="data.kind: dataset reads folders")
    if path.exists() and not path.is_file():
        what = f"data.path: {path} is a device or a pipe, which cannot be read from the middle"
        raise TrainingError(what, hint="write its rows into a file")
    with reading(path):
        size = path.stat().st_size
        if path.suffix not in TABLES:
            with path.open("rb") as file:
                _refuse_others(path, file.peek(4))
            return size, {}
    with _table_file(path) as file:
        schema = file.schema_arrow if path.suffix == ".parquet" else file.schema
    for column in lacking(columns, schema.names):
        has = f"it has {', '.join(schema.names)}"
        close = nearest(column, schema.names)
        hint = f"did you mean {close}? {has}" if close else has
        raise TrainingError(f"data.path: {path} has no column {column!r}", hint=hint)
    return size, _label_names(schema)


def holding(fields: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The columns that hold some fields: a name with a dot that is none of them leads into a mapping."""
    return list(dict.fromkeys(name if name in columns else name.partition(".")[0] for name in fields))


def lacking(fields: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The fields that no column holds."""
    return [name for name in fields if not set(holding([name], columns)) <= set(columns)]


def rows_of(path: Path, columns: Sequence[str], start: Mark) -> Iterator[tuple[Mark, RawRow]]:
    """The rows of a file from a place on, each with its own. TrainingError names a row that cannot be read."""
    if path.suffix == ".parquet":
        return _of_parquet(path, columns, start)
    if path.suffix == ".arrow":
        return _of_arrow(path, columns, start)
    return _of_lines(path, start)


def _of_lines(path: Path, start: Mark) -> Iterator[tuple[Mark, RawRow]]:
    row, offset = start
    with reading(path), path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if line.strip():
                yield Mark(row, offset), RawRow(f"{path}:{row + 1}", line)
            row, offset = row + 1, offset + len(line)


def _of_parquet(path: Path, columns: Sequence[str], start: Mark) -> Iterator[tuple[Mark, RawRow]]:
    with _table_file(path) as file:
        chosen = holding(columns, file.schema_arrow.names)
        first = 0  # row of the group
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if first + size > start.row:
                batches = file.iter_batches(_READ, row_groups=[group], columns=chosen, use_threads=False)
                yield from _of_batches(path, batches, first, start.row)
            first += size


def _of_arrow(path: Path, columns: Sequence[str], start: Mark) -> Iterator[tuple[Mark, RawRow]]:
    with _table_file(path) as file:
        chosen = holding(columns, file.schema.names)
        batches = (batch.select(chosen) for batch in file)
        yield from _of_batches(path, batches, 0, start.row)


def _of_batches(path: Path, batches: Iterator[Any], row: int, start: int) -> Iterator[tuple[Mark, RawRow]]:
    """Rows from `start` on of record batches whose first row is `row`."""
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # Arrow raises anything over what is damaged
            raise _unreadable(path, row, error) from error
        if batch is None:
            return
        for first in range(min(batch.num_rows, max(0, start - row)), batch.num_rows, _READ):
            yield from _values(path, batch.slice(first, _READ), row + first)
        row += batch.num_rows


def _values(path: Path, batch: Any, row: int) -> Iterator[tuple[Mark, RawRow]]:
    """Rows of a record batch whose first row is `row`. TrainingError names the one that holds what is no value."""
    try:
        values = batch.to_pylist()
    except Exception as error:  # text that is no UTF-8, times outside the calendar
        if batch.num_rows == 1:
            raise _unreadable(path, row, error) from error
        values = ()
        for place in range(batch.num_rows):
            yield from _values(path, batch.slice(place, 1), row + place)
    for number, fields in enumerate(values, start=row):
        yield Mark(number), RawRow(f"{path}: row {number}", fields)


def _unreadable(path: Path, row: int, error: Exception) -> TrainingError:
    return TrainingError(f"data.path: {path}: row {row} cannot be read: {first_line(error)}")


@contextmanager
def _table_file(path: Path) -> Iterator[Any]:
    """A parquet or Arrow file, open. TrainingError where it is none, or pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        what = f"data.path: {path} needs the package pyarrow, which cannot be imported: {first_line(error)}"
        raise TrainingError(what, hint="pip install --upgrade 'trainkit[hf]'") from error
    try:
        if path.suffix == ".parquet":
            # Buffered: a row group, which may be of gigabytes, is never read at once.
            sparing = {"pre_buffer": False, "buffer_size": 1 << 20}
            file = pyarrow.parquet.ParquetFile(path, **sparing, page_checksum_verification=True)
        else:
            file = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
    except Exception as error:  # Arrow raises anything over what is damaged
        kind = "parquet" if path.suffix == ".parquet" else "Arrow"
        raise TrainingError(f"data.path: {path} is no sound {kind} file: {first_line(error)}") from error
    with file:
        yield file


def _label_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """What `datasets` writes of its features into a file's schema."""
    try:
        known = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(map(str, feature["names"]))
            for column, feature in known.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError):  # written by somebody else
        return {}
