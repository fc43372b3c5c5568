"""`torchrun`: torch.distributed.run. One node meets itself; several meet statically, or by c10d where ranks restart."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import Template
from typing import Any, TypeVar

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Variable
from trainkit.launch_plan.provenance import OWN_INTERPRETER, Source, SourcedVariable, Token, variable
from trainkit.machine.facts import has
from trainkit.recipe.interpolation import REFERENCE
from trainkit.recipe.schema.launching import NO_RANGE
from trainkit.tools.base.fields import UNSET, Settings, Unsupported
from trainkit.tools.base.imported_recipe import (
    ImportContext,
    ImportedFlag,
    ImportedRecipe,
    apply_flag,
    argv_origin,
    number_of,
)
from trainkit.tools.base.interface import ALWAYS_A_GROUP, NODE_RANK, LauncherCommand, master, nothing, restarts
from trainkit.tools.base.launcher_flags import (
    LauncherFlag,
    always,
    launcher_argv,
    parse_flags,
    put_settings,
    rule,
    whole_number,
    without_key,
)

# The wrapper kills its program after the grace time, then writes the exit record; torchrun kills the wrapper later.
RECORD_SECONDS = 5
OF_RANK = "torchrun tells each rank its place"
ITS_OWN = "torchrun sets it for every rank"
# The default of --signals-to-handle (torch/distributed/run.py).
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
C10D_RESTARTS = "restarts need it; the static backend has none"
OWN_FILES = "torchrun's own files stay in the run directory, not in /tmp"

T = TypeVar("T")
HELP = "is PyTorch's own"
COMMAND = re.compile(r"torchrun|torch\.distributed\.(run|launch)")
REQUIRES: Mapping[str, str] = {"torch": "2.6"}
INCOMPATIBLE = ALWAYS_A_GROUP
files = environment = nothing  # torchrun sets the rank environment itself
_LOCAL_RANK = re.compile(r"(--local[-_]rank)=\$\{local_rank\}")  # which torchrun fills in


def _node_count(value: Any) -> Settings | Unsupported:
    """A number, or the same number as least and most."""
    least, _, most = str(value).partition(":")
    if not least.isdecimal() or most not in ("", least):
        return Unsupported(*NO_RANGE)
    return {"nodes.count": int(least)} if int(least) > 1 else {}


def by_nodes(one: T, several: T) -> Callable[[Context], T]:
    """A value, or its source, on one node and on several."""
    return lambda context: one if context.topology.nodes == 1 else several


def meets_statically(context: Context) -> bool:
    """Whether node 0 is where the ranks meet, and nodes have the numbers that they are given."""
    return context.topology.nodes > 1 and context.recipe.launcher.max_restarts == 0


def _endpoint(context: Context) -> tuple[str | Variable, ...]:
    if context.topology.nodes == 1:
        return ("127.0.0.1:0",)
    before, after = ("[", "]:") if context.recipe.nodes.rendezvous.startswith("[") else ("", ":")  # an IPv6 address
    return (before, Variable.MASTER_ADDR, after, Variable.PORT)


def shutdown_seconds(context: Context) -> int:
    """How long the agent waits between TERM and KILL, in seconds."""
    return math.ceil(context.recipe.launcher.grace_seconds) + RECORD_SECONDS


# In the order of the plan's command; defaults as torch/distributed/run.py has them.
FLAGS: tuple[LauncherFlag, ...] = (
    LauncherFlag("nnodes", ("nodes.count",), lambda context: context.topology.nodes, _node_count, "1:1"),
    LauncherFlag(
        "nproc_per_node",
        ("nodes.processes_per_node", "devices.select", "strategy.kind"),
        lambda context: context.processes,
        whole_number("nodes.processes_per_node"),
        "1",
    ),
    LauncherFlag(
        "rdzv_backend",
        encode=lambda context: "static" if meets_statically(context) else "c10d",
        default="static",
        source=lambda context: Source(
            rule="global ranks follow the node ranks; c10d would sort nodes by the text of their addresses"
            if meets_statically(context)
            else by_nodes("one node meets itself; the default backend would use port 29500", C10D_RESTARTS)(context)
        ),
    ),
    LauncherFlag(
        "node_rank",
        encode=lambda context: (Variable.NODE_RANK,) if meets_statically(context) else UNSET,
        default=0,
        source=rule("the number of this node"),
    ),
    LauncherFlag(
        "rdzv_endpoint",
        encode=_endpoint,
        default="",
        source=by_nodes(
            Source(rule="port 0 is chosen by the kernel when it is used, so no other process can take it before"),
            Source(("nodes.rendezvous",)),
        ),
    ),
    LauncherFlag(
        "rdzv_conf",
        encode=lambda context: (
            UNSET if meets_statically(context) else by_nodes(("is_host=true",), ("is_host=", Variable.IS_HOST))(context)
        ),
        default="",
        source=by_nodes(
            Source(rule="this node hosts the store, whatever its name resolves to"),
            Source(rule="torchrun would guess the host by comparing host names, and hang on a miss"),
        ),
    ),
    LauncherFlag(
        "local_addr",
        encode=lambda context: (
            UNSET if meets_statically(context) else by_nodes(("127.0.0.1",), (Variable.LOCAL_ADDR,))(context)
        ),
        source=by_nodes(
            Source(rule="a host name that does not resolve would hang the start"),
            Source(rule="the others reach this node under this address"),
        ),
    ),
    always("rdzv_id", (Variable.RUN_ID,), "the run's id, so that runs never meet one another", default="none"),
    LauncherFlag(
        "max_restarts",
        ("launcher.max_restarts",),
        lambda context: context.recipe.launcher.max_restarts,
        whole_number("launcher.max_restarts"),
        0,
    ),
    always("log_dir", (Variable.ATTEMPT_DIR, "/torchrun"), OWN_FILES),
    LauncherFlag(
        "shutdown_timeout",
        encode=lambda context: (
            shutdown_seconds(context) if has(context.facts, "torchrun --shutdown-timeout") else UNSET
        ),
        source=rule(f"{RECORD_SECONDS} s more than the grace time, for the exit records", ("launcher.grace_seconds",)),
    ),
    always("no_python", True, OWN_INTERPRETER, default=False),
    LauncherFlag("module", short="-m", switch=True),
    LauncherFlag("redirects", short="-r"),
    LauncherFlag("tee", short="-t"),
    *without_key("standalone run_path virtual_local_rank use_env", switch=True),
    *without_key(
        "monitor_interval start_method event_log_handler role local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters master_addr master_port logs_specs numa_binding signals_to_handle "
        "log_line_prefix_template print_completion"
    ),
)


def argv(context: Context) -> tuple[Token, ...]:
    """torchrun's words. Ranks write their own logs, so nothing is redirected."""
    return tuple(launcher_argv(context, "torch.distributed.run", FLAGS, "-"))


def added(context: Context) -> tuple[SourcedVariable, ...]:
    """What the agent sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    return (
        *of_agent(context),
        variable("TORCHELASTIC_RUN_ID", Variable.RUN_ID, rule=ITS_OWN),
        variable("TORCHELASTIC_USE_AGENT_STORE", "True", rule=ITS_OWN),
    )


def of_agent(context: Context) -> tuple[SourcedVariable, ...]:
    """The same without what follows from the kind of rendezvous."""
    world, nodes = str(context.topology.world_size), str(context.topology.nodes)
    known = {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(context.processes),
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": str(context.recipe.launcher.max_restarts),
    }
    if has(context.facts, "torchrun --signals-to-handle"):
        known["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
    places = ["RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"]
    if nodes == "1":
        known["GROUP_RANK"] = "0"
    else:
        places.append("GROUP_RANK")
    meeting = "where the ranks meet, chosen by torchrun"
    errors = "1, unless your environment has another: errors of NCCL end the process"
    return (
        *(variable(name, rule=OF_RANK) for name in places),
        *(variable(name, value, rule=ITS_OWN) for name, value in known.items()),
        *(variable(name, rule=meeting) for name in ("MASTER_ADDR", "MASTER_PORT")),
        variable("TORCHELASTIC_ERROR_FILE", rule="where a program on torch's @record leaves its error"),
        variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", rule=errors, yields=True),
    )


def escape(word: str, context: Context) -> str:
    """torchrun passes each word through string.Template (its `${local_rank}` macro); `$$` stands for a dollar sign."""
    changed = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if changed else word


def local_rank(context: Context) -> str:
    """torchrun's macro (torch/distributed/elastic/agent/server/api.py)."""
    return "${local_rank}"


def shell_words(context: Context, folder: str) -> tuple[str, ...]:
    """A run of one node by itself, or with node 0 as the place to meet."""
    nodes, (host, port) = context.topology.nodes, master(context)
    place = (f"--nnodes={nodes}", f"--node_rank={NODE_RANK}", f"--master_addr={host}", f"--master_port={port}")
    several = place if nodes > 1 else ("--standalone",)
    return ("torchrun", f"--nproc_per_node={context.processes}", *several, *restarts(context))


def read(draft: ImportedRecipe, context: ImportContext, argv: Sequence[str]) -> LauncherCommand:
    """Import `torchrun`, `torch.distributed.run` and the older `torch.distributed.launch`."""
    used, program = parse_flags(draft, "torchrun", FLAGS, argv[1:])
    draft.set("launcher.kind", "torchrun", argv_origin("torchrun"))
    named = {use.name: use for use in used}
    done = {"nproc_per_node", "module", "no_python", "standalone", "use_env"}
    put_settings(draft, FLAGS, [named["nnodes"]] if "nnodes" in named else [], done)
    if draft.get("nodes.count"):
        read_rendezvous(draft, named)
        done |= {"rdzv_endpoint", "master_addr", "master_port"}
    processes: Any = 1
    if "nproc_per_node" in named:
        # One for each GPU, None here, where a word names the kind of device: the words are trainkit's own too.
        use = _counted(draft, named["nproc_per_node"])
        apply_flag(draft, context, use.name, use.value, use.origin)
        processes = draft.get("nodes.processes_per_node")
        if processes in (1, "auto"):
            draft.settings.pop("nodes.processes_per_node", None)
        processes = number_of(processes)
    put_settings(draft, FLAGS, used, done | {"nnodes"})
    # `$$` is how a dollar sign is written for torchrun: see `escape`.
    # torch.distributed.launch adds --local-rank unless it is given --use_env; torchrun fills in a macro.
    adds = posixpath.basename(argv[0]) == "torch.distributed.launch" and "use_env" not in named
    program = [word.replace("$$", "$") for word in program]
    asked = [found[1] for found in map(_LOCAL_RANK.fullmatch, program) if found]
    kept = [word for word in program if not _LOCAL_RANK.fullmatch(word)]
    command = LauncherCommand("torchrun", kept, processes, "module" in named, "no_python" not in named)
    command.local_rank = asked[-1] if asked else "--local-rank" if adds else ""
    return command


def _counted(draft: ImportedRecipe, use: ImportedFlag) -> ImportedFlag:
    """The number of processes; a kind of device as the default of a variable becomes trainkit's own word for it."""
    found = REFERENCE.fullmatch(use.value or "")
    if found is None or found[2] not in ("gpu", "cpu"):
        return use
    draft.set("devices.type", {"gpu": "cuda", "cpu": "cpu"}[found[2]], use.origin)
    return replace(use, value=f"${{oc.env:{found[1]},auto}}")


def read_rendezvous(draft: ImportedRecipe, named: Mapping[str, ImportedFlag]) -> None:
    """Where several nodes meet; the ports are torchrun's defaults."""
    # 29400 is the port of c10d (c10d_rendezvous_backend.py), 29500 that of static rendezvous, which has a master.
    endpoint, host = named.get("rdzv_endpoint"), named.get("master_addr")
    if endpoint is not None:
        value = endpoint.value or ""
        draft.set("nodes.rendezvous", value if ":" in value else f"{value}:29400", endpoint.origin)
    elif host is not None:
        port = named["master_port"].value if "master_port" in named else "29500"
        draft.set("nodes.rendezvous", f"{host.value}:{port}", host.origin)
