"""What a launcher module offers; all of them are listed in `frameworks.registry`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trainkit.plan.combination import Refusal
from trainkit.plan.context import Context
from trainkit.plan.provenance import AddedVariable, SourcedFile, SourcedVariable, Token

if TYPE_CHECKING:
    from trainkit.frameworks.base.draft import Draft, ImportContext

# Unsupported under launchers that make each process a rank of a group, a single one too.
ALWAYS_A_GROUP: tuple[Refusal, ...] = (
    Refusal(
        {"device": ("mps",)},
        "launcher.kind",
        "this launcher is for several processes, and MPS takes one",
        "launcher.kind: python",
    ),
    Refusal(
        {"device": ("xla",), "ranks": ("one",)},
        "launcher.kind",
        "this launcher is for several processes, and a run on XLA is one",
        "launcher.kind: python",
    ),
    Refusal(
        {"program": ("hf",), "strategy": ("single",)},
        "launcher.kind",
        "this launcher sets LOCAL_RANK, and Trainer wraps the model in DDP wherever it finds that",
        "launcher.kind: python, or strategy.kind: ddp",
    ),
    Refusal(
        {"program": ("accelerate",), "strategy": ("single",)},
        "launcher.kind",
        "this launcher sets LOCAL_RANK, and accelerate wraps the model in DDP wherever it finds that",
        "launcher.kind: accelerate or python, or strategy.kind: ddp",
    ),
)


# The shell ends a script with these words where the variable is not set.
NODE_RANK = '"${NODE_RANK:?number of this machine, from 0}"'


@dataclass
class LauncherCommand:
    """What a launcher's part of a command says besides settings.

    processes: on each machine, None where the launcher takes as many as there are cards. argv: from the script on.
    module, python: whether that is a module, and whether Python runs it. local_rank: whether the launcher puts
    `--local_rank=N` before the program's arguments.
    """

    launcher: str
    argv: list[str] = field(default_factory=list)
    processes: int | None = 1
    module: bool = False
    python: bool = True
    local_rank: bool = False


class Launcher(Protocol):
    """What a launcher module offers; every function is pure."""

    HELP: str  # what it is, behind its name
    COMMAND: re.Pattern[str]  # names of commands, and of modules behind `python -m`, that are this launcher
    REQUIRES: Mapping[str, str]  # package -> the oldest version that works
    UNSUPPORTED: tuple[Refusal, ...]  # what does not work under this launcher

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

    def shell_words(self, context: Context, folder: str) -> tuple[str, ...]:
        """The launcher as one starts it without trainkit, ready for the shell. folder: where its files lie."""

    def read(self, draft: Draft, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
        """Import a command: the launcher's flags become settings, and errors are noted in the draft."""


def no_files(context: Context) -> tuple[SourcedFile, ...]:
    """For launchers that read none."""
    return ()


def unchanged(word: str, context: Context) -> str:
    """For launchers that hand words on as they are."""
    return word


def chosen_cards(context: Context) -> tuple[int | str, ...]:
    """The cards as the recipe names them, else by what the plan found."""
    select = context.recipe.devices.select
    return tuple(select) if isinstance(select, list) else context.devices


def restarts(context: Context) -> tuple[str, ...]:
    """The flag that torchrun and accelerate have for restarts."""
    count = context.recipe.launcher.max_restarts
    return (f"--max_restarts={count}",) if count else ()
