"""How trainkit says no, warns and remarks: each room has one list of rules, asked with what the room knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from trainkit.errors import Diagnostic, Origin, Severity


class Places(Protocol):
    """What a rule is asked with: it can tell where a setting was given."""

    def origin(self, key: str) -> Origin | None:
        """Where the value of a key comes from."""


C = TypeVar("C", bound=Places)
C_contra = TypeVar("C_contra", bound=Places, contravariant=True)


class Check(Protocol[C_contra]):
    """A rule: a row (:class:`Rule`), or a function where the sentence depends on what it finds."""

    def __call__(self, context: C_contra, /) -> Iterable[Diagnostic]:
        """What the rule finds: nothing where all is well."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[C]):
    """A rule whose sentence is the same each time. what: the sentence, or what makes it of the context."""

    key: str
    when: Callable[[C], object]
    what: str | Callable[[C], str]
    hint: str
    why: str = ""
    severity: Severity = "error"

    def __call__(self, context: C, /) -> Iterator[Diagnostic]:
        """The diagnostic, where the condition holds."""
        if self.when(context):
            what = self.what if isinstance(self.what, str) else self.what(context)
            yield Diagnostic(self.severity, what, self.key, why=self.why, hint=self.hint)


def check(rules: Iterable[Check[C]], context: C) -> list[Diagnostic]:
    """Everything that the rules find, each at the place of its key, in the order of the rules."""
    found = (each for rule in rules for each in rule(context))
    return [replace(each, origin=each.origin or context.origin(each.key)) if each.key else each for each in found]
