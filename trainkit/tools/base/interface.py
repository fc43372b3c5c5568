"""What a launcher module and a module for a kind of program offer; all are listed in `tools.registry`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.provenance import SourcedFile, SourcedVariable, Token
from trainkit.launch_plan.rules import InputRule, PlanRule, Table, incompatible

if TYPE_CHECKING:
    from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe

# Of launchers that make each process a rank of a group, a single one too.
ALWAYS_A_GROUP: tuple[PlanRule, ...] = (
    incompatible(
        "launcher.kind",
        lambda c: c.device == "mps",
        "this launcher is for several processes, and MPS takes one",
        "launcher.kind: python",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.device == "xla" and c.ranks == 1,
        "this launcher is for several processes, and a run on XLA is one",
        "launcher.kind: python",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.program == "hf" and c.strategy == "single",
        "this launcher sets LOCAL_RANK, and Trainer wraps the model in DDP wherever it finds that",
        "launcher.kind: python, or strategy.kind: ddp",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.program == "accelerate" and c.strategy == "single",
        "this launcher sets LOCAL_RANK, and accelerate wraps the model in DDP wherever it finds that",
        "launcher.kind: accelerate or python, or strategy.kind: ddp",
    ),
)
NEVER_RESTARTS = incompatible(
    "launcher.max_restarts",
    lambda c: c.recipe.launcher.max_restarts,
    "this launcher never restarts ranks",
    "launcher.kind: torchrun, or launcher.max_restarts: 0",
)


# The shell ends a script with these words where the variable is not set.
NODE_RANK = '"${NODE_RANK:?number of this machine, from 0}"'
MASTER = ('"${MASTER_ADDR:?address of node 0}"', '"${MASTER_PORT:?a free port of node 0}"')


def master(context: Context) -> tuple[str, str]:
    """Address and port of node 0, as words of a shell command."""
    host, _, port = context.recipe.nodes.rendezvous.rpartition(":")
    return (host, port) if host else MASTER


@dataclass
class LauncherCommand:
    """What a launcher's part of a command says besides settings.

    processes: on each machine, None where the launcher takes as many as there are GPUs. argv: from the script on.
    module, python: whether that is a module, and whether Python runs it. local_rank: the flag that the launcher puts
    before the program's arguments, with the rank on the node; empty for none.
    """

    launcher: str
    argv: list[str] = field(default_factory=list)
    processes: int | None = 1
    module: bool = False
    python: bool = True
    local_rank: str = ""


class Launcher(Protocol):
    """What a launcher module offers; every function is pure."""

    HELP: str  # what it is, behind its name
    COMMAND: re.Pattern[str]  # names of commands, and of modules behind `python -m`, that are this launcher
    REQUIRES: Mapping[str, str]  # package -> the oldest version that works
    INCOMPATIBLE: tuple[PlanRule, ...]  # what does not work under this launcher

    def argv(self, context: Context) -> tuple[Token, ...]:
        """The launcher's own words, up to and without the program."""

    def files(self, context: Context) -> tuple[SourcedFile, ...]:
        """Files that the launcher reads."""

    def environment(self, context: Context) -> tuple[SourcedVariable, ...]:
        """Variables that the launcher, or its ranks in its stead, need."""

    def added(self, context: Context) -> tuple[SourcedVariable, ...]:
        """Variables that the launcher gives each rank by itself."""

    def escape(self, word: str, context: Context) -> str:
        """How a program's word must be written so that the launcher hands it on unchanged."""

    def local_rank(self, context: Context) -> str:
        """What becomes each rank's local rank in a program's words; empty where the launcher has no such mark."""

    def shell_words(self, context: Context, folder: str) -> tuple[str, ...]:
        """The launcher as one starts it without trainkit, ready for the shell. folder: where its files lie."""

    def read(self, draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
        """Import a command: the launcher's flags become settings, and errors are noted in the draft."""


def unchanged(word: str, context: Context) -> str:
    """For launchers that hand words on as they are."""
    return word


def chosen_cards(context: Context) -> tuple[int | str, ...]:
    """The GPUs as the recipe names them, else by what the plan found."""
    select = context.recipe.devices.select
    return tuple(select) if isinstance(select, list) else context.devices


def restarts(context: Context) -> tuple[str, ...]:
    """The flag that torchrun and accelerate have for restarts."""
    count = context.recipe.launcher.max_restarts
    return (f"--max_restarts={count}",) if count else ()


@dataclass(frozen=True, slots=True)
class Detection:
    """How a script of this kind is recognised.

    library: what it is built on, for people. imports: patterns of that library's names, and parsers: names of which a
    script needs one besides, so that its flags mean something. flags: arguments that only such scripts have. shared:
    arguments that scripts of other kinds have too, which tell nothing. of_file, of_line: methods of the parsers; with
    the first alone it reads no flags.
    """

    library: str = ""
    imports: frozenset[str] = frozenset()
    parsers: frozenset[str] = frozenset()
    flags: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    of_file: frozenset[str] = frozenset()
    of_line: frozenset[str] = frozenset()


class Program(Protocol):
    """What a program module offers; every function is pure."""

    INCOMPATIBLE: tuple[PlanRule, ...]  # what programs of this kind cannot be run with
    RULES: tuple[PlanRule, ...]  # what else is wrong, or good to know, once every decision is taken
    INPUT_RULES: tuple[InputRule, ...]  # what is asked before a device is chosen
    SUPPORT: Table  # how each setting of the recipe reaches the program, and why the others cannot
    REQUIRES: Mapping[str, str]  # package -> the oldest version that works
    DETECTION: Detection
    STRATEGY_BY: str  # who sets the strategy up, as the plan says it; empty for the built-in trainer

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

    def read(self, draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> list[str]:
        """Import a script's arguments: those with a recipe key become settings, and the others are returned."""


def nothing(context: Context) -> tuple[()]:
    """For what a launcher or a program has none of."""
    return ()


def all_own(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> list[str]:
    """For programs whose arguments are all their own affair."""
    return list(argv)
