"""What programs of the user's own have in common: a script, a module or an executable, and its exact words."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trainkit.errors import Diagnostic, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text
from trainkit.launch_plan.provenance import SourcedVariable, Token, interpreter, token, variable
from trainkit.lazy import call
from trainkit.recipe.schema.launching import Scalar, program_argv
from trainkit.text import pluralize
from trainkit.tools.base.fields import is_set
from trainkit.tools.registry import LAUNCHERS, PROGRAMS

made_in_script = call("trainkit.tools.hf.support:made_in_script")
PYTHON = (".py", ".pyw", ".pyc", ".pyz")  # what the interpreter is given to run; anything else runs by itself
ITSELF = f"a name that ends in none of {', '.join(PYTHON)} is executed itself, without an interpreter"

IN_FOLDER = "launchers start ranks where they are started; a shell goes to the program's folder first"
BY_SHELL = "the launcher tells a rank its place in LOCAL_RANK alone; a shell makes an argument of it"


def is_executable(context: Context) -> bool:
    """Whether the script is executed itself, without the interpreter: a file that is no Python by its name."""
    script = context.recipe.program.script
    return bool(script and not script.endswith(PYTHON))


def of_trl(context: Context) -> bool:
    """Whether the program is a script of the package trl, as `trl dpo` starts it."""
    return (context.recipe.program.module or "").startswith("trl.")


def own_program_line(context: Context) -> str:
    """The program, for people."""
    program = context.recipe.program
    if is_executable(context):
        return f"your executable {program.script}"
    return f"your script {program.script}" if program.script else f"your module {program.module}"


def reason(context: Context) -> str:
    """The same with the library that it is built on."""
    return f"{own_program_line(context)}, on {PROGRAMS[context.recipe.program.kind].DETECTION.library}"


def argv(context: Context, more: tuple[Token, ...] = (), own: tuple[Token, ...] | None = None) -> tuple[Token, ...]:
    """Interpreter, script or module, and its arguments, written so that the launcher hands them on unchanged.

    own: its arguments, where they are not program.args as they are. more: arguments that the plan adds. What follows a
    bare `--` is no flag, so they come before it.
    """
    program, launcher = context.recipe.program, LAUNCHERS[context.launcher]
    # Launchers change some words on the way (torchrun fills in macros), so each is escaped for the chosen one.
    if own is None:
        own = tuple(token(word, keys=(key,)) for word, key in arguments(program.args))
    end = next((place for place, word in enumerate(own) if str(word.text) == "--"), len(own))
    target = _target(context)
    if program.local_rank:
        flag = "--local_rank" if program.local_rank is True else program.local_rank
        target = _with_local_rank(target, flag, launcher.local_rank(context))
    if program.folder:
        keys, line = ("program.folder",), 'cd "$1" && shift && exec "$@"'
        enter = (token(word, keys=keys, rule=IN_FOLDER) for word in ("/bin/sh", "-c", line, "sh", program.folder))
        target = (*enter, *target)
    for word in (*own[:end], *more, *own[end:]):
        parts = (launcher.escape(part, context) if isinstance(part, str) else part for part in word.text.parts)
        target += (Token(Text(tuple(parts)), word.source),)
    return target


def _with_local_rank(target: tuple[Token, ...], flag: str, mark: str) -> tuple[Token, ...]:
    """The program, with the argument that says the local rank. mark: what the launcher fills in; empty for none."""
    keys = ("program.local_rank",)
    if mark:
        return (*target, token(f"{flag}={mark}", keys=keys))
    names = [f"word{place}" for place in range(1, len(target) + 1)]
    taken = " ".join(f"{name}=${place}" for place, name in enumerate(names, 1))
    words = " ".join(f'"${name}"' for name in names)
    line = f'{taken}; shift {len(names)}; exec {words} {flag}="$LOCAL_RANK" "$@"'
    return (*(token(word, keys=keys, rule=BY_SHELL) for word in ("/bin/sh", "-c", line, "sh")), *target)


def _target(context: Context) -> tuple[Token, ...]:
    """The interpreter with a script or a module, or an executable alone."""
    script, module = context.recipe.program.script, context.recipe.program.module
    if script and is_executable(context):
        return (token(script if "/" in script else f"./{script}", keys=("program.script",), rule=ITSELF),)
    python = interpreter(context)
    if script:  # a name that begins with a dash would be one of the interpreter's own flags
        return (python, token(f"./{script}" if script.startswith("-") else script, keys=("program.script",)))
    return (python, token("-m", keys=("program.module",)), token(module or "", keys=("program.module",)))


def arguments(args: dict[str, Scalar | list[Scalar]] | list[str]) -> tuple[tuple[str, str], ...]:
    """The program's words, each with the recipe key that made it.

    A list is passed word for word; in a mapping `key: value` becomes `--key value`, `true` a bare `--key`,
    `false` and `null` nothing, a list `--key a b`.
    """
    if isinstance(args, list):
        return tuple((word, "program.args") for word in args)
    pairs = ((word, name) for name, value in args.items() for word in program_argv({name: value}))
    return tuple((word, f"program.args.{name}") for word, name in pairs)


# What becomes of the GPUs that one process sees, by what the program is built on.
_SPREADS = {
    "hf": "Trainer wraps the model in nn.DataParallel over all of them and multiplies each batch by {n}, unless the "
    'script lays the model over them (device_map="auto")',
    "accelerate": 'Accelerator() computes on the first, unless the script lays the model over them (device_map="auto")',
    "deepspeed": "its engine computes on the first",
    "torch": 'the program decides what it does with them (nn.DataParallel, device_map="auto", processes of its own)',
}


def several_cards(context: Context) -> Iterator[Diagnostic]:
    """What a program does with more GPUs than ranks."""
    if not context.sees_several:
        return
    n, kind = len(context.devices), context.recipe.program.kind
    if context.processes == 1 and context.recipe.strategy.kind == "single" and context.launcher == "python":
        yield note(f"one process sees {n} GPUs: {_SPREADS[kind].format(n=n)}", "devices.select: 1 shows one")
        return
    what = f"{pluralize(context.processes, 'rank')} of a node {'see' if context.processes > 1 else 'sees'} {n} GPUs"
    yield note(f"{what}: libraries take the i-th for rank i, and the others are the program's own affair")


def made_strategy(context: Context) -> Iterator[Diagnostic]:
    """A strategy that the script's source gives to its TrainingArguments: it counts, whatever the plan says."""
    made = made_in_script(context.resolved.script)
    for name in ("deepspeed", "fsdp") if made else ():
        value = made.fields.get(name) if made else None
        if made and value is not None and ast.unparse(value) not in ("None", "False", "''", "[]"):
            what = f"line {made.line} of {context.recipe.program.script} says {name}={ast.unparse(value)[:80]}"
            hint = "leave it out there and set strategy.kind, so that the plan is about what runs"
            yield warning(f"{what}: Trainer sets that strategy up, whatever the plan says", hint)


# How much libraries say, which they read from the environment: one level on main ranks, another on the rest.
LEVELS = ("logging.level", "logging.replica_level", "logging.each_node")
LIBRARIES = ("TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY")


def wrapper(context: Context, names: tuple[str, ...] = LIBRARIES) -> tuple[Token, ...]:
    """The level of the libraries' log lines on the ranks that are not a main one."""
    keys = ("logging.replica_level", "logging.each_node")
    if not is_set(context, *LEVELS):
        return ()
    logging = context.recipe.logging
    main = "each-node" if logging.each_node else "one"
    settings = (word for name in names for word in ("--replica-env", f"{name}={logging.replica_level}"))
    return tuple(token(word, keys=keys) for word in ("--main", main, *settings))


def verbosity(context: Context, names: tuple[str, ...] = LIBRARIES) -> tuple[SourcedVariable, ...]:
    """The level of the main ranks."""
    level, key = context.recipe.logging.level, "logging.level"
    if not is_set(context, *LEVELS):
        return ()
    return tuple(variable(name, level, keys=(key,), rule="the level of the main ranks") for name in names)
