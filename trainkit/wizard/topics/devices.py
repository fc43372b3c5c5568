"""Where it runs: this machine's cards, its CPU, or several machines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from trainkit.machine.facts import Gpu
from trainkit.machine.selection import allocation, is_idle, occupants, restriction, usable
from trainkit.recipe.schema.fields import schema
from trainkit.text import GIB, MIB, counted
from trainkit.wizard.planner_check import ENGINES, validated
from trainkit.wizard.question import AnswerError, Choice, Question, Settings, Topic, View

KEYS = ("devices.type", "devices.select", "nodes.processes_per_node", "nodes.count", "nodes.rendezvous")
# A run of one process; the shipped presets set the same.
ONE = {"nodes.count": 1, "nodes.processes_per_node": 1}
CPU = {"devices.type": "cpu", "devices.select": "none", "data.pin_memory": False}
NO_ACCELERATOR = "no accelerator, even where there is one"
PORT = 29500  # torchrun's and DeepSpeed's default, which a firewall most likely lets through
IDLE_BELOW = int(schema().settings["devices.idle_below"][0].default) * MIB


def _where(view: View) -> Question:
    cards = allocation(view.facts)
    hidden = len(usable(view.facts.gpus)) - len(cards)
    busy = [occupants(gpu) for gpu in cards if not is_idle(gpu, IDLE_BELOW)]
    why = (
        f"Found on {view.facts.hostname}: {described(usable(view.facts.gpus)) or 'no GPU that CUDA could use'}"
        f"{'; Apple MPS' if view.facts.mps else ''}; {counted(view.facts.cpu_cores, 'CPU core')}."
        + (f" {restriction(view.facts)} hides {hidden} of them." if hidden else ""),
        *(f"Just now {each}." for each in busy),
        *(f"What could not be found out ({name}: {note})" for name, note in view.facts.notes.items()),
        "Every process uses one card. A list such as 2,0 gives the first process card 2 and the second card 0.",
    )
    expected = "a number of cards, a list (0,2), or free 2" if cards else "a number of processes"
    # Asked of the planner here and not by the session: the best that can be taken is proposed.
    offered = validated(view, KEYS, _places(view))
    words = [choice.word for choice in offered if not choice.refused]
    several = () if view.get("strategy.kind") == "single" else ("cpu-2",)
    order = ("same", "all", "one", "mps", *several, "cpu", *words)
    default = next((word for word in order if word in words), "")
    source = view.base.name if default == "same" else "found here"
    return Question("Where does it run?", why, offered, default, source, expected)


def described(gpus: Sequence[Gpu]) -> str:
    """`2 x NVIDIA A100 (80 GiB), 1 x Tesla T4 (16 GiB)`."""
    kinds = Counter((gpu.name, round(gpu.memory_total / GIB)) for gpu in gpus)
    return ", ".join(
        f"{f'{count} x ' if len(gpus) > 1 else ''}{name} ({size} GiB)" for (name, size), count in kinds.items()
    )


def _places(view: View) -> Iterator[Choice]:
    cards, alone = allocation(view.facts), _alone(view)
    if view.base.path:
        here = f"{counted(view.ranks, 'process', 'es')} on {view.device}"
        yield Choice("same", f"as {view.base.name} has it; here {here}", {}, "")
    if len(cards) > 1:
        sets = {"devices.type": "cuda", "devices.select": len(cards)}
        yield Choice("all", f"{described(cards)}, a process on each", sets, f"all of {described(cards)}")
        sets = {"devices.type": "cuda", "devices.select": "free", **alone, **ONE}
        reason = "a card that is idle when the run starts"
        yield Choice("free", "one card that is idle when the run starts, whichever it is", sets, reason)
    if cards:
        sets = {"devices.type": "cuda", "devices.select": 1, **alone, **ONE}
        yield Choice("one", f"one process on {described(cards[:1])}", sets, f"one process on {described(cards[:1])}")
    if view.facts.mps and view.get("program.kind") not in ENGINES:  # which need a process group, and MPS has none
        sets = {"devices.type": "mps", **alone, "data.pin_memory": False, **ONE}
        yield Choice("mps", "the GPU of this Mac, one process", sets, "Apple silicon takes one process")
    cores = counted(view.facts.cpu_cores, "core")
    yield Choice("cpu", f"the CPU ({cores}), one process", {**CPU, **alone}, NO_ACCELERATOR)
    two = {**CPU, "nodes.processes_per_node": 2}
    yield Choice("cpu-2", "the CPU, two processes: to try a strategy without cards", two, NO_ACCELERATOR)
    each = len(cards) or 1
    device = {"devices.type": "cuda", "devices.select": each} if cards else CPU
    alike = f"a process on each of {counted(each, 'card')}" if cards else "one process on the CPU of each"
    sets = {**device, "nodes.processes_per_node": each, "nodes.count": 2}
    yield Choice("nodes", f"several machines like this one: {alike}", sets, f"machines alike: {alike}")


def _alone(view: View) -> Settings:
    """The strategy of one process, unless the program's engine brings one."""
    return {} if view.get("program.kind") in ENGINES else {"strategy.kind": "single"}


def _read_where(view: View, text: str) -> tuple[Settings, str]:
    if free := re.fullmatch(r"free (\d+)", text):
        sets = {"devices.type": "cuda", "devices.select": "free", "nodes.processes_per_node": int(free[1])}
        return sets, f"{counted(int(free[1]), 'card')}, idle when the run starts"
    names = [name.strip() for name in text.strip("[]").split(",") if name.strip()]
    if not names:
        raise AnswerError("no card is named", "write a number of cards, or a list such as 0,2")
    if not all(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names):
        raise AnswerError(f"{text!r} is not a device", "choose a word, or write a number, or a list such as 0,2")
    cards = [int(name) if name.isdecimal() else name for name in names]
    if len(names) > 1 or not names[0].isdecimal() or text.startswith("["):
        alone = _alone(view) if len(cards) == 1 else {}
        return {"devices.type": "cuda", "devices.select": cards, **alone}, "rank i uses the i-th of these"
    count = int(names[0])
    if not 1 <= count <= 4096:
        raise AnswerError(f"{count} processes cannot be started", "write a number from 1 to 4096")
    alone = {**_alone(view), **ONE} if count == 1 else {}
    if allocation(view.facts):
        return {"devices.type": "cuda", "devices.select": count, **alone}, "a process on each"
    return {**CPU, "nodes.processes_per_node": count, **alone}, NO_ACCELERATOR


def _machines(view: View) -> Question:
    why = (
        "How many machines take part, and where they meet: a port of the first machine, by a name that all of them "
        "know. Start the same command on each; a scheduler's variables or --node-rank say which is which."
    )
    count, address = view.get("nodes.count"), view.get("nodes.rendezvous")
    default, source = f"{max(count, 2)} {view.facts.hostname}:{PORT}", "this machine as the first"
    if count > 1 and address != "auto":
        default, source = f"{count} {address}", view.base.name
    return Question("How many machines, and where do they meet?", (why,), (), default, source, "4 host:29500")


def _read_machines(view: View, text: str) -> tuple[Settings, str]:
    count, _, address = text.partition(" ")
    if not count.isdecimal() or not address.strip():
        raise AnswerError(f"{text!r} is not a number with an address", f"write 2 {view.facts.hostname}:{PORT}")
    if int(count) < 2:
        raise AnswerError(f"{count} is not several machines", "write 2 or more, or go back with <")
    sets: Settings = {"nodes.count": int(count), "nodes.rendezvous": address.strip()}
    return sets, f"start it on each of the {count} machines; they meet at {address.strip()}"


WHERE = Topic("where", KEYS, lambda view: True, _where, _read_where, KEYS[:-1], planned=False)
MACHINES = Topic(
    "machines", KEYS[-1:], lambda view: int(view.get("nodes.count")) > 1, _machines, _read_machines, KEYS[-2:]
)
