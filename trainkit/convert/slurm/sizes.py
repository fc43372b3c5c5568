"""How much of a cluster a batch script asks for: nodes, tasks, cards, processors and memory, by arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from trainkit.convert.slurm.asked import SIZES, UNITS, Batch, Sizes
from trainkit.schedulers.slurm_options import Option

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
