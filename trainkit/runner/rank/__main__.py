"""``python -m trainkit.runner.rank --attempt DIR … -- program args…``: one rank; the environment says which."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from trainkit.runner.rank.wrapper import Options, Wrapper

USAGE = (
    "usage: python -m trainkit.runner.rank --attempt DIR [--grace SECONDS] "
    "[--main each-node|one] [--expect FILE] [--node N] [--replica-env NAME=VALUE]… [--cores LIST:LIST…] "
    "[--heartbeat yes|no] [--prove yes|no] "
    "-- program args…"
)


def parse(argv: Sequence[str]) -> Options:
    """Read the command line. Raises ValueError when it is wrong."""
    # By hand: argparse costs more than all the rest here.
    values = {"--attempt": "", "--grace": "30", "--main": "each-node", "--expect": "", "--node": "0", "--cores": ""}
    values |= {"--heartbeat": "no", "--prove": "no"}
    rest, variables = list(argv), list[str]()
    while rest and rest[0] in (*values, "--replica-env") and len(rest) > 1:
        if rest[0] in values:
            values[rest[0]] = rest[1]
        else:
            variables.append(rest[1])
        del rest[:2]
    if rest[:1] != ["--"] or len(rest) < 2 or not values["--attempt"]:
        raise ValueError(USAGE)
    pairs = tuple((name, value) for name, _, value in (each.partition("=") for each in variables))
    attempt, grace, main_ranks, expected, node, cores, heartbeat, prove = values.values()
    each_node, program = main_ranks == "each-node", tuple(rest[1:])
    told = (heartbeat == "yes", prove == "yes")
    return Options(attempt, float(grace), program, each_node, pairs, expected, int(node), cores, *told)


def main() -> NoReturn:
    """Entry point."""
    try:
        options = parse(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    code = Wrapper(options, dict(os.environ)).run()
    os._exit(code)  # there is nothing to clean up, and a finaliser that hangs would block the launcher


if __name__ == "__main__":
    main()
