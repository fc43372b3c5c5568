"""Help for commands that take a recipe and overrides: the grammar in the usage line, the schema's flags below."""

from __future__ import annotations

import shutil
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

_NARROWEST, _WIDEST = 40, 100


class _Switches:
    """Help that shows no type behind a switch: there is no value to give."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters; a switch has an empty type."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class Command(_Switches, TyperCommand):
    """A command of trainkit's."""


class CommandGroup(_Switches, TyperGroup):
    """Commands below one name."""


class OverridableCommand(Command):
    """A command whose words after the options are a recipe and overrides. Its help says so, and where the flags are."""

    words: ClassVar[str] = "RECIPE [OVERRIDE]..."

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options, then the words that no option claims."""
        return [*super().collect_usage_pieces(ctx), self.words]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the options as Typer does, then what overrides are."""
        super().format_help(ctx, formatter)
        typer.echo(self.overrides(min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)), nl=False)

    def overrides(self, width: int) -> str:
        """What may follow the recipe."""
        return _filled(
            "OVERRIDE is section.key=value (`trainkit schema --reference` lists the keys), or a flag that Hugging Face "
            "users know (`trainkit schema --flags` lists them).",
            width,
        )


class LaunchingCommand(OverridableCommand):
    """A command whose help also lists the override flags; they are read from the schema, so they can't drift."""

    words: ClassVar[str] = "RECIPE [OVERRIDE]... [-- PROGRAM ARGUMENTS]"

    def overrides(self, width: int) -> str:
        """Every flag, with the keys that it sets."""
        from trainkit.flags.registry import flag_reference

        what = (
            "OVERRIDE is section.key=value (`trainkit schema --reference` lists the keys), or one of these flags, "
            "which Hugging Face users know (`-` and `_` are the same):"
        )
        return f"{_filled(what, width)}\n{flag_reference(width)}"


class KeyCommand(OverridableCommand):
    """A command that may be given a key behind the recipe."""

    words: ClassVar[str] = "RECIPE [KEY] [OVERRIDE]..."


class DoctorCommand(OverridableCommand):
    """A command that does without a recipe too."""

    words: ClassVar[str] = "[RECIPE] [OVERRIDE]..."


class ManyRecipesCommand(OverridableCommand):
    """A command that takes any number of recipes."""

    words: ClassVar[str] = "RECIPE... [OVERRIDE]..."


def _filled(text: str, width: int) -> str:
    import textwrap

    return textwrap.fill(text, width - 1, initial_indent=" ", subsequent_indent=" ") + "\n"
