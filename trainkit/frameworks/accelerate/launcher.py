"""`accelerate launch`: an explicit config file, and as flags what accelerate would lose from it."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.errors import UsageError
from trainkit.frameworks import python, torchrun
from trainkit.frameworks.accelerate import rank_environment
from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.accelerate.flags import CONFIG, FLAGS
from trainkit.frameworks.accelerate.setting import chooses_cpu, through_torchrun
from trainkit.frameworks.base.draft import argv_origin
from trainkit.frameworks.base.fields import UNSET
from trainkit.frameworks.base.launcher import NODE_RANK, LauncherCommand, restarts
from trainkit.frameworks.base.launcher_flags import flag_tokens, parse_flags
from trainkit.machine.versions import has
from trainkit.plan.combination import Refusal
from trainkit.plan.context import Context
from trainkit.plan.provenance import AddedVariable, Source, SourcedFile, SourcedVariable, Token, module, token, variable
from trainkit.recipe.yaml.writer import block, scalar

if TYPE_CHECKING:
    from trainkit.frameworks.base.draft import Draft, ImportContext

HELP = "is `accelerate launch`, with a config file that the plan writes"
COMMAND = re.compile(r"accelerate(-launch|\.commands\.launch)?")
REQUIRES: Mapping[str, str] = {"torch": "2.6", "accelerate": "1.9"}
UNSUPPORTED = (
    Refusal(
        {"ranks": ("one",), "restarts": ("yes",)},
        "launcher.max_restarts",
        "accelerate starts a single process directly and never restarts it",
        "launcher.kind: torchrun, or launcher.max_restarts: 0",
    ),
    Refusal(
        {"device": ("xla",)},
        "launcher.kind",
        "accelerate launch does not run the script on a TPU: it imports it and calls its main() once for each chip, in "
        "processes that trainkit does not see",
        "launcher.kind: python; Accelerator() finds XLA by itself",
    ),
)
Entries = Mapping[str, tuple[Any, Source]]  # value and what made it, by dotted key of the file


def argv(context: Context) -> tuple[Token, ...]:
    """accelerate's words. A single process is started directly, several go through torchrun inside accelerate."""
    command = module(context, "accelerate.commands.launch", keys=("launcher.kind",))
    return (*command, *flag_tokens(context, FLAGS), token("--", rule=torchrun.END_OF_FLAGS))


def files(context: Context) -> tuple[SourcedFile, ...]:
    """The config file: the topology, and for a program on Accelerator() its settings."""
    found = entries(context)
    return (SourcedFile(CONFIG, yaml_text(found), {key: source for key, (_, source) in found.items()}),)


def entries(context: Context) -> Entries:
    """The file's keys in their order."""
    found = {
        each.name: (value, each.made_by(context))
        for each in SETTINGS
        if each.in_file(context) and (value := each.encode(context)) is not UNSET
    }
    return {key: found[key] for key in sorted(found)}


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What accelerate has no flag for."""
    variables: list[SourcedVariable] = []
    if not through_torchrun(context):
        variables += python.environment(context)
    elif has(context.facts, "torchrun --shutdown-timeout"):
        variables.append(
            variable(
                "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
                str(torchrun.shutdown_seconds(context)),
                keys=("launcher.grace_seconds",),
                rule="accelerate has no flag for torchrun's --shutdown-timeout",
            )
        )
    if chooses_cpu(context):
        variables.append(
            variable("ACCELERATE_USE_CPU", "True", rule="accelerate's own --cpu would start one process only")
        )
    return tuple(variables)


def added(context: Context) -> tuple[AddedVariable, ...]:
    """What accelerate sets, and torchrun where it goes through that."""
    return tuple(rank_environment.several(context) if through_torchrun(context) else rank_environment.alone(context))


def escape(word: str, context: Context) -> str:
    """As torchrun where accelerate goes through it; a single process gets its words as they are."""
    return torchrun.escape(word, context) if through_torchrun(context) else word


def local_rank(context: Context) -> str:
    """As torchrun where accelerate goes through it."""
    return torchrun.local_rank(context) if through_torchrun(context) else "0"


def shell_words(context: Context, folder: str) -> tuple[str, ...]:
    """The config file, and where several nodes meet."""
    host, _, port = context.recipe.nodes.rendezvous.rpartition(":")
    place = (f"--machine_rank={NODE_RANK}", f"--main_process_ip={host}", f"--main_process_port={port}")
    several = place if context.topology.nodes > 1 else ("--main_process_port=0",)
    config = f"--config_file={shlex.quote(f'{folder}/{CONFIG}')}"
    return ("accelerate", "launch", config, *several, *restarts(context))


def read(draft: Draft, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
    """Import `accelerate launch`, with its config file where one is named."""
    from trainkit.frameworks.accelerate.importer import launched

    words = argv[1:]
    if posixpath.basename(argv[0]) == "accelerate":
        if words[:1] != ["launch"]:
            raise UsageError("accelerate starts programs with `accelerate launch`", hint="add launch behind accelerate")
        words = words[1:]
    used, program = parse_flags(draft, "accelerate launch", FLAGS, words)
    if draft.problems:
        return LauncherCommand("accelerate")
    processes = launched(draft, context, used)
    draft.set("launcher.kind", "accelerate", argv_origin("accelerate launch"))
    names = {use.name for use in used}
    return LauncherCommand("accelerate", program, processes, "module" in names, "no_python" not in names)


def yaml_text(found: Entries) -> str:
    """The file. Mappings are one deep, which is all that accelerate has."""
    tree: dict[str, Any] = {}
    for key in sorted(found):
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = found[key][0]
    return "".join(f"{line}\n" for line in block(tree, lambda value, _: scalar(value, "'")))
