"""What Typer finds wrong with a command line, said as trainkit says it."""

from __future__ import annotations

import re
from typing import Any

import typer

from trainkit.errors import UsageError

# Typer brings its own copy of click, or uses the installed one, by its version: the class is known by its heir only.
WRONG_USAGE: type[Exception] = typer.BadParameter.__mro__[1]
_WORD = re.compile(r"'[^']+'|--\S+")
_ADVICE = re.compile(r" \(?(?:Did you mean|Possible options).*")


def usage_error(error: Any) -> UsageError:
    """The same error with a next step: the nearest command or option, or where the help is.

    An empty message is what remains of a call without arguments, whose help has been shown already.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return UsageError(())
    message = _ADVICE.sub("", error.format_message()).rstrip(". ")
    context = error.ctx
    near = _nearest(message, context)
    path = context.command_path if context else "trainkit"
    hint = f"did you mean {near}?" if near else f"`{path} --help` shows what there is"
    return UsageError(f"{message[:1].lower()}{message[1:]}", hint=hint)


def _nearest(message: str, context: Any) -> str:
    """A command or option that looks like the unknown word of the message."""
    word = _WORD.search(message)
    if not word or not context or not message.startswith("No such"):
        return ""
    import difflib

    options = (name for each in context.command.params for name in each.opts)
    known = [*getattr(context.command, "commands", ()), *options]
    return next(iter(difflib.get_close_matches(word[0].strip("'"), known, n=1)), "")
