"""`trainkit import`: the recipe that another tool's command or file means."""

from __future__ import annotations

import os
import posixpath
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from trainkit.cli.diagnostics import show_diagnostics, write_text
from trainkit.cli.file_system import FileSystem, modeline, working_folder, write_file
from trainkit.cli.options import Force
from trainkit.errors import Diagnostic, UsageError
from trainkit.files import is_there

Output = Annotated[
    str | None, Option("--output", "-o", metavar="FILE", help="The recipe to write; default, and `-`: standard output.")
]
Kind = Annotated[
    str | None, Option("--kind", metavar="KIND", help="The kind of program (program.kind), if you know it.")
]
Variables = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="Set a variable for the shell text; may be repeated."),
]
Line = Annotated[
    int | None, Option("--line", metavar="NUMBER", help="If a script has several commands, the one on this line.")
]

Public = Annotated[
    list[str] | None,
    Option("--public", metavar="NAME", help="An argument that looks like a secret but is not; may be repeated."),
]

# Words that no launcher and hardly a script has: behind the command they are a slip.
OWN_OPTIONS = {"-o": False, "--output": False}


def import_(
    context: typer.Context,
    *,
    output: Output = None,
    kind: Kind = None,
    set_: Variables = None,
    line: Line = None,
    public: Public = None,
    force: Force = False,
) -> None:
    """Convert another tool's command or file into a recipe.

    COMMAND is a command line as you use it today, as separate arguments or quoted:
    python, torchrun, python -m torch.distributed.launch, accelerate launch or
    deepspeed, perhaps after variable assignments. Options come before it. FILE is
    a settings file of axolotl, LLaMA-Factory, TRL, torchtune, DeepSpeed or
    accelerate, or a shell script (.sh) or notebook with one such command; a variable
    that it does not set is read from your environment each time the recipe is used.
    Flags that the other tool ignores or misreads become comments in the recipe;
    flags without a recipe key are named.

    Example: trainkit import torchrun --nproc_per_node 2 train.py --do_train --bf16 --output_dir out

    Example: trainkit import ds_config.json --output recipe.yaml
    """
    from trainkit.convert.importing import ShellOptions, check_import, import_words
    from trainkit.tools.base.imported_recipe import ImportContext

    argv, cwd, output = list(context.args), working_folder(), None if output == "-" else output
    refuse(argv, output, kind, force=force)
    target = posixpath.normpath(posixpath.join(cwd, output or "recipe.yaml"))
    first = modeline() if output is not None else ""
    here = ImportContext(FileSystem(), cwd, os.environ, frozenset(public or ()), tuple(filter(None, sys.path)))
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
        raise UsageError("there is nothing to import", hint="name a file, or a command: trainkit import torchrun …")
    from_file = is_file(argv[0])
    if (from_file or is_line(argv[0])) and len(argv) > 1:
        hint = (
            f"give the program's arguments after `--`: trainkit import {shlex.quote(argv[0])} -- {shlex.join(argv[1:])}"
        )
        raise UsageError(f"unexpected argument {argv[1]!r}", hint=hint)
    own = [each for each in PROGRAM_KINDS if each != "builtin"]
    if kind is not None and kind not in own:
        raise UsageError(f"--kind {kind!r} is unknown", hint=f"choose one of: {', '.join(own)}")
    if output is not None and is_there(output) and not force:
        raise UsageError(f"{output} exists", hint="give another --output, or --force to replace it")
    if output is not None and from_file and os.path.realpath(output) == os.path.realpath(argv[0]):
        raise UsageError(f"{output} is the file to import", hint="give another --output")
