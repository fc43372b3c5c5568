"""Where a plan runs: device, number of processes, GPUs of each node, and the cores that each rank stays on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trainkit.errors import Diagnostic, RecipeError, blocker, note, warning
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Device, GpuWait, NodeGroup, Topology
from trainkit.launch_plan.provenance import Token, token
from trainkit.machine.cpu_affinity import core_ranges
from trainkit.machine.facts import Facts, Gpu
from trainkit.machine.selection import (
    ORDER,
    Selection,
    allocation,
    duplicates,
    is_idle,
    is_part,
    is_simulated,
    kind_of_cards,
    occupants,
    ordered,
    pick,
    restriction,
    speed,
    take,
    take_free,
    take_when_idle,
    unread,
)
from trainkit.recipe.resolved import Resolved
from trainkit.text import MIB, pluralize

KEY = "launcher.numa_binding"


def core_argv(context: Context) -> tuple[Token, ...]:
    """The argv that gives trainkit.runner.rank its cores; empty where no binding is asked for or none is possible."""
    if context.recipe.launcher.numa_binding == "none" or isinstance(found := _shares(context), str):
        return ()
    rule = "the cores of the NUMA node that each local rank's GPU is on, less those that this process may not use"
    return (token("--cores", keys=(KEY,), rule=rule), token(":".join(map(core_ranges, found)), keys=(KEY,), rule=rule))


def core_notices(context: Context) -> Iterator[Diagnostic]:
    """Why ranks cannot be bound here."""
    if context.recipe.launcher.numa_binding != "none" and isinstance(found := _shares(context), str):
        yield blocker(f"ranks cannot be bound to NUMA nodes: {found}", f"set {KEY} to none")


def _shares(context: Context) -> tuple[tuple[int, ...], ...] | str:
    """The cores of each local rank, or why they are not known."""
    facts = context.facts
    if not facts.numa:
        return "the system does not report its NUMA nodes"
    if context.topology.device == "cuda":
        nodes = [gpu.numa_node for gpu in context.cards]
        if not nodes:
            return "there is no GPU"
        if unknown := next((gpu for gpu in context.cards if gpu.numa_node is None), None):
            return f"the system does not report on which node GPU {unknown.index} is"
    else:  # without GPUs ranks are spread over the nodes in order
        nodes = [facts.numa[rank * len(facts.numa) // context.processes].index for rank in range(context.processes)]
    # A container or a scheduler may have left this process fewer cores than the node has.
    usable: dict[int | None, tuple[int, ...]] = {
        node.index: tuple(core for core in node.cpus if not facts.cpu_affinity or core in facts.cpu_affinity)
        for node in facts.numa
    }
    found = tuple(usable.get(node, ()) for node in nodes)
    empty = next((node for node, cores in zip(nodes, found, strict=True) if not cores), None)
    return found if empty is None else f"this process may use no core of node {empty}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks on devices. cards: the chosen GPUs in rank order, empty off CUDA or where this machine lacks them.

    waits: what the run waits for, where its GPUs may be in use.
    """

    topology: Topology
    cards: tuple[Gpu, ...]
    device_reason: str
    notices: tuple[Diagnostic, ...] = ()
    waits: GpuWait | None = None


def place(resolved: Resolved, facts: Facts) -> Placement:
    """Decide device, processes per node and cards. Raises RecipeError for what is wrong on any machine."""
    device, reason = _choose_device(resolved, facts)
    if device == "cuda":
        return _place_on_cards(resolved, facts, reason)
    recipe = resolved.recipe
    if not isinstance(recipe.devices.select, str):
        what = f"devices.select chooses CUDA GPUs, but the run uses {device}"
        hint = "set devices.type to cuda, or leave devices.select out"
        raise RecipeError(resolved.error("devices.select", what, hint))
    processes = recipe.nodes.processes_per_node
    if processes == "auto":
        # Two ranks are the fewest that exchange anything: enough to try a strategy out on a CPU. A program of the
        # user's for which a launcher counts the GPUs is one process where there are none.
        counts_cards = recipe.devices.select == "all" and recipe.program.kind != "builtin"
        alone = device in ("mps", "xla") or recipe.strategy.kind == "single" or counts_cards
        processes = 1 if alone else 2
    group = NodeGroup(recipe.nodes.count, processes, (device,) * processes)
    return Placement(Topology(device, (group,)), (), reason, tuple(_off_cards(resolved, facts, device, reason)))


def counted_cards(resolved: Resolved, facts: Facts) -> Resolved:
    """The recipe with the order in which GPUs are counted."""
    recipe, devices = resolved.recipe, resolved.recipe.devices
    if devices.order != "auto":
        return resolved
    exported = next((ours for ours, (theirs, _) in ORDER.items() if theirs == facts.device_order), None)
    own = recipe.program.kind != "builtin" and not isinstance(devices.select, list)
    amd = any(gpu.vendor == "amd" for gpu in facts.gpus)  # whose order no variable changes
    order = "pci" if amd else exported or ("fastest" if own else "pci")
    return replace(resolved, recipe=recipe.model_copy(update={"devices": devices.model_copy(update={"order": order})}))


def _choose_device(resolved: Resolved, facts: Facts) -> tuple[Device, str]:
    """The kind of device and why: as asked for, else CUDA, then MPS, then CPU; never XLA by itself."""
    devices = resolved.recipe.devices
    if devices.select == "none":
        if devices.type in {"cuda", "mps", "xla"}:
            what = f"devices.type is {devices.type}, but devices.select is none"
            hint = "leave devices.select out to use a GPU, or set devices.type to cpu"
            raise RecipeError(resolved.error("devices.select", what, hint))
        return "cpu", "devices.select is none"
    if devices.type != "auto":
        return devices.type, f"devices.type is {devices.type}"
    if not isinstance(devices.select, str) or devices.select == "free":
        return "cuda", "devices.select requests GPUs"
    if allocation(facts):
        return "cuda", f"{pluralize(len(allocation(facts)), 'GPU')} can be used here"
    if facts.gpus:
        return "cpu", f"{restriction(facts) or 'MIG'} hides every GPU"
    return ("mps", "Apple silicon without a CUDA GPU") if facts.mps else ("cpu", "there is no GPU here")


def _off_cards(resolved: Resolved, facts: Facts, device: Device, reason: str) -> Iterator[Diagnostic]:
    """What a run that uses no CUDA GPU should know; the empty variable hides GPUs on purpose, others may be stale."""
    recipe, devices = resolved.recipe, resolved.recipe.devices
    if device == "mps" and not facts.mps:
        yield blocker("this machine has no MPS device", "set devices.type to auto or cpu")
    if device != "cpu" or devices.type != "auto" or devices.select == "none":
        return
    # A program of the user's own in one process takes what there is; whoever asks for more is told.
    asks = devices.select == "all" and not (recipe.strategy.kind == "single" and recipe.program.kind != "builtin")
    if facts.gpus or asks:
        hint = "set devices.type to cpu if that is meant, else see `trainkit env gpus`"
        yield (note if facts.visible_devices == "" else warning)(f"the run uses the CPU: {reason}", hint)


def _place_on_cards(resolved: Resolved, facts: Facts, reason: str) -> Placement:
    select, nodes = resolved.recipe.devices.select, resolved.recipe.nodes.count
    if waits(resolved) and nodes > 1:
        what = f"devices.when_busy is wait, but the run has {nodes} nodes"
        why = "each machine has a line of its own, and two such runs could wait for one another for ever"
        hint = "let a scheduler queue the run: set cluster.kind"
        raise RecipeError(resolved.error("devices.when_busy", what, hint, why=why))
    selection, requested = _select(resolved, facts)
    processes = _processes(resolved, requested)
    if not selection.missing:
        group = NodeGroup(nodes, processes, tuple(gpu.uuid for gpu in selection.cards))
        wait = _wait(resolved, selection.cards, facts) if waits(resolved) else None
        notices = tuple(_card_notices(resolved, selection.cards, facts, wait))
        return Placement(Topology("cuda", (group,)), selection.cards, reason, notices, wait)
    # The plan is written all the same, so that it can be read: with the recipe's list, or with indices.
    names = tuple(map(str, select if isinstance(select, list) else range(requested)))
    hint = "`devices.select: auto` takes what is there"
    if select == "free" and allocation(facts):
        hint = "`trainkit run --wait` waits for them; or name GPUs and set devices.when_busy: warn"
    missing = (f"not on this machine: {what}{_why_none(facts)}" for what in selection.missing)
    blockers = tuple(blocker(what, hint) for what in missing)
    return Placement(Topology("cuda", (NodeGroup(nodes, processes, names),)), (), reason, blockers)


def _processes(resolved: Resolved, cards: int) -> int:
    """Processes of each node on so many GPUs: one on each, or fewer that see them all, of a program of the user's."""
    recipe, key = resolved.recipe, "nodes.processes_per_node"
    asked, own = recipe.nodes.processes_per_node, recipe.program.kind != "builtin"
    if asked == "auto":
        return 1 if own and recipe.strategy.kind == "single" else cards
    if asked == cards or (own and asked < cards):
        return asked
    problem = resolved.error(
        key,
        f"{cards} GPUs are selected for {asked} processes on each node",
        f"set nodes.processes_per_node to {cards}, or devices.select to {asked}",
        why="a process needs a GPU of its own" if own else "each process uses exactly one GPU",
        at=resolved.origin(key) or resolved.origin("devices.select"),
    )
    raise RecipeError(problem)


def _why_none(facts: Facts) -> str:
    """Why no GPU can be used; empty where one can."""
    if allocation(facts):
        return ""
    if facts.gpus:
        return f": {restriction(facts) or 'MIG'} hides every GPU"
    note = next((facts.notes[name] for name in ("gpus", "amd", "nvidia") if name in facts.notes), "")
    return f": {note}" if note else ""


def _select(resolved: Resolved, facts: Facts) -> tuple[Selection, int]:
    """The GPUs, and how many were asked for."""
    recipe = resolved.recipe
    select, count = recipe.devices.select, recipe.nodes.processes_per_node
    if isinstance(select, list):
        _check_list(resolved, facts, select)
        return pick(select, facts, recipe.devices.order), len(select)
    allowed = allocation(facts)
    if resolved.given("devices.order") or not restriction(facts):  # a caller's list has an order of its own
        allowed = ordered(allowed, recipe.devices.order)
    single = recipe.strategy.kind == "single"
    if select == "free":
        if recipe.nodes.count > 1:
            problem = resolved.error(
                "devices.select",
                f"devices.select is free, but the run has {recipe.nodes.count} nodes",
                "let the scheduler choose, or use a count",
                why="which GPUs are idle differs from machine to machine, and one plan serves all nodes",
            )
            raise RecipeError(problem)
        amount = count if count != "auto" else 1 if single else None
        selection = take_free(amount, allowed, idle_below(resolved))
        if selection.missing and waits(resolved):
            selection = take_when_idle(amount or 1, allowed, idle_below(resolved))
        return selection, amount or max(len(selection.cards), 1)
    if isinstance(select, int):
        requested = select
    elif select != "all" and count != "auto":
        requested = count
    else:
        requested = 1 if single and select != "all" else max(len(allowed), 1)
    if waits(resolved):
        selection = take_when_idle(requested, allowed, idle_below(resolved))
    else:
        selection = take(requested, allowed)
    if recipe.launcher.kind == "deepspeed" and not resolved.given("devices.order"):  # which sorts them by number
        selection = replace(selection, cards=tuple(sorted(selection.cards, key=lambda gpu: gpu.index)))
    return selection, requested


def _check_list(resolved: Resolved, facts: Facts, select: list[int | str]) -> None:
    problems = []
    if not select:
        problems.append(("devices.select is an empty list", "use `none` for no GPU, or name at least one"))
    own = "name each GPU once; a process needs a GPU of its own"
    order, nodes = resolved.recipe.devices.order, resolved.recipe.nodes.count
    problems += [(f"devices.select names GPU `{name}` twice", own) for name in duplicates(select, facts, order)]
    problems += [
        (f"devices.select names `{name}`, which no GPU can be", "name GPUs by index (from 0), UUID or MIG id")
        for name in select
        if not str(name).strip() or (isinstance(name, int) and name < 0)
    ]
    by_name = [name for name in select if not str(name).isdecimal()]
    if by_name and nodes > 1:
        what = f"devices.select names `{by_name[0]}`, but the run has {nodes} nodes"
        problems.append((what, "use indices or a count"))
    if problems:
        raise RecipeError(resolved.error("devices.select", what, hint) for what, hint in problems)


def idle_below(resolved: Resolved) -> int:
    """The recipe's threshold of an idle GPU, in bytes."""
    return resolved.recipe.devices.idle_below * MIB


def waits(resolved: Resolved) -> bool:
    """Whether the run waits for its GPUs itself: under a scheduler it is given them."""
    return resolved.recipe.devices.when_busy == "wait" and resolved.recipe.cluster.kind == "none"


def _wait(resolved: Resolved, cards: Sequence[Gpu], facts: Facts) -> GpuWait:
    """What a run waits for that has these GPUs if it need not wait."""
    devices, idle = resolved.recipe.devices, all(is_idle(gpu, idle_below(resolved)) for gpu in cards)
    # One that takes all that are idle waits for the first.
    open_end = devices.select == "free" and len(cards) > 1 and resolved.recipe.nodes.processes_per_node == "auto"
    among = cards if isinstance(devices.select, list) else allocation(facts)
    possible = tuple(gpu.uuid for gpu in among if gpu.compute_mode != "prohibited")
    return GpuWait(1 if open_end else len(cards), possible, idle_below(resolved), idle)


def _card_notices(resolved: Resolved, cards: Sequence[Gpu], facts: Facts, wait: GpuWait | None) -> Iterator[Diagnostic]:
    if given := restriction(facts):
        job = facts.allocation
        giver = f", the allocation of {job.scheduler} job {job.job}" if job and job.job else ""
        yield note(f"GPUs were chosen inside the caller's {given}{giver}")
        if wrong := unread(facts):
            what = f"`{wrong}` in {given} matches no single GPU; CUDA ignores it and all later entries"
            yield warning(what, "export the GPUs that `trainkit env gpus` shows")
    yield from _busy(resolved, cards, facts, wait)
    yield from _uneven(resolved, cards, facts)
    # CUDA counts fastest first unless the environment says otherwise, nvidia-smi and schedulers by PCI address.
    by_number = any(part.strip().isdecimal() for part in (facts.visible_devices or "").split(","))
    if by_number and facts.device_order is None and len({gpu.name for gpu in facts.gpus}) > 1:
        what = f"CUDA_VISIBLE_DEVICES={facts.visible_devices} is read as nvidia-smi counts; CUDA alone would count the "
        hint = "export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
        yield warning(f"{what}fastest GPU as 0, and the GPUs here differ", hint)


def _busy(resolved: Resolved, cards: Sequence[Gpu], facts: Facts, wait: GpuWait | None) -> Iterator[Diagnostic]:
    """A busy GPU blocks the run. Facts from a file are a snapshot, which says nothing of the moment of the start."""
    devices, queued = resolved.recipe.devices, resolved.recipe.cluster.kind
    if devices.when_busy == "wait" and queued != "none":
        what = f"devices.when_busy: wait has no effect with cluster.kind: {queued}: the nodes of a job do not wait"
        yield note(what, "a GPU that is in use there is refused")
    busy = [gpu for gpu in cards if not is_idle(gpu, idle_below(resolved))]
    if wait and not facts.origin and all(gpu.compute_mode != "prohibited" for gpu in busy):
        if busy:
            yield warning(
                _what_for(wait, facts, idle_below(resolved)),
                "it starts when its turn has come; `trainkit env gpus` shows who is before it",
            )
        return
    for gpu in busy:
        if facts.origin:
            yield note(f"when the facts were taken: {occupants(gpu)}")
        elif devices.when_busy == "warn" and gpu.compute_mode == "default":
            yield warning(occupants(gpu), "devices.when_busy: warn starts the run all the same")
        else:
            hint = "`devices.select: free` takes idle GPUs; `devices.when_busy` says to wait for it, or to start beside"
            yield blocker(occupants(gpu), hint)


def _what_for(wait: GpuWait, facts: Facts, below: int) -> str:
    """That the run waits, for what, and who is before it."""
    among = [gpu for gpu in allocation(facts) if gpu.uuid in wait.among]
    idle = [gpu for gpu in among if is_idle(gpu, below)]
    which = f"{wait.count} of {len(among)} GPUs are idle" if wait.count < len(among) else "its GPUs are idle"
    if wait.count < len(among):
        which += f", and takes those; {len(idle)} are now"
    return f"the run waits until {which}; {'; '.join(occupants(gpu) for gpu in among if gpu not in idle)}"


def _uneven(resolved: Resolved, cards: Sequence[Gpu], facts: Facts) -> Iterator[Diagnostic]:
    names = sorted({gpu.name for gpu in cards})
    if len(names) > 1:
        what = f"the GPUs differ ({', '.join(names)}): every step waits for the slowest"
        yield warning(what, "select GPUs of one kind")
    if isinstance(resolved.recipe.devices.select, list) or any(map(is_part, cards)):
        return
    best, first = max(allocation(facts), key=speed), cards[0]
    if speed(best) > max(map(speed, cards)):
        what = f"GPU {first.index} ({first.name}) is slower than GPU {best.index} ({best.name}), left out here"
        yield warning(what, "`devices.order: fastest` takes the fastest first; a list names GPUs outright")
    elif len(names) > 1 and speed(first) < speed(best):
        what = f"rank 0 is on the slower GPU {first.index} ({first.name})"
        yield warning(what, "`devices.order: fastest` puts the fastest first")


def name_cards(placement: Placement, launcher: str, strategy: str, *, queued: bool = False) -> Topology:
    """The topology with each GPU named as all who read CUDA_VISIBLE_DEVICES understand it.

    A UUID is the same GPU whatever the order of counting. Other nodes have other UUIDs, HIP counts, and
    DeepSpeed reads the variable as integers (its launcher: https://github.com/deepspeedai/DeepSpeed/issues/5278;
    its runtime: cuda_accelerator.py, _get_nvml_gpu_id). queued: whether a scheduler will choose the machine.
    """
    topology, cards = placement.topology, placement.cards
    group, kind = topology.groups[0], kind_of_cards(cards)
    counts = launcher == "deepspeed" or strategy.startswith("zero") or group.count > 1 or kind == "amd"
    counts = counts or queued or any(is_simulated(gpu) for gpu in cards)
    if not cards or kind == "mig" or not counts:
        return topology
    devices = tuple(str(gpu.index) for gpu in cards)
    return Topology(topology.device, (NodeGroup(group.count, group.processes, devices),))
