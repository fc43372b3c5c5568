"""What the processes execute: trainkit's own trainer, or a script with its command line."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainkit.machine.capability import fast_format
from trainkit.machine.facts import Gpu
from trainkit.machine.selection import allocation, is_idle, occupants, restriction, usable
from trainkit.recipe.paths import absolute
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.validate import takes_switch
from trainkit.text import GIB, MIB, counted
from trainkit.tools.base.fsdp_settings import SHARDING as EVERY_VERSION
from trainkit.tools.builtin.memory import in_words, largest, parameters
from trainkit.tools.registry import LAUNCHERS
from trainkit.wizard.planner_check import ENGINES, UNCONFIGURED, check, needs_strategy, reaches, used_cards, validated
from trainkit.wizard.question import AnswerError, Choice, Question, Settings, Topic, View, offered


def _kinds(view: View) -> Question:
    why = (
        "trainkit's own trainer reads the whole recipe. A script of yours is started unedited, in as many "
        "processes as you choose, and gets what its kind says."
    )
    kinds = offered(view, "program.kind", lambda kind: view.meaning("program.kind", kind))
    default, source = str(view.get("program.kind")), view.base.name or "no script needed"
    return Question("What do the processes execute?", (why,), kinds, default, source)


def _command(view: View) -> Question:
    script, module, args = (view.get(f"program.{name}") for name in ("script", "module", "args"))
    target = [script] if script else ["-m", module] if module else []
    written = shlex.join([*target, *(args if isinstance(args, list) else ())]) if target else ""
    why = (
        "What you would type behind `python`: train.py --epochs 3, or -m package.module. The words reach the "
        "program exactly as they are; quote them as in a shell."
    )
    source = view.base.name if written else ""
    return Question("Which script, with which arguments?", (why,), (), written, source, "train.py --lr 0.1")


def _read_command(view: View, text: str) -> tuple[Settings, str]:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise AnswerError(f"the quotes do not match: {error}", "write the words as in a shell") from error
    # Pasted from a shell line; which interpreter starts it is the plan's to say.
    if argv[:1] in (["python"], ["python3"]):
        argv = argv[1:]
    if not argv:
        raise AnswerError("no script is named", "write what you would type behind `python`: train.py --lr 0.1")
    if argv == ["-m"]:
        raise AnswerError("no module is named behind -m", "write -m package.module")
    key, first = ("program.module", 1) if argv[0] == "-m" else ("program.script", 0)
    sets: dict[str, object] = {key: argv[first]}
    if argv[first + 1 :] or view.get("program.args"):
        sets["program.args"] = argv[first + 1 :]
    return sets, "started unedited"


PROGRAM = Topic("program", ("program.kind",), lambda view: True, _kinds, planned=False)
COMMAND_KEYS = ("program.script", "program.module", "program.args")
COMMAND = Topic("command", COMMAND_KEYS[:-1], lambda view: not view.builtin, _command, _read_command, COMMAND_KEYS)


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


OFFLOADS = ("strategy.offload_optimizer", "strategy.offload_param")
NVME = "strategy.nvme_path"


def _strategy(view: View) -> Question:
    cards = used_cards(view) if view.device == "cuda" else ()
    why: tuple[str, ...] = (
        (
            f"{counted(view.ranks, 'process', 'es')} train one model. ddp is the fastest while the model fits on one "
            "card; the others divide it, which takes memory off each card and adds traffic between them."
        ),
        (
            "How large a model may be is counted from the memory of the smallest card, less 2 GiB: 18 bytes for each "
            "parameter (mixed precision, AdamW), divided as the strategy divides them. Activations come on top."
        ),
    )
    if view.get("program.kind") in UNCONFIGURED:
        why += ("A script of kind torch does this by itself: choose what it does.",)
    choices = []
    for name in view.values("strategy.kind"):
        note = reason = what = view.meaning("strategy.kind", name)
        if cards:
            size = in_words(largest(name, view.ranks, min(gpu.memory_total for gpu in cards)))
            note = f"up to {size} parameters; {what[:1].lower()}{what[1:]}"
            reason = f"{what}; room for about {size} parameters before activations"
        choices.append(Choice(name, note, {"strategy.kind": name}, reason))
    spread = tuple(choice for choice in choices if choice.word != "single")
    return Question("How is the model spread over the processes?", why, spread, *_best(view, cards))


def _best(view: View, cards: Sequence[Gpu]) -> tuple[str, str]:
    """ddp while the model is known to fit or nothing is known of it, else the first that divides it enough."""
    if view.base.path and view.get("strategy.kind") != "single":
        return str(view.get("strategy.kind")), view.base.name
    if (engine := ENGINES.get(str(view.get("program.kind")))) is not None:
        return engine, "the script runs on DeepSpeed's engine"
    sizes = {name: view.get(f"model.{name}") for name in ("kind", "hidden_size", "layers", "vocab_size")}
    size = parameters(sizes) if view.builtin else None
    if size is None or not cards:
        return "ddp", "the fastest while the model fits"
    memory = min(gpu.memory_total for gpu in cards)
    # Each next one divides more and so has more traffic.
    order = ("ddp", "zero2", "fsdp")
    fitting = (name for name in order if largest(name, view.ranks, memory) >= size)
    return next(fitting, "fsdp"), f"the model has {in_words(size)} parameters"


def _sharding(view: View) -> Question:
    key = SHARDING.keys[0]
    choices = [
        Choice(name, note, {key: name, "strategy.offload": False}, f"{name} {note}".strip())
        for name in EVERY_VERSION
        for note in [view.meaning(key, name)]
    ]
    first = choices[0].word
    note = f"{first}, with the shards in CPU memory; slower"
    reason = "shards live in CPU memory: the least device memory, slower steps"
    choices.append(Choice("offload", note, {key: first, "strategy.offload": True}, reason))
    default = "offload" if view.get("strategy.offload") else str(view.get(key))
    return Question("What is sharded, and where is it kept?", (), tuple(choices), default, view.base.name)


def _wrapping(view: View) -> Question:
    floor = view.get("strategy.min_params")
    notes = {
        "transformer": "each transformer block, by the model's own class",
        "none": "the whole model at once",
        "size": f"modules of {floor:,} parameters or more" if isinstance(floor, int) else "",
    }
    why = (
        "A unit is gathered, used and freed as a whole: blocks are a good size. Type class names (BertLayer, "
        "LlamaDecoderLayer) for a model whose blocks are not known, or a number for the smallest unit."
    )
    classes = view.get("strategy.wrap_classes")
    default = ",".join(classes) if classes else str(view.get("strategy.auto_wrap"))
    choices = offered(view, "strategy.auto_wrap", lambda name: notes.get(name, ""))
    expected = "class names, or a number"
    return Question("Which modules are units?", (why,), choices, default, view.base.name, expected)


def _read_wrapping(view: View, text: str) -> tuple[Settings, str]:
    if text.replace("_", "").isdecimal():
        return {"strategy.auto_wrap": "size", "strategy.min_params": int(text)}, "units of this size or more"
    names = [name.strip() for name in text.strip("[]").split(",")]
    if not all(name.isidentifier() for name in names):
        hint = "write them with commas between: BertLayer,BertPooler"
        raise AnswerError(f"{text!r} is not a list of class names", hint)
    return {"strategy.auto_wrap": "transformer", "strategy.wrap_classes": names}, "the classes of the model's blocks"


def _offload(view: View) -> Question:
    choices = tuple(_offloads(view))
    why = (
        "State that lives outside the card makes room for a larger model; each step then moves it. First the "
        "optimizer's, then the parameters."
    )
    agreeing = (each.word for each in choices if all(view.get(key) == value for key, value in each.sets.items()))
    default = next(agreeing, "none")
    source = view.base.name if default != "none" else "the fastest"
    return Question("What leaves the cards?", (why,), choices, default, source)


def _offloads(view: View) -> Iterator[Choice]:
    """Nothing; the optimizer's state to each place; state and parameters, where the stage divides both."""
    optimizer, parameter = (
        [place for place in view.values(key) if place != "none"] if view.declared(key) else [] for key in OFFLOADS
    )
    nothing = {key: "none" for key in OFFLOADS if view.declared(key)}
    yield Choice("none", "everything stays on the cards", nothing, "nothing is offloaded")
    for place in optimizer:
        reason = f"optimizer state lives on {place.upper()}: slower, and room on the cards"
        yield Choice(place, f"optimizer state to {place.upper()}", {**nothing, OFFLOADS[0]: place}, reason)
    for place in parameter:
        if place in optimizer:
            what, sets = f"optimizer state and parameters to {place.upper()}", dict.fromkeys(OFFLOADS, place)
            reason = f"optimizer state and parameters live on {place.upper()}: the slowest, the least on the cards"
            yield Choice(f"{place}-all", what, sets, reason)


def _nvme(view: View) -> Question:
    why = "A folder on a local NVMe disk, the same path on every machine."
    default = str(view.get(NVME) or "")
    return Question("In which folder on a fast disk?", (why,), (), default, view.base.name, "/local_nvme")


def _launcher(view: View) -> Question:
    key = "launcher.kind"
    notes = {
        name: view.meaning(key, name) or (LAUNCHERS[name].HELP if name in LAUNCHERS else "")
        for name in view.values(key)
    }
    choices = tuple(Choice(name, note, {key: name}, f"{name} {note}".strip()) for name, note in notes.items())
    why = "auto is right unless a program or a habit requires another; the same processes start under each."
    default, source = str(view.get(key)), view.base.name or "nothing requires another"
    return Question("Who starts the processes?", (why,), choices, default, source)


def _has(key: str) -> Callable[[View], bool]:
    """Whether the strategy has the setting and the program would see it."""
    return lambda view: view.declared(key) is not None and reaches(view, key)


STRATEGY = Topic("strategy", ("strategy.kind",), needs_strategy, _strategy)
SHARDING = Topic("sharding", ("strategy.sharding", "strategy.offload"), _has("strategy.sharding"), _sharding)
WRAPPED = ("strategy.auto_wrap", "strategy.wrap_classes", "strategy.min_params")
WRAPPING = Topic("wrapping", WRAPPED[:2], _has(WRAPPED[0]), _wrapping, _read_wrapping, WRAPPED)
OFFLOAD = Topic("offload", OFFLOADS, _has(OFFLOADS[0]), _offload)
NVME_PATH = Topic(
    "nvme",
    (NVME,),
    lambda view: "nvme" in map(view.get, OFFLOADS),
    _nvme,
    lambda view, text: ({NVME: text}, "a folder on a local NVMe disk"),
)
# On several machines torchrun's agents start the processes, whichever launcher is named.
LAUNCHER = Topic(
    "launcher", ("launcher.kind",), lambda view: view.ranks > 1 and int(view.get("nodes.count")) == 1, _launcher
)


# By the ending of a file: the kind of data that reads it.
DATA_KINDS: Mapping[str, str] = {".jsonl": "jsonl", ".npy": "tokens"}
WILD = frozenset("*?[")
# What `save_to_disk` of Hugging Face's datasets leaves in a folder, and what else that kind of data reads.
SAVED = ("dataset_dict.json", "state.json")
ROWS = (".parquet", ".jsonl")


def _data(view: View) -> Question:
    why = (
        "A text file, a folder with a pattern (corpus/**/*.txt), rows in JSON lines (*.jsonl), a folder of rows "
        "(rows/*.parquet), or token ids (*.npy). python-stdlib is 12 MB of source code that every Python brings "
        "along: good for a first try."
    )
    source = view.base.name or "always there"
    return Question("What text does it train on?", (why,), (), str(view.get("data.path")), source, "corpus.txt")


def _read_data(view: View, text: str) -> tuple[Settings, str]:
    if text == "python-stdlib":
        return {"data.kind": "text", "data.path": text}, "source code that every Python brings along"
    # A pattern begins at the first part with a wild card in it; what is above is the folder.
    parts = text.split("/")
    wild = next((index for index, part in enumerate(parts) if WILD & {*part}), len(parts))
    pattern = "/".join(parts[wild:])
    folder = "/".join(parts[:wild]) or ("/" if text.startswith("/") else ".")
    if pattern.endswith(ROWS) or any(view.files.exists(absolute(f"{text}/{name}", view.cwd)) for name in SAVED):
        return {"data.kind": "dataset", "data.path": folder}, view.meaning("data.kind", "dataset")
    if pattern:
        return {"data.kind": "text", "data.path": folder, "data.include": pattern}, "every file that fits the pattern"
    try:
        view.files.read(absolute(text, view.cwd))
    except IsADirectoryError as error:
        raise AnswerError(f"{text} is a folder", f"name files in it: {text.rstrip('/')}/**/*.txt") from error
    except OSError:
        pass  # the planner says what is wrong with a file
    kind = next((kind for ending, kind in DATA_KINDS.items() if text.endswith(ending)), "text")
    return {"data.kind": kind, "data.path": text}, view.meaning("data.kind", kind)


def _is_text(view: View) -> bool:
    return view.builtin and view.get("data.kind") == "text" and not isinstance(view.get("data.path"), list)


DATA = Topic(
    "data", ("data.path", "data.kind", "data.target"), _is_text, _data, _read_data, ("data.path", "data.include")
)


EVERY = "efficiency.gradient_checkpointing.every"
SAVE = "checkpoint.every_steps"
STEPS = 500  # what the quickstart takes: minutes, not hours
FORMATS = {
    "fp32": "single precision throughout",
    "fp16": "16 bits with loss scaling, for cards with tensor cores before Ampere",
    "bf16": "16 bits without loss scaling, for Ampere and later",
    "auto": "bf16 where every card has it, else fp16 where every card has tensor cores, else fp32",
}
# `64/8`, `64/auto`, `/8`, or `64` alone.
KEEPS_ITS_BATCH = ("hf",)  # DeepSpeed's engine needs sizes in its file, and others are not told
_PAIR = re.compile(r"(?P<first>\d*)\s*/\s*(?P<second>\d+|auto)|(?P<only>\d+)")
# `500`, `500/250`, `3 epochs`, `1.5 epochs/1000`.
_LENGTH = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>steps?|epochs?)?(?:\s*/\s*(?P<save>\d+))?")


def _precision(view: View) -> Question:
    why = (
        "The format of forward and backward. 16 bits are about twice as fast on cards that have units for them; "
        "weights and the optimizer's state stay in fp32. bf16 needs compute capability 8.0 (Ampere) or newer."
    )
    cards = used_cards(view) if view.device == "cuda" and not view.base.path else ()
    default, source = "fp32", "the fastest on a CPU" if view.device == "cpu" else "safe everywhere"
    if view.base.path:
        default, source = str(view.get("precision.dtype")), view.base.name
    elif cards:  # the oldest decides: all ranks compute in one format
        oldest = min(cards, key=lambda gpu: gpu.compute_capability)
        default, source = fast_format(cards), f"found: {oldest.name}"  # what auto would be
    formats = offered(view, "precision.dtype", lambda name: FORMATS.get(name, ""))
    return Question("Which number format does it compute in?", (why,), formats, default, source)


def _batch(view: View) -> Question:
    why = (
        "64/8 means 64 samples per optimizer step, in passes of 8 samples on each process; the passes that are "
        "still missing are accumulated. The first number is for the model's sake, the second for the memory's: "
        "make it as large as fits. 64/auto finds that out at the start, and 64 alone is passes of at most 8."
    )
    text = f"How many samples per step/per pass, on {counted(view.ranks, 'process', 'es')}?"
    expected = "64/8, 64/auto, or 64"
    if view.get("program.kind") in KEEPS_ITS_BATCH:
        own = Choice("own", "the script's own sizes: it is told none", {}, "")
        return Question(text, (why,), (own,), own.word, "nothing else is known of the script", expected)
    each = max(32 // view.ranks, 8) if view.builtin else 8
    default, source = f"{each * view.ranks}/{each}", "a start"
    if view.base.path and (plan := check(view).plan) and plan.batch.global_ is not None:
        micro = "auto" if plan.batch.search else plan.batch.micro
        default, source = f"{plan.batch.global_}/{micro}", view.base.name
    return Question(text, (why,), (), default, source, expected)


def _read_batch(view: View, text: str) -> tuple[Settings, str]:
    found = _PAIR.fullmatch(text)
    if not found:
        raise AnswerError(f"{text!r} is not a batch", "write samples per step/samples per pass: 64/8")
    total, micro = found["only"] or found["first"], found["second"]
    if micro == "auto":
        if not total:
            raise AnswerError("nothing says how many samples a step takes", "write 64/auto")
        sets: Settings = {"batch.global": int(total), "batch.micro": "auto"}
        return sets, "the largest pass that fits in memory is found at the start"
    if not micro:
        return {"batch.global": int(total)}, f"{total} samples per step over {counted(view.ranks, 'process', 'es')}"
    if not total:
        return {"batch.micro": int(micro)}, f"{micro} samples in one pass"
    passes, rest = divmod(int(total), max(int(micro) * view.ranks, 1))
    factors = f"{micro} per pass x {counted(passes, 'pass', 'es')} x {counted(view.ranks, 'process', 'es')}"
    product = f"{total} = {factors}" if rest == 0 and passes > 0 else ""
    return {"batch.global": int(total), "batch.micro": int(micro)}, product


def _checkpointing(view: View) -> Question:
    why = "A batch that fits needs no technique that saves memory. Where it does not fit, this is the first one to try."
    reason = "activations are computed again in backward: less memory, about a quarter more time"
    choices = (
        Choice("no", "the fastest while the batch fits", {EVERY: False}, "the batch fits"),
        Choice("yes", "much less memory, about a quarter more time", {EVERY: True}, reason),
    )
    setting = view.declared(EVERY)
    default = "yes" if setting and not takes_switch(setting) and view.get(EVERY) else "no"
    text, source = "Is memory so tight that activations are computed twice?", view.base.name or "the fastest"
    return Question(text, (why,), choices, default, source)


def _length(view: View) -> Question:
    why = (
        "500/250 trains 500 steps and saves after 250 and at the end; 3 epochs/1000 counts passes over the data. 0 "
        "behind the slash saves nothing."
    )
    steps, epochs, save = (view.get(key) for key in ("train.steps", "train.epochs", SAVE))
    if steps is not None or epochs is not None:
        default, source = (f"{steps}/{save}" if steps is not None else f"{epochs:g} epochs/{save}"), view.base.name
    else:
        default, source = f"{STEPS}/{STEPS // 2}", "a first try"
    text = "How long does it train, and how often is it saved (steps)?"
    return Question(text, (why,), (), default, source, "500/250, or 3 epochs/1000")


def _read_length(view: View, text: str) -> tuple[Settings, str]:
    found = _LENGTH.fullmatch(text)
    if not found:
        raise AnswerError(f"{text!r} is not a length", "write steps/steps between savings: 500/250, or 3 epochs/1000")
    sets: dict[str, object] = {}
    if (found["unit"] or "").startswith("epoch"):
        sets["train.epochs"] = float(found["count"])
        if view.get("train.steps") is not None:
            sets["train.steps"] = None
    elif "." in found["count"]:
        raise AnswerError(f"{found['count']} steps is not a whole number", "write whole steps, or 1.5 epochs")
    else:
        sets["train.steps"] = int(found["count"])
    save = int(found["save"]) if found["save"] else None
    if save is not None:
        sets[SAVE] = save
    return sets, f"a run of {text.partition('/')[0].strip()}{'' if found['unit'] else ' steps'}, {_saved(save)}"


def _saving(view: View) -> Question:
    why = ("0 leaves it to the program.",)
    default, source = str(view.get(SAVE)) if view.base.path else str(STEPS), view.base.name or "usual"
    return Question("Save after how many steps?", why, (), default, source, "500, or 0")


def _read_saving(view: View, text: str) -> tuple[Settings, str]:
    if not text.isdecimal():
        raise AnswerError(f"{text!r} is not a number of steps", "write a whole number, 0 for never")
    return {SAVE: int(text)}, _saved(int(text))


def _saved(steps: int | None) -> str:
    return f"saved every {counted(steps, 'step')}" if steps else "nothing is saved before the end"


PRECISION = Topic("precision", ("precision.dtype",), lambda v: reaches(v, "precision.dtype"), _precision)
BATCHES = ("batch.global", "batch.micro", "batch.accumulation")
BATCH = Topic("batch", BATCHES, lambda v: reaches(v, "batch.micro"), _batch, _read_batch, BATCHES[:2])
SELECTIVE = "efficiency.gradient_checkpointing.selective"
CHECKPOINTING = Topic(
    "checkpointing", (EVERY,), lambda v: reaches(v, EVERY), _checkpointing, explains=(EVERY, SELECTIVE)
)
LENGTHS = ("train.steps", "train.epochs")
LENGTH = Topic("length", LENGTHS, lambda v: v.builtin, _length, _read_length, (*LENGTHS, SAVE))
SAVES = (SAVE, "checkpoint.keep", "checkpoint.resume")
SAVING = Topic("saving", (SAVE,), lambda v: not v.builtin and reaches(v, SAVE), _saving, _read_saving, SAVES)


TOPICS: tuple[Topic, ...] = (
    PROGRAM, COMMAND, WHERE, MACHINES, STRATEGY, SHARDING, WRAPPING, OFFLOAD, NVME_PATH, LAUNCHER, DATA, PRECISION,
    BATCH, CHECKPOINTING, LENGTH, SAVING,
)  # fmt: skip
