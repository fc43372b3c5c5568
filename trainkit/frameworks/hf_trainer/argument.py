"""One field of TrainingArguments, and with it one flag of the script's: a row of `fields`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainkit.frameworks.base.fields import Field, Policy, chosen, said
from trainkit.plan.context import Context


def _nowhere(context: Context) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Argument(Field):
    """One field of TrainingArguments, and with it one flag of the script's.

    switch: whether it takes yes or no. needed: where it is given though no layer says it, as policy ALWAYS does it
    everywhere. owned: the program's own arguments may not say otherwise, whether a layer says it or not.
    """

    switch: bool = False
    needed: Callable[[Context], bool] = _nowhere
    owned: bool = False

    def is_given(self, context: Context) -> bool:
        """Whether the plan speaks of the field; it may still leave it to the program."""
        return self.policy is Policy.ALWAYS or self.needed(context) or said(context, *self.keys)

    def name_in(self, version: str) -> str:
        """What a version calls the field: before `since` by the name that it had."""
        return self.name if self.known_to(version) or not self.aliases else self.aliases[0]


def plain(name: str, key: str, default: Any = None, **columns: Any) -> Argument:
    """A field with the value of one key as it is."""
    codec = {"encode": lambda context: chosen(context, key), "decode": lambda value: {key: value}}
    return Argument(name, default=default, **{"keys": (key,), **codec, **columns})


def switch(name: str, key: str, default: Any = False, *, means: Any = True, **columns: Any) -> Argument:
    """A field that takes yes or no. means: the value of the key that yes stands for; no then says nothing."""
    decode = (lambda on: {key: on}) if means is True else (lambda on: {key: means} if on else {})
    return plain(name, key, default, switch=True, **{"decode": decode, **columns})
