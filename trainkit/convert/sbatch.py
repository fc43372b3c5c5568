"""A batch script of Slurm: what its `#SBATCH` lines and its srun ask for, as a recipe's `cluster` and `nodes`."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from trainkit.convert.command import first_of_command
from trainkit.convert.shell.rewriting import RANKS, is_open
from trainkit.errors import Origin
from trainkit.planner.env import DECIDED
from trainkit.recipe.yaml_writer import recipe_name
from trainkit.schedulers.slurm import NAMED, SET_HERE, UNLIMITED
from trainkit.schedulers.slurm_options import MAGIC, Option, directives, options
from trainkit.tools.base.imported_recipe import ImportedRecipe, argv_origin, number_of
from trainkit.tools.registry import launcher_of

# Option -> recipe key below `cluster`, for those whose value is taken as it is.
AS_IT_IS = {option: key for key, option in NAMED.items() if key not in ("time", "memory_per_node")}
READ_BY_NAME = ("time", "job-name", "signal", "requeue", "no-requeue", "exclusive")
# Those that say how much of a node, or how many nodes; `JobSizes` reads them.
SIZES = frozenset({
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu", "mem", "mem-per-cpu",
    "mem-per-gpu", "gpus", "gpus-per-node", "gpus-per-task", "gres",
})  # fmt: skip
ARRAY_TURN = "SLURM_ARRAY_TASK_ID"
TASKS = "trainkit starts one task on each node"
UNITS = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}  # in KiB
# What is left out, and why.
_OF_COMMAND = "it is about the sbatch command itself"
LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode"), "the job's output is job.out in the run directory"),
    "wait": "trainkit waits for the nodes by itself",
    **dict.fromkeys(("parsable", "quiet", "verbose", "test-only", "help", "usage", "version"), _OF_COMMAND),
    **dict.fromkeys(("ntasks-per-core", "ntasks-per-socket", "overcommit", "distribution"), TASKS),
    "array": "`trainkit submit --variant all` makes one job of many runs",
    "chdir": "call trainkit in that folder",
    "input": "no rank reads the job's input",
    "kill-on-bad-exit": "trainkit ends the nodes in order",
    **dict.fromkeys(("unbuffered", "jobid"), "trainkit sets it by itself"),
    "label": "`trainkit logs --all` shows each line with its rank and host",
    "overlap": "trainkit has one step",
}
LAUNCHES = ("torch.distributed.", "accelerate.commands.")  # modules that start the ranks themselves
BY_TORCHRUN = (
    "srun starts a process for each rank; trainkit starts torchrun on each node, which sets RANK, LOCAL_RANK and "
    "WORLD_SIZE: a script that reads SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS must read these."
)
_GPUS = re.compile(r"(?:gpu:)?(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<count>\d+)|gpu(?::(?P<alone>[A-Za-z][\w.-]*))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"<[^<>]*>|\{\{.*\}\}|\$\w+|\$\{.*\}|\[[A-Z_ ]+\]")
_SIGNAL = re.compile(r"(?:(?P<to>[BR]*):)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_PLAIN_SHELL = re.compile(r"#!\s*(/usr)?/bin/(env\s+)?(ba)?sh")
_LOGIN = re.compile(r"\s(-[a-z]*l[a-z]*|--login)\b")


class JobSizes:
    """How much a job asks for, on each node but for `nodes`. None: nothing said. memory: in KiB, 0 for all of it.

    given: options by name. of_step: those of srun that say how many tasks there are, which win.
    """

    def __init__(self, given: Mapping[str, Option], of_step: Mapping[str, Option] = MappingProxyType({})) -> None:
        self.given = {**given, **of_step}
        self.problems: list[tuple[Option, str, str]] = []
        self.remarks: list[str] = []
        self.gpus: int | None = None
        self.gpu_kind, self.gres = "", False
        self.memory: int | None = None
        self.nodes, self.tasks = self._nodes_and_tasks()
        self._read_gpus()
        of_gpu, of_task, cpus = map(self._number, ("ntasks-per-gpu", "cpus-per-task", "cpus-per-gpu"))
        if self.tasks is None and of_gpu and self.gpus:
            self.tasks = of_gpu * self.gpus
        self.cpus = of_task * (self.tasks or 1) if of_task else cpus * self.gpus if cpus and self.gpus else None
        self._read_memory()

    def _nodes_and_tasks(self) -> tuple[int | None, int | None]:
        option, total, tasks = self.given.get("nodes"), self._number("ntasks"), self._number("ntasks-per-node")
        if option and (match := re.fullmatch(r"(\d+)-(\d+)", option.value or "")):
            nodes: int | None = int(match[1])
            if match[1] != match[2]:
                what = f"`{option.word}` leaves the number of nodes to Slurm"
                self.remarks.append(f"{what}: the least, {match[1]}, is taken.")
        else:
            nodes = self._number("nodes")
        if total and tasks is None and nodes is None:
            what = f"`{self.given['ntasks'].word}` without --nodes"
            self.remarks.append(f"{what}: Slurm chooses how many nodes; one is taken.")
            return 1, total
        if total and tasks is None:
            return nodes, self._share("ntasks", total, nodes or 1, "tasks")
        return math.ceil(total / tasks) if nodes is None and total and tasks else nodes, tasks

    def _read_gpus(self) -> None:
        for name in ("gpus-per-node", "gres", "gpus-per-task", "gpus"):
            if (option := self.given.get(name)) is None:
                continue
            asked = (option.value or "").split(",")
            pieces = [each for each in asked if name != "gres" or each.startswith("gpu")]
            if len(pieces) < len(asked):
                what = f"`{option.word}`: only GPUs are taken over"
                self.remarks.append(f"{what}; add the rest to the nodes of the site.")
            match = _GPUS.fullmatch(re.sub(r"\(.*\)$", "", pieces[0])) if len(pieces) == 1 else None
            if match:
                count = int(match["count"] or 1)
                if name == "gpus-per-task":
                    count *= self.tasks or 1
                elif name == "gpus":
                    count = self._share(name, count, self.nodes or 1, "GPUs") or count
                self.gpus, self.gpu_kind, self.gres = count, match["kind"] or match["alone"] or "", name == "gres"
                return
            if pieces:
                what = f"`{option.word}` names no number of GPUs of one kind"
                self.problems.append((option, what, "write it as --gres=gpu:4"))

    def _read_memory(self) -> None:
        of = {"mem": (1, ""), "mem-per-gpu": (self.gpus, "GPUs"), "mem-per-cpu": (self.cpus or self.tasks, "CPUs")}
        for name, (count, unit) in of.items():
            if (option := self.given.get(name)) is None:
                continue
            if (match := _MEMORY.fullmatch(option.value or "")) is None:
                self.problems.append((option, f"`{option.word}` is not an amount of memory", "write it as --mem=64G"))
            elif count is None:
                what = f"`{option.word}` is memory of each of the {unit}, and nothing says how many there are"
                self.problems.append((option, what, "write --mem, or how many there are"))
            else:
                self.memory = int(match[1]) * UNITS[match[2].upper() or "M"] * count

    def _number(self, name: str) -> int | None:
        option = self.given.get(name)
        value = (option.value or "").strip() if option else ""
        if option is None or (value.isdecimal() and int(value)):
            return int(value) if option else None
        hint = "write the number itself"
        hint += ": sbatch puts no variables into #SBATCH lines" if option.line else ""
        self.problems.append((option, f"`{option.word}` is not a number", hint))
        return None

    def _share(self, name: str, total: int, nodes: int, of: str) -> int | None:
        """How many of a total each node has."""
        option = self.given[name]
        if of == "tasks" and total < nodes and not option.line:
            what = f"`{option.word}` of srun is on fewer than the job's {nodes} nodes"
            self.remarks.append(f"{what}; one on each is taken.")
            return 1
        if total % nodes == 0:
            return total // nodes
        what = f"`{option.word}` is not the same number of {of} on each of {nodes} nodes"
        self.problems.append((option, what, "change one of them"))
        return None


@dataclass
class SbatchScript:
    """What is asked for. path: of the script; given: options by name, of `#SBATCH` lines before those of srun."""

    path: str
    given: dict[str, Option]
    others: list[Option]
    remarks: list[str]
    sizes: JobSizes
    step: list[Option] = field(default_factory=list)

    def origin(self, option: Option) -> Origin:
        """The line of an option, or its words."""
        if not option.line:
            return argv_origin(option.written)
        length = max(len(option.written), 1)
        return Origin(f"file {self.path}", 1, self.path, option.line, 1, length, option.written)

    @property
    def turns(self) -> list[str]:
        """The numbers of an array's tasks, as sbatch(1) has them: `0-15:4,20%2`."""
        asked = next((each.value or "" for each in self.others if each.name == "array"), "")
        made = list[str]()
        for first, last, step in re.findall(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?", asked.partition("%")[0]):
            made += map(str, islice(range(int(first), int(last or first) + 1, int(step or 1) or 1), 101))
        return made[:101]

    @property
    def variables(self) -> dict[str, str]:
        """What Slurm sets in the job, as far as it is known."""
        sizes = self.sizes
        nodes, tasks = sizes.nodes or 1, sizes.tasks or 1
        found = {"SLURM_SUBMIT_DIR": "."}
        found |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
        found |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(nodes * tasks))
        if "ntasks-per-node" in self.given:
            found["SLURM_NTASKS_PER_NODE"] = str(tasks)
        if sizes.gpus:
            found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), str(sizes.gpus))
        for option, name in (("cpus-per-task", "SLURM_CPUS_PER_TASK"), ("job-name", "SLURM_JOB_NAME")):
            if option in self.given:
                found[name] = str(self.given[option].value)
        return found

    def tasks_option(self) -> str:
        """The option that says how many tasks there are, as a word."""
        names = ("ntasks-per-node", "ntasks")
        return next((self.given[name].word for name in names if name in self.given), "")


def read_batch(text: str, path: str) -> SbatchScript | None:
    """What a script's `#SBATCH` lines ask for; None where it has none."""
    found = directives(text)
    if not found:
        return None
    given, others, remarks = dict[str, Option](), list[Option](), list[str]()
    for option in found:
        if not option.known:
            remarks.append(f"line {option.line}: `{option.written}`: Slurm has no such option, so it is left out.")
        elif option.name in SIZES or option.name in AS_IT_IS or option.name in READ_BY_NAME:
            given[option.name] = option
        else:
            others.append(option)
    last = max(option.line for option in found)
    remarks += [
        f"line {number}: sbatch reads no #SBATCH line below the first command, so `{line.rstrip()}` is left out."
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith(MAGIC) and number > last
    ]
    first = text.partition("\n")[0].rstrip()
    if first.startswith("#!") and not _PLAIN_SHELL.fullmatch(first):
        login = " It is a login shell, which reads /etc/profile and ~/.bash_profile first: source them in cluster.setup"
        more = f"{login} where the job needs them." if _LOGIN.search(first) else ""
        remarks.append(f"`{first}` is left out: trainkit's job.sh is started by /bin/bash without options.{more}")
    return SbatchScript(path, given, others, remarks, JobSizes(given))


def take_srun(batch: SbatchScript, words: Sequence[str]) -> list[str]:
    """A command without its srun, whose options are kept. Variables may be in front.

    Python, started by srun once for each rank, becomes torchrun's.
    """
    found = next((place for place, word in enumerate(words) if posixpath.basename(word) == "srun"), None)
    if found is None:
        if (batch.sizes.tasks or 1) > 1:
            what = f"`{batch.tasks_option()}` is left out: no srun starts the tasks, and "
            batch.remarks.append(f"{what}the command in the script runs once.")
        return list(words)
    end = first_of_command(words, found + 1)
    for option in options(words[found + 1 : end]):
        value = option.value or ""
        if is_open(value) or "${oc.env:" in value or not option.known:
            batch.remarks.append(f"`{option.word if option.known else option.name}` of srun is not taken over.")
            continue
        batch.step.append(option)
        if option.name in SIZES:
            batch.given.setdefault(option.name, option)
    of_step = {option.name: option for option in batch.step if option.name.startswith("ntasks")}
    batch.sizes = JobSizes(batch.given, of_step)

    before, command = list(words[:found]), list(words[end:])
    launchers = {place: name for place, word in enumerate(command) if (name := launcher_of(posixpath.basename(word)))}
    start = next(iter(launchers), None)
    tasks, nodes = batch.sizes.tasks or 1, batch.sizes.nodes or 1
    if start is not None and launchers[start] != "python" and tasks > 1:
        what = f"`{batch.tasks_option()}` is left out: {TASKS}, and "
        batch.remarks.append(f"{what}{command[start]} starts the ranks.")
    if start is None or launchers[start] != "python" or tasks * nodes == 1:
        return before + command
    rest, flags = command[start + 1 :], list[str]()
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        flags.append(rest.pop(0))
    if rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith(LAUNCHES):
        return before + command
    batch.remarks += [f"`{flag}` of Python is not taken over." for flag in flags if flag != "-u"]
    batch.remarks.append(BY_TORCHRUN)
    several = [f"--nnodes={nodes}"] if nodes > 1 else []
    return [*before, *command[:start], "torchrun", f"--nproc_per_node={tasks}", *several, *rest]


def put_cluster(batch: SbatchScript, draft: ImportedRecipe, setup: Iterable[str]) -> None:
    """Set the section, what a node has, and the name; note what is left out. setup: lines of shell."""
    anywhere, sizes, given = argv_origin(batch.path), batch.sizes, batch.given
    draft.set("cluster.kind", "slurm", anywhere)
    for name, option in given.items():
        key, value = AS_IT_IS.get(name), option.value or ""
        if key and _PLACEHOLDER.fullmatch(value):
            draft.remark(f"`{option.word}` is to be replaced: set cluster.{key}.")
        elif key and value:
            draft.set(f"cluster.{key}", value, batch.origin(option))
        elif name == "job-name" and value and not _PLACEHOLDER.fullmatch(value):
            draft.name = value
            if recipe_name(value) != value:
                draft.remark(f"The job's name {value} becomes {recipe_name(value)}, a folder's name.")
        elif name == "time":
            if (time := time_limit(value)) is None:
                hint = 'write it as --time="1-12:00:00"'
                draft.fail(f"`{option.word}` is not a time limit that Slurm accepts", batch.origin(option), hint)
            else:
                draft.set("cluster.time", time, batch.origin(option))
    _put_nodes_and_gpus(sizes, draft, anywhere)
    if sizes.cpus:
        draft.set("cluster.cpus_per_node", sizes.cpus, anywhere)
    if sizes.memory is not None:
        unit = next(name for name in ("T", "G", "M", "K") if sizes.memory % UNITS[name] == 0)
        draft.set("cluster.memory_per_node", f"{sizes.memory // UNITS[unit]}{unit}" if sizes.memory else "0", anywhere)
    if exclusive := given.get("exclusive"):
        draft.set("cluster.exclusive", True, batch.origin(exclusive))
        if exclusive.value:
            draft.remark(f"`{exclusive.word}` is taken over as --exclusive.")
    _put_requeue(batch, draft)
    _put_setup(draft, setup, anywhere)
    for command, found in (("sbatch", batch.others), ("srun", [each for each in batch.step if each.name not in SIZES])):
        kept = []
        for option in found:
            if option.name in LEFT_OUT:
                draft.remark(f"`{option.word}` is left out: {LEFT_OUT[option.name]}.")
            elif option.name in SET_HERE:
                draft.remark(f"`{option.word}` of {command} is left out: trainkit sets --{option.name} by itself.")
            elif option.name != "export" or (option.value or "").upper() != "ALL":  # which is as without it
                kept.append(option.word)
        if kept:
            draft.set(f"cluster.{command}", kept, anywhere)
    draft.remarks += [*batch.remarks, *sizes.remarks]
    for option, what, hint in sizes.problems:
        draft.fail(what, batch.origin(option), hint)


def time_limit(text: str) -> str | None:
    """A time of sbatch's as a recipe has it; None for what is none. sbatch(1): a bare number is minutes, 0 no limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        return "infinite" if text.upper() in (*UNLIMITED, "INFINITE") else None
    days, *parts = match.groups()
    pieces = [each for each in parts if each is not None]
    if not any(int(each) for each in (days or "0", *pieces)):
        return "infinite"
    if days is not None:
        return f"{int(days)}-" + ":".join(f"{int(each):02}" for each in pieces)
    first, *rest = pieces if len(pieces) > 1 else [*pieces, "0"]
    return ":".join([str(int(first)), *(f"{int(each):02}" for each in rest)])


def _put_nodes_and_gpus(sizes: JobSizes, draft: ImportedRecipe, anywhere: Origin) -> None:
    """What the command says of nodes and ranks wins over what the job asks for, and a remark says so."""
    asked, named = sizes.nodes or 1, draft.get("nodes.count")
    if named is None:
        if asked > 1:
            what = f"The job has {asked} nodes, and the command starts the program on one"
            draft.remark(f"{what}: set nodes.count where it is to run on all.")
        draft.set("nodes.count", 1, anywhere)
    else:
        if number_of(named) not in (None, asked):
            draft.remark(f"The job asks for {asked} nodes, and the command names {number_of(named)}, which is taken.")
        if "nodes.rendezvous" in draft.settings:
            draft.forget("nodes.rendezvous")
            draft.remark("Where nodes meet is left out: trainkit takes the first node of the job.")
    if draft.get("devices.type") == "cpu":
        return
    if sizes.gpus is None:
        reason = "the script asks for no GPUs: nodes are given with those that they have"
        draft.set("cluster.gpus", "none", anywhere, reason)
        return
    draft.set("cluster.gpus", "gres" if sizes.gres else "gpus-per-node", anywhere)
    if sizes.gpu_kind:
        draft.set("cluster.gpu_kind", sizes.gpu_kind, anywhere)
    processes = number_of(draft.get("nodes.processes_per_node"))
    if processes is not None and processes > sizes.gpus:
        what = f"The job asks for {sizes.gpus} GPUs on each node, and the command starts {processes} ranks there"
        draft.remark(f"{what}: trainkit asks for {processes}.")
    elif draft.get("devices.select") in (None, "all") and draft.get("devices.type") in (None, "cuda"):
        draft.settings.pop("devices.select", None)
        draft.set("devices.select", sizes.gpus, anywhere, "as many GPUs as the job asks for")


def _put_requeue(batch: SbatchScript, draft: ImportedRecipe) -> None:
    if option := batch.given.get("no-requeue"):
        draft.set("cluster.requeue.after", [], batch.origin(option))
    elif "requeue" not in batch.given:
        what = "trainkit queues the job again before its time is up, and after a failed node"
        draft.remark(f"{what}: see cluster.requeue.")
    if (option := batch.given.get("signal")) is None:
        return
    if (match := _SIGNAL.fullmatch(option.value or "")) is None:
        hint = "write it as --signal=B:USR1@180"
        draft.fail(f"`{option.word}` is not a signal that Slurm accepts", batch.origin(option), hint)
        return
    seconds = int(match["seconds"] or 60)  # sbatch(1), --signal
    draft.set("cluster.requeue.warn_seconds", max(10, seconds), batch.origin(option))
    to_script, number = "B" in (match["to"] or ""), match["name"].upper().removeprefix("SIG")
    if number not in ("USR1", "10") or not to_script or seconds < 10:
        draft.remark(f"`{option.word}`: trainkit has Slurm send USR1 to the job script; ranks get TERM, and save.")


def _put_setup(draft: ImportedRecipe, setup: Iterable[str], anywhere: Origin) -> None:
    """Lines that each job runs first; variables that the plan decides are named."""
    lines, asked = list[str](), set[str]()
    for line in dict.fromkeys(setup):
        exported = re.match(r"export (\w+)=", line)
        if exported and (exported[1] in DECIDED or exported[1] in RANKS):
            draft.remark(f"`{line[:100]}` is left out: trainkit starts the ranks, and sets {exported[1]} for each.")
        elif exported and line.endswith(f'="${{{exported[1]}}}"'):
            asked.add(exported[1])  # a remark says what it comes to
        elif "\n" in line:
            shown = line.partition("\n")[0][:100]
            draft.remark(f"`{shown}` is left out, for it has several lines: set it in a file, and source that.")
        else:
            lines.append(line)
    if lines:
        draft.set("cluster.setup", lines, anywhere)
    used = " ".join(str(each.value) for each in draft.settings.values())
    for name in dict.fromkeys(re.findall(r"\$\{oc\.env:(SLURMD?_\w+)", used)):
        what = f"{name} is known only in the job, and a plan is made where it is submitted"
        draft.remark(
            f"{what}: write a variant for each value, give it with --set {name}=VALUE, or have the program read it."
        )
    asked |= {*re.findall(r"\$\{(?:oc\.env:)?(\w+)", used)}
    late = re.compile(r"(\w+) is what `")  # remarks on variables that are known late count where one is used
    draft.remarks = [each for each in draft.remarks if not (found := late.match(each)) or found[1] in asked]
