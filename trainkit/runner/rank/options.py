"""The command line of the rank wrapper. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Options(NamedTuple):
    """The wrapper's command line."""

    attempt_dir: str
    grace: float  # seconds between TERM and KILL
    program: tuple[str, ...]
    each_node: bool = True  # whether the first rank of each node counts as a main rank
    replica_env: tuple[tuple[str, str], ...] = ()  # variables of the ranks that are no main one
    expected: str = ""  # file that says what the program should be seen to run
    cores: str = ""  # which each local rank stays on, as cpu_affinity.py reads them


def parse(argv: Sequence[str]) -> Options:
    """Read the command line (ValueError when it is wrong). By hand: argparse costs more than all the rest here."""
    values = {"--attempt": "", "--grace": "30", "--main": "each-node", "--expect": "", "--cores": ""}
    rest, variables = list(argv), list[str]()
    while rest and rest[0] in (*values, "--replica-env") and len(rest) > 1:
        if rest[0] in values:
            values[rest[0]] = rest[1]
        else:
            variables.append(rest[1])
        del rest[:2]
    if rest[:1] != ["--"] or len(rest) < 2 or not values["--attempt"]:
        raise ValueError(
            "usage: python -m trainkit.runner.rank --attempt DIR [--grace SECONDS] "
            "[--main each-node|one] [--expect FILE] [--replica-env NAME=VALUE]… [--cores LIST:LIST…] -- program args…"
        )
    pairs = tuple((name, value) for name, _, value in (each.partition("=") for each in variables))
    attempt, grace, main, expected, cores = (values[name] for name in values)
    return Options(attempt, float(grace), tuple(rest[1:]), main == "each-node", pairs, expected, cores)
