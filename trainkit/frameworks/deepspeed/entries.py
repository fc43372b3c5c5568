"""The keys of a DeepSpeed file on their way into a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainkit.frameworks.base.draft import Draft, wrong_values
from trainkit.frameworks.base.fields import Unsupported
from trainkit.frameworks.base.foreign_file import ForeignFile
from trainkit.frameworks.deepspeed.fields import AUTO, ROWS, STAGES
from trainkit.frameworks.deepspeed.readers import Row
from trainkit.frameworks.deepspeed.sharding import formats
from trainkit.recipe.layers.assignment import Assignment
from trainkit.recipe.layers.merge import value_at


@dataclass
class Entries:
    """What has been taken over so far.

    read: keys that need the file no more. skipped: keys and sections that are not taken over as they are. reasons: by
    key. obstacles: keys with which the file cannot be the base, why, and what to do.
    """

    draft: Draft
    source: ForeignFile
    kind: str
    read: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    obstacles: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def stage(self) -> int:
        """Of ZeRO; 0 without it."""
        return STAGES.get(self.kind, 0)

    @property
    def dtype(self) -> str:
        """The format in which values are exchanged."""
        return next(iter(formats(self.source.tree)), "fp32")

    def get(self, key: str) -> Any:
        """The value at a dotted key, None where there is none."""
        return value_at(self.source.tree, key)

    def skip(self, *keys: str) -> None:
        """Leave keys, or whole sections, out."""
        self.skipped.update(keys)

    def put(self, key: str, setting: str, value: Any, reason: str = "") -> None:
        """Set what a key means, or note what is wrong with it."""
        assignment = Assignment(setting, value, self.source.at(key))
        self.read.add(key)
        problems = wrong_values([assignment], self.draft)
        self.draft.problems += problems
        if not problems:
            self.draft.put(assignment, reason)

    def take(self, row: Row) -> None:
        """Set what a field says, by any of its names; what no setting says stays in the file."""
        for key in (row.name, *row.aliases):
            value, skipped = self.get(key), any(f"{key}.".startswith(f"{each}.") for each in self.skipped)
            found = Unsupported("") if skipped or value in (None, AUTO) else row.decode(value)
            if isinstance(found, Unsupported):
                continue
            self.read.add(key)
            for setting, each in found.items():
                self.put(key, setting, each, self.reasons.get(key, ""))

    def has_counterpart(self, key: str) -> bool:
        """Whether a recipe has a name for the class that a key names; where it has not, a script's engine may."""
        value, section = self.get(key), key.partition(".")[0]
        found = ROWS[key].decode(value)
        if value in (None, AUTO) or (isinstance(found, Unsupported) and self.source.program and type(value) is str):
            self.skip(section)
            return False
        if isinstance(found, Unsupported):
            what = f"{key} {value} has no counterpart in the recipe"
            if not isinstance(value, str):
                what = f"{key} must be the name of a class, not {value!r}"
            hint = f"{found.instead}, or remove the section and choose {ROWS[key].keys[0]} in the recipe"
            self.draft.fail(what, self.source.at(key), hint)
            self.skip(section)
        return not isinstance(found, Unsupported)
