"""One verdict over the nodes of a run: the first cause by node 0's clock, among what is no consequence of another."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.files import open_regular
from trainkit.runner.report.exit_status import Verdict

# What gloo, NCCL and launchers say of a peer that has gone: it has failed, and not the rank that says so.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|refused) by (?:remote )?peer|connection reset|socket closed|broken pipe"
    r"|ncclRemoteError|remote process exited|ncclSystemError|recvValue failed|RendezvousClosedError"
    r"|RendezvousConnectionError|failed to recv|DistNetworkError",
    re.IGNORECASE,
)
END_BYTES = 4096  # of a failed rank's log, in which it says what it died of …
ABORT_BYTES = 4 * END_BYTES  # … and where it was aborted, C++ lists its frames behind that
OWN, LAUNCHERS, CONSEQUENCE = range(3)  # how likely a failure is the cause of the others, the likeliest first


class NodeEnd(NamedTuple):
    """How the run ended on one node. at: when node 0 heard of it first, on its monotonic clock.

    consequence: it was told to end, or its rank has only lost a peer. received: the signal that its trainkit received,
    also when it was told to end before.
    """

    node: int
    host: str
    at: float
    verdict: Verdict
    consequence: bool = False
    received: int | None = None


def verdict_of(said: Mapping[str, object]) -> Verdict:
    """That of another node, as it came over the line. Raises TypeError or ValueError for what is none."""
    found = Verdict(**said)  # type: ignore[arg-type]
    whole, texts = (found.exit_code, found.rank or 0, found.signal or 0), (found.failure or "", found.why)
    if not all(isinstance(each, int) for each in whole) or not all(isinstance(each, str) for each in texts):
        raise ValueError("no verdict")
    return found


def judge_nodes(ends: Sequence[NodeEnd]) -> Verdict:
    """The verdict on the run, from that of each node, node 0's first."""
    failures = [each for each in ends if each.verdict.failure is not None]
    if not failures:
        return Verdict(0)
    first = min(failures, key=lambda end: (_rank_of(end), end.at, end.node))
    others = [each for each in ends if each.node]
    if len(others) > 1 and first.node and all(each.verdict.failure == "node" for each in others):
        mine = next(each for each in ends if not each.node)
        why = f"node 0 ({mine.host}) has lost all other nodes: most likely it is its own network that fails"
        return first.verdict._replace(why=why, node=0, blamed=mine.host)
    everywhere = (
        first.verdict.failure in ("signal", "submitter")
        and sum(each.received == first.verdict.signal for each in ends) > 1
    )
    why = first.verdict.why if everywhere else located(first)
    blamed = first.host if first.verdict.failure == "node" else first.verdict.blamed
    return first.verdict._replace(why=why, blamed=blamed, node=first.node)


def _rank_of(end: NodeEnd) -> int:
    if end.consequence:
        return CONSEQUENCE
    # A launcher whose ranks have not failed has heard of another node's; but not one that was killed.
    return LAUNCHERS if end.verdict.failure == "launcher" and end.verdict.signal is None else OWN


def located(end: NodeEnd) -> str:
    """What happened, and on which node: ``rank 1 (tk2) was ended by SIGKILL``."""
    rank, why = f"rank {end.verdict.rank} ", end.verdict.why
    if end.verdict.rank is not None and why.startswith(rank):
        return f"{rank}({end.host}) {why.removeprefix(rank)}"
    return why if end.verdict.failure in {"node", "hang"} else f"{why} (node {end.node}, {end.host})"


def reports_lost_peer(text: str) -> bool:
    """Whether the last lines of a rank's log say no more than that another one has gone."""
    return _LOST_PEER.search(text) is not None


def has_lost_peer(verdict: Verdict, log: str) -> bool:
    """Whether a rank has ended only because another one has gone. log: path of what it has said of that."""
    if verdict.rank is None or verdict.signal not in (None, signal.SIGABRT):  # NCCL's watchdog aborts the process
        return False
    return reports_lost_peer(_end_of(log, END_BYTES if verdict.signal is None else ABORT_BYTES))


def _end_of(log: str, size: int) -> str:
    """The last bytes of a log; empty where it cannot be read."""
    try:
        with os.fdopen(open_regular(log), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
