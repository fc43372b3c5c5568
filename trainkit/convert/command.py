"""A command line of a launcher or of Python: its launcher's flags, its program, and the program's own words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import get_args

from trainkit.convert.command_environment import read_variables, take_variables
from trainkit.convert.launcher_commands import LAUNCHERS, Start, command_name
from trainkit.convert.launcher_flags import PYTHON
from trainkit.errors import UsageError
from trainkit.frameworks.base.argv_reader import as_arguments, script_flags, without_secrets
from trainkit.frameworks.base.detection import FLAG, DetectedKind, program_kind
from trainkit.frameworks.base.draft import Draft, FlagUse, ImportContext, argv_origin, read_flag
from trainkit.frameworks.hf_trainer.argument_file import flags_in_file
from trainkit.frameworks.hf_trainer.importer import read_program
from trainkit.recipe.layers.secrets import mask_words
from trainkit.recipe.schema import Program

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")
KINDS = tuple(get_args(Program.model_fields["kind"].annotation))
_DATA_PARALLEL = (
    "Trainer in one process that sees several cards wraps the model in nn.DataParallel and multiplies the batch; "
    "trainkit starts a process for each card instead."
)


def read_command(draft: Draft, context: ImportContext, words: Sequence[str], kind: str | None = None) -> None:
    """Everything that a command says. kind: of the program, where the caller knows it."""
    shown = " ".join(shlex.quote(word) for word in mask_words(words))
    draft.title = f"{draft.title}: {shown}" if draft.title else shown
    variables, rest = take_variables(draft, words, starts)
    read_variables(draft, variables)
    start = _start(draft, context, rest)
    if draft.problems:
        return
    if not start.words:
        raise UsageError("the command names no program", hint="add the script: trainkit import torchrun … train.py")
    draft.replicas = start.launcher != "python" and _several(draft, start)
    _program(draft, context, start, kind)
    _spread(draft, start)


def starts(word: str) -> bool:
    """Whether a word begins a command that can be read."""
    name = command_name(word)
    return bool(_PYTHON.fullmatch(name)) or name in LAUNCHERS or name.endswith(".py")


def _start(draft: Draft, context: ImportContext, words: Sequence[str]) -> Start:
    name = command_name(words[0]) if words else ""
    if _PYTHON.fullmatch(name):
        return _python(draft, context, words[1:])
    if name not in LAUNCHERS:
        if name.endswith(".py"):
            return Start("python", list(words))
        known = "python, torchrun, accelerate launch, deepspeed"
        hint = f"name a .json or .yaml file, or a command that begins with one of: {known}"
        raise UsageError(f"{name or 'an empty word'} is neither a file nor a launcher", hint=hint)
    return _launched(draft, context, name, words[1:])


def _launched(draft: Draft, context: ImportContext, name: str, words: Sequence[str]) -> Start:
    launcher, read = LAUNCHERS[name]
    if name == "accelerate" and words[:1] != ["launch"]:
        raise UsageError("accelerate starts programs with `accelerate launch`", hint="add launch behind accelerate")
    start = Start(launcher)
    words = words[1:] if name == "accelerate" else words
    read(draft, context, start, words)
    return start


def _python(draft: Draft, context: ImportContext, words: Sequence[str]) -> Start:
    """Python's own flags, up to a script or `-m module`, which may be a launcher's."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "-m" and rest:
            name = rest.pop(0)
            if name in LAUNCHERS:
                return _launched(draft, context, name, rest)
            return Start("python", [name, *rest], module=True)
        if word[1:2] in PYTHON.values:
            word = f"{word} {rest.pop(0)}" if len(word) == 2 and rest else word
        elif not set(word[1:]) <= PYTHON.switches:
            draft.fail(f"python {word} starts no script", argv_origin(word), "name the script, or -m module")
            return Start("python")
        draft.remark(f"python {word} is not taken over: ranks start without it.")
    return Start("python", rest)


def _program(draft: Draft, context: ImportContext, start: Start, kind: str | None) -> None:
    read_target(draft, context, start.words, kind, module=start.module)
    if start.local_rank and draft.get("program.kind") != "hf":
        reason = "the command passes it; leave it out where the script reads LOCAL_RANK"
        draft.set("program.local_rank", True, argv_origin("torch.distributed.launch"), reason)
    if not start.python and start.words[0].endswith(".py"):
        draft.remark(f"{start.words[0]} was started without Python (--no_python), and trainkit starts it with Python.")


def read_target(
    draft: Draft, context: ImportContext, given: Sequence[str], kind: str | None, *, module: bool = False
) -> None:
    """The script or module, what its words say, and those that stay its own."""
    target = given[0]
    words = flags_in_file(draft, context, given[1:])
    given = (target, *words)
    origin = argv_origin(target)
    if command_name(target) == "xla_spawn.py":
        why = "it imports another script and starts that once for each chip, in processes of its own"
        hint = "import the script that it names: python SCRIPT …; strategy.kind: fsdp is over every chip"
        draft.fail("xla_spawn.py cannot be run by trainkit", origin, hint, why)
        return
    otherwise = "accelerate" if draft.get("launcher.kind") == "accelerate" else "torch"
    built = DetectedKind(kind) if kind else program_kind(context, given, otherwise, module=module)
    if built.remark:
        draft.remark(built.remark)
    reason = f"a script on {_LIBRARY[built.kind]}, as {built.by} tells" if built.by else ""
    draft.name = re.sub(r"\.py$", "", command_name(target))
    draft.set("program.kind", built.kind, origin, reason)
    draft.set("program.module" if module else "program.script", target, origin)
    reader = _READERS.get(draft.get("program.kind"))
    kept, secrets = without_secrets(reader(draft, context, words) if reader else words)
    for flag in secrets:
        draft.remark(f"{flag} is a secret and not written down: give it to the script in its environment (env_from).")
    if kept:
        draft.set("program.args", as_arguments(kept), origin)


def _own_engine(draft: Draft, context: ImportContext, words: Sequence[str]) -> list[str]:
    """Words of a script that calls deepspeed.initialize: the plan passes the file itself."""
    found = list(script_flags(words))
    said = next((each for each in found if each.name == FLAG), None)
    if said is None:
        return list(words)
    assignments, problems = read_flag(draft, context, FlagUse("deepspeed", next(iter(said.values), ""), said.origin))
    draft.problems += problems
    for each in assignments:
        draft.put(each)
    more = said.values[1:]  # words behind the file are the script's own
    return [word for each in found for word in (more if each is said else each.words)]


_LIBRARY = {"hf": "transformers' Trainer", "accelerate": "Accelerator()", "deepspeed": "DeepSpeed's engine"}
_READERS = {"hf": read_program, "deepspeed": _own_engine}


def _several(draft: Draft, start: Start) -> bool:
    return start.processes is None or start.processes > 1 or (draft.get("nodes.count") or 1) > 1


def _spread(draft: Draft, start: Start) -> None:
    """The strategy, where the program's words name none: a replica on each rank where there are several."""
    kind, cards, on_xla = draft.get("strategy.kind"), draft.get("devices.select"), draft.get("devices.type") == "xla"
    if on_xla and draft.get("launcher.kind") == "accelerate":
        draft.forget("launcher.kind")
    if start.launcher == "accelerate" and start.processes is None and cards is None:
        draft.set("devices.select", "all", argv_origin("accelerate launch"))
    several = _several(draft, start)
    origin = argv_origin(start.launcher)
    if start.launcher == "python" and kind == "fsdp" and not on_xla:
        draft.remark("Trainer refuses --fsdp in a process that python starts alone; trainkit starts one for each card.")
    elif start.launcher == "python" and isinstance(cards, list) and len(cards) > 1:
        if draft.get("program.kind") == "hf" and kind is None:
            draft.remark(_DATA_PARALLEL)
            draft.set("strategy.kind", "ddp", origin)
    elif kind is None and several:
        draft.set("strategy.kind", "ddp", origin)
        if start.processes is None and cards is None:
            draft.set("devices.select", "all", origin)
    if draft.get("devices.type") == "cpu" and isinstance(draft.get("devices.select"), int):
        draft.settings.pop("devices.select")  # deepspeed --num_gpus counts ranks on a CPU too
    if kind == "fsdp" and start.processes == 1 and start.launcher != "python":
        draft.set("nodes.processes_per_node", 1, origin)
