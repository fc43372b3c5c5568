"""The plan: what will be executed. A frozen value that every command, renderer and the run itself consume."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Literal

from trainkit.decode import decode
from trainkit.distribution import is_install
from trainkit.errors import MachineError
from trainkit.hub.references import Download, RepoRef
from trainkit.lazy import call

PLAN_VERSION = 1
# How a plan, and what it is expected to take, look as text.
shown_plan = call("trainkit.launch_plan.render.table:render")
shown_foresight = call("trainkit.foresight.render:page")


class Variable(Enum):
    """What is known only at run time; `bind` fills it in."""

    RUN_ID = "run_id"
    RUN_DIR = "run_dir"  # absolute path
    ATTEMPT = "attempt"  # number of the start within the run
    ATTEMPT_DIR = "attempt_dir"  # <run_dir>/attempts/<attempt>
    PORT = "port"  # free TCP port on one node, the rendezvous port on several
    NODE_RANK = "node_rank"
    MASTER_ADDR = "master_addr"
    LOCAL_ADDR = "local_addr"
    IS_HOST = "is_host"  # "true" on node 0, else "false"
    RESUME = "resume"  # checkpoint that the run goes on from; a word with it is left out where there is none
    USER = "user"  # uid:gid of the caller; this and the following are for containers
    WORKING_DIR = "working_dir"  # where trainkit was started
    CACHE_DIR = "cache_dir"  # this user's, for containers
    PACKAGE = "package"  # folder of trainkit's own code
    HOST = "host"  # name of this machine


Device = Literal["cpu", "cuda", "mps", "xla"]


@dataclass(frozen=True, slots=True)
class Text:
    """A string with run-time variables in it, kept apart from the literal parts, so nothing needs escaping."""

    parts: tuple[str | Variable, ...]

    def bind(self, values: Mapping[Variable, str]) -> str:
        """The string, with each variable replaced by its value (KeyError if one is missing)."""
        return "".join(part if isinstance(part, str) else values[part] for part in self.parts)

    def __str__(self) -> str:
        return "".join(part if isinstance(part, str) else f"<{part.value}>" for part in self.parts)

    def to_json(self) -> str | list[str | dict[str, str]]:
        """A plain string where there is no variable, else the list of parts."""
        parts = [part if isinstance(part, str) else {"variable": part.value} for part in self.parts]
        return parts if any(isinstance(part, Variable) for part in self.parts) else str(self)

    @classmethod
    def from_json(cls, data: str | list[str | dict[str, str]]) -> Text:
        """The inverse of :meth:`to_json`."""
        if isinstance(data, str):
            return text(data)
        return cls(tuple(part if isinstance(part, str) else Variable(part["variable"]) for part in data))


def text(*parts: str | Variable) -> Text:
    """Build a :class:`Text`; neighbouring literals are joined, so equal strings are equal values."""
    joined: list[str | Variable] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "" or not parts[1:]:
            joined.append(part)
    return Text(tuple(joined))


def bind_words(words: Iterable[Text], values: Mapping[Variable, str]) -> tuple[str, ...]:
    """Words with every variable replaced, without that of the checkpoint where there is none (or it is not given)."""
    there = (word for word in words if Variable.RESUME not in word.parts or values.get(Variable.RESUME))
    return tuple(word.bind(values) for word in there)


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and why it was taken."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that are alike. devices[i] is what local rank i uses on each: ``cpu``, ``mps``, ``GPU-…`` or an index.

    Where there are more devices than processes, every process of a node sees them all, in this order.
    """

    count: int
    processes: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """A physical GPU. index: as nvidia-smi counts; several parts of a GPU that MIG split share it."""

    index: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes x processes per node."""

    device: Device
    groups: tuple[NodeGroup, ...]

    @property
    def nodes(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def world_size(self) -> int:
        """Number of ranks over all nodes."""
        return sum(group.count * group.processes for group in self.groups)


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """The solved triangle: global_ = micro x accumulation x ranks, in samples. note: what gave way, if anything.

    A side that nobody gave to a program of the user's own is None: it is the script's own, and nothing is made of it.
    search: the micro batches, ascending, of which the trainer takes the largest that fits; until then micro is the
        least of them. Empty where micro is decided.
    """

    global_: int | None
    micro: int | None
    accumulation: int | None
    ranks: int
    eval_micro: int | None
    note: str = ""
    search: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SolvedBatch(BatchArithmetic):
    """The triangle of the built-in trainer, whose every side is known."""

    global_: int
    micro: int
    accumulation: int
    eval_micro: int


@dataclass(frozen=True, slots=True)
class Command:
    """What one node group executes: launcher + wrapper + program, in a container where there is one.

    Without the wrapper (``trainkit.runner.rank``) it is the bare command for machines that have no trainkit.
    container: the words in front of the launcher: the engine's, the image, and what starts the rest inside.
    """

    launcher: tuple[Text, ...]
    wrapper: tuple[Text, ...]
    program: tuple[Text, ...]
    container: tuple[Text, ...] = ()

    @property
    def argv(self) -> tuple[Text, ...]:
        """The whole command as it is started."""
        return self.container + self.launcher + self.wrapper + self.program

    @property
    def bare(self) -> tuple[Text, ...]:
        """The command without trainkit's wrapper."""
        return self.container + self.launcher + self.program


@dataclass(frozen=True, slots=True)
class Preparation:
    """A command that is run once on each node before the ranks start (building DeepSpeed's ops)."""

    title: str
    argv: tuple[Text, ...]
    lock: str = ""  # by which two runs never prepare the same thing at once; empty where they may


@dataclass(frozen=True, slots=True)
class EnvironmentDiff:
    """How the ranks' environment differs from the caller's. Sorted by name.

    Applied in this order: the caller's variables, less those that `unset` names, plus those that `take` names, with
    `set` on top. So a variable in `set` or `take` is there even where a pattern of `unset` matches it.
    added: what the launcher gives each rank besides, by itself; None where ranks differ, or only the start decides.
    """

    set: tuple[tuple[str, Text], ...] = ()
    unset: tuple[str, ...] = ()  # names, or prefixes that end in `*`
    take: tuple[str, ...] = ()  # from the caller's environment by name; required
    added: tuple[tuple[str, Text | None], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedContainer:
    """What the launcher and its ranks run in. kind: of the engine. handed_in: names of variables.

    prefix: under which the engine reads them; may be empty. caches: folder that is made. end: command for the end.
    """

    kind: str
    image: str
    handed_in: tuple[str, ...]
    caches: Text
    prefix: str = ""
    end: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file written into the run directory before the start; path is relative to it."""

    path: str
    content: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A remark on the plan. A `blocker` is why this machine cannot run it; `run` then exits 4."""

    severity: Literal["note", "warning", "blocker"]
    what: str
    hint: str = ""

    @property
    def installs(self) -> bool:
        """Whether the hint is the command that installs what is missing."""
        return is_install(self.hint)


@dataclass(frozen=True, slots=True)
class TechniqueInForce:
    """A technique that the built-in trainer uses in this run, and what it does to speed and to memory."""

    key: str  # the recipe key
    value: str
    speed: str
    memory: str


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint that the run starts from. path is None for `never` or when nothing fits; reason: why that one.

    Chosen when the plan is made. A run makes its plan when it starts; a script, or a job in a queue, chooses again.
    """

    path: str | None
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Job:
    """What a scheduler is given, and how the plan starts on each of its machines.

    content: what the command `submit` submits, kept as `file` in the run directory; with hosts it is run once for each.
    step: the words before a command that start it on every node. start_seconds: how long nodes wait for one another.
    requeue: after what it is queued again, as `cluster.requeue.after` calls it; without_progress: after how many
        attempts without a newer checkpoint it is not. warn_seconds: before the time limit, that it is asked to end.
    """

    scheduler: str
    file: str
    content: Text
    submit: tuple[Text, ...]
    step: tuple[Text, ...] = ()
    requeue: tuple[str, ...] = ()
    without_progress: int = 1
    warn_seconds: int = 0
    start_seconds: int = 600
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HangWatch:
    """When the run counts as one that hangs. Seconds; after is None where its own pace decides, 0 for no watch.

    start: for what has not happened once in the run. ends: whether the run is ended then; reason: why, or why not.
    """

    after: float | None = None
    start: float = 1800.0
    ends: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Foresight:
    """What the run is expected to take on the rank that takes most; bytes and seconds.

    basis: `traced` from the model's own code, `formula` from its sizes, or `remembered` from a run that was measured;
    margin: by how much that is wrong at most, as a share. total: of all parts, on a GPU as the driver counts it; limit:
    what there is. verdict: `fits`, `tight` (within the margin) or `too large`. moment, operator: of the peak.
    host: of all ranks of a machine together, host_limit: what it has. start: what is taken before the first step, where
    that is more than a step takes: on the device, and in the machine's memory; start_verdict as above.
    step: seconds of an optimizer step; hours of the whole run, price of these on all GPUs; None where not known.
    allocated, reserved: of tensors, and what torch's allocator holds for them. work: of a step, what its time is
    reckoned from: FLOPs by format, bytes moved, operators.
    checkpoint: of one checkpoint, disk: of all that are kept. peak_share: model FLOPs utilisation.
    """

    basis: str
    margin: float
    parts: tuple[tuple[str, int], ...]
    total: int
    limit: int
    verdict: str
    moment: str
    operator: str = ""
    allocated: int = 0
    reserved: int = 0
    host: int = 0
    host_limit: int = 0
    start: tuple[int, int] = (0, 0)
    start_verdict: str = "fits"
    step: float | None = None
    tokens_per_second: float | None = None
    peak_share: float | None = None
    hours: float | None = None
    price: float | None = None
    disk: int = 0
    checkpoint: int = 0
    work: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(shown_foresight(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # in a notebook
        printer.text(str(self))

    @property
    def headroom(self) -> int:
        """Bytes that are left; below 0 what is missing."""
        return self.limit - self.total

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part of what torch allocates."""
        own = [each for each in self.parts if each[0] not in ("context", "process", "fragmentation")]
        return max(own or self.parts, key=lambda each: each[1])


@dataclass(frozen=True, slots=True)
class GpuWait:
    """What a run waits for before it starts: so many idle GPUs among these (by UUID, in order of preference).

    idle_below: bytes, as in the recipe. ready: whether they were idle, and nobody before it in line, at the time of the
    plan, whose `cards` it then has; else these are what it would have if all were idle, and it chooses at the start.
    """

    count: int
    among: tuple[str, ...]
    idle_below: int
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `run` does, in the order of the plan's JSON. Fields with a default came later than plans."""

    plan_version: int
    name: str
    recipe_digest: str
    training_digest: str
    training: tuple[tuple[str, str], ...] = ()  # what is trained, in words; none for a program of the user's own
    strategy: Choice
    launcher: Choice
    program: Choice
    device: Choice
    topology: Topology
    cards: tuple[PlannedGpu, ...] = ()  # of this machine, by local rank; none off CUDA or where they are missing
    shares_cards: bool = False  # whether the run may start on GPUs that another one has
    waits: GpuWait | None = None  # where it starts only when its GPUs are idle, instead of being refused
    batch: BatchArithmetic
    commands: tuple[Command, ...]  # one for each group of the topology
    preparations: tuple[Preparation, ...]
    repositories: tuple[RepoRef, ...] = ()  # of the Hub, each at its commit
    downloads: tuple[Download, ...] = ()  # of those of which it is known
    container: PlannedContainer | None = None
    environment: EnvironmentDiff
    files: tuple[PlannedFile, ...]
    resume: Resume
    rendezvous: str = "auto"  # host:port of node 0, which MASTER_ADDR and PORT are bound to; auto is a free local port
    job: Job | None = None  # where `cluster` names a scheduler
    output_root: str
    max_restarts: int
    grace_seconds: float
    hang: HangWatch = HangWatch()
    techniques: tuple[TechniqueInForce, ...] = ()  # none are known of a program of the user's own
    foresight: Foresight | None = None  # None where it cannot be told
    notices: tuple[Notice, ...]

    def __str__(self) -> str:
        return str(shown_plan(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # in a notebook
        printer.text(str(self))

    @property
    def blockers(self) -> tuple[Notice, ...]:
        """Why this machine cannot run it; empty where it can."""
        return tuple(notice for notice in self.notices if notice.severity == "blocker")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which recipe keys, or which rule of trainkit's, made each part of a plan.

    A part is a path: ``commands.0.argv.5`` (as in the plan's JSON), ``files.deepspeed.json.zero_optimization.stage``.
    """

    parts: Mapping[str, tuple[str, ...]]  # recipe keys (dotted)
    rules: Mapping[str, str]  # for parts that no recipe key made


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and, beside it, what made each part of it."""

    plan: Plan
    provenance: Provenance


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Builtins only, in the order of the plan's fields; :func:`plan_from_json` gives an equal value back.

    A command is its whole `argv`, with the place of trainkit's wrapper in it (`first`, `count`); without the wrapper it
    is the bare command. `container` is the number of its words in front of the launcher, where there are any. A word
    without run-time variables is a string, one with them a list of its parts.
    """
    topology, environment = plan.topology, plan.environment
    return {
        **_builtins(plan),
        "topology": {
            "device": topology.device,
            "nodes": topology.nodes,  # this and the next follow from the groups, for those who read the JSON
            "world_size": topology.world_size,
            "groups": _builtins(topology.groups),
        },
        "commands": [
            {
                "argv": _builtins(command.argv),
                "wrapper": {
                    "first": len(command.container) + len(command.launcher),
                    "count": len(command.wrapper),
                },
                **({"container": len(command.container)} if command.container else {}),
            }
            for command in plan.commands
        ],
        "environment": {
            **_builtins(environment),
            "set": {name: value.to_json() for name, value in environment.set},
            "added": {name: value.to_json() if value else None for name, value in environment.added},
        },
        "files": {file.path: file.content for file in plan.files},
    }


def plan_from_json(data: object) -> Plan:
    """The inverse of :func:`plan_to_json`.

    Raises MachineError for a plan of another version, and ValueError, KeyError or TypeError for what is not a plan.
    """
    if not isinstance(data, Mapping):
        raise ValueError("a plan is a JSON object")
    version = data.get("plan_version")
    if version != PLAN_VERSION:
        raise MachineError(
            f"this plan is of version {version}, and this trainkit reads version {PLAN_VERSION}",
            hint="make the plan again from its recipe with `trainkit plan`",
        )
    topology, environment = _mapping(data, "topology"), _mapping(data, "environment")
    shaped = {
        **data,
        "topology": {"device": topology["device"], "groups": topology["groups"]},
        "batch": {"global_" if key == "global" else key: value for key, value in _mapping(data, "batch").items()},
        "commands": [_command(command) for command in data["commands"]],
        "environment": {
            **environment,
            "set": [*_mapping(environment, "set").items()],
            "added": [*_mapping({"added": {}, **environment}, "added").items()],
        },
        "files": [{"path": path, "content": content} for path, content in _mapping(data, "files").items()],
    }
    plan: Plan = decode(Plan, shaped)
    return plan


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(data[name], Mapping):
        raise TypeError(f"{name} is not a mapping")
    return data[name]  # type: ignore[no-any-return]


def _builtins(value: Any) -> Any:
    if isinstance(value, Text):
        return value.to_json()
    if is_dataclass(value):
        return {each.name.rstrip("_"): _builtins(getattr(value, each.name)) for each in fields(value)}
    return [_builtins(item) for item in value] if isinstance(value, tuple) else value


def _command(data: Mapping[str, Any]) -> dict[str, Any]:
    argv, inside, first = data["argv"], data.get("container", 0), data["wrapper"]["first"]
    end = first + data["wrapper"]["count"]
    return {
        "container": argv[:inside],
        "launcher": argv[inside:first],
        "wrapper": argv[first:end],
        "program": argv[end:],
    }
