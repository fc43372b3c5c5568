"""Options that several commands take, declared once, and how the help of the commands is written."""

from __future__ import annotations

import shutil
import textwrap
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

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
        help="Another machine: a file that `trainkit facts` wrote there, or a profile such as 8xh100.",
    ),
]
Force = Annotated[bool, Option("--force", help="Replace an existing file.")]
Run = Annotated[
    str | None,
    Argument(
        metavar="[RUN]",
        help="A run directory, a run's id or short id, a job's number, a name (its newest run). Default: the newest.",
    ),
]
Root = Annotated[str, Option("--root", metavar="FOLDER", help="The recipes' output.root.")]

_NARROWEST, _WIDEST = 40, 100  # columns of the text below the options


class _Switches:
    """Help that shows no type behind a switch: it takes no value."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters; a switch has an empty type."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class Command(_Switches, TyperCommand):
    """A command of trainkit's. arguments: what its usage line shows behind the declared options."""

    arguments: str = ""

    def invoke(self, ctx: Any) -> Any:
        """Run it. UsageError for words after `--` that it would not read."""
        if ctx.obj and not isinstance(self, RecipeCommand) and "--" not in self.arguments:
            what = f"`{ctx.command_path}` takes no arguments after --"
            raise UsageError(what, hint=f"remove them: {' '.join(ctx.obj)[:100]}")
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options, then the arguments."""
        return [*super().collect_usage_pieces(ctx), *filter(None, [self.arguments])]


class CommandGroup(_Switches, TyperGroup):
    """Commands below one name."""


class RecipeCommand(Command):
    """A command that takes a recipe and overrides, whose grammar is trainkit's own: no option claims these words."""

    ignore_unknown_options = True
    allow_extra_args = True
    lists_flags = False

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
        """Write the options as Typer does, then what overrides are."""
        super().format_help(ctx, formatter)
        width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
        flags = "a flag named as in Hugging Face's tools (`trainkit schema --flags` lists them)."
        if self.lists_flags:
            flags = "one of these flags, named as in Hugging Face's tools (`-` and `_` are the same):"
        override = f"OVERRIDE is section.key=value (`trainkit schema --reference` lists the keys), or {flags}"
        typer.echo(textwrap.fill(override, width - 1, initial_indent=" ", subsequent_indent=" "))
        if self.lists_flags:  # as the schema has them, so they can't drift
            from trainkit.recipe.flags import flag_reference

            typer.echo(f"\n{flag_reference(width)}", nl=False)


class LaunchCommand(RecipeCommand):
    """A command whose help also lists the override flags."""

    lists_flags = True


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
