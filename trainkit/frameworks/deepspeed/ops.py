"""Ops that DeepSpeed would compile at first use in the ranks: they are built before the start.

Ranks killed meanwhile leave a lock that stops the next run.
"""

from __future__ import annotations

from trainkit.plan.context import Context
from trainkit.plan.model import Preparation, text
from trainkit.plan.provenance import module, texts
from trainkit.recipe.layers.merge import value_at


def preparations(context: Context) -> tuple[Preparation, ...]:
    """The command that builds what this run needs, on each node before the ranks start."""
    # A script of kind torch gets nothing of DeepSpeed's from the plan: whether it uses DeepSpeed at all is not known.
    ops = _ops(context) if context.zero and context.recipe.program.kind != "torch" else []
    if not ops:
        return ()
    argv = (*texts(module(context, "trainkit.trainer.perf.build_ops")), text("--ops"), text(",".join(ops)))
    return (Preparation("build DeepSpeed ops", argv, "deepspeed-ops"),)


def _ops(context: Context) -> list[str]:
    """By the names of trainkit.trainer.perf.build_ops."""
    places = {getattr(context.recipe.strategy, name, "none") for name in ("offload_optimizer", "offload_param")}
    swapping = ["async_io"] if "nvme" in places else []
    if context.recipe.program.kind == "builtin":
        return swapping  # it hands DeepSpeed torch's own optimizer, and needs none of its collectives on a CPU
    base, on_cpu = context.resolved.attachments.get("strategy.config"), context.topology.device == "cpu"
    # comm/torch.py builds its collectives in shared memory wherever the device is a CPU.
    ops = ["shm_comm"] if on_cpu else []
    # An optimizer in the file is made by DeepSpeed itself, with kernels of its own.
    if base is not None and value_at(base.tree, "optimizer") is not None:
        ops += ["cpu_adam"] if on_cpu or "cpu" in places else ["fused_adam"]
    return ops + swapping
