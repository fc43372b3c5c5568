"""`accelerate launch`: its config file, as flags what it would lose from that, and what it gives each rank."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.errors import UsageError
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import OWN_INTERPRETER, Source, SourcedFile, SourcedVariable, Token, variable
from trainkit.launch_plan.rules import incompatible
from trainkit.machine.facts import at_least, has
from trainkit.recipe.schema.fields import nest
from trainkit.recipe.schema.launching import ON_ACCELERATE
from trainkit.recipe.yaml_writer import block, scalar
from trainkit.tools import python, torchrun
from trainkit.tools.accelerate.fields import SETTINGS, chooses_cpu, distributed_type, is_zero, through_torchrun, when
from trainkit.tools.base.fields import UNSET
from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe, argv_origin
from trainkit.tools.base.interface import NODE_RANK, LauncherCommand, master, restarts
from trainkit.tools.base.launcher_flags import (
    LauncherFlag,
    always,
    fixed,
    launcher_argv,
    parse_flags,
    rule,
    without_key,
)
from trainkit.tools.deepspeed.fields import FILE as DEEPSPEED
from trainkit.tools.deepspeed.launcher import by_import

HELP = "is `accelerate launch`, with a config file that the plan writes"
COMMAND = re.compile(r"accelerate(-launch|\.commands\.launch)?")
REQUIRES: Mapping[str, str] = {"torch": "2.6", "accelerate": "1.9"}
INCOMPATIBLE = (
    incompatible(
        "launcher.max_restarts",
        lambda c: c.ranks == 1 and c.recipe.launcher.max_restarts,
        "accelerate starts a single process directly and never restarts it",
        "launcher.kind: torchrun, or launcher.max_restarts: 0",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.device == "xla",
        "accelerate launch does not run the script on a TPU: it imports it and calls its main() once for each "
        "chip, in processes that trainkit does not see",
        "launcher.kind: python; Accelerator() finds XLA by itself",
    ),
)
Entries = Mapping[str, tuple[Any, Source]]  # value and what made it, by dotted key of the file
CONFIG = "accelerate.yaml"


def _together(context: Context) -> bool:
    return context.topology.nodes > 1 and through_torchrun(context)


# What the plan passes as flags, in the order of its command: what accelerate would lose from the file.
_PASSED: tuple[LauncherFlag, ...] = (
    always("config_file", (Variable.RUN_DIR, f"/{CONFIG}"),
           "without it accelerate reads a default file from the home folder"),
    LauncherFlag("deepspeed_config_file", encode=when(is_zero, fixed((Variable.RUN_DIR, f"/{DEEPSPEED}"))),
                 source=rule("as a flag, because the run directory is known only when the run starts")),
    LauncherFlag("machine_rank", encode=when(_together, fixed((Variable.NODE_RANK,))),
                 source=rule("which of the nodes this is")),
    LauncherFlag("main_process_ip", ("nodes.rendezvous",), when(_together, fixed((Variable.MASTER_ADDR,)))),
    LauncherFlag("main_process_port",
                 source=torchrun.by_nodes(Source(rule="accelerate picks a free port when it is used"),
                                          Source(("nodes.rendezvous",))),
                 encode=when(through_torchrun, lambda context: (Variable.PORT,) if _together(context) else 0)),
    LauncherFlag("rdzv_backend", encode=when(through_torchrun, fixed("static")),
                 source=rule("the file's value is never applied; static ranks follow the node's rank")),
    LauncherFlag("max_restarts", ("launcher.max_restarts",),
                 when(through_torchrun, lambda context: context.recipe.launcher.max_restarts)),
    LauncherFlag("log_dir", encode=when(through_torchrun, fixed((Variable.ATTEMPT_DIR, "/torchrun"))),
                 source=rule(torchrun.OWN_FILES)),
    LauncherFlag("quiet", encode=when(lambda context: not through_torchrun(context), fixed(True)),
                 source=rule("the program's own error is shown, not accelerate's traceback about it"),
                 short="-q", switch=True),
    always("no_python", True, OWN_INTERPRETER),
)  # fmt: skip
_OTHERS: tuple[LauncherFlag, ...] = (
    LauncherFlag("module", short="-m", switch=True),
    LauncherFlag("tee", short="-t"),
    *without_key(
        "multi_gpu tpu use_parallelism_config use_megatron_lm tpu_cluster no_tpu_cluster fp8_use_autocast_during_eval "
        "ipex use_xpu use_tp",
        switch=True,
    ),
    *without_key("role rdzv_conf monitor_interval vm env aws_access_key_id aws_secret_access_key mpirun_hostfile "
                 "mpirun_ccl tp_size"),
    *without_key("fsdp_ megatron_lm_ fp8_ parallelism_config_", family=True),
)  # fmt: skip
_NAMED = {each.name for each in _PASSED}
FLAGS: tuple[LauncherFlag, ...] = (
    *_PASSED,
    *(
        LauncherFlag(name, switch=each.switch)
        for each in SETTINGS
        if each.flag and (name := each.name.rpartition(".")[2]) not in _NAMED
    ),
    *_OTHERS,
)

RULE = "accelerate launch sets it for every rank, whatever the program"
# utils/launch.py: prepare_simple_launcher_cmd_env
THREADS_OF_INTEL: Mapping[str, str] = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
# GPUs that cannot reach one another directly, and the first driver that knows it (accelerate, utils/environment.py).
UNLINKED, NEW_ENOUGH = "RTX 40", "550.40.07"


def argv(context: Context) -> tuple[Token, ...]:
    """accelerate's words. A single process is started directly, several go through torchrun inside accelerate."""
    return tuple(launcher_argv(context, "accelerate.commands.launch", FLAGS))


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
    """What accelerate has no flag for. By itself it starts a single process without a rank environment."""
    asked = context.resolved.given("nodes.processes_per_node") or context.recipe.program.kind not in (
        *ON_ACCELERATE,
        "torch",
    )
    variables = [*python.environment(context)] if asked and not through_torchrun(context) else []
    if through_torchrun(context) and has(context.facts, "torchrun --shutdown-timeout"):
        name, seconds = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(torchrun.shutdown_seconds(context))
        rule = "accelerate has no flag for torchrun's --shutdown-timeout"
        variables.append(variable(name, seconds, keys=("launcher.grace_seconds",), rule=rule))
    if chooses_cpu(context):
        rule = "accelerate's own --cpu would start one process only"
        variables.append(variable("ACCELERATE_USE_CPU", "True", rule=rule))
    return tuple(variables)


def added(context: Context) -> tuple[SourcedVariable, ...]:
    """What accelerate sets, and torchrun where it goes through that."""
    return tuple(_of_several(context) if through_torchrun(context) else _of_one(context))


def escape(word: str, context: Context) -> str:
    """As torchrun where accelerate goes through it; a single process gets its words as they are."""
    return torchrun.escape(word, context) if through_torchrun(context) else word


def local_rank(context: Context) -> str:
    return torchrun.local_rank(context) if through_torchrun(context) else "0"


def shell_words(context: Context, folder: str) -> tuple[str, ...]:
    host, port = master(context)
    place = (f"--machine_rank={NODE_RANK}", f"--main_process_ip={host}", f"--main_process_port={port}")
    several = place if context.topology.nodes > 1 else ("--main_process_port=0",)
    config = f"--config_file={shlex.quote(f'{folder}/{CONFIG}')}"
    return ("accelerate", "launch", config, *several, *restarts(context))


def read(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
    """Import `accelerate launch`, with its config file where one is named."""
    from trainkit.tools.accelerate.importer import launched

    # accelerate-launch and `python -m accelerate.commands.launch` have no subcommand.
    words = argv[1:]
    if posixpath.basename(argv[0]) == "accelerate":
        if words[:1] != ["launch"]:
            asks = "`trainkit config` asks what is to be run and writes a recipe"
            hint = asks if words[:1] == ["config"] else "add launch behind accelerate"
            raise UsageError("accelerate starts programs with `accelerate launch`", hint=hint)
        words = words[1:]
    used, program = parse_flags(draft, "accelerate launch", FLAGS, words, abbreviated=False)
    if draft.problems:
        return LauncherCommand("accelerate")
    processes = launched(draft, context, used)
    draft.set("launcher.kind", "accelerate", argv_origin("accelerate launch"))
    names = {use.name for use in used}
    return LauncherCommand("accelerate", program, processes, "module" in names, "no_python" not in names)


def yaml_text(found: Entries) -> str:
    # Sorted and in single quotes, as `accelerate config` writes it (yaml.safe_dump).
    tree = nest({key: found[key][0] for key in sorted(found)})
    return "".join(f"{line}\n" for line in block(tree, lambda value, _: scalar(value, "'")))


def unlinked(context: Context) -> tuple[SourcedVariable, ...]:
    """What Accelerator() demands on GPUs without direct links, and accelerate launch alone would set."""
    reads = context.launcher == "accelerate" or context.recipe.program.kind in ON_ACCELERATE
    cards = context.facts.gpus
    if not reads or context.topology.device != "cuda" or len(cards) < 2 or at_least(context.facts.driver, NEW_ENOUGH):
        return ()
    if not any(UNLINKED in card.name for card in cards):
        return ()
    rule = f"accelerate asks for it where {UNLINKED}xx GPUs have a driver before {NEW_ENOUGH}"
    return tuple(variable(name, "1", rule=rule) for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"))


def _of_one(context: Context) -> Iterator[SourcedVariable]:
    """To a single process that is started directly."""
    yield from _defaults(context, "")
    on_cpu = context.topology.device == "cpu"
    yield variable("ACCELERATE_USE_CPU", str(on_cpu), rule=RULE)
    if on_cpu or not has(context.facts, "accelerate sets KMP_* on a CPU only"):
        rule = "accelerate launch binds threads so; only Intel's OpenMP reads it"
        yield from (variable(name, value, rule=rule) for name, value in THREADS_OF_INTEL.items())


def _of_several(context: Context) -> Iterator[SourcedVariable]:
    """To ranks that it starts with torchrun."""
    yield from torchrun.of_agent(context)
    yield from (variable(f"TORCHELASTIC_{name}", rule=torchrun.ITS_OWN) for name in ("RUN_ID", "USE_AGENT_STORE"))
    kind = distributed_type(context)
    if kind != "DEEPSPEED":
        yield from _defaults(context, "")
        yield from _defaults(context, "FSDP_") if kind == "FSDP" else ()
        return
    there = (each for each in SETTINGS if each.name.startswith("deepspeed_config.") and each.in_file(context))
    names = sorted(each.name.rpartition(".")[2] for each in there if each.encode(context) is not UNSET)
    rule = "the keys of its own file about DeepSpeed"
    yield variable("ACCELERATE_CONFIG_DS_FIELDS", ",".join(names), rule=rule)
    # utils/launch.py: prepare_deepspeed_cmd_env
    yield variable("PYTHONPATH", rule="yours, and the working folder after it", yields=True)
    yield from by_import(context)


def _defaults(context: Context, start: str) -> Iterator[SourcedVariable]:
    """The defaults of its own flags, for what neither file nor flags set. start: of FSDP's variables, or empty."""
    installed = context.facts.packages.get("accelerate") or "0"
    rule = f"{RULE} under FSDP" if start else RULE
    for each in SETTINGS:
        of_fsdp = each.variable.startswith("FSDP_")
        if each.variable and each.default is not UNSET and of_fsdp is bool(start) and each.known_to(installed):
            yield variable(each.variable, each.text(each.default), rule=rule)
