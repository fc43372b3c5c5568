"""The watch over a run that may hang: when it speaks, what it does then, and what the ranks are given for it."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.plan.context import Context
from trainkit.plan.model import HangWatch
from trainkit.plan.provenance import SourcedVariable, Token, token, variable
from trainkit.planner.expected import is_verified
from trainkit.recipe.schema.cluster import Cluster, Kubernetes, Slurm

STAMPS = "each rank's program says how far it is, for the watch over a run that hangs"
RECORDED = "collectives that torch keeps, so that the rank that others wait for can be named"
ENTRIES = 2000  # as torch keeps for NCCL by itself


def hang_watch(context: Context) -> HangWatch:
    """What the plan promises. The plan decides whether a run that hangs is ended; the guardian obeys."""
    asked = context.recipe.hang
    after = None if asked.after_seconds == "auto" else float(asked.after_seconds)
    if asked.then == "auto":
        again = _starts_again(context.recipe.cluster)
        reason = "it is started again" if again else "nothing would start it again"
        return HangWatch(after, asked.start_seconds, ends=again, reason=reason)
    return HangWatch(after, asked.start_seconds, ends=asked.then == "end", reason="hang.then says so")


def _starts_again(cluster: Cluster) -> bool:
    """Whether a run that has ended for a hang goes on by itself from its newest checkpoint."""
    if isinstance(cluster, Kubernetes):
        return cluster.restarts > 0
    return isinstance(cluster, Slurm) and "hang" in cluster.requeue.after


def is_stamped(context: Context) -> bool:
    """Whether the program says how far it is: the built-in trainer does, and the hook in programs of the user's own."""
    return context.recipe.program.kind == "builtin" or is_verified(context)


def wrapper(context: Context) -> tuple[Token, ...]:
    """The argv for the rank wrapper."""
    if not is_stamped(context):
        return ()
    return (token("--stamps", rule=STAMPS), token("yes", rule=STAMPS))


def environment(context: Context) -> Iterator[SourcedVariable]:
    """What has torch keep its latest collectives, where there are several ranks and somebody who can ask for them."""
    if context.topology.world_size > 1 and is_stamped(context) and context.recipe.hang.after_seconds:
        yield variable("TORCH_FR_BUFFER_SIZE", str(ENTRIES), rule=RECORDED)
