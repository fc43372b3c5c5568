"""`torchrun`: torch.distributed.run with a c10d rendezvous."""

from __future__ import annotations

import math
from string import Template

from trainkit.machine.versions import has
from trainkit.plan.context import Context
from trainkit.plan.interpreter import OWN_INTERPRETER, module
from trainkit.plan.model import Variable
from trainkit.plan.provenance import AddedVariable, SourcedFile, SourcedVariable, Token, added_variable, token

# The wrapper kills its program after the grace time, then writes the exit record; torchrun kills the wrapper later.
RECORD_SECONDS = 5
OF_RANK = "torchrun tells each rank its place"
ITS_OWN = "torchrun sets it for every rank"
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
END_OF_FLAGS = "ends the launcher's flags, so that no word of the program is read as one"


def argv(context: Context) -> tuple[Token, ...]:
    """torchrun's words. Ranks write their own logs, so nothing is redirected."""
    return (
        *module(context, "torch.distributed.run", keys=("launcher.kind",)),
        token(f"--nnodes={context.topology.nodes}", keys=("nodes.count",)),
        token(
            f"--nproc-per-node={context.processes}",
            keys=("nodes.processes_per_node", "devices.select", "strategy.kind"),
        ),
        *_rendezvous(context),
        token(f"--max-restarts={context.recipe.launcher.max_restarts}", keys=("launcher.max_restarts",)),
        token(
            "--log-dir=",
            Variable.ATTEMPT_DIR,
            "/torchrun",
            rule="torchrun's own files stay in the run directory, not in /tmp",
        ),
        *_shutdown(context),
        token("--no-python", rule=OWN_INTERPRETER),
        token("--", rule=END_OF_FLAGS),
    )


def files(context: Context) -> tuple[SourcedFile, ...]:
    """None."""
    return ()


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """None: torchrun sets the rank environment itself."""
    return ()


def added(context: Context) -> tuple[AddedVariable, ...]:
    """What the agent sets (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    return (
        *of_agent(context),
        added_variable("TORCHELASTIC_RUN_ID", Variable.RUN_ID, rule=ITS_OWN),
        added_variable("TORCHELASTIC_USE_AGENT_STORE", "True", rule=ITS_OWN),
    )


def of_agent(context: Context) -> tuple[AddedVariable, ...]:
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
        *(added_variable(name, rule=OF_RANK) for name in places),
        *(added_variable(name, value, rule=ITS_OWN) for name, value in known.items()),
        *(added_variable(name, rule=meeting) for name in ("MASTER_ADDR", "MASTER_PORT")),
        added_variable("TORCHELASTIC_ERROR_FILE", rule="where a program on torch's @record leaves its error"),
        added_variable("TORCH_NCCL_ASYNC_ERROR_HANDLING", rule=errors, yields=True),
    )


def escape(word: str, context: Context) -> str:
    """torchrun passes each word through string.Template (its `${local_rank}` macro); `$$` stands for a dollar sign."""
    changed = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if changed else word


def local_rank(context: Context) -> str:
    """torchrun's macro (torch/distributed/elastic/agent/server/api.py)."""
    return "${local_rank}"


def shutdown_seconds(context: Context) -> int:
    """How long the agent waits between TERM and KILL, in seconds."""
    return math.ceil(context.recipe.launcher.grace_seconds) + RECORD_SECONDS


def _rendezvous(context: Context) -> tuple[Token, ...]:
    if context.topology.nodes == 1:
        port = "port 0 is chosen by the kernel when it is used, so it cannot be taken by somebody else before"
        return (
            token("--rdzv-backend=c10d", rule="one node meets itself; the default backend would use port 29500"),
            token("--rdzv-endpoint=127.0.0.1:0", rule=port),
            token("--rdzv-conf=is_host=true", rule="this node hosts the store, whatever its name resolves to"),
            token("--local-addr=127.0.0.1", rule="a host name that does not resolve would hang the start"),
            token("--rdzv-id=", Variable.RUN_ID, rule="the run's id, so that runs never meet one another"),
        )
    before, after = ("[", "]:") if context.recipe.nodes.rendezvous.startswith("[") else ("", ":")  # an IPv6 address
    return (
        token("--rdzv-backend=c10d", rule="restarts need it; the default backend has none"),
        token(f"--rdzv-endpoint={before}", Variable.MASTER_ADDR, after, Variable.PORT, keys=("nodes.rendezvous",)),
        token(
            "--rdzv-conf=is_host=",
            Variable.IS_HOST,
            rule="torchrun would guess the host by comparing host names, and hang on a miss",
        ),
        token("--local-addr=", Variable.LOCAL_ADDR, rule="the others reach this node under this address"),
        token("--rdzv-id=", Variable.RUN_ID, rule="the run's id, so that runs never meet one another"),
    )


def _shutdown(context: Context) -> tuple[Token, ...]:
    if not has(context.facts, "torchrun --shutdown-timeout"):
        return ()
    rule = f"{RECORD_SECONDS} s more than the grace time, for the exit records"
    return (token(f"--shutdown-timeout={shutdown_seconds(context)}", keys=("launcher.grace_seconds",), rule=rule),)
