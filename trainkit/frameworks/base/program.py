"""What a program module offers; all kinds of program are listed in `frameworks.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trainkit.errors import Diagnostic
from trainkit.plan.context import Context
from trainkit.plan.model import Notice, Preparation
from trainkit.plan.provenance import SourcedFile, SourcedVariable, Token
from trainkit.plan.support import Table

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved


class Program(Protocol):
    """What a program module offers; every function is pure."""

    REACH: Table  # how each setting of the recipe reaches the program, and why the others cannot

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
