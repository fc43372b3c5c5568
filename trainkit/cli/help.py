"""Help for commands that take overrides: Typer's own, followed by the flags that the schema declares."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class OverridableCommand(TyperCommand):
    """A command whose help also lists the override flags; they are read from the schema, so they can't drift."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the options as Typer does, then the flags."""
        from trainkit.recipe.flags import flag_reference

        super().format_help(ctx, formatter)
        typer.echo(
            "Overrides: section.key=value, or the flags that Hugging Face users know (`-` and `_` are the same):\n"
        )
        typer.echo(flag_reference())
