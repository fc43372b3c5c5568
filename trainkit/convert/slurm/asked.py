"""What a batch script asks Slurm for, as far as it has been read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice

from trainkit.errors import Origin
from trainkit.frameworks.base.draft import argv_origin
from trainkit.schedulers.slurm import NAMED
from trainkit.schedulers.slurm_options import Option

# Option -> recipe key below `cluster`, for those whose value is taken as it is.
AS_IT_IS = {option: key for key, option in NAMED.items() if key not in ("time", "memory_per_node")}
ONCE = ("time", "job-name", "signal", "requeue", "no-requeue", "exclusive")
# Those that say how much of a node, or how many nodes; `_Sizes` reads them.
SIZES = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu", "mem", "mem-per-cpu",
    "mem-per-gpu", "gpus", "gpus-per-node", "gpus-per-task", "gres",
})  # fmt: skip
TASKS = "trainkit starts one task on each node"
UNITS = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}  # in KiB


@dataclass
class Sizes:
    """How much a job asks for, on each node but for `nodes`. None: nothing said. memory: in KiB, 0 for all of it."""

    nodes: int | None = None
    tasks: int | None = None
    cpus: int | None = None
    cards: int | None = None
    kind: str = ""
    gres: bool = False
    memory: int | None = None


ARRAY_TURN = "SLURM_ARRAY_TASK_ID"


@dataclass
class Batch:
    """What is asked for. path: of the script; given: options by name, of `#SBATCH` lines before those of srun."""

    path: str
    given: dict[str, Option] = field(default_factory=dict)
    others: list[Option] = field(default_factory=list)
    step: list[Option] = field(default_factory=list)
    problems: list[tuple[Option, str, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    sizes: Sizes = field(default_factory=Sizes)

    def origin(self, option: Option) -> Origin:
        """The line of an option, or its words."""
        if not option.line:
            return argv_origin(option.written)
        length = max(len(option.written), 1)
        return Origin(f"file {self.path}", 1, self.path, option.line, 1, length, option.written)

    def refuse(self, option: Option, what: str, hint: str) -> None:
        """Note an error."""
        self.problems.append((option, what, hint))

    @property
    def turns(self) -> list[str | None]:
        """The numbers of an array's tasks, as sbatch(1) has them: `0-15:4,20%2`. None: it is no array."""
        asked = next((each.value or "" for each in self.others if each.name == "array"), "")
        made = list[str | None]()
        for first, last, step in re.findall(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", asked.partition("%")[0]):
            made += map(str, islice(range(int(first), int(last or first) + 1, int(step or 1) or 1), 101))
        return made[:101] or [None]

    @property
    def variables(self) -> dict[str, str]:
        """What Slurm sets in the job, as far as it is known."""
        sizes, found = self.sizes, {"SLURM_SUBMIT_DIR": "."}
        nodes, tasks = sizes.nodes or 1, sizes.tasks or 1
        found |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
        if "ntasks-per-node" in self.given:
            found["SLURM_NTASKS_PER_NODE"] = str(tasks)
        found |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(nodes * tasks))
        if sizes.cards:
            found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), str(sizes.cards))
        if "cpus-per-task" in self.given:
            found["SLURM_CPUS_PER_TASK"] = str(self.given["cpus-per-task"].value)
        if "job-name" in self.given:
            found["SLURM_JOB_NAME"] = str(self.given["job-name"].value)
        return found
