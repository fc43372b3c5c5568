"""`trainkit import`: the recipe that another tool's command or file means."""

from __future__ import annotations

import os
import posixpath
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click

from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.disk import Disk, modeline, working_folder, write_file
from trainkit.cli.options import Force, Option
from trainkit.errors import Diagnostic, UsageError
from trainkit.files import is_there

Output = Annotated[
    str | None, Option("--output", "-o", metavar="FILE", help="The recipe to write; default, and `-`: standard output.")
]
Kind = Annotated[
    str | None, Option("--kind", metavar="KIND", help="What the program is (program.kind), where you know.")
]
Variables = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="A variable of the shell text, as the caller sets it; repeatable."),
]
Line = Annotated[
    int | None, Option("--line", metavar="NUMBER", help="Of several commands in a script, the one on this line.")
]

Public = Annotated[
    list[str] | None,
    Option("--public", metavar="NAME", help="An argument that sounds like a secret and is none; repeatable."),
]

# Words that no launcher and hardly a script has: behind the command they are a slip.
OWN_OPTIONS = {"-o": False, "--output": False}


def import_(
    context: click.Context,
    *,
    output: Output = None,
    kind: Kind = None,
    set_: Variables = None,
    line: Line = None,
    public: Public = None,
    force: Force = False,
) -> None:
    """Write the recipe that another tool's command or file means.

    COMMAND is a line as you type it today, word for word or quoted as one:
    python, torchrun, python -m torch.distributed.launch, accelerate launch or
    deepspeed, with variables in front of it. Options come before it. FILE is
    a DeepSpeed JSON, an accelerate config, or a shell script (.sh) or notebook
    with one such command; a variable that nothing in it sets is read from your
    environment when the recipe is. What the other tool ignores or misreads
    becomes a comment in the recipe; what has no key is named.

    Example: trainkit import torchrun --nproc_per_node 2 train.py --do_train --bf16 --output_dir out

    Example: trainkit import ds_config.json --output recipe.yaml
    """
    from trainkit.convert.importing import ShellOptions, check_import, import_words
    from trainkit.tools.base.draft import ImportContext

    argv, cwd, output = list(context.args), working_folder(), None if output == "-" else output
    refuse(argv, output, kind, force=force)
    target = posixpath.normpath(posixpath.join(cwd, output or "recipe.yaml"))
    first = modeline() if output is not None else ""
    here = ImportContext(Disk(), cwd, os.environ, frozenset(public or ()), tuple(filter(None, sys.path)))
    lines = ShellOptions(dict(_assignment(each) for each in set_ or ()), line)
    read = import_words(argv, here, target, program=context.obj, kind=kind, modeline=first, lines=lines)
    show_diagnostics([*check_import(read, here, target), *_slips(argv)])
    if output is None:
        sys.stdout.write(read.text)
    else:
        write_file(Path(output), read.text, "give another --output")
        write_text(f"{output} is written. Next: trainkit plan {shlex.quote(output)}\n")


def _slips(argv: Sequence[str]) -> list[Diagnostic]:
    """Notes on words behind the command that are meant for this one."""
    from trainkit.cli.own_programs import notes_on_words

    return list(notes_on_words(argv, OWN_OPTIONS))


def _assignment(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--set {word!r} sets nothing", hint="write --set NAME=VALUE")
    return name, value


def refuse(argv: Sequence[str], output: str | None, kind: str | None, *, force: bool) -> None:
    """What is wrong with the call itself. Raises UsageError."""
    from trainkit.convert.command import PROGRAM_KINDS
    from trainkit.convert.importing import is_file, is_line

    if not any(word.strip() for word in argv[:1]):
        raise UsageError("nothing to import is named", hint="name a file, or a command: trainkit import torchrun …")
    from_file = is_file(argv[0])
    if (from_file or is_line(argv[0])) and len(argv) > 1:
        hint = (
            f"give the program's arguments after `--`: trainkit import {shlex.quote(argv[0])} -- {shlex.join(argv[1:])}"
        )
        raise UsageError(f"one word too many: {argv[1]!r}", hint=hint)
    own = [each for each in PROGRAM_KINDS if each != "builtin"]
    if kind is not None and kind not in own:
        raise UsageError(f"--kind {kind!r} is unknown", hint=f"choose one of: {', '.join(own)}")
    if output is not None and is_there(output) and not force:
        raise UsageError(f"{output} exists", hint="give another --output, or --force to replace it")
    if output is not None and from_file and os.path.realpath(output) == os.path.realpath(argv[0]):
        raise UsageError(f"{output} is what is imported", hint="give another --output")
