"""A command line of a launcher or of Python: its launcher's flags, its program, and the program's own words."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence
from typing import get_args

from trainkit.convert.command_environment import read_variables, take_variables
from trainkit.errors import UsageError
from trainkit.frameworks.base.argv_reader import as_arguments, without_secrets
from trainkit.frameworks.base.detection import DetectedKind, program_kind
from trainkit.frameworks.base.draft import Draft, ImportContext, argv_origin
from trainkit.frameworks.base.interface import LauncherCommand
from trainkit.frameworks.hf_trainer.argv_reader import flags_in_file
from trainkit.frameworks.registry import LAUNCHERS, PROGRAMS, launcher_of
from trainkit.recipe.layers.secrets import mask_words
from trainkit.recipe.schema import Program

KINDS = tuple(get_args(Program.model_fields["kind"].annotation))
_DATA_PARALLEL = (
    "Trainer in one process that sees several cards wraps the model in nn.DataParallel and multiplies the batch; "
    "trainkit starts a process for each card instead."
)


def read_command(draft: Draft, context: ImportContext, words: Sequence[str], kind: str | None = None) -> None:
    """Import a command. kind: of the program, where the caller knows it."""
    shown = " ".join(shlex.quote(word) for word in mask_words(words))
    draft.title = f"{draft.title}: {shown}" if draft.title else shown
    variables, rest = take_variables(draft, words, starts)
    read_variables(draft, variables)
    name = posixpath.basename(rest[0]) if rest else ""
    launcher = launcher_of(name)
    if launcher is None:
        hint = f"name a .json or .yaml file, or a command that begins with one of: {', '.join(LAUNCHERS)}"
        raise UsageError(f"{name or 'an empty word'} is neither a file nor a launcher", hint=hint)
    command = LAUNCHERS[launcher].read(draft, context, rest)
    if draft.problems:
        return
    if not command.argv:
        raise UsageError("the command names no program", hint="add the script: trainkit import torchrun … train.py")
    draft.replicas = command.launcher != "python" and _several(draft, command)
    read_target(draft, context, command.argv, kind, module=command.module)
    if command.local_rank and draft.get("program.kind") != "hf":
        reason = "the command passes it; leave it out where the script reads LOCAL_RANK"
        draft.set("program.local_rank", True, argv_origin("torch.distributed.launch"), reason)
    if not command.python and command.argv[0].endswith(".py"):
        draft.remark(f"{command.argv[0]} was started without Python (--no_python), and trainkit starts it with Python.")
    _spread(draft, command)


def starts(word: str) -> bool:
    """Whether a word begins a command that can be read."""
    return launcher_of(posixpath.basename(word)) is not None


def read_target(
    draft: Draft, context: ImportContext, argv: Sequence[str], kind: str | None, *, module: bool = False
) -> None:
    """Import a script or module: arguments with a recipe key become settings, and the others stay its own."""
    target = argv[0]
    words = flags_in_file(draft, context, argv[1:])
    origin = argv_origin(target)
    if posixpath.basename(target) == "xla_spawn.py":
        why = "it imports another script and starts that once for each chip, in processes of its own"
        hint = "import the script that it names: python SCRIPT …; strategy.kind: fsdp is over every chip"
        draft.fail("xla_spawn.py cannot be run by trainkit", origin, hint, why)
        return
    otherwise = "accelerate" if draft.get("launcher.kind") == "accelerate" else "torch"
    detected = DetectedKind(kind) if kind else program_kind(context, (target, *words), otherwise, module=module)
    if detected.remark:
        draft.remark(detected.remark)
    reason = f"a script on {PROGRAMS[detected.kind].DETECTION.library}, as {detected.by} tells" if detected.by else ""
    draft.name = re.sub(r"\.py$", "", posixpath.basename(target))
    draft.set("program.kind", detected.kind, origin, reason)
    draft.set("program.module" if module else "program.script", target, origin)
    kept, secrets = without_secrets(PROGRAMS[draft.get("program.kind")].read(draft, context, words))
    for flag in secrets:
        draft.remark(f"{flag} is a secret and not written down: give it to the script in its environment (env_from).")
    if kept:
        draft.set("program.args", as_arguments(kept), origin)


def _several(draft: Draft, command: LauncherCommand) -> bool:
    return command.processes is None or command.processes > 1 or (draft.get("nodes.count") or 1) > 1


def _spread(draft: Draft, command: LauncherCommand) -> None:
    """The strategy, where the program's words name none: a replica on each rank where there are several."""
    kind, cards, on_xla = draft.get("strategy.kind"), draft.get("devices.select"), draft.get("devices.type") == "xla"
    if on_xla and draft.get("launcher.kind") == "accelerate":
        draft.forget("launcher.kind")
    if command.launcher == "accelerate" and command.processes is None and cards is None:
        draft.set("devices.select", "all", argv_origin("accelerate launch"))
    several = _several(draft, command)
    origin = argv_origin(command.launcher)
    if command.launcher == "python" and kind == "fsdp" and not on_xla:
        draft.remark("Trainer refuses --fsdp in a process that python starts alone; trainkit starts one for each card.")
    elif command.launcher == "python" and isinstance(cards, list) and len(cards) > 1:
        if draft.get("program.kind") == "hf" and kind is None:
            draft.remark(_DATA_PARALLEL)
            draft.set("strategy.kind", "ddp", origin)
    elif kind is None and several:
        draft.set("strategy.kind", "ddp", origin)
        if command.processes is None and cards is None:
            draft.set("devices.select", "all", origin)
    if draft.get("devices.type") == "cpu" and isinstance(draft.get("devices.select"), int):
        draft.settings.pop("devices.select")  # deepspeed --num_gpus counts ranks on a CPU too
    if kind == "fsdp" and command.processes == 1 and command.launcher != "python":
        draft.set("nodes.processes_per_node", 1, origin)
