"""The limit of open files on node 0, which holds a connection to every other node: ``ulimit -n`` is often 1,024."""

from __future__ import annotations

import resource

from trainkit.errors import MachineError

SPARE = 512  # for what else is open: logs, locks, ranks, and connections of who has come to the port by mistake


def allow(nodes: int) -> int:
    """Raise the soft limit where it is too low for so many nodes; what it was before, 0 where it was not raised.

    Raises MachineError where the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = nodes + SPARE
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return 0
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise MachineError(
            f"node 0 of {nodes} nodes needs {needed} open files, for a connection to each, and may have {hard}",
            hint="raise the hard limit on it: ulimit -Hn, or LimitNOFILE of the service that starts the job",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return soft
