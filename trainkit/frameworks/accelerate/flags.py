"""The flags of `accelerate launch`: those that the plan passes, those of the config file's settings, and the others."""

from __future__ import annotations

from typing import Any

from trainkit.frameworks.accelerate.fields import SETTINGS
from trainkit.frameworks.accelerate.setting import is_zero, through_torchrun, when
from trainkit.frameworks.base.fields import UNSET
from trainkit.frameworks.base.launcher_flags import LauncherFlag, families, fixed, rule, switches, values
from trainkit.frameworks.deepspeed.fields import FILE as DEEPSPEED
from trainkit.frameworks.torchrun import OWN_FILES
from trainkit.plan.context import Context
from trainkit.plan.model import Variable
from trainkit.plan.provenance import OWN_INTERPRETER, Source

CONFIG = "accelerate.yaml"


def _together(context: Context) -> bool:
    return context.topology.nodes > 1 and through_torchrun(context)


def _port(context: Context) -> Any:
    if not through_torchrun(context):
        return UNSET
    return (Variable.PORT,) if _together(context) else 0


def _port_source(context: Context) -> Source:
    several = context.topology.nodes > 1
    return Source(("nodes.rendezvous",)) if several else Source(rule="accelerate picks a free port when it is used")


# What the plan passes as flags, in the order of its command: what accelerate would lose from the file.
_PASSED: tuple[LauncherFlag, ...] = (
    LauncherFlag("config_file", encode=fixed((Variable.RUN_DIR, f"/{CONFIG}")),
                 source=rule("without it accelerate reads a default file from the home folder")),
    LauncherFlag("deepspeed_config_file", encode=when(is_zero, fixed((Variable.RUN_DIR, f"/{DEEPSPEED}"))),
                 source=rule("as a flag, because the run directory is known only when the run starts")),
    LauncherFlag("machine_rank", encode=when(_together, fixed((Variable.NODE_RANK,))),
                 source=rule("which of the nodes this is")),
    LauncherFlag("main_process_ip", ("nodes.rendezvous",), when(_together, fixed((Variable.MASTER_ADDR,)))),
    LauncherFlag("main_process_port", encode=_port, source=_port_source),
    LauncherFlag("rdzv_backend", encode=when(through_torchrun, fixed("static")),
                 source=rule("the file's value is never applied; static ranks follow the node's rank")),
    LauncherFlag("max_restarts", ("launcher.max_restarts",),
                 when(through_torchrun, lambda context: context.recipe.launcher.max_restarts)),
    LauncherFlag("log_dir", encode=when(through_torchrun, fixed((Variable.ATTEMPT_DIR, "/torchrun"))),
                 source=rule(OWN_FILES)),
    LauncherFlag("quiet", encode=when(lambda context: not through_torchrun(context), fixed(True)),
                 source=rule("the program's own error is shown, not accelerate's traceback about it"),
                 short="-q", switch=True),
    LauncherFlag("no_python", encode=fixed(True), source=rule(OWN_INTERPRETER), switch=True),
)  # fmt: skip
# Flags that say which of the kinds of distributed_type it is.
KIND_FLAGS = {"multi_gpu": "MULTI_GPU", "use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "tpu": "XLA",
              "use_megatron_lm": "MEGATRON_LM"}  # fmt: skip
_OTHERS: tuple[LauncherFlag, ...] = (
    LauncherFlag("module", short="-m", switch=True),
    LauncherFlag("tee", short="-t"),
    *switches(
        "multi_gpu tpu use_parallelism_config use_megatron_lm tpu_cluster no_tpu_cluster fp8_use_autocast_during_eval "
        "ipex use_xpu use_tp"
    ),
    *values("role rdzv_conf monitor_interval vm env aws_access_key_id aws_secret_access_key mpirun_hostfile mpirun_ccl "
            "tp_size"),
    *families("fsdp_ megatron_lm_ fp8_ parallelism_config_"),
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
