"""Ops that DeepSpeed would compile at first use in the ranks: they are built before the start.

Ranks killed meanwhile leave a lock that stops the next run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Preparation, text
from trainkit.launch_plan.provenance import module, texts
from trainkit.recipe.merge import value_at
from trainkit.tools.base.fields import setting
from trainkit.tools.deepspeed.fields import OFFLOADS, ZERO

# Type of optimizer in the file, in small letters -> the op on the device, and the one for offloaded state
# (deepspeed/runtime/engine.py: _configure_basic_optimizer).
OF_OPTIMIZER: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("adam", "adamw", "muon"), ("fused_adam", "cpu_adam")),
    "lamb": ("fused_lamb", "fused_lamb"),
    "lion": ("fused_lion", "cpu_lion"),
    "adagrad": ("", "cpu_adagrad"),
}


def preparations(context: Context) -> tuple[Preparation, ...]:
    """The command that builds what this run needs, on each node before the ranks start."""
    # A script of kind torch gets nothing of DeepSpeed's from the plan: whether it uses DeepSpeed at all is not known.
    ops = list(dict.fromkeys(_ops(context))) if context.deepspeed and context.recipe.program.kind != "torch" else []
    if not ops:
        return ()
    device = "cuda" if context.topology.device == "cuda" else "cpu"
    words = ["--ops", ",".join(ops), "--device", device]
    if capabilities := sorted({gpu.compute_capability for gpu in context.cards}):
        words += ["--capabilities", ",".join(f"{major}.{minor}" for major, minor in capabilities)]
    argv = (*texts(module(context, "trainkit.trainer.perf.build_ops")), *map(text, words))
    return (Preparation("build DeepSpeed ops", argv, "deepspeed-ops"),)


def _ops(context: Context) -> Iterator[str]:
    """By the names of trainkit.trainer.perf.build_ops."""
    places = {name: setting_of(context, name) for name in OFFLOADS}
    # The built-in trainer hands DeepSpeed torch's own optimizer, and needs none of its collectives on a CPU.
    if context.recipe.program.kind != "builtin":
        # comm/torch.py builds its collectives in shared memory wherever the device is a CPU.
        yield from ["shm_comm"] if context.topology.device == "cpu" else []
        yield from _of_optimizer(context, offloaded=places["offload_optimizer"] in ("cpu", "nvme"))
    yield from ["async_io"] if "nvme" in places.values() else []


def _of_optimizer(context: Context, *, offloaded: bool) -> Iterator[str]:
    """An optimizer in the file is made by DeepSpeed, with kernels of its own."""
    base = context.resolved.attachments.get("strategy.config")
    tree = base.tree if base else {}
    kind = value_at(tree, "optimizer.type")
    if kind is None:
        # Its CPUAdam takes the place of an AdamW whose state is offloaded (accelerate: map_pytorch_optim_to_deepspeed).
        forced = value_at(tree, "zero_force_ds_cpu_optimizer", True)
        yield from ["cpu_adam"] if offloaded and forced is not False else []
    elif value_at(tree, "optimizer.params.torch_adam") is not True:
        op = OF_OPTIMIZER.get(str(kind).lower(), ("", ""))[offloaded]
        yield from [op] if op else []


def setting_of(context: Context, name: str) -> str:
    """Where the recipe, or else the user's file, keeps a part."""
    base = context.resolved.attachments.get("strategy.config")
    key = f"strategy.{name}"
    if base is None or context.resolved.given(key):
        return str(setting(context, key))
    found = value_at(base.tree, f"{ZERO}.{name}.device")
    old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_params"}[name]
    return "cpu" if value_at(base.tree, f"{ZERO}.{old}") is True else str(found or "none")
