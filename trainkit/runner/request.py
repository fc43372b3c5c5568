"""What is to be run, as the command line gives it to the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trainkit.launch_plan.model import Planned
from trainkit.runner.nodes.assembly import START_SECONDS
from trainkit.runner.report.shortage import Shortage
from trainkit.schedulers.base import Place


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run. recipe_yaml and command_shell are written into the run directory as they are.

    node_rank: this machine's number among several, or its place; None reads the scheduler's variables.
    run_dir: the directory of a submitted run, which already holds its plan; empty creates a new one.
    attempt: number of the start within the run. job: the scheduler's id. start_seconds: limit for the nodes to meet.
    again: plans again when another run has locked a GPU in the meantime, or the run has waited for GPUs: then with the
    number of its ticket. answer: what to change where memory ran out.
    """

    planned: Planned
    recipe_yaml: str
    command_shell: str
    environ: Mapping[str, str]
    node_rank: int | Place | None = None
    again: Callable[[int | None], RunRequest] | None = None
    answer: Callable[[Shortage], Iterable[str]] | None = None
    run_dir: str = ""
    attempt: int = 1
    job: str = ""
    start_seconds: float = START_SECONDS
