"""`deepspeed`: DeepSpeed's own launcher, on one node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import OWN_INTERPRETER, SourcedVariable, Token, token, variable
from trainkit.launch_plan.rules import incompatible
from trainkit.machine.facts import has
from trainkit.recipe.assignment import Assignment
from trainkit.recipe.paths import absolute
from trainkit.tools.base.fields import UNSET, Settings, Unsupported
from trainkit.tools.base.imported_recipe import (
    ImportContext,
    ImportedFlag,
    ImportedRecipe,
    argv_origin,
    card,
    number_of,
    read_flag,
)
from trainkit.tools.base.interface import (
    ALWAYS_A_GROUP,
    NEVER_RESTARTS,
    LauncherCommand,
    chosen_cards,
    nothing,
    unchanged,
)
from trainkit.tools.base.launcher_flags import (
    END_OF_FLAGS,
    LauncherFlag,
    always,
    launcher_argv,
    parse_flags,
    put_settings,
    rule,
    whole_number,
    without_key,
)
from trainkit.tools.torchrun import read_rendezvous

OF_RANK = "the deepspeed launcher tells each rank its place"
ITS_OWN = "the deepspeed launcher sets it for every rank"
RANKS = ("nodes.processes_per_node", "devices.select", "strategy.kind")
LOCALHOST = ("localhost", "127.0.0.1")
SORTED = "deepspeed sorts the GPUs: rank 0 is on GPU {}"

HELP = "is DeepSpeed's own, for one machine"
COMMAND = re.compile(r"deepspeed(\.launcher\.runner)?")
REQUIRES: Mapping[str, str] = {"torch": "2.6", "deepspeed": "0.16"}
INCOMPATIBLE = (
    *ALWAYS_A_GROUP,
    incompatible(
        "launcher.kind",
        lambda c: c.topology.nodes > 1,
        "the deepspeed launcher requires a hostfile that names every machine, and numbers the ranks by that file",
        "launcher.kind: torchrun, which runs every strategy on several nodes, the zero ones too",
    ),
    incompatible(
        "devices.select",
        lambda c: c.device == "cuda" and [gpu.index for gpu in c.cards] != sorted(gpu.index for gpu in c.cards),
        "the deepspeed launcher sorts the GPUs, so ranks would sit on other GPUs than the recipe says",
        "devices.select in ascending order, or launcher.kind: torchrun",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.kind_of_cards == "mig",
        "the deepspeed launcher takes GPUs by number only, and parts of a GPU have none",
        "launcher.kind: python",
    ),
    incompatible(
        "launcher.kind",
        lambda c: c.kind_of_cards == "amd",
        "the deepspeed launcher renumbers GPUs in CUDA_VISIBLE_DEVICES, while ROCm goes by HIP_VISIBLE_DEVICES",
        "launcher.kind: torchrun, which runs the zero strategies too",
    ),
    NEVER_RESTARTS,
)
files = nothing
escape = unchanged


def _cards(value: Any) -> Settings | Unsupported:
    """Cards of this machine; its name alone means all of them."""
    host, _, cards = str(value).partition(":")
    if "@" in str(value) or host not in LOCALHOST:
        return Unsupported("it names GPUs of other hosts", "write localhost:0,1, or set nodes and devices.select")
    if not cards:
        return {}
    return {"devices.select": _as_deepspeed([card(each) for each in cards.split(",")])}


def _as_deepspeed(cards: list[Any]) -> list[Any]:
    """Cards in DeepSpeed's own order, each once (launcher/runner.py: parse_node_config_list), names as they are."""
    return sorted(set(cards)) if all(isinstance(each, int) for each in cards) else cards


# In the order of the plan's command; defaults as deepspeed/launcher/runner.py has them.
FLAGS: tuple[LauncherFlag, ...] = (
    always(
        "hostfile",
        "/dev/null",
        "without it a file at /job/hostfile would turn this into a run on several nodes",
        default="/job/hostfile",
        short="-H",
    ),
    LauncherFlag(
        "include",
        RANKS,
        lambda context: f"localhost:{','.join(context.devices)}" if context.topology.device == "cuda" else UNSET,
        _cards,
        "",
        source=rule("DeepSpeed ignores CUDA_VISIBLE_DEVICES beside a count and would start on GPU 0", RANKS),
        short="-i",
    ),
    LauncherFlag(
        "num_accelerators",
        RANKS,
        lambda context: context.processes if context.topology.device != "cuda" else UNSET,
        default=-1,
        source=rule("DeepSpeed would count NUMA domains", RANKS),
        aliases=("num_gpus",),
    ),
    always("master_port", (Variable.PORT,), "a free port of this machine; the default is 29500", default=29500),
    always("no_local_rank", True, "DeepSpeed would add --local_rank to the program's arguments", default=False),
    always("no_python", True, OWN_INTERPRETER, default=False),
    LauncherFlag("exclude", short="-e"),
    LauncherFlag(
        "num_nodes",
        ("nodes.count",),
        decode=lambda value: {} if value == "1" else whole_number("nodes.count")(value),
        default=-1,
    ),
    LauncherFlag("quiet", short="-q", switch=True),
    *without_key("module no_ssh no_ssh_check force_multi save_pid bind_cores_to_rank elastic_training", switch=True),
    *without_key(
        "master_addr node_rank launcher launcher_args enable_each_rank_log autotuning bind_core_list ssh_port "
        "venv_script log_level min_elastic_nodes max_elastic_nodes"
    ),
)


def argv(context: Context) -> tuple[Token, ...]:
    # The runner eats the first `--` and hands the second on to the launcher that it starts, which has its own flags.
    return (*launcher_argv(context, "deepspeed.launcher.runner", FLAGS), token("--", rule=END_OF_FLAGS))


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    keys, rule = ("nodes.processes_per_node",), "DeepSpeed's launcher does not set it; torchrun does"
    return (variable("LOCAL_WORLD_SIZE", str(context.processes), keys=keys, rule=rule),)


def added(context: Context) -> tuple[SourcedVariable, ...]:
    """What the launcher on the node sets (deepspeed/launcher/launch.py)."""
    here = context.devices if context.topology.device == "cuda" else tuple(map(str, range(context.processes)))
    known: dict[str, tuple[str | Variable, ...]] = {
        "WORLD_SIZE": (str(context.processes),),
        "LOCAL_SIZE": (str(context.processes),),
        "CROSS_RANK": ("0",),
        "CROSS_SIZE": ("1",),
        "MASTER_ADDR": ("127.0.0.1",),
        "MASTER_PORT": (Variable.PORT,),
        "CUDA_VISIBLE_DEVICES": (",".join(here),),  # on a CPU too, where they are its slots
    }
    rank = tuple(variable(name, rule=OF_RANK) for name in ("RANK", "LOCAL_RANK"))
    return (*rank, *(variable(name, *value, rule=ITS_OWN) for name, value in known.items()), *by_import(context))


def by_import(context: Context) -> tuple[SourcedVariable, ...]:
    """What any process has that imports DeepSpeed."""
    if not has(context.facts, "deepspeed sets PYTORCH_NVML_BASED_CUDA_CHECK"):
        return ()
    rule = "DeepSpeed sets it where it is imported"
    return (variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1", rule=rule, yields=True),)


def local_rank(context: Context) -> str:
    """None: the deepspeed launcher says it only to scripts that it starts through no wrapper."""
    return ""


def shell_words(context: Context, folder: str) -> tuple[str, ...]:
    cards = ",".join(map(str, chosen_cards(context)))
    which = f"--include=localhost:{cards}" if context.cards else f"--num_gpus={context.processes}"
    return ("deepspeed", "--no_local_rank", which)


def read(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
    """Import a command of DeepSpeed's launcher, which takes all GPUs where it is given none."""
    used, program = parse_flags(draft, "deepspeed", FLAGS, argv[1:])
    named = {"num_gpus" if use.name == "num_accelerators" else use.name: use for use in used}
    draft.set("launcher.kind", "deepspeed", argv_origin("deepspeed"))
    command = LauncherCommand("deepspeed", program, None, "module" in named, "no_python" not in named)
    done = {"num_gpus", "num_accelerators", "exclude", "hostfile", "module", "no_python", "no_local_rank"}
    put_settings(draft, FLAGS, [named[name] for name in ("include", "num_nodes") if name in named], done)
    chosen = draft.settings.get("devices.select")
    if "include" in named and chosen and chosen.origin == named["include"].origin:
        command.processes = len(chosen.value)
        _name_order(draft, chosen, str(named["include"].value).partition(":")[2])
    elif chosen and isinstance(chosen.value, list):  # of CUDA_VISIBLE_DEVICES, which counts without other choices
        written = ",".join(map(str, chosen.value))
        draft.settings["devices.select"] = replace(chosen, value=_as_deepspeed(chosen.value))
        _name_order(draft, draft.settings["devices.select"], written)
    if "num_gpus" in named:
        command.processes = _read_count(draft, context, named["num_gpus"])
    hosts = _read_hosts(draft, context, named["hostfile"]) if "hostfile" in named else True
    if draft.get("nodes.count"):
        draft.set("launcher.kind", "torchrun", argv_origin("deepspeed"), "on several nodes, one torchrun on each")
        read_rendezvous(draft, named)
        draft.remark("deepspeed starts the other nodes by ssh; trainkit run is started on each, with --node-rank N.")
        done |= {"master_addr", "master_port"} if draft.get("nodes.rendezvous") else set()
    if "exclude" in named or not hosts:
        draft.remark(
            "Hosts and GPUs that --hostfile and --exclude choose are not known here: set nodes and devices.select."
        )
    command.local_rank = "" if "no_local_rank" in named else "--local_rank"
    put_settings(draft, FLAGS, used, done | {"include", "num_nodes"})
    return command


def _read_hosts(draft: ImportedRecipe, context: ImportContext, use: ImportedFlag) -> bool:
    """The number of nodes and of ranks on each, of a hostfile; False for one that cannot be read.

    Source: launcher/runner.py (_parse_hostfile, main); --num_nodes and --num_gpus take the first of them.
    """
    try:
        lines = context.files.read(absolute(str(use.value), context.cwd)).decode("utf-8", "replace").splitlines()
    except OSError:  # DeepSpeed goes on with this machine alone
        return False
    found = (re.match(r"(\S+)\s+slots=(\d+)", line.strip()) for line in lines)
    slots = {match[1]: int(match[2]) for match in found if match and not match[1].startswith("#")}
    if not slots:
        return False
    if len(set(slots.values())) > 1:
        what = f"{use.value} gives its hosts different numbers of slots, and each node of a recipe has as many ranks"
        draft.fail(what, use.origin, "write one number for all")
        return True
    for key, value in {"nodes.count": len(slots), "nodes.processes_per_node": next(iter(slots.values()))}.items():
        if draft.get(key) is None and not (key == "nodes.count" and value == 1):
            draft.set(key, value, use.origin)
    first = next(iter(slots))
    if len(slots) > 1 and draft.get("nodes.rendezvous") is None:
        draft.set("nodes.rendezvous", f"{first}:29500", use.origin, "the first host of the file, at DeepSpeed's port")
    return True


def _name_order(draft: ImportedRecipe, chosen: Assignment, written: str) -> None:
    """Say so where the GPUs are not as they were written."""
    if ",".join(map(str, chosen.value)) != written.replace(" ", ""):
        draft.reasons["devices.select"] = SORTED.format(chosen.value[0])


def _read_count(draft: ImportedRecipe, context: ImportContext, use: ImportedFlag) -> int | None:
    """The number of GPUs, which are the first ones whatever CUDA_VISIBLE_DEVICES says (runner.py: main)."""
    chosen = draft.settings.get("devices.select")
    assignments, problems = read_flag(draft, context, replace(use, name="num_gpus"))
    if problems or chosen is None or not isinstance(chosen.value, list):
        draft.put_all(assignments, problems)
        return None if problems else number_of(use.value or "1")
    count = number_of(use.value or "1")
    if count is None:
        draft.set("nodes.processes_per_node", use.value, use.origin)
        return None
    first = list(range(count))
    if chosen.value != first:
        draft.remark(
            f"deepspeed --num_gpus {use.value} ignores {chosen.origin.text} and runs on "
            f"{'GPU' if count == 1 else 'GPUs'} {','.join(map(str, first))}, and so does the recipe: for those of "
            f"the variable leave --num_gpus out, which makes it a process for each."
        )
    draft.forget("devices.select")
    draft.set("devices.select", first, use.origin)
    return count
