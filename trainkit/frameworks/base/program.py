"""What a program module offers; all kinds of program are listed in `frameworks.registry`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainkit.errors import Diagnostic
from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation
from trainkit.plan.provenance import SourcedFile, SourcedVariable, Token
from trainkit.plan.support import Table

if TYPE_CHECKING:
    from trainkit.frameworks.base.draft import Draft, ImportContext
    from trainkit.recipe.resolved import Resolved


@dataclass(frozen=True, slots=True)
class Detection:
    """How a script of this kind is recognised.

    library: what it is built on, for people. imports: names of that library, and parsers: names of which a script needs
    one besides, so that its flags mean something. flags: arguments that only such scripts have. shared: arguments that
    scripts of other kinds have too, which tell nothing.
    """

    library: str = ""
    imports: frozenset[str] = frozenset()
    parsers: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()


class Program(Protocol):
    """What a program module offers; every function is pure."""

    REACH: Table  # how each setting of the recipe reaches the program, and why the others cannot
    REQUIRES: Mapping[str, str]  # package -> the oldest version that works
    DETECTION: Detection

    def check(self, resolved: Resolved) -> tuple[Diagnostic, ...]:
        """What is wrong with the program section."""

    def problems(self, context: Context) -> tuple[Diagnostic, ...]:
        """What is wrong, that is known only with every decision taken."""

    def reason(self, context: Context) -> str:
        """What the program is, for people."""

    def argv(self, context: Context) -> tuple[Token, ...]:
        """The command of one rank."""

    def wrapper(self, context: Context) -> tuple[Token, ...]:
        """Further words for the rank wrapper: what differs from rank to rank."""

    def files(self, context: Context) -> tuple[SourcedFile, ...]:
        """Files through which settings reach the program."""

    def environment(self, context: Context) -> tuple[SourcedVariable, ...]:
        """Variables through which settings reach the program."""

    def preparations(self, context: Context) -> tuple[Preparation, ...]:
        """What must be done on each node before the ranks start."""

    def notices(self, context: Context) -> tuple[Notice, ...]:
        """What the user should know about how settings reach the program."""

    def read(self, draft: Draft, context: ImportContext, argv: Sequence[str]) -> list[str]:
        """Import a script's arguments: those with a recipe key become settings, and the others are returned."""


def nothing(context: Context) -> tuple[()]:
    """For what a program has none of."""
    return ()


def all_own(draft: Draft, context: ImportContext, argv: Sequence[str]) -> list[str]:
    """For programs whose arguments are all their own affair."""
    return list(argv)
