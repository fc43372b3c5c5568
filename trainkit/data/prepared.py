"""Rows prepared once: token ids on disk, by content, that every process of a machine maps into memory.

`<cache>/<digest>/` holds what a tokenizer made of the files' rows; below it a view says which texts train, which
evaluate, and how long samples are, by the settings that decide these. The digest is over contents: a file that has
moved is found again, and one that has changed is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit.data.encode import Limits, RowEncoder
from trainkit.data.packing import bins_needed, groups_of, in_group
from trainkit.errors import TrainingError
from trainkit.files import parse_json, remove_tree, try_lock, write_json
from trainkit.seeds import derived_seed
from trainkit.tasks import CAUSAL, WRITING

FORMAT = 4  # of the files; part of the digest
PATIENCE = 3600.0  # seconds to wait for another process that prepares the same data
ROUND = 64  # tokens
_EDGE = 1 << 16  # bytes at either end of an array whose checksum is kept
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Side:
    """What of the rows trains, or evaluates. tokens: of its samples. learned: those that are targets."""

    rows: int
    samples: int  # texts, or pieces of them
    tokens: int
    learned: int
    cut: int  # texts whose end does not fit
    pieces: int  # texts of several samples, because they are longer than one
    without: int  # texts without a token to learn within a sample
    skipped: int  # empty rows
    bins: tuple[int, ...] = ()  # of each group of texts; empty where texts are not packed
    window: int = 0  # samples of texts end to end; 0 where they are not


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of texts (in pairs of sources), in tokens. counts: texts up to each of the bounds."""

    median: int
    p99: int
    longest: int
    bounds: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """The choices and counts of one way to train on prepared rows."""

    sequence_length: int
    target_length: int | None
    packing: str
    train: Side
    validation: Side
    lengths: Lengths
    targets: Lengths | None
    labels: tuple[tuple[int, int], ...] = ()  # of each label how many train and how many evaluate
    equal_rows: int = 0  # rows that have an equal one on the other side


@dataclass(frozen=True)
class Mapped:
    """A file that holds an array, mapped into memory when it is first used; other processes get it by name alone."""

    path: Path
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def array(self) -> Array:
        """The array. OSError or ValueError where the file is gone or torn."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        return np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=self.shape))

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("path", "dtype", "shape")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True)
class Tokens:
    """What a tokenizer made of rows. Texts follow one another; rows are numbered, those to evaluate on last."""

    folder: Path
    meta: Mapping[str, Any] = field(repr=False)

    def __getattr__(self, name: str) -> Array:
        """ids, learned (of tokens), starts, rows (of texts; with the end), keys and label_of_row (of rows)."""
        try:
            kept = self.__dict__["meta"]["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None
        found = Mapped(self.folder / f"{name}.bin", kept["dtype"], tuple(kept["shape"])).array
        object.__setattr__(self, name, found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "meta": self.meta}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def text(self, number: int) -> tuple[Array, Array]:
        """The ids of a text, and which of them are learned."""
        start, stop = self.starts[number : number + 2].tolist()
        return self.ids[start:stop], self.learned[start:stop]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared rows with one view of them. spans: (samples, 2), index of the first token and of the end of each."""

    tokens: Tokens
    view: View
    folder: Path

    def spans(self, side: str) -> Mapped:
        return Mapped(self.folder / f"{side}.bin", "int64", (self.side(side).samples, 2))

    def joined(self, side: str) -> Mapped:
        """Where each text begins, if they follow one another, and the end."""
        return Mapped(self.folder / f"{side}-joined.bin", "int64", (self.side(side).samples + 1,))

    def labels(self, side: str) -> Mapped:
        """The label of each sample, as a number."""
        return Mapped(self.folder / f"{side}-labels.bin", "int64", (self.side(side).samples,))

    def side(self, side: str) -> Side:
        return self.view.train if side == "train" else self.view.validation


def save_array(folder: Path, name: str, array: Array) -> dict[str, Any]:
    """Write an array and return what the metadata keeps of it."""
    with (folder / f"{name}.bin").open("wb") as file:
        file.write(np.ascontiguousarray(array).data if array.size else b"")
        file.flush()
        os.fsync(file.fileno())
    return {"dtype": array.dtype.name, "shape": [*array.shape]}


def edges(path: Path) -> tuple[int, str]:
    """Size in bytes of a file, and a digest of its ends: a torn one differs in one of them."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(_EDGE))
        file.seek(max(0, size - _EDGE))
        found.update(file.read(_EDGE))
    return size, found.hexdigest()[:16]


def finish(scratch: Path, ready: Path, meta: Mapping[str, Any]) -> None:
    """Give a complete folder its name. Its metadata, written last, says how each file must look."""
    files = {path.name: edges(path) for path in sorted(scratch.glob("*.bin"))}
    write_json(scratch / "meta.json", {**meta, "files": files}, indent=None)
    for path in (scratch / "meta.json", scratch):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # after a power cut the renamed files must not be full of zeros
        os.close(fd)
    scratch.rename(ready)


def read_whole_folder(ready: Path) -> Mapping[str, Any] | None:
    """The metadata of a complete folder; None where there is none, or one of its files is torn."""
    try:
        meta: Mapping[str, Any] = parse_json((ready / "meta.json").read_bytes())
        if all(edges(ready / name) == (size, digest) for name, (size, digest) in meta["files"].items()):
            return meta
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """An exclusive lock, released when its holder dies. TrainingError if another process holds it for too long."""
    deadline = time.monotonic() + PATIENCE
    with path.open("a") as file:
        while not try_lock(file.fileno()):
            if time.monotonic() > deadline:
                raise TrainingError(f"another process has been preparing the data under {path} for {PATIENCE:.0f} s")
            time.sleep(0.1)
        yield


def view_of(tokens: Tokens, encoder: RowEncoder, asked: Mapping[str, Any], label_numbers: Array | None) -> Prepared:
    """The view with these settings, made and kept if there is none. OSError where it cannot be kept.

    asked: as :func:`asked_view` gives it. label_numbers: of each row.
    """
    if found := read_view(tokens, asked):
        return found
    folder = _view_folder(tokens, asked)
    with locked(tokens.folder / f"{folder.name}.lock"):
        if found := read_view(tokens, asked):
            return found
        for leftover in tokens.folder.glob(f"{folder.name}*"):
            if leftover.is_dir():
                remove_tree(leftover)
        scratch = tokens.folder / f"{folder.name}.tmp-{os.getpid()}"
        scratch.mkdir()
        try:
            view = _make_view(tokens, encoder, asked, label_numbers, scratch)
            finish(scratch, folder, {"view": asdict(view)})
        finally:
            if scratch.exists():
                remove_tree(scratch)
    return Prepared(tokens, view, folder)


def _view_folder(tokens: Tokens, asked: Mapping[str, Any]) -> Path:
    described = json.dumps([FORMAT, asked], sort_keys=True)
    return tokens.folder / f"view-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def read_view(tokens: Tokens, asked: Mapping[str, Any]) -> Prepared | None:
    """The view with these settings; None where there is none, or one of its files is torn."""
    folder = _view_folder(tokens, asked)
    meta = read_whole_folder(folder)
    if meta is None:
        return None
    kept = dict(meta["view"])
    for name in ("train", "validation"):
        kept[name] = Side(**{**kept[name], "bins": tuple(kept[name]["bins"])})
    for name in ("lengths", "targets"):
        if kept[name]:
            tuples = {each: tuple(kept[name][each]) for each in ("bounds", "counts")}
            kept[name] = Lengths(**{**kept[name], **tuples})
    kept["labels"] = tuple(tuple(each) for each in kept["labels"])
    return Prepared(tokens, View(**kept), folder)


def _make_view(
    tokens: Tokens, encoder: RowEncoder, asked: Mapping[str, Any], label_numbers: Array | None, scratch: Path
) -> View:
    """Divide the rows, choose the lengths, find the samples, and write them."""
    starts: Array = tokens.starts
    sizes = np.diff(starts)
    pairs, causal = encoder.task == WRITING, encoder.task == CAUSAL
    learned = np.add.reduceat(tokens.learned, starts[:-1], dtype=np.int64) if len(sizes) else np.zeros(0, np.int64)
    before, after = sizes - learned, learned  # of a pair: the source is read, the target is learned
    length = _chosen(asked["sequence_length"], before if pairs else sizes, asked["limit"])
    target = None
    if pairs:
        target = _chosen(asked["target_length"] or length, after, asked["limit"])
    on_validation, equal_rows = _held_out(tokens, asked)
    sides: dict[str, Side] = {}
    every_label: dict[str, Array] = {}
    for name, chosen in (("train", ~on_validation), ("validation", on_validation)):
        numbers = np.flatnonzero(chosen[tokens.rows]) if len(sizes) else np.zeros(0, np.int64)
        if asked["packing"] == "dense":  # windows cut texts where they are full, and lose nothing
            spans, counts = _whole(tokens, numbers), (0, 0, 0)
        else:
            spans, counts = _samples(tokens, numbers, Limits.of(encoder, length, target), encoder)
        save_array(scratch, name, spans)
        if label_numbers is not None:
            every_label[name] = label_numbers[tokens.rows[numbers]]
            save_array(scratch, f"{name}-labels", every_label[name])
        inside = spans[:, 1] - spans[:, 0]
        if asked["packing"] != "dense":
            inside = np.minimum(inside, length + causal)
        bins: tuple[int, ...] = ()
        window = 0
        if asked["packing"] == "isolated":
            groups = groups_of(len(spans)) if len(spans) else 0
            places = inside - 1
            bins = tuple(bins_needed(places[in_group(each, groups, len(spans))], length) for each in range(groups))
        elif asked["packing"] == "dense":
            joined = np.concatenate([[0], np.cumsum(inside)])
            save_array(scratch, f"{name}-joined", joined)
            window = max(0, -(-(int(joined[-1]) - causal) // length))
        rows = int(np.count_nonzero(chosen))
        empty = int(np.count_nonzero(np.bincount(tokens.rows, minlength=len(chosen))[chosen] == 0))
        counted = int(learned[numbers].sum()) if len(numbers) else 0
        sides[name] = Side(rows, len(spans), int(inside.sum()), counted, *counts, empty, bins, window)
    labels: tuple[tuple[int, int], ...] = ()
    if every_label:
        most = max((int(each.max(initial=-1)) for each in every_label.values()), default=-1) + 1
        both = [np.bincount(each, minlength=most).tolist() for each in every_label.values()]
        labels = tuple(zip(*both, strict=True))
    return View(
        length, target, asked["packing"], sides["train"], sides["validation"],
        _lengths(before if pairs else sizes), _lengths(after) if pairs else None, labels, equal_rows,
    )  # fmt: skip


def may_be_split(encoder: RowEncoder) -> bool:
    """Whether the rest of a text that is too long becomes a sample of its own: of one that is learned as a whole."""
    return encoder.task == CAUSAL and encoder.form.name in ("text", "ids") and "labels" not in encoder.form.columns


def _chosen(asked: int | str, sizes: Array, limit: int | None) -> int:
    """The length of samples: as asked, or what 99 of 100 texts fit into."""
    if isinstance(asked, int):
        return asked
    fitting = int(np.percentile(sizes, 99, method="inverted_cdf")) if len(sizes) else ROUND
    rounded = -(-fitting // ROUND) * ROUND
    return min(rounded, limit) if limit else rounded


def _held_out(tokens: Tokens, asked: Mapping[str, Any]) -> tuple[NDArray[np.bool_], int]:
    """Which rows are evaluated on, and how many of them have an equal row that is trained on.

    Drawn by content and seed: equal rows are on the same side, whatever their places in the file, unless so many are
    equal that nothing else would be left.
    """
    count, first = len(tokens.keys), tokens.meta["training_rows"]
    chosen = np.zeros(count, dtype=np.bool_)
    filled = np.unique(tokens.rows)  # empty rows are all equal, and nothing to evaluate on
    if first < count:  # rows of their own
        chosen[first:] = True
        return chosen, int(np.isin(tokens.keys[filled[filled >= first]], tokens.keys[filled[filled < first]]).sum())
    count = len(filled)
    held = max(1, round(count * asked["validation_fraction"])) if count > 1 else 0
    mixed = _mixed(tokens.keys[filled], derived_seed(asked["split_seed"], "split"))
    order = np.argsort(mixed, kind="stable")
    drawn = mixed[order]
    end = int(np.searchsorted(drawn, drawn[held - 1], side="right")) if held else 0
    if end <= max(2 * held, count // 10) and end < count:
        held, twice = end, 0
    else:
        twice = held - int(np.searchsorted(drawn, drawn[held - 1], side="left"))
    chosen[filled[order[:held]]] = True
    return chosen, twice


def _mixed(keys: Array, seed: int) -> Array:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014) over keys and a seed."""
    value = keys.astype(np.uint64) + np.uint64(seed)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _samples(
    tokens: Tokens, numbers: Array, limits: Limits, encoder: RowEncoder
) -> tuple[NDArray[np.int64], tuple[int, int, int]]:
    """The spans of the samples of these texts, and how many are cut, in pieces, and left out with nothing to learn."""
    spans = _whole(tokens, numbers)
    sizes = spans[:, 1] - spans[:, 0]
    if limits.target is not None:
        learned = np.array([int(np.count_nonzero(tokens.learned[a:b])) for a, b in spans.tolist()], dtype=np.int64)
        return spans, (int(np.count_nonzero((sizes - learned > limits.tokens) | (learned > limits.target))), 0, 0)
    if encoder.whole:  # cut when it is read, for its end token stays
        return spans, (int(np.count_nonzero(sizes > limits.tokens)), 0, 0)
    split = may_be_split(encoder)
    long = np.flatnonzero(sizes > limits.tokens)
    if not split:
        spans[long, 1] = spans[long, 0] + limits.tokens
    cut, pieces = (0, len(long)) if split else (len(long), 0)
    if split and len(long):
        parts = [spans[sizes <= limits.tokens]]
        for start, stop in spans[long].tolist():
            # Each begins with the last token of the one before, which is predicted there.
            places = np.arange(start, max(start + 1, stop - 1), limits.tokens - 1)
            parts.append(np.stack([places, np.minimum(places + limits.tokens, stop)], axis=1))
        spans = np.concatenate(parts)
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
    kept = _learnable(tokens, spans)
    return spans[kept], (cut, pieces, int(np.count_nonzero(~kept)))


def _whole(tokens: Tokens, numbers: Array) -> NDArray[np.int64]:
    """The first token and the end of each of these texts."""
    return np.stack([tokens.starts[numbers], tokens.starts[numbers + 1]], axis=1).astype(np.int64)


def _learnable(tokens: Tokens, spans: Array) -> NDArray[np.bool_]:
    """Which samples have a target: a learned token behind their first."""
    kept = spans[:, 1] - spans[:, 0] > 1
    places = np.flatnonzero(kept)
    bounds = np.stack([spans[places, 0] + 1, spans[places, 1]], axis=1).ravel()
    if len(bounds):
        padded = bounds if bounds[-1] < len(tokens.learned) else bounds[:-1]
        counts = np.add.reduceat(tokens.learned, padded, dtype=np.int64)[::2]
        kept[places] = counts > 0
    return kept


def _lengths(sizes: Array) -> Lengths:
    if not len(sizes):
        return Lengths(0, 0, 0, (), ())
    longest = int(sizes.max())
    bounds = [16]
    while bounds[-1] < longest:
        bounds.append(bounds[-1] * 2)
    counts = np.histogram(sizes, bins=[0, *(each + 1 for each in bounds)])[0]
    p99 = int(np.percentile(sizes, 99, method="inverted_cdf"))
    return Lengths(int(np.median(sizes)), p99, longest, tuple(bounds), tuple(counts.tolist()))


def known_labels(found: Sequence[int | str], names: Sequence[str]) -> tuple[tuple[str, ...], dict[int | str, int]]:
    """The names of labels in the order of their numbers, and the number of each. found: every label that there is."""
    words = sorted(each for each in found if isinstance(each, str))
    chosen = tuple(names or words)  # in alphabetical order: the same on every machine
    return chosen, {each: chosen.index(each) if isinstance(each, str) else each for each in found if each in chosen
                    or not isinstance(each, str)}  # fmt: skip
