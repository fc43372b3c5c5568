"""`accelerate launch`: an explicit config file, and as flags what accelerate would lose from it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.errors import UsageError
from trainkit.frameworks import python, torchrun
from trainkit.frameworks.accelerate import deepspeed, rank_environment
from trainkit.frameworks.accelerate.fields import distributed_type, settings
from trainkit.frameworks.accelerate.setting import Written
from trainkit.frameworks.base.draft import argv_origin
from trainkit.frameworks.base.launcher import LauncherCommand
from trainkit.frameworks.base.launcher_flags import LauncherFlag, families, parse_flags, switches, values
from trainkit.machine.versions import has
from trainkit.plan.combination import Refusal
from trainkit.plan.context import Context
from trainkit.plan.interpreter import OWN_INTERPRETER, module
from trainkit.plan.model import Variable
from trainkit.plan.provenance import AddedVariable, Source, SourcedFile, SourcedVariable, Token, token, variable
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
FLAGS: tuple[LauncherFlag, ...] = (
    LauncherFlag("quiet", short="-q", switch=True),
    LauncherFlag("module", short="-m", switch=True),
    LauncherFlag("tee", short="-t"),
    *switches(
        "cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic "
        "dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network "
        "no_python tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16 fp8_use_autocast_during_eval debug "
        "use_mps_device ipex use_xpu use_tp"
    ),
    *values(
        "config_file mixed_precision num_processes num_machines num_cpu_threads_per_process dynamo_backend dynamo_mode "
        "gpu_ids machine_rank main_process_ip main_process_port log_dir role rdzv_backend rdzv_conf max_restarts "
        "monitor_interval vm env main_training_function deepspeed_config_file zero_stage offload_optimizer_device "
        "offload_param_device offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps "
        "gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter deepspeed_multinode_launcher deepspeed_moe_layer_cls_names aws_access_key_id "
        "aws_secret_access_key mpirun_hostfile mpirun_ccl tp_size"
    ),
    *families("fsdp_ megatron_lm_ fp8_ parallelism_config_"),
)
CONFIG = "accelerate.yaml"
DEFAULT = Source(rule="accelerate's default")

Entry = tuple[str, Written, Source]  # key of the file, dotted; its value; what made it


def argv(context: Context) -> tuple[Token, ...]:
    """accelerate's words. A single process is started directly, several go through torchrun inside accelerate."""
    return (
        *module(context, "accelerate.commands.launch", keys=("launcher.kind",)),
        token(
            "--config_file=",
            Variable.RUN_DIR,
            f"/{CONFIG}",
            rule="without it accelerate reads a default file from the home folder",
        ),
        *_deepspeed_file(context),
        *(_several(context) if _through_torchrun(context) else _one()),
        token("--no_python", rule=OWN_INTERPRETER),
        token("--", rule=torchrun.END_OF_FLAGS),
    )


def files(context: Context) -> tuple[SourcedFile, ...]:
    """The config file: the topology, and for a program on Accelerator() its settings."""
    entries = _entries(context)
    return (SourcedFile(CONFIG, _yaml(entries), {key: source for key, _, source in entries}),)


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """What accelerate has no flag for."""
    variables: list[SourcedVariable] = []
    if not _through_torchrun(context):
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
    if _chooses_cpu(context):
        variables.append(
            variable("ACCELERATE_USE_CPU", "True", rule="accelerate's own --cpu would start one process only")
        )
    return tuple(variables)


def added(context: Context) -> tuple[AddedVariable, ...]:
    """What accelerate sets, and torchrun where it goes through that."""
    return tuple(rank_environment.several(context) if _through_torchrun(context) else rank_environment.alone(context))


def escape(word: str, context: Context) -> str:
    """As torchrun where accelerate goes through it; a single process gets its words as they are."""
    return torchrun.escape(word, context) if _through_torchrun(context) else word


def _through_torchrun(context: Context) -> bool:
    """Whether accelerate starts the ranks with torchrun: several, and one that it has to shard for."""
    return context.topology.world_size > 1 or (_on_accelerator(context) and distributed_type(context) != "NO")


def _on_accelerator(context: Context) -> bool:
    """Whether the program takes its settings from accelerate."""
    return context.recipe.program.kind == "accelerate"


def _deepspeed_file(context: Context) -> tuple[Token, ...]:
    if not (_on_accelerator(context) and context.zero):
        return ()
    rule = "as a flag, because the run directory is known only when the run starts"
    return (token("--deepspeed_config_file=", Variable.RUN_DIR, f"/{deepspeed.CONFIG}", rule=rule),)


def local_rank(context: Context) -> str:
    """As torchrun where accelerate goes through it."""
    return torchrun.local_rank(context) if _through_torchrun(context) else "0"


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


def _one() -> tuple[Token, ...]:
    return (token("--quiet", rule="the program's own error is shown, not accelerate's traceback about it"),)


def _several(context: Context) -> tuple[Token, ...]:
    return (
        *_rendezvous(context),
        token("--rdzv_backend=static", rule="the file's value is never applied; static ranks follow the node's rank"),
        token(f"--max_restarts={context.recipe.launcher.max_restarts}", keys=("launcher.max_restarts",)),
        token(
            "--log_dir=",
            Variable.ATTEMPT_DIR,
            "/torchrun",
            rule="torchrun's own files stay in the run directory, not in /tmp",
        ),
    )


def _rendezvous(context: Context) -> tuple[Token, ...]:
    if context.topology.nodes == 1:
        return (token("--main_process_port=0", rule="accelerate picks a free port when it is used"),)
    return (
        token("--machine_rank=", Variable.NODE_RANK, rule="which of the nodes this is"),
        token("--main_process_ip=", Variable.MASTER_ADDR, keys=("nodes.rendezvous",)),
        token("--main_process_port=", Variable.PORT, keys=("nodes.rendezvous",)),
    )


def _chooses_cpu(context: Context) -> bool:
    """Whether accelerate says that there is no card. Trainer is told by its own flag, and would leave DeepSpeed out."""
    kind = context.recipe.program.kind
    return context.topology.device == "cpu" and kind != "hf" and not (kind == "accelerate" and context.zero)


def _entries(context: Context) -> tuple[Entry, ...]:
    """The file in the order of its keys."""
    found: dict[str, tuple[Written, Source]] = {
        "compute_environment": ("LOCAL_MACHINE", Source(rule="not SageMaker")),
        "debug": (False, DEFAULT),
        "enable_cpu_affinity": (False, Source(rule="threads are set by OMP_NUM_THREADS")),
        "gpu_ids": ("all", Source(rule="the cards are chosen by CUDA_VISIBLE_DEVICES")),
        "machine_rank": (0, Source(rule="given as a flag on several nodes")),
        "main_training_function": ("main", DEFAULT),
        "num_machines": (context.topology.nodes, Source(("nodes.count",))),
        "num_processes": (
            context.topology.world_size,
            Source(("nodes.count", "nodes.processes_per_node", "devices.select", "strategy.kind")),
        ),
        "rdzv_backend": ("static", Source(rule="also given as a flag, because accelerate ignores it here")),
        "same_network": (False, DEFAULT),
        "use_cpu": (_chooses_cpu(context), Source(("devices.type",))),
    }
    found |= _of_accelerator(context) if _on_accelerator(context) else _of_others(context)
    return tuple((key, *found[key]) for key in sorted(found))


def _of_others(context: Context) -> dict[str, tuple[Written, Source]]:
    """accelerate only starts processes: the program does its own sharding and precision."""
    kind = "MULTI_GPU" if context.topology.world_size > 1 else "NO"
    rule = "accelerate only starts processes; the program shards the model itself"
    return {
        "distributed_type": (kind, Source(rule=rule)),
        "mixed_precision": ("no", Source(rule="the program sets its own precision")),
    }


def _of_accelerator(context: Context) -> dict[str, tuple[Written, Source]]:
    """The settings of the program's Accelerator()."""
    found: dict[str, tuple[Written, Source]] = {
        each.key: (each.written, Source(each.keys, each.rule)) for each in settings(context) if each.key
    }
    found["distributed_type"] = (distributed_type(context), Source(("strategy.kind",)))
    if context.zero and context.topology.nodes > 1:
        rule = "accelerate would start the ranks with pdsh; this is torchrun on each node"
        found["deepspeed_config.deepspeed_multinode_launcher"] = ("standard", Source(rule=rule))
    return found


def _yaml(entries: tuple[Entry, ...]) -> str:
    tree: dict[str, Any] = {}
    for key, value, _ in entries:
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return "".join(f"{line}\n" for line in block(tree, lambda value, _: scalar(value, "'")))
