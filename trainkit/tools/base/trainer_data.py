"""Data sets that another trainer's file names, as one `data` section: what may be read together, and what may not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.tools.base.trainer_files import TrainerFile

# A share that is a single row: trainkit holds out one at least.
ONE_HELD_OUT = 1e-9
_DOWNLOAD = "download them, and name their files, or mix them by weight with data.mix, data.streaming and train.steps"


@dataclass(frozen=True, slots=True)
class Rows:
    """One data set. paths: files or folders, or one name of the Hub. columns: as data.columns. form: of its rows.

    first: how many of its rows alone are read, below 1 as a share, None for all.
    """

    paths: tuple[str, ...]
    form: str
    columns: Mapping[str, str] = field(default_factory=dict)
    on_hub: bool = False
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    first: float | None = None

    @property
    def is_text(self) -> bool:
        """Whether it is plain text, whose lines are rows."""
        return all(path.endswith((".txt", ".md")) for path in self.paths)


_SLICE = re.compile(r"(?P<split>[^\[]+)\[(?:0?:(?P<first>\d+)(?P<percent>%?)|.*)\]")


def sliced(split: str) -> tuple[str, float | None] | None:
    """A split and how many of its first rows `train[:500]` or `train[:20%]` names; None for other parts of a split."""
    found = _SLICE.fullmatch(split)
    if found is None:
        return split, None
    if found["first"] is None:
        return None
    first = int(found["first"])
    if found["percent"]:
        return found["split"], first / 100 if first < 100 else None
    return found["split"], first


def put_rows(file: TrainerFile, name: str, found: Sequence[Rows]) -> Rows | None:
    """Set `data` to several data sets of one form, or say why they are not read together; the first of them."""
    if not found:
        file.draft.set("data.kind", "dataset", file.source.at(name))  # by which other keys are judged
        return None
    first = found[0]
    if any((each.form, each.columns) != (first.form, first.columns) for each in found):
        file.refuse(name, "its data sets have rows of different forms or columns", "write their rows in one form")
        return None
    if len(found) > 1 and any(each.on_hub for each in found):
        file.refuse(name, "several data sets are read in full from files alone", _DOWNLOAD)
        return None
    if len({(each.is_text, each.subset, each.split, each.revision, each.first) for each in found}) > 1:
        why = "its data sets have different splits, or some are plain texts"
        file.refuse(name, why, "write their rows into files of one form")
        return None
    settings: dict[str, Any] = {"data.kind": "text" if first.is_text else "dataset", "data.path": one_or_all(found)}
    if not first.is_text:
        settings |= {"data.columns": dict(first.columns)} if first.columns else {}
        said = {part: getattr(first, part) for part in ("subset", "split", "revision")} | {"max_rows": first.first}
        settings |= {f"data.{part}": value for part, value in said.items() if value}
    file.put(name, settings)
    return first


def put_evaluation_rows(file: TrainerFile, name: str, found: Sequence[Rows], train: Rows | None) -> None:
    """Set what is evaluated on: files, or another split of the same data set of the Hub."""
    same = train is not None and len(found) == 1 and replace(found[0], split=train.split, first=train.first) == train
    if {each.first for each in found} - {train.first if train else None}:
        file.refuse(name, "as many rows of it are read as of the others (data.max_rows)", "read all of them")
    elif same and found[0].on_hub and found[0].split:
        file.put(name, {"data.validation_split": found[0].split})
    elif any(each.on_hub for each in found):
        file.refuse(name, "data.validation_path names files, and data.validation_split a split of data.path", _DOWNLOAD)
    elif found:
        file.put(name, {"data.validation_path": one_or_all(found)})


def one_or_all(found: Sequence[Rows]) -> str | list[str]:
    """The paths of data sets as data.path has them."""
    paths = [path for each in found for path in each.paths]
    return paths[0] if len(paths) == 1 else paths


def put_validation_share(file: TrainerFile, name: str, size: Any) -> None:
    """A share of the rows, or, from 1 on, a number of them."""
    streams = bool(file.draft.get("data.streaming"))
    if size and size >= 1 and streams:
        file.put(name, {"data.validation_rows": int(size)})
    elif size and size >= 1:
        file.leave(name, "data.validation_fraction is a share of the rows: set it to what these are of yours")
    elif size:
        file.put(name, {"data.validation_fraction": float(size)})
    elif not streams and file.draft.get("data.kind") == "dataset":
        why = f"{name} is 0, and trainkit holds out one row at least"
        file.draft.set("data.validation_fraction", ONE_HELD_OUT, file.source.at(name), why)
    if not size and file.get(name) is not None:
        file.put(name, {})
