"""Options that several commands take, declared once, and how the help of the commands is written."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from copy import copy
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from trainkit.colour import Colour
from trainkit.errors import UsageError

Presets = Annotated[
    list[str] | None,
    Option("--with", metavar="PRESET", help="Apply a preset on top of the recipe; may be repeated."),
]
Variant = Annotated[str | None, Option("--variant", metavar="NAME", help="Use this variant of the recipe.")]
Json = Annotated[bool, Option("--json", help="Print JSON for scripts.")]
On = Annotated[
    str | None,
    Option(
        "--on",
        metavar="MACHINE",
        help="Another machine: a file that `trainkit env facts` wrote there, or a profile such as 8xh100.",
    ),
]
Wait = Annotated[
    bool, Option("--wait", help="Wait until the GPUs are free, in order of arrival (devices.when_busy: wait).")
]
Force = Annotated[bool, Option("--force", help="Replace an existing file.")]
Run = Annotated[
    str | None,
    Argument(
        metavar="[RUN]",
        help="A run directory, a run's id or short id, a job's number, a name (its newest run). Default: the newest.",
    ),
]
Runs = Annotated[
    list[str] | None,
    Argument(
        metavar="RUN",
        help="Run directories, ids, names (the newest run of each) or jobs' numbers. Default: the newest run.",
    ),
]
HELP_ALL = "--help-all"
Root = Annotated[str, Option("--root", metavar="FOLDER", help="The recipes' output.root.")]

_NARROWEST, _WIDEST = 40, 100  # columns of the help
_EXAMPLE = "Example: "


class _Help:
    """Help for terminals: at most 100 columns, paragraphs and examples folded to them, types only where they say more.

    What is set on Typer's parameters and its `rich_utils` here is what it offers no argument for.
    """

    help: str | None

    def get_params(self, ctx: Any) -> Any:
        """The parameters: a switch and an argument have no type, a number is N."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda ctx: None
            elif getattr(each, "is_flag", False):
                each.metavar = ""
            elif each.metavar is None and _is_bounded(getattr(each, "type", each)):  # older Typers have it on the type
                each.metavar = "N"
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options, then the arguments with one pair of brackets at most."""
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [each.replace("[[", "[").replace("]]", "]").strip("{}") for each in pieces]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from typer import rich_utils

        rich_utils.MAX_WIDTH = help_width()
        rich_utils.STYLE_HELPTEXT = ""  # it dims all behind the first paragraph, examples too
        # By itself rich leaves bold with NO_COLOR, and takes GitHub's log for a terminal.
        is_coloured = Colour(sys.stdout, os.environ).is_on
        rich_utils.COLOR_SYSTEM, rich_utils.FORCE_TERMINAL = ("auto", True) if is_coloured else (None, None)
        self.help = folded(self.help or "")
        super().format_help(ctx, formatter)  # type: ignore[misc]


def _is_bounded(number: Any) -> bool:
    return any(getattr(number, name, None) is not None for name in ("min", "max"))


def help_width() -> int:
    """Columns of the help."""
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def folded(docstring: str) -> str:
    """A docstring with each paragraph as one line, for the terminal to fold, and its examples as one block."""
    paragraphs = [" ".join(each.split()) for each in docstring.split("\n\n")]
    text = [each for each in paragraphs if not each.startswith(_EXAMPLE)]
    examples = [each.removeprefix(_EXAMPLE) for each in paragraphs if each.startswith(_EXAMPLE)]
    return "\n\n".join([*text, *filter(None, ["\n".join(f"$ {each}" for each in examples)])])


class Command(_Help, TyperCommand):
    """A command of trainkit's. arguments: what its usage line shows behind the declared options."""

    arguments: str = ""

    def invoke(self, ctx: Any) -> Any:
        """Run it. UsageError for words after `--` that it would not read."""
        if not isinstance(self, RecipeCommand) and "--" not in self.arguments:
            refuse_arguments(ctx)
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options, then the arguments."""
        return [*super().collect_usage_pieces(ctx), *filter(None, [self.arguments])]


def refuse_arguments(ctx: Any) -> None:
    """Raise UsageError for words behind `--`."""
    if ctx.obj:
        what = f"`{ctx.command_path}` takes no arguments after --"
        raise UsageError(what, hint=f"remove them: {' '.join(ctx.obj)[:100]}")


class CommandGroup(_Help, TyperGroup):
    """Commands below one name."""


class RecipeCommand(Command):
    """A command that takes a recipe and overrides, whose grammar is trainkit's own: no option claims these words."""

    ignore_unknown_options = True
    allow_extra_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the words of a program away: they are not the command's own, whatever they look like."""
        from trainkit.cli.line import OWN_PROGRAM, OwnProgram, program_at

        options = {name: bool(getattr(each, "is_flag", False)) for each in self.get_params(ctx) for name in each.opts}
        at = program_at(args, options)
        if at < len(args):
            ctx.meta[OWN_PROGRAM] = OwnProgram(tuple(args[at:]), options)
        rest: list[str] = super().parse_args(ctx, args[:at])
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then what overrides are."""
        super().format_help(ctx, formatter)
        override = (
            "OVERRIDE is section.key=value (`trainkit schema --reference` lists the keys), or a flag named as in"
            " Hugging Face's tools (`trainkit schema --flags` lists them)."
        )
        typer.echo(textwrap.fill(override, help_width() - 1, initial_indent=" ", subsequent_indent=" "))


class LaunchCommand(RecipeCommand):
    """A command whose longer help also lists the override flags."""

    lists_flags = False
    longer: Any = None

    def get_params(self, ctx: Any) -> Any:
        """The parameters, with the option for the longer help behind that for the short one."""
        params = super().get_params(ctx)
        if self.longer is None:  # one object, as Typer compares them
            self.longer = copy(params[-1])
            self.longer.name, self.longer.opts = "help_all", [HELP_ALL]
            self.longer.help = "Show this message and the flags."
        return [*params, self.longer]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note which help is meant: both options call the same function."""
        self.lists_flags = HELP_ALL in args
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and for `--help-all` the flags as the schema has them."""
        super().format_help(ctx, formatter)
        if self.lists_flags:
            from trainkit.recipe.flags import flag_reference

            typer.echo(f"\n{flag_reference(help_width())}", nl=False)


class ImportCommand(Command):
    """A command whose own options end where another tool's command line begins; behind a file they may follow."""

    ignore_unknown_options = True
    allow_extra_args = True
    with_value = ("--output", "-o", "--kind", "--set", "--line", "--public")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let options follow a file, and leave the words of a command alone."""
        from trainkit.convert.importing import is_file, is_line

        rest = list(args)
        while rest and rest[0].startswith("-"):
            del rest[: 2 if rest[0] in self.with_value else 1]
        ctx.allow_interspersed_args = any(is_file(word) or is_line(word) for word in rest[:1])
        return super().parse_args(ctx, args)
