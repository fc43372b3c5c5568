"""Which cores each rank stays on, where the recipe binds ranks near to their cards (NUMA)."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.machine.cpu_affinity import core_ranges
from trainkit.plan.context import Context
from trainkit.plan.model import Notice
from trainkit.plan.provenance import Token, token

KEY = "launcher.numa_binding"


def core_argv(context: Context) -> tuple[Token, ...]:
    """The argv that gives trainkit.runner.rank its cores; empty where no binding is asked for or none is possible."""
    if context.recipe.launcher.numa_binding == "none" or isinstance(found := _shares(context), str):
        return ()
    rule = "the cores of the NUMA node that each local rank's card is on, less those that this process may not use"
    return (token("--cores", keys=(KEY,), rule=rule), token(":".join(map(core_ranges, found)), keys=(KEY,), rule=rule))


def core_notices(context: Context) -> Iterator[Notice]:
    """Why ranks cannot be bound here."""
    if context.recipe.launcher.numa_binding != "none" and isinstance(found := _shares(context), str):
        yield Notice("blocker", f"ranks cannot be bound to NUMA nodes: {found}", f"set {KEY} to none")


def _shares(context: Context) -> tuple[tuple[int, ...], ...] | str:
    """The cores of each local rank, or why they are not known."""
    facts = context.facts
    if not facts.numa:
        return "the system does not report its NUMA nodes"
    if context.topology.device == "cuda":
        nodes = [gpu.numa_node for gpu in context.cards]
        if not nodes:
            return "there is no card"
        if unknown := next((gpu for gpu in context.cards if gpu.numa_node is None), None):
            return f"the system does not report on which node card {unknown.index} is"
    else:  # without cards ranks are spread over the nodes in order
        nodes = [facts.numa[rank * len(facts.numa) // context.processes].index for rank in range(context.processes)]
    # A container or a scheduler may have left this process fewer cores than the node has.
    usable: dict[int | None, tuple[int, ...]] = {
        node.index: tuple(core for core in node.cpus if not facts.cpu_affinity or core in facts.cpu_affinity)
        for node in facts.numa
    }
    found = tuple(usable.get(node, ()) for node in nodes)
    empty = next((node for node, cores in zip(nodes, found, strict=True) if not cores), None)
    return found if empty is None else f"this process may use no core of node {empty}"
