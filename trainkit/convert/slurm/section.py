"""The recipe's `cluster` section, and what a node has, of what a batch script asks for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainkit.convert.shell.marks import RANKS
from trainkit.convert.slurm.asked import AS_IT_IS, SIZES, TASKS, UNITS, Batch
from trainkit.errors import Origin
from trainkit.frameworks.base.draft import Draft, argv_origin, number_of
from trainkit.planner.env import DECIDED
from trainkit.recipe.yaml.writer import recipe_name
from trainkit.schedulers.slurm import SET_HERE
from trainkit.schedulers.slurm_answers import UNLIMITED
from trainkit.schedulers.slurm_options import Option

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
