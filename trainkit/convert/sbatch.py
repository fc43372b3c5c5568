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
from trainkit.schedulers.slurm import NAMED, SET_HERE
from trainkit.schedulers.slurm_answers import UNLIMITED
from trainkit.schedulers.slurm_options import MAGIC, Option, directives, options
from trainkit.tools.base.draft import Draft, argv_origin, number_of
from trainkit.tools.registry import launcher_of

_CARDS = re.compile(r"(?:gpu:)?(?:(?P<kind>[A-Za-z][\w.-]*):)?(?P<count>\d+)|gpu(?::(?P<alone>[A-Za-z][\w.-]*))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


def sizes_of(batch: Batch, of_step: Mapping[str, Option] = MappingProxyType({})) -> Sizes:
    """The sizes by arithmetic. of_step: options of srun that say how many tasks there are."""
    batch.problems = [each for each in batch.problems if each[0].name not in SIZES]
    given = {**batch.given, **of_step}
    nodes, total = _nodes(batch), _number(batch, given.get("ntasks"))
    tasks = _number(batch, given.get("ntasks-per-node"))
    if tasks is None and total and nodes is None:
        batch.remarks.append(f"`{given['ntasks'].word}` without --nodes: Slurm chooses how many nodes; one is taken.")
        nodes, tasks = 1, total
    elif nodes is None and total and tasks:
        nodes = math.ceil(total / tasks)
    elif tasks is None and total:
        tasks = _share(batch, given["ntasks"], total, nodes or 1, "tasks")
    sizes = Sizes(nodes, tasks)
    _read_cards(batch, sizes, given)
    each = _number(batch, given.get("ntasks-per-gpu"))
    if sizes.tasks is None and each and sizes.cards:
        sizes.tasks = each * sizes.cards
    _read_processors(batch, sizes, given)
    return sizes


def _nodes(batch: Batch) -> int | None:
    option = batch.given.get("nodes")
    if option and (match := re.fullmatch(r"(\d+)-(\d+)", option.value or "")):
        if match[1] != match[2]:
            batch.remarks.append(
                f"`{option.word}` leaves the number of nodes to Slurm: the least, {match[1]}, is taken."
            )
        return int(match[1])
    return _number(batch, option)


def _read_cards(batch: Batch, sizes: Sizes, given: Mapping[str, Option]) -> None:
    for name in ("gpus-per-node", "gres", "gpus-per-task", "gpus"):
        option = given.get(name)
        if option is None:
            continue
        pieces = [each for each in (option.value or "").split(",") if name != "gres" or each.startswith("gpu")]
        if name == "gres" and len(pieces) < len((option.value or "").split(",")):
            batch.remarks.append(f"`{option.word}`: only cards are taken over; add the rest to the nodes of the site.")
        match = _CARDS.fullmatch(re.sub(r"\(.*\)$", "", pieces[0])) if len(pieces) == 1 else None
        if match is None:
            if pieces:
                batch.refuse(
                    option, f"`{option.word}` names no number of cards of one kind", "write it as --gres=gpu:4"
                )
            continue
        count, kind = int(match["count"] or 1), match["kind"] or match["alone"] or ""
        if name == "gpus-per-task":
            count *= sizes.tasks or 1
        elif name == "gpus":
            count = _share(batch, option, count, sizes.nodes or 1, "cards") or count
        sizes.cards, sizes.kind, sizes.gres = count, kind, name == "gres"
        return


def _read_processors(batch: Batch, sizes: Sizes, given: Mapping[str, Option]) -> None:
    """Processors and memory of a node."""
    of_task, of_card = _number(batch, given.get("cpus-per-task")), _number(batch, given.get("cpus-per-gpu"))
    sizes.cpus = of_task * (sizes.tasks or 1) if of_task else of_card * sizes.cards if of_card and sizes.cards else None
    for name, count, of in (
        ("mem", 1, ""),
        ("mem-per-gpu", sizes.cards, "cards"),
        ("mem-per-cpu", sizes.cpus or sizes.tasks, "processors"),
    ):
        option = given.get(name)
        if option is None:
            continue
        match = _MEMORY.fullmatch(option.value or "")
        if match is None:
            batch.refuse(option, f"`{option.word}` is no amount of memory", "write it as --mem=64G")
        elif count is None:
            what = f"`{option.word}` is memory of each of the {of}, and nothing says how many there are"
            batch.refuse(option, what, "write --mem, or how many there are")
        else:
            sizes.memory = int(match[1]) * UNITS[match[2].upper() or "M"] * count


def _number(batch: Batch, option: Option | None) -> int | None:
    if option is None:
        return None
    said = (option.value or "").strip()
    if said.isdecimal() and int(said):
        return int(said)
    hint = "write the number itself: sbatch puts no variables into #SBATCH lines" if option.line else "write the number"
    batch.refuse(option, f"`{option.word}` is no number", hint)
    return None


def _share(batch: Batch, option: Option, total: int, nodes: int, of: str) -> int | None:
    """How many of a total each node has."""
    if of == "tasks" and total < nodes and not option.line:
        batch.remarks.append(f"`{option.word}` of srun is on fewer than the job's {nodes} nodes; one on each is taken.")
        return 1
    if total % nodes == 0:
        return total // nodes
    batch.refuse(
        option, f"`{option.word}` is not the same number of {of} on each of {nodes} nodes", "change one of them"
    )
    return None


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


# What is left out, and why.
_OUTPUT = "the job's output is job.out in the run directory"
_OF_COMMAND = "it is about the sbatch command itself"
LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode"), _OUTPUT),
    "wait": "trainkit waits for the nodes by itself",
    **dict.fromkeys(("parsable", "quiet", "verbose", "test-only", "help", "usage", "version"), _OF_COMMAND),
    **dict.fromkeys(("ntasks-per-core", "ntasks-per-socket", "overcommit", "distribution"), TASKS),
    "array": "`trainkit submit --variant all` makes one job of many runs",
    "chdir": "call trainkit in that folder",
    "input": "no rank reads the job's input",
    "kill-on-bad-exit": "trainkit ends the nodes in order",
    "unbuffered": "trainkit says it by itself",
    "label": "`trainkit logs --all` shows each line with its rank and host",
    "jobid": "trainkit says it by itself",
    "overlap": "trainkit has one step",
}
_PLACEHOLDER = re.compile(r"<[^<>]*>|\{\{.*\}\}|\$\w+|\$\{.*\}|\[[A-Z_ ]+\]")
_SIGNAL = re.compile(r"(?:(?P<to>[BR]*):)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def put_cluster(batch: Batch, draft: Draft, setup: Iterable[str]) -> None:
    """Set the section, what a node has, and the name; note what is left out. setup: lines of shell."""
    anywhere = argv_origin(batch.path)
    draft.set("cluster.kind", "slurm", anywhere)
    for name, option in batch.given.items():
        if name in AS_IT_IS and option.value:
            if _PLACEHOLDER.fullmatch(option.value):
                draft.remark(f"`{option.word}` is to be replaced: set cluster.{AS_IT_IS[name]}.")
            else:
                draft.set(f"cluster.{AS_IT_IS[name]}", option.value, batch.origin(option))
    _put_name(batch, draft)
    _put_time(batch, draft)
    _put_nodes(batch, draft, anywhere)
    _put_cards(batch, draft, anywhere)
    if batch.sizes.cpus:
        draft.set("cluster.cpus_per_node", batch.sizes.cpus, anywhere)
    if batch.sizes.memory is not None:
        draft.set("cluster.memory_per_node", _memory(batch.sizes.memory), anywhere)
    if alone := batch.given.get("exclusive"):
        draft.set("cluster.exclusive", True, batch.origin(alone))
        if alone.value:
            draft.remark(f"`{alone.word}` is taken over as --exclusive.")
    _put_requeue(batch, draft)
    _put_setup(batch, draft, setup)
    _put_words(batch, draft, "sbatch", batch.others)
    _put_words(batch, draft, "srun", [each for each in batch.step if each.name not in SIZES])
    for remark in batch.remarks:
        draft.remark(remark)
    for option, what, hint in batch.problems:
        draft.fail(what, batch.origin(option), hint)


def _put_name(batch: Batch, draft: Draft) -> None:
    option = batch.given.get("job-name")
    if option and option.value and not _PLACEHOLDER.fullmatch(option.value):
        draft.name = option.value
        if recipe_name(option.value) != option.value:
            draft.remark(f"The job's name {option.value} becomes {recipe_name(option.value)}, a folder's name.")


def _put_time(batch: Batch, draft: Draft) -> None:
    option = batch.given.get("time")
    if option is None:
        return
    if (time := time_limit(option.value or "")) is None:
        batch.refuse(option, f"`{option.word}` is no time limit of Slurm's", 'write it as --time="1-12:00:00"')
    else:
        draft.set("cluster.time", time, batch.origin(option))


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


def _memory(kib: int) -> str:
    """In the largest unit that leaves no rest."""
    if kib == 0:
        return "0"
    unit = next(name for name in ("T", "G", "M", "K") if kib % UNITS[name] == 0)
    return f"{kib // UNITS[unit]}{unit}"


def _put_nodes(batch: Batch, draft: Draft, anywhere: Origin) -> None:
    asked, said = batch.sizes.nodes, draft.get("nodes.count")
    if said is None and asked and asked > 1:
        what = f"The job has {asked} nodes, and the command starts the program on one: set nodes.count where it is to "
        draft.remark(f"{what}run on all.")
    elif said is not None and number_of(said) is not None and number_of(said) != (asked or 1):
        draft.remark(f"The job asks for {asked or 1} nodes, and the command names {number_of(said)}, which is taken.")
    if said is not None and "nodes.rendezvous" in draft.settings:
        draft.forget("nodes.rendezvous")
        draft.remark("Where nodes meet is left out: trainkit takes the first node of the job.")
    elif said is None:
        draft.set("nodes.count", 1, anywhere)


def _put_cards(batch: Batch, draft: Draft, anywhere: Origin) -> None:
    sizes, select = batch.sizes, draft.get("devices.select")
    if draft.get("devices.type") == "cpu":
        return
    if sizes.cards is None:
        reason = "the script asks for no cards: nodes are given with those that they have"
        draft.set("cluster.gpus", "none", anywhere, reason)
        return
    draft.set("cluster.gpus", "gres" if sizes.gres else "gpus-per-node", anywhere)
    if sizes.kind:
        draft.set("cluster.gpu_kind", sizes.kind, anywhere)
    processes = number_of(draft.get("nodes.processes_per_node"))
    if processes is not None and processes > sizes.cards:
        what = f"The job asks for {sizes.cards} cards on each node, and the command starts {processes} ranks there: "
        draft.remark(f"{what}trainkit asks for {processes}.")
    elif select in (None, "all") and draft.get("devices.type") in (None, "cuda"):
        draft.settings.pop("devices.select", None)
        draft.set("devices.select", sizes.cards, anywhere, "as many cards as the job asks for")


def _put_requeue(batch: Batch, draft: Draft) -> None:
    if option := batch.given.get("no-requeue"):
        draft.set("cluster.requeue.after", [], batch.origin(option))
    elif "requeue" not in batch.given:
        draft.remark(
            "trainkit queues the job again before its time is up, and after a failed node: see cluster.requeue."
        )
    option = batch.given.get("signal")
    if option is None:
        return
    match = _SIGNAL.fullmatch(option.value or "")
    if match is None:
        batch.refuse(option, f"`{option.word}` is no signal of Slurm's", "write it as --signal=B:USR1@180")
        return
    seconds = int(match["seconds"] or 60)  # sbatch(1), --signal
    draft.set("cluster.requeue.warn_seconds", max(10, seconds), batch.origin(option))
    if (
        match["name"].upper().removeprefix("SIG") not in ("USR1", "10")
        or "B" not in (match["to"] or "")
        or seconds < 10
    ):
        draft.remark(f"`{option.word}`: trainkit has Slurm send USR1 to the job script; ranks get TERM, and save.")


def _put_setup(batch: Batch, draft: Draft, setup: Iterable[str]) -> None:
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
        draft.set("cluster.setup", lines, argv_origin(batch.path))
    used = " ".join(str(each.value) for each in draft.settings.values())
    for name in dict.fromkeys(re.findall(r"\$\{oc\.env:(SLURMD?_\w+)", used)):
        what = (
            f"{name} is known only in the job, and a plan is made where it is submitted: write a variant for each value"
        )
        draft.remark(f"{what}, give it with --set {name}=VALUE, or have the program read it.")
    asked |= {*re.findall(r"\$\{(?:oc\.env:)?(\w+)", used)}
    draft.remarks = [
        each
        for each in draft.remarks
        if not (late := re.match(r"(\w+) is (?:what `|\S+, which is `)", each)) or late[1] in asked
    ]


def _put_words(batch: Batch, draft: Draft, key: str, found: Sequence[Option]) -> None:
    """Further words; those that trainkit sets are named."""
    kept = []
    for option in found:
        if option.name == "export" and (option.value or "").upper() == "ALL":
            continue  # as without it
        if option.name in LEFT_OUT:
            draft.remark(f"`{option.word}` is left out: {LEFT_OUT[option.name]}.")
        elif option.name in SET_HERE:
            draft.remark(f"`{option.word}` of {key} is left out: trainkit sets --{option.name} by itself.")
        else:
            kept.append(option.word)
    if kept:
        draft.set(f"cluster.{key}", kept, argv_origin(batch.path))


_PLAIN_SHELL = re.compile(r"#!\s*(/usr)?/bin/(env\s+)?(ba)?sh")
_LOGIN = re.compile(r"\s(-[a-z]*l[a-z]*|--login)\b")
LAUNCHES = ("torch.distributed.", "accelerate.commands.")  # modules that start the ranks themselves
BY_TORCHRUN = (
    "srun starts a process for each rank; trainkit starts torchrun on each node, which sets RANK, LOCAL_RANK and "
    "WORLD_SIZE: a script that reads SLURM_PROCID, SLURM_LOCALID and SLURM_NTASKS must read these."
)


def read_batch(text: str, path: str) -> Batch | None:
    """What a script's `#SBATCH` lines ask for; None where it has none."""
    found = directives(text)
    if not found:
        return None
    batch = Batch(path)
    for option in found:
        if not option.known:
            batch.remarks.append(
                f"line {option.line}: `{option.written}`: Slurm has no such option, so it is left out."
            )
        elif option.name in SIZES or option.name in AS_IT_IS or option.name in ONCE:
            batch.given[option.name] = option
        else:
            batch.others.append(option)
    read = {option.line for option in found}
    batch.remarks += [
        f"line {number}: sbatch reads no #SBATCH line below the first command, so `{line.rstrip()}` is left out."
        for number, line in enumerate(text.splitlines(), 1)
        if line.startswith(MAGIC) and number > max(read)
    ]
    first = text.partition("\n")[0].rstrip()
    if first.startswith("#!") and not _PLAIN_SHELL.fullmatch(first):
        login = (
            " It is a login shell, which reads /etc/profile and ~/.bash_profile first: source them in cluster.setup "
        )
        more = f"{login}where the job needs them." if _LOGIN.search(first) else ""
        batch.remarks.append(f"`{first}` is left out: trainkit's job.sh is started by /bin/bash without options.{more}")
    batch.sizes = sizes_of(batch)
    return batch


def take_srun(batch: Batch, words: Sequence[str]) -> list[str]:
    """A command without its srun, whose options are kept; one process for each card becomes torchrun's."""
    found = next((place for place, word in enumerate(words) if posixpath.basename(word) == "srun"), None)
    if found is None:
        if (batch.sizes.tasks or 1) > 1:
            what = f"`{_shown(batch, 'ntasks-per-node', 'ntasks')}` is left out: no srun starts the tasks, and "
            batch.remarks.append(f"{what}the command in the script runs once.")
        return list(words)
    end = first_of_command(words, found + 1)
    before, command = list(words[:found]), list(words[end:])
    for option in options(words[found + 1 : end]):
        said = option.value or ""
        if is_open(said) or "${oc.env:" in said or not option.known:
            batch.remarks.append(f"`{option.word if option.known else option.name}` of srun is not taken over.")
        elif option.name in SIZES:
            batch.given.setdefault(option.name, option)
            batch.step.append(option)
        else:
            batch.step.append(option)
    batch.sizes = sizes_of(batch, {option.name: option for option in batch.step if option.name.startswith("ntasks")})
    return [*before, *_as_ranks(batch, command)]


def _as_ranks(batch: Batch, command: list[str]) -> list[str]:
    """Python, started by srun once for each rank, as torchrun starts it. Variables may be in front."""
    start = next((place for place, word in enumerate(command) if launcher_of(posixpath.basename(word))), None)
    tasks, nodes = batch.sizes.tasks or 1, batch.sizes.nodes or 1
    if start is None or launcher_of(posixpath.basename(command[start])) != "python" or tasks * nodes == 1:
        if start is not None and tasks > 1 and launcher_of(posixpath.basename(command[start])) != "python":
            what = f"`{_shown(batch, 'ntasks-per-node', 'ntasks')}` is left out: {TASKS}, and "
            batch.remarks.append(f"{what}{command[start]} starts the ranks.")
        return command
    rest, flags = command[start + 1 :], list[str]()
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        flags.append(rest.pop(0))
    if rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith(LAUNCHES):
        return command
    batch.remarks += [f"`{flag}` of Python is not taken over." for flag in flags if flag != "-u"]
    batch.remarks.append(BY_TORCHRUN)
    several = [f"--nnodes={nodes}"] if nodes > 1 else []
    return [*command[:start], "torchrun", f"--nproc_per_node={tasks}", *several, *rest]


def _shown(batch: Batch, *names: str) -> str:
    return next((batch.given[name].word for name in names if name in batch.given), "")
