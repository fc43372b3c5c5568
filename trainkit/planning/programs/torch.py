"""`torch`: the user's script or module, which reads only the rank environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.errors import Diagnostic
from trainkit.planning.context import Context
from trainkit.planning.launchers import LAUNCHERS
from trainkit.planning.plan import Notice, Preparation
from trainkit.planning.sourced import SourcedFile, Token, token

if TYPE_CHECKING:
    from trainkit.recipe.resolved import Resolved

Scalar = str | int | float | bool | None


def check(resolved: Resolved) -> tuple[Diagnostic, ...]:
    """Exactly one of script and module must be given, and nothing that only the built-in trainer can do."""
    program, found = resolved.recipe.program, []
    if bool(program.script) == bool(program.module):
        both = bool(program.script)
        neither = "a program of kind torch needs a script or a module"
        what = "program.script and program.module are both given" if both else neither
        hint = (
            "Keep one of the two." if both else "Set program.script to its path, or program.module to its dotted name."
        )
        found.append(Diagnostic("error", what, key="program", origin=resolved.origin("program.kind"), hint=hint))
    if resolved.recipe.checkpoint.resume != "never":
        key = "checkpoint.resume"
        what = f"{key} cannot reach a program of kind torch"
        hint = f"Pass the checkpoint in program.args, and leave {key} out."
        found.append(Diagnostic("error", what, key=key, origin=resolved.origin(key), hint=hint))
    return tuple(found)


def reason(context: Context) -> str:
    """For people."""
    program = context.recipe.program
    return f"your script {program.script}" if program.script else f"your module {program.module}"


def argv(context: Context) -> tuple[Token, ...]:
    """Interpreter, script or module, and the arguments word for word."""
    program = context.recipe.program
    python = token(context.facts.executable, rule="the interpreter that plans is the interpreter that runs")
    if program.script:
        target: tuple[Token, ...] = (token(_as_file(program.script), keys=("program.script",)),)
    else:
        target = (token("-m", keys=("program.module",)), token(program.module or "", keys=("program.module",)))
    launcher = LAUNCHERS[context.launcher]
    words = tuple(token(launcher.escape(word, context), keys=(key,)) for word, key in arguments(program.args))
    return (python, *target, *words)


def files(context: Context) -> tuple[SourcedFile, ...]:
    """None: the resolved recipe lies in the run directory anyway."""
    return ()


def preparations(context: Context) -> tuple[Preparation, ...]:
    """None."""
    return ()


def notices(context: Context) -> tuple[Notice, ...]:
    """Settings do not reach a script by themselves."""
    what = "Settings of the recipe reach this program only through its arguments and the file named by TRAINKIT_RECIPE."
    return (Notice("note", what),)


def arguments(args: dict[str, Scalar | list[Scalar]] | list[str]) -> tuple[tuple[str, str], ...]:
    """The program's words, each with the recipe key that made it.

    A list is passed word for word; in a mapping `key: value` becomes `--key value`, `true` a bare `--key`,
    `false` and `null` nothing, a list `--key a b`.
    """
    if isinstance(args, list):
        return tuple((word, "program.args") for word in args)
    words: list[tuple[str, str]] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [(word, f"program.args.{name}") for word in (f"--{name}", *(str(item) for item in values))]
    return tuple(words)


def _as_file(script: str) -> str:
    """A path that no interpreter reads as one of its own flags."""
    return f"./{script}" if script.startswith("-") else script
