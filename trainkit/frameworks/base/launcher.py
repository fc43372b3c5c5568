"""What a launcher module offers; all of them are listed in `frameworks.registry`."""

from __future__ import annotations

from typing import Protocol

from trainkit.plan.context import Context
from trainkit.plan.provenance import AddedVariable, SourcedFile, SourcedVariable, Token


class Launcher(Protocol):
    """What a launcher module offers; every member is a pure function of the context."""

    def argv(self, context: Context) -> tuple[Token, ...]:
        """The launcher's own words, up to and without the program."""

    def files(self, context: Context) -> tuple[SourcedFile, ...]:
        """Files that the launcher reads."""

    def environment(self, context: Context) -> tuple[SourcedVariable, ...]:
        """Variables that the launcher, or its ranks in its stead, need."""

    def added(self, context: Context) -> tuple[AddedVariable, ...]:
        """Variables that the launcher gives each rank by itself."""

    def escape(self, word: str, context: Context) -> str:
        """How a program's word must be written so that the launcher hands it on unchanged."""

    def local_rank(self, context: Context) -> str:
        """What becomes each rank's local rank in a program's words; empty where the launcher has no such mark."""
