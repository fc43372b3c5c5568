"""How a command is declared: its options by the signature of its function, its help by the docstring."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import click

from trainkit.errors import UsageError
from trainkit.lazy import load

if TYPE_CHECKING:
    from importlib.abc import InspectLoader


class Option:
    """A parameter of a command's function that a name with dashes sets. min: of a number."""

    def __init__(
        self, *names: str, help: str = "", metavar: str | None = None, min: int | None = None, hidden: bool = False
    ) -> None:
        self.names, self.help, self.metavar, self.min, self.hidden = names, help, metavar, min, hidden

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        """The option as click takes it. kind: the parameter's type."""
        several = get_origin(kind) is list
        metavar = self.metavar or ("NUMBER" if kind is int else None)
        if kind is int and self.min is not None:
            kind = click.IntRange(min=self.min)
        return click.Option(
            [*self.names, name],
            type=str if several else kind,
            is_flag=kind is bool,
            multiple=several,
            show_default=bool(default) and default is not inspect.Parameter.empty,
            help=self.help,
            metavar=metavar,
            hidden=self.hidden,
            **_default(default),
        )


@dataclass(frozen=True)
class Argument:
    """A parameter of a command's function that a word sets by its place."""

    help: str = ""
    metavar: str | None = None

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        """The argument as click takes it. kind: the parameter's type."""
        made = _Word(
            [name],
            type=click.Path(path_type=Path) if kind is Path else kind,
            metavar=self.metavar,
            **_default(default),
        )
        made.means = self.help
        return made


class _Word(click.Argument):
    """An argument with its help, of which click shows none."""

    means: str = ""


def _default(declared: Any) -> dict[str, Any]:
    """What click knows of a parameter that may be left out, or must not: a default that is None would be a value."""
    return {"required": True} if declared is inspect.Parameter.empty else {"required": False, "default": declared}


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
        help="A run directory, a run's id, a job's number, or a name (its newest run). Default: the newest run.",
    ),
]
Root = Annotated[str, Option("--root", metavar="FOLDER", help="The recipes' output.root.")]

_NARROWEST, _WIDEST = 40, 100  # columns of the text below the options


class Command(click.Command):
    """A command of trainkit's. arguments: what its usage line shows behind the declared options."""

    arguments: str = ""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. UsageError for words after `--` that it would not read."""
        if ctx.obj and not isinstance(self, RecipeCommand) and "--" not in self.arguments:
            what = f"`{ctx.command_path}` takes no arguments after --"
            raise UsageError(what, hint=f"remove them: {' '.join(ctx.obj)[:100]}")
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The options, then the arguments."""
        return [*super().collect_usage_pieces(ctx), *filter(None, [self.arguments])]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the arguments mean, then the options."""
        words = [each for each in self.params if isinstance(each, _Word) and each.means]
        if words:
            with formatter.section("Arguments"):
                formatter.write_dl([(each.metavar or each.human_readable_name, each.means) for each in words])
        super().format_options(ctx, formatter)


@dataclass(frozen=True)
class Row:
    """Where a command's function is, how its argv is read, and what its usage line says of that."""

    place: str
    cls: type[Command] = Command
    arguments: str = ""

    def command(self, name: str) -> Command:
        """The command, whose module is imported for it."""
        function: Callable[..., Any] = load(f"trainkit.cli.commands.{self.place}")
        parameters, takes_context = [], False
        hints = get_type_hints(function, include_extras=True)
        for each, declared in inspect.signature(function).parameters.items():
            if hints[each] is click.Context:
                takes_context = True
                continue
            kind, how = get_args(hints[each]) if get_origin(hints[each]) is Annotated else (hints[each], Argument())
            if isinstance(kind, UnionType):  # with None: what may be left out
                kind = get_args(kind)[0]
            parameters.append(how.parameter(each, kind, declared.default))
        made = self.cls(
            name,
            params=parameters,
            callback=click.pass_context(function) if takes_context else function,
            help=inspect.getdoc(function),
        )
        made.arguments = self.arguments
        return made

    def summary(self) -> str:
        """The first paragraph of the function's docstring, read off the compiled module: none is run for a list."""
        module, _, name = self.place.partition(":")
        module = f"trainkit.cli.commands.{module}"
        spec = find_spec(module)
        code = cast("InspectLoader", spec.loader).get_code(module) if spec else None
        functions = (each for each in code.co_consts if isinstance(each, CodeType)) if code else ()
        text = next((each.co_consts[0] for each in functions if each.co_name == name), None)
        return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split()) if isinstance(text, str) else ""


class CommandGroup(click.Group):
    """Commands below one name; a module is imported, and its signature read, when its command is looked up."""

    def __init__(self, name: str, rows: Mapping[str, Row | CommandGroup], help: str, **more: Any) -> None:
        super().__init__(name, help=help, no_args_is_help=False, **more)
        self.rows = rows

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the command's name. UsageError without one, as the help says all that there is to say."""
        if not args:
            click.echo(ctx.get_help())
            raise UsageError(())
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return [name for name, row in self.rows.items() if isinstance(row, Row) or not row.hidden]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; None where there is none of this name."""
        row = self.rows.get(cmd_name)
        return row.command(cmd_name) if isinstance(row, Row) else row

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does."""
        rows = [(name, self.rows[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, row.summary() if isinstance(row, Row) else row.help or "") for name, row in rows]
            )


class RecipeCommand(Command):
    """A command that takes a recipe and overrides, whose grammar is trainkit's own: no option claims these words."""

    ignore_unknown_options = True
    allow_extra_args = True
    lists_flags = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words of a program away: they are not the command's own, whatever they look like."""
        from trainkit.cli.line import OWN_PROGRAM, OwnProgram, program_at

        options = {name: bool(getattr(each, "is_flag", False)) for each in self.get_params(ctx) for name in each.opts}
        at = program_at(args, options)
        if at < len(args):
            ctx.meta[OWN_PROGRAM] = OwnProgram(tuple(args[at:]), options)
        rest: list[str] = super().parse_args(ctx, args[:at])
        return rest

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then what overrides are."""
        super().format_help(ctx, formatter)
        formatter.write_paragraph()
        width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
        flags = "a flag named as in Hugging Face's tools (`trainkit schema --flags` lists them)."
        if self.lists_flags:
            flags = "one of these flags, named as in Hugging Face's tools (`-` and `_` are the same):"
        override = f"OVERRIDE is section.key=value (`trainkit schema --reference` lists the keys), or {flags}"
        formatter.write(f"{textwrap.fill(override, width - 1)}\n")
        if self.lists_flags:  # as the schema has them, so they can't drift
            from trainkit.recipe.flags import flag_reference

            formatter.write(f"\n{flag_reference(width)}")


class LaunchCommand(RecipeCommand):
    """A command whose help also lists the override flags."""

    lists_flags = True


class ImportCommand(Command):
    """A command whose own options end where another tool's command line begins; behind a file they may follow."""

    ignore_unknown_options = True
    allow_extra_args = True
    with_value = ("--output", "-o", "--kind", "--set", "--line", "--public")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let options follow a file, and leave the words of a command alone."""
        from trainkit.convert.importing import is_file, is_line

        rest = list(args)
        while rest and rest[0].startswith("-"):
            del rest[: 2 if rest[0] in self.with_value else 1]
        ctx.allow_interspersed_args = any(is_file(word) or is_line(word) for word in rest[:1])
        return super().parse_args(ctx, args)
