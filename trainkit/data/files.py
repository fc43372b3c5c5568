"""The files of a data set by split, and the rows of a file from any position on, a few at a time.

JSON lines, JSON arrays, CSV and TSV, plain or compressed, need nothing but Python; parquet and Arrow need pyarrow.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from trainkit.distribution import install
from trainkit.errors import TrainingError, first_line
from trainkit.files import parse_json
from trainkit.hub.splits import (
    ENDINGS,
    READ,
    README,
    NoSuchPartError,
    RowSelection,
    files_by_split,
    of_other_formats,
    selected_splits,
)
from trainkit.recipe.suggestions import nearest

# First bytes of files whose rows cannot be read, whatever their names: what they are, and what to do.
_NO_ROWS = {
    b"PAR1": ("a parquet file", "give it a name that ends in .parquet"),
    b"ARROW1": ("an Arrow file", "give it a name that ends in .arrow"),
    b"PK\x03\x04": ("a zip archive, or a spreadsheet", "unpack it with unzip, or save it as CSV"),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8: iconv -f UTF-16 -t UTF-8"),
}
TABLES = (".parquet", ".arrow")  # endings of files that pyarrow reads
CELLS = (".csv", ".tsv")  # whose values are all texts
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_DELIMITERS = ",;\t|"
HEAD = 1 << 18  # bytes of a file that a plan looks at
MOST_LABELS = 1 << 20  # the class of each label has weights, up to the highest
MISSING = object()
_NOTHING: tuple[Any, ...] = (None, "", [])
_READ = 128  # rows at a time: all their columns are held in memory


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """In this context an OSError becomes a TrainingError that names the file."""
    try:
        yield
    except OSError as error:
        raise TrainingError(f"data.path: {file} cannot be read: {error.strerror or error}") from error


LARGEST_TEXT = 1 << 28  # bytes; the largest tokenizers take a tenth


def refuse_special(folder: str, key: str) -> None:
    """TrainingError for a folder on which libraries would hang: with a FIFO, a device, or endless settings."""
    for path in sorted(Path(folder).glob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise TrainingError(
                f"{key}: {path} is not a regular file", hint="use the folder as save_pretrained writes it"
            )
        most = LARGEST_TEXT // 16 if path.name.endswith("config.json") else LARGEST_TEXT
        if path.suffix in (".json", ".jinja", ".txt") and path.is_file() and path.stat().st_size > most:
            raise TrainingError(
                f"{key}: {path} is larger than any settings", hint="take it as save_pretrained makes it"
            )


def ending(path: Path) -> str:
    """The ending of a file's name, in small letters: `.csv`."""
    return path.suffix.lower()


class SourceRow(NamedTuple):
    """One row of a data set. place: file and line, or folder and number. cells: whether all its values are texts."""

    place: str
    fields: dict[str, Any]
    cells: bool = False

    def wrong(self, what: str, hint: str = "") -> TrainingError:
        """An error that names this row; its default hint lists the row's fields."""
        names = ", ".join(self.fields) or "no field"
        return TrainingError(f"data.path: {self.place}: {what}", hint=hint or f"the row has {names}")

    def blank(self, fields: Iterable[str]) -> bool:
        """Whether one of these fields is null, an empty text or an empty list."""
        return any(_listed_mappings(self._found(field)) in _NOTHING for field in fields)

    def text(self, field: str) -> str:
        """The text in a field. TrainingError if there is none."""
        return cast("str", self._given(field, str, "text"))

    def optional_text(self, field: str | None) -> str:
        """The text in a field that need not be there; empty where it is not."""
        found = self.value(field)
        if found is not None and not isinstance(found, str):
            raise self.wrong(f"field {field!r} is no text but {_kind(found)}")
        return found or ""

    def value(self, field: str | None) -> Any:
        """The value of a field; None where it is not there."""
        found = self._found(field) if field is not None else MISSING
        return None if found is MISSING else found

    def items(self, field: str) -> Sequence[Any]:
        """The list in a field. TrainingError if there is none."""
        return cast("list[Any]", self._given(field, list, "list"))

    def label(self, field: str) -> int | str:
        """The label in a field: a number from 0 on, or a name. TrainingError if there is none."""
        found = self._given(field, object)
        if self.cells and isinstance(found, str) and found.strip().removeprefix("-").isdecimal():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int | str) or found == "":
            raise self.wrong(f"field {field!r} is not a label: expected a whole number or a name, not {found!r}")
        if isinstance(found, int) and not 0 <= found < MOST_LABELS:
            limit = "labels begin at 0" if found < 0 else f"no label is above {MOST_LABELS - 1:,}"
            raise self.wrong(f"field {field!r} has label {found}, and {limit}")
        return found

    def ids(self, field: str) -> Sequence[int]:
        """The whole numbers in a field. TrainingError for anything else."""
        found = self.items(field)
        if not {int}.issuperset(map(type, found)):  # three times as fast as checking each one
            odd = next(each for each in found if type(each) is not int)
            raise self.wrong(f"field {field!r} holds {odd!r}: expected whole numbers")
        return found

    def _given(self, field: str, kind: type, term: str = "") -> Any:
        """The value of a field, of this kind and not empty."""
        found = self._found(field)
        if found is MISSING:
            raise self.wrong(f"field {field!r} is missing")
        found = _listed_mappings(found) if kind is list else found
        if kind is list and isinstance(found, str) and found.lstrip().startswith("["):
            try:
                found = json.loads(found)
            except ValueError as error:
                raise self.wrong(f"field {field!r} is not JSON: {error}") from error
        if kind is not object and not (isinstance(found, kind) and found):
            hint = "data.skip_empty=true skips such rows" if self.blank([field]) else ""
            what = "empty" if found == kind() else f"no {term} but {_kind(found)}"
            raise self.wrong(f"field {field!r} is {what}", hint)
        return found

    def _found(self, field: str) -> Any:
        """The value of a field, if it exists."""
        found: Any = self.fields
        for name in (field,) if field in self.fields else field.split("."):
            if not isinstance(found, dict) or name not in found:
                return MISSING
            found = found[name]
        return found


def _kind(value: Any) -> str:
    """The kind of a value, in JSON's terms if possible."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a text"), (list, "a list"), (dict, "an object"))
    other = "null" if value is None else type(value).__name__
    return next((term for kind, term in kinds if isinstance(value, kind)), other)


def _listed_mappings(value: Any) -> Any:
    """A list of mappings, also if an older data set holds a mapping of lists."""
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        lengths = {len(each) for each in value.values()}
        if len(lengths) == 1:
            return [dict(zip(value, each, strict=True)) for each in zip(*value.values(), strict=True)]
    return value


def chosen_files(path: Path, asked: RowSelection) -> tuple[list[Path], list[Path]]:
    """The files to train on, and those to evaluate on, possibly none.

    path: a file, a plain folder, or a folder from `save_to_disk`. TrainingError if there is no such data.
    """
    if not path.exists():
        raise TrainingError(f"data.path: {path} does not exist", hint="check the path; it starts at the working folder")
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    if asked.subset is not None and (not path.is_dir() or saved):
        what = f"data.subset: {path} has no subset {asked.subset!r}"
        raise TrainingError(what, hint="leave data.subset out: it selects from the subsets that a README.md lists")
    try:
        if not path.is_dir():
            splits = {"train": [path]}
        else:
            splits = _saved_files(path) if saved else split_files(path, asked.subset)
        if not splits:
            what = f"data.path: {path} holds no rows: nothing of save_to_disk, and no file of {', '.join(READ)}"
            raise TrainingError(what, hint="name files of rows; text files are for data.kind: text")
        first, second = selected_splits(splits, asked)
    except NoSuchPartError as error:
        raise TrainingError(f"data.{error.key}: {path} {error.what}", hint=error.hint) from error
    return splits[first], splits[second] if second else []


def split_files(path: Path, subset: str | None = None) -> dict[str, list[Path]]:
    """The files of rows in a folder by split, of the first format that it has; {} if it has none."""

    names, readme = _names_below(path)
    splits = files_by_split(names, readme, subset)
    return {split: [path / name for name in files] for split, files in splits.items()}


def left_out(path: Path) -> list[str]:
    """The files of rows in a folder that are of another format than those that are read."""
    if not path.is_dir() or (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return []
    return of_other_formats(*_names_below(path))


def _names_below(path: Path) -> tuple[list[str], str]:
    """The names of the files of rows in a folder, and its README.md."""

    def refuse(error: OSError) -> None:
        raise error

    names: list[str] = []
    with reading(path):
        for found, folders, files in os.walk(path, onerror=refuse, followlinks=True):
            real = Path(found).resolve()
            # A link to a parent folder would lead in circles.
            folders[:] = [each for each in folders if Path(found, each).resolve() not in (real, *real.parents)]
            below = Path(found).relative_to(path)
            names += [(below / name).as_posix() for name in files if name.lower().endswith(ENDINGS)]
        readme = (path / README).read_text("utf-8", "replace") if (path / README).is_file() else ""
    return names, readme


def _saved_files(path: Path) -> dict[str, list[Path]]:
    """The Arrow files that `save_to_disk` wrote: one data set, or several as splits."""
    try:
        folders = {"train": path}
        if (path / "dataset_dict.json").exists():
            names = parse_json((path / "dataset_dict.json").read_bytes())["splits"]
            folders = {str(name): path / str(name) for name in names}
        states = {name: parse_json((folder / "state.json").read_bytes()) for name, folder in folders.items()}
        return {
            name: [folders[name] / str(each["filename"]) for each in state["_data_files"]]
            for name, state in states.items()
        }
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TrainingError(f"data.path: {path} is not a valid data set: {first_line(error)}") from error


def check_shard(path: Path, columns: Sequence[str] = ()) -> tuple[int, dict[str, tuple[str, ...]]]:
    """A file's size in bytes, and its label names by column, if it has them.

    Reads only a file's head or footer. TrainingError for a file of another format, or a table without these columns.
    """
    if path.is_dir():
        raise TrainingError(f"data.path: {path} is a folder", hint="name the files in it, or the folder alone")
    if path.exists() and not path.is_file():
        what = f"data.path: {path} is a device or a pipe, and rows are read more than once"
        raise TrainingError(what, hint="write its rows to a file")
    with reading(path):
        size = path.stat().st_size
        if ending(path) not in TABLES:
            with path.open("rb") as file:
                head = file.read(8)
            for beginning, (kind, hint) in _NO_ROWS.items():
                if head.startswith(beginning):
                    raise TrainingError(f"data.path: {path} is {kind}", hint=hint)
            return size, {}
    with _table(path) as (_, schema):
        for column in columns:
            if not {column, column.partition(".")[0]}.intersection(schema.names):
                close, has = nearest(column, schema.names), f"it has {', '.join(schema.names)}"
                hint = f"did you mean {close}? {has}" if close else has
                raise TrainingError(f"data.path: {path} has no column {column!r}", hint=hint)
        return size, _label_names(schema)


def columns_of(path: Path) -> tuple[str, ...]:
    """The columns of a file: of a table those of its schema, else those of its first row; () without rows."""
    if ending(path) in TABLES:
        with _table(path) as (_, schema):
            return tuple(schema.names)
    first = next(rows_of(path, ()), None)
    return tuple(first.row().fields) if first else ()


def head_rows(name: str, head: bytes, *, whole: bool) -> list[SourceRow]:
    """The rows in the beginning of a text file. whole: whether that is all of it.

    TrainingError for a row that is none.
    """
    inner = _name_inside(name)
    if head.startswith(b"\x1f\x8b"):
        try:
            head, whole = zlib.decompressobj(31).decompress(head, 1 << 22), False
        except zlib.error as error:
            raise _torn(name, error) from error
    elif head[:3] in (b"\x28\xb5\x2f", b"BZh", b"\xfd7z"):  # not worth a look
        return []
    for beginning, (kind, hint) in _NO_ROWS.items():
        if head.startswith(beginning):
            raise TrainingError(f"data.path: {name} is {kind}", hint=hint)
    if not whole:
        if (end := head.rfind(b"\n")) < 0 and not head.lstrip().startswith(b"["):
            return []
        head = head[: end + 1] if not head.lstrip().startswith(b"[") else head
    path, found = Path(name), list[SourceRow]()
    for raw in _text_rows(path, io.BytesIO(head), START, inner, whole=whole):
        found.append(raw.row())
    return found


def _name_inside(name: str) -> str:
    """The name of a file, in small letters, without the ending of its compression."""
    name = name.lower()
    return name[: name.rindex(".")] if name.endswith(COMPRESSED) else name


class ShardPosition(NamedTuple):
    """A position before a row in a series of files. shard: number of the file.

    offset: the row's first byte, 0 in tables.
    """

    shard: int = 0
    row: int = 0  # the row, counted from 0; in JSON lines the line
    offset: int = 0


START = ShardPosition()


class RawRow(NamedTuple):
    """A row as read from the file: a line that is not yet parsed, or values by field. line: 0 where there are none."""

    path: Path
    position: ShardPosition
    content: bytes | dict[str, Any]
    line: int = 0
    cells: bool = False

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.path}:{self.line}" if self.line else f"{self.path}: row {self.position.row}"

    def row(self) -> SourceRow:
        """The parsed row. TrainingError for an invalid line."""
        found: Any = self.content
        if isinstance(self.content, bytes):
            try:
                found = json.loads(self.content)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError too
                listed = ", or the file is one list of them" if ending(self.path) == ".json" else ""
                what = f"data.path: {self.place} is not JSON: {error}"
                raise TrainingError(what, hint=f"{_IN_PLACE} on a line of its own{listed}") from error
        if not isinstance(found, dict):
            raise TrainingError(f"data.path: {self.place} is not a JSON object", hint=_IN_PLACE)
        return SourceRow(self.place, found, self.cells)


_IN_PLACE = "mend the file there: each row is an object of fields"


def rows_of(
    path: Path, columns: Sequence[str], start: ShardPosition = START, end: float | None = None
) -> Iterator[RawRow]:
    """The rows of a file from a position on, without blank lines. TrainingError names a row that cannot be read.

    columns: of a table, to read no others, as far as they are there; all of them if none is named. end: the row before
    which to end, as :class:`ShardPosition` counts them.
    """
    for raw in _every_row_of(path, columns, start):
        if end is not None and raw.position.row >= end:
            return
        yield raw


def _every_row_of(path: Path, columns: Sequence[str], start: ShardPosition) -> Iterator[RawRow]:
    if ending(path) not in TABLES:
        with reading(path), path.open("rb") as file:
            yield from _text_rows(path, file, start, _name_inside(path.name))
        return
    for row, batch in batches_of(path, columns, start):
        yield from values_of(path, batch, start.shard, row)


def first_rows(files: Sequence[Path], most: float | None) -> tuple[list[Path], int | None]:
    """The files that hold the first so many rows, and the row of the last one before which these end.

    None where that is read to its end. most: below 1 a share of all rows. Only rows up to there are looked for, and of
    parquet none; for a share each one, once.
    """
    if most is not None and most < 1:
        every = sum(_rows_in(path) if ending(path) in TABLES else sum(1 for _ in rows_of(path, ())) for path in files)
        most = max(1, round(most * every))
    left = None if most is None else int(most)
    for number, path in enumerate(files if left is not None else ()):
        assert left is not None
        if ending(path) in TABLES:
            size = _rows_in(path)
            if size >= left:
                return [*files[: number + 1]], left if size > left else None
            left -= size
            continue
        for raw in rows_of(path, ()):
            if not left:
                return [*files[: number + 1]], raw.position.row
            left -= 1
        if not left:
            return [*files[: number + 1]], None
    return [*files], None


def _rows_in(path: Path) -> int:
    """How many rows a table has."""
    if ending(path) == ".arrow":
        return sum(int(batch.num_rows) for _, batch in batches_of(path, ()))
    with _table(path) as (file, _):
        return int(file.metadata.num_rows)


def batches_of(path: Path, columns: Sequence[str], start: ShardPosition = START) -> Iterator[tuple[int, Any]]:
    """The rows of a table from a position on, as record batches of a few rows, each with the number of its first.

    columns: as of :func:`rows_of`. TrainingError names a row that cannot be read.
    """
    with _table(path) as (file, schema):
        # A name with a dot that is not a column selects from a mapping.
        there = [name for name in columns if {name, name.partition(".")[0]}.intersection(schema.names)]
        named = there or schema.names
        chosen = list(dict.fromkeys(name if name in schema.names else name.partition(".")[0] for name in named))
        if ending(path) == ".arrow":
            every = file if hasattr(file, "__iter__") else map(file.get_batch, range(file.num_record_batches))
            yield from _of_batches(path, (batch.select(chosen) for batch in every), 0, start)
            return
        first = 0  # number of the row within its group
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if first + size > start.row:
                batches = file.iter_batches(_READ, row_groups=[group], columns=chosen, use_threads=False)
                yield from _of_batches(path, batches, first, start)
            first += size


def _text_rows(path: Path, file: BinaryIO, start: ShardPosition, name: str, *, whole: bool = True) -> Iterator[RawRow]:
    """The rows of an open file of JSON or cells. name: without the ending of its compression."""
    lines, compressed = _decompressed(path, file)
    try:
        if name.endswith(CELLS):
            yield from _cell_rows(path, lines, start, whole=whole)
            return
        if lines.peek(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            yield from _array_rows(path, lines, start, whole=whole)
            return
        shard, row, offset = start if not compressed else (start.shard, 0, 0)
        if offset:
            lines.seek(offset)
        for line in lines:
            if line.strip() and row >= start.row:
                content = line.removeprefix(b"\xef\xbb\xbf") if row == 0 else line
                yield RawRow(path, ShardPosition(shard, row, offset), content, row + 1)
            row, offset = row + 1, 0 if compressed else offset + len(line)
    except Exception as error:
        if type(error).__name__ not in ("EOFError", "error", "LZMAError", "BadGzipFile", "ZstdError"):
            raise
        raise _torn(path, error) from error


def _torn(path: Path | str, error: Exception) -> TrainingError:
    return TrainingError(f"data.path: {path} cannot be unpacked: {first_line(error)}", hint="write it anew")


def _decompressed(path: Path, file: BinaryIO) -> tuple[Any, bool]:
    """The file's content, and whether it was compressed, which its first bytes tell."""
    buffered = io.BufferedReader(cast("io.RawIOBase", file), 1 << 16)
    head = buffered.peek(4)[:4]
    if head.startswith(b"\x1f\x8b"):
        import gzip

        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=buffered)), 1 << 16), True
    if head.startswith(b"BZh"):
        import bz2

        return io.BufferedReader(cast("io.RawIOBase", bz2.BZ2File(buffered)), 1 << 16), True
    if head.startswith(b"\xfd7zX"):
        import lzma

        return io.BufferedReader(cast("io.RawIOBase", lzma.LZMAFile(buffered)), 1 << 16), True
    if head == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError as error:
            what = f"data.path: {path} needs the package zstandard, which cannot be imported: {first_line(error)}"
            raise TrainingError(what, hint=install(sys.executable, "zstandard")) from error
        return io.BufferedReader(_ZstdReader(buffered, zstandard.ZstdDecompressor().decompressobj), 1 << 16), True
    return buffered, False


class _ZstdReader(io.RawIOBase):
    """The content of a zstandard file. The package's own reader takes an end in the middle for the end.

    begin: makes the reader of a frame; a file may have several.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]) -> None:
        self._file, self._begin = file, begin
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            ended = self._frame is not None and self._frame.eof
            packed = (self._frame.unused_data if ended else b"") or self._file.read(1 << 12)  # which may be large
            if not packed:
                if self._frame is not None and not ended:
                    raise EOFError("it ends in the middle")
                return 0
            if self._frame is None or ended:
                self._frame = self._begin()
            self._ready = self._frame.decompress(packed)
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _array_rows(path: Path, file: IO[bytes], start: ShardPosition, *, whole: bool) -> Iterator[RawRow]:
    """The objects of a JSON array, one after the other. whole: whether an end in the middle is an error."""
    content = file.read()
    try:
        text = content.decode("utf-8-sig", "strict" if whole else "replace")
    except UnicodeDecodeError as error:
        raise _no_utf8(path, content.count(b"\n", 0, error.start) + 1) from error
    decoder, place, row = json.JSONDecoder(), text.index("[") + 1, 0
    space = " \t\r\n"
    while True:
        while place < len(text) and text[place] in space:
            place += 1
        if text[place : place + 1] == "]":
            if whole and text[place + 1 :].strip():
                what = f"data.path: {path} goes on behind its list of rows, which ends with row {row - 1}"
                raise TrainingError(
                    what, hint="put all rows into one list, or each on a line of its own without a list"
                )
            return
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            if not whole:
                return
            raise TrainingError(f"data.path: {path}: row {row} is not JSON: {error}", hint=_IN_PLACE) from error
        if row >= start.row:
            yield RawRow(path, ShardPosition(start.shard, row), found)
        row += 1
        while place < len(text) and text[place] in space:
            place += 1
        if text[place : place + 1] == ",":
            place += 1
        elif text[place : place + 1] != "]":
            if not whole:
                return
            raise TrainingError(
                f"data.path: {path} ends, or goes on with no comma, behind row {row - 1}", hint=_IN_PLACE
            )


def _cell_rows(path: Path, file: IO[bytes], start: ShardPosition, *, whole: bool) -> Iterator[RawRow]:
    """The rows of CSV or TSV with a head; the delimiter is the one that its head has most of.

    whole: whether an end within quotes is an error.
    """
    csv.field_size_limit(1 << 30)
    text = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    try:
        first, above = text.readline(), 1
        while first.isspace():
            first, above = text.readline(), above + 1
        _require_utf8(path, above, first)
        delimiter = max(_DELIMITERS, key=first.count)
        names = next(csv.reader([first], delimiter=delimiter), [])
        if len({*names}) < len(names) or "" in names:
            what = f"data.path: {path}: its first line must name the columns, each once: {', '.join(names)[:200]}"
            raise TrainingError(what, hint="write the names of the columns into the first line")
        reader, row = csv.reader(text, delimiter=delimiter, strict=True), 0
        for cells in reader:
            if not cells:
                continue
            line = reader.line_num + above
            _require_utf8(path, line, "".join(cells))
            if len(cells) != len(names):
                what = f"data.path: {path}:{line}: {len(cells)} cells, and its first line names {len(names)} columns"
                raise TrainingError(what, hint="put texts with delimiters or line breaks into quotes")
            if row >= start.row:
                yield RawRow(path, ShardPosition(start.shard, row), dict(zip(names, cells, strict=True)), line, True)
            row += 1
    except csv.Error as error:
        if not whole:
            return
        raise TrainingError(f"data.path: {path}:{reader.line_num + above}: {error}", hint="check its quotes") from error


def _require_utf8(path: Path, line: int, text: str) -> None:
    """TrainingError for a text with bytes that are not UTF-8, which `surrogateescape` has kept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _no_utf8(path, line) from error


def _no_utf8(path: Path, line: int) -> TrainingError:
    hint = "write the file in UTF-8; one of Windows with iconv -f WINDOWS-1252 -t UTF-8"
    return TrainingError(f"data.path: {path}:{line} is not UTF-8 text", hint=hint)


def _of_batches(path: Path, batches: Iterator[Any], row: int, start: ShardPosition) -> Iterator[tuple[int, Any]]:
    """Parts from `start` on of record batches whose first row is `row`."""
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # Arrow raises any exception for damaged data
            raise _unreadable(path, row, error) from error
        if batch is None:
            return
        for first in range(min(batch.num_rows, max(0, start.row - row)), batch.num_rows, _READ):
            yield row + first, batch.slice(first, _READ)
        row += batch.num_rows


def values_of(path: Path, batch: Any, shard: int, row: int) -> Iterator[RawRow]:
    """Rows of a record batch whose first row is `row`. TrainingError names a row with an invalid value."""
    try:
        values = batch.to_pylist()
    except Exception as error:  # text that is not UTF-8, times outside the calendar
        if batch.num_rows == 1:
            raise _unreadable(path, row, error) from error
        values = ()
        for place in range(batch.num_rows):
            yield from values_of(path, batch.slice(place, 1), shard, row + place)
    for number, fields in enumerate(values, start=row):
        yield RawRow(path, ShardPosition(shard, number), fields)


def _unreadable(path: Path, row: int, error: Exception) -> TrainingError:
    return TrainingError(f"data.path: {path}: row {row} cannot be read: {first_line(error)}")


@contextmanager
def _table(path: Path) -> Iterator[tuple[Any, Any]]:
    """An open parquet or Arrow file, and its schema. TrainingError if it is neither, or without pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        what = f"data.path: {path} needs the package pyarrow, which cannot be imported: {first_line(error)}"
        raise TrainingError(what, hint=install(sys.executable, "pyarrow")) from error
    try:
        if ending(path) == ".parquet":
            # Buffered: a row group may have gigabytes, and is never read at once.
            sparing = {"pre_buffer": False, "buffer_size": 1 << 20}
            file = pyarrow.parquet.ParquetFile(path, **sparing, page_checksum_verification=True)
            schema = file.schema_arrow
        else:
            mapped = pyarrow.memory_map(str(path))
            random_access = mapped.read(6) == b"ARROW1"  # as pandas and Polars write it; `datasets` writes streams
            mapped.seek(0)
            file = (pyarrow.ipc.open_file if random_access else pyarrow.ipc.open_stream)(mapped)
            schema = file.schema
    except Exception as error:  # Arrow raises any exception for damaged data
        kind = "parquet" if ending(path) == ".parquet" else "Arrow"
        raise TrainingError(f"data.path: {path} is not a valid {kind} file: {first_line(error)}") from error
    with file:
        yield file, schema


def _label_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """The label names that `datasets` writes into a file's schema."""
    try:
        known = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: tuple(map(str, feature["names"]))
            for column, feature in known.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, LookupError, TypeError, AttributeError):  # written by another program
        return {}


def json_of(path: Path) -> dict[str, Any]:
    """The object in a small file that a library reads; {} where there is none: the library says what is wrong."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_TEXT:
            return {}
        found = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
