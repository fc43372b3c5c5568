"""Ops that DeepSpeed would compile at first use in the ranks of a user's program: they are built before the start."""

from __future__ import annotations

from trainkit.plan.context import Context
from trainkit.plan.model import Preparation, text
from trainkit.plan.provenance import module, texts
from trainkit.recipe.layers.merge import value_at


def preparations(context: Context) -> tuple[Preparation, ...]:
    """Ops that DeepSpeed would compile in the ranks: where it exchanges data on a CPU, and its own optimizer there."""
    base = context.resolved.attachments.get("strategy.config")
    ops = ["shm_comm"] if context.topology.device == "cpu" else []
    places = {getattr(context.recipe.strategy, name, "none") for name in ("offload_optimizer", "offload_param")}
    if base is not None and value_at(base.tree, "optimizer") is not None:
        ops += ["cpu_adam"] if context.topology.device == "cpu" or "cpu" in places else ["fused_adam"]
    ops += ["async_io"] if "nvme" in places else []
    if not ops:
        return ()
    argv = (*texts(module(context, "trainkit.trainer.perf.build_ops")), text("--ops"), text(",".join(ops)))
    return (Preparation("build DeepSpeed ops", argv, "deepspeed-ops"),)
