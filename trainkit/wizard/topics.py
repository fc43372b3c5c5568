"""What is asked, one row for each question in the order of asking, and how answers that are typed are read."""

from __future__ import annotations

import re
import shlex
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from trainkit.batch import Sides, solve
from trainkit.errors import UsageError
from trainkit.machine.capability import fast_format
from trainkit.machine.facts import Gpu
from trainkit.machine.selection import allocation, is_idle, occupants, restriction, usable
from trainkit.recipe.hub_name import ROWS
from trainkit.recipe.paths import absolute
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.validate import takes_switch
from trainkit.text import GIB, MIB, pluralize
from trainkit.tools.base.detection import program_kind
from trainkit.tools.base.fsdp_settings import SHARDING
from trainkit.tools.base.imported_recipe import ImportContext
from trainkit.tools.builtin.memory import format_parameters, largest, parameters
from trainkit.tools.registry import LAUNCHERS
from trainkit.wizard import fine_tuning
from trainkit.wizard.question import UNCONFIGURED, AnswerOption, Settings, Topic, View, as_recipe, as_schema

Read = tuple[Settings, str]  # what a typed answer sets, and the reason


# What is wanted, and what the processes execute.

FIRST_STEPS = (
    ("try", "a small model from scratch, on text that is here already: nothing is downloaded"),
    ("finetune", "a model of the Hub or of yours goes on learning, from your chats, rows or texts"),
    ("pretrain", "a model from scratch, on text of yours"),
    ("script", "your own program, unedited, in as many processes as you choose"),
)
BUILTIN = {"program.kind": "builtin"}
TRIED = {**BUILTIN, "data.path": "python-stdlib", "precision.dtype": "auto", "batch.micro": 32}


def _wishes(view: View) -> Iterator[AnswerOption]:
    sets: Mapping[str, Settings] = {
        "try": {**TRIED, EVERY: False},
        "finetune": {**BUILTIN, "model.kind": "hf"},
        "pretrain": BUILTIN,
        "script": {"program.kind": "torch"},
    }
    for word, note in FIRST_STEPS:
        yield AnswerOption(word, note, sets[word], note)


def _wish(view: View) -> tuple[str, str]:
    if view.base.path:
        return view.get("program.kind") if not view.builtin else _trained(view), view.base.name
    if view.kind("model") == "hf" or view.kind("data") == "dataset":
        return _trained(view, "finetune"), "what is given"
    given = {key.partition(".")[0] for key in view.given}
    return (
        ("pretrain", "what is given") if given & {"model", "data", "batch", "precision"} else ("try", "no file needed")
    )


def _trained(view: View, otherwise: str = "pretrain") -> str:
    return "finetune" if view.fine_tunes else "pretrain" if view.kind("model") != "gpt" else otherwise


def _read_wish(view: View, text: str) -> Read:
    if text not in view.values("program.kind"):
        raise UsageError(f"{text!r} is none of the choices", hint="type one of the words that are shown")
    return {"program.kind": text}, view.meaning("program.kind", text)


def _command(view: View) -> tuple[str, str]:
    script, module, args = (view.get(f"program.{name}") for name in ("script", "module", "args"))
    target = [script] if script else ["-m", module] if module else []
    written = shlex.join([*target, *(args if isinstance(args, list) else ())]) if target else ""
    return written, view.base.name if written else ""


def _read_command(view: View, text: str) -> Read:
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the quotes do not match: {error}", hint="write the words as in a shell") from error
    # Pasted from a shell line; which interpreter starts it is the plan's to say.
    if argv[:1] in (["python"], ["python3"]):
        argv = argv[1:]
    if not argv:
        raise UsageError("no script is named", hint="write what you would type behind `python`: train.py --lr 0.1")
    if argv == ["-m"]:
        raise UsageError("no module is named behind -m", hint="write -m package.module")
    key, first = ("program.module", 1) if argv[0] == "-m" else ("program.script", 0)
    sets: dict[str, object] = {key: argv[first]}
    if argv[first + 1 :] or view.get("program.args"):
        sets["program.args"] = argv[first + 1 :]
    if not any(each.topic == "program" and each.typed == "script" for each in view.answers):
        return sets, "started unedited"
    found = program_kind(ImportContext(view.files, view.cwd), argv[first:], module=bool(first))
    sets["program.kind"] = found.kind
    return sets, f"started unedited; of kind {found.kind}{f', by {found.by}' if found.by else ''}"


# Where it runs.

# A run of one process; the shipped presets set the same.
ONE = {"nodes.count": 1, "nodes.processes_per_node": 1}
CPU = {"devices.type": "cpu", "devices.select": "none", "data.pin_memory": False}
NO_ACCELERATOR = "no accelerator, even where there is one"
PORT = 29500  # torchrun's and DeepSpeed's default, which a firewall most likely lets through
IDLE_BELOW = int(schema().settings["devices.idle_below"][0].default) * MIB


def describe_gpus(gpus: Sequence[Gpu]) -> str:
    """`2 x NVIDIA A100 (80 GiB), 1 x Tesla T4 (16 GiB)`."""
    kinds = Counter((gpu.name, round(gpu.memory_total / GIB)) for gpu in gpus)
    return ", ".join(
        f"{f'{count} x ' if len(gpus) > 1 else ''}{name} ({size} GiB)" for (name, size), count in kinds.items()
    )


def _machine(view: View) -> Iterator[str]:
    cards, gpus = allocation(view.facts), usable(view.facts.gpus)
    mps = "; Apple MPS" if view.facts.mps else ""
    hidden = len(gpus) - len(cards)
    hides = f" {restriction(view.facts)} hides {hidden} of them." if hidden else ""
    found = (
        f"{describe_gpus(gpus) or 'no GPU that CUDA could use'}{mps}; {pluralize(view.facts.cpu_cores, 'CPU core')}."
    )
    yield f"Found on {view.facts.hostname}: {found}{hides}"
    yield from (f"Just now {occupants(gpu)}." for gpu in cards if not is_idle(gpu, IDLE_BELOW))
    yield from (f"What could not be found out ({name}: {note})" for name, note in view.facts.notes.items())
    yield "Every process uses one GPU. A list such as 2,0 gives the first process GPU 2 and the second GPU 0."


def _places(view: View) -> Iterator[AnswerOption]:
    cards, alone = allocation(view.facts), _alone(view)
    cuda = {"devices.type": "cuda"}
    if view.base.path:
        here = f"{pluralize(view.ranks, 'process', 'es')} on {view.device}"
        yield AnswerOption("same", f"as {view.base.name} has it; here {here}", {}, "")
    if len(cards) > 1:
        sets: Settings = {**cuda, "devices.select": len(cards)}
        yield AnswerOption("all", f"{describe_gpus(cards)}, a process on each", sets, f"all of {describe_gpus(cards)}")
    if cards:
        what = f"one process on {describe_gpus(cards[:1])}"
        yield AnswerOption("one", what, {**cuda, "devices.select": 1, **alone, **ONE}, what)
    if len(cards) > 1:
        sets = {**cuda, "devices.select": "free", **alone, **ONE}
        reason = "a GPU that is idle when the run starts"
        yield AnswerOption("free", "one GPU that is idle when the run starts, whichever it is", sets, reason)
    if _has_mps(view):
        sets = {"devices.type": "mps", **alone, "data.pin_memory": False, **ONE}
        yield AnswerOption("mps", "the GPU of this Mac, one process", sets, "Apple silicon takes one process")
    cores = pluralize(view.facts.cpu_cores, "core")
    yield AnswerOption("cpu", f"the CPU ({cores}), one process", {**CPU, **alone}, NO_ACCELERATOR)
    two = {**CPU, "nodes.processes_per_node": 2}
    yield AnswerOption("cpu-2", "the CPU, two processes: to try a strategy without GPUs", two, NO_ACCELERATOR)
    each = len(cards) or 1
    device = {**cuda, "devices.select": each} if cards else CPU
    alike = f"a process on each of {pluralize(each, 'GPU')}" if cards else "one process on the CPU of each"
    sets = {**device, "nodes.processes_per_node": each, "nodes.count": 2}
    yield AnswerOption("nodes", f"several machines like this one: {alike}", sets, f"machines alike: {alike}")


def _place(view: View) -> tuple[str, str]:
    if view.base.path:
        return "same", view.base.name
    if cards := allocation(view.facts):
        return "all" if len(cards) > 1 else "one", "found here"
    on_cpu = "cpu" if view.get("strategy.kind") == "single" else "cpu-2"
    return "mps" if _has_mps(view) else on_cpu, "found here"


def _has_mps(view: View) -> bool:
    return view.facts.mps and not view.engine  # which needs a process group, and MPS has none


def _alone(view: View) -> Settings:
    """The strategy of one process, unless the program's engine brings one."""
    return {} if view.engine else {"strategy.kind": "single"}


def _read_place(view: View, text: str) -> Read:
    if free := re.fullmatch(r"free (\d+)", text):
        sets = {"devices.type": "cuda", "devices.select": "free", "nodes.processes_per_node": int(free[1])}
        return sets, f"{pluralize(int(free[1]), 'GPU')}, idle when the run starts"
    names = [name.strip() for name in text.strip("[]").split(",") if name.strip()]
    if not names:
        raise UsageError("no GPU is named", hint="write a number of GPUs, or a list such as 0,2")
    if not all(name.isdecimal() or name.startswith(("GPU-", "MIG-")) for name in names):
        raise UsageError(f"{text!r} is not a device", hint="choose a word, or write a number, or a list such as 0,2")
    cards = [int(name) if name.isdecimal() else name for name in names]
    if len(names) > 1 or not names[0].isdecimal() or text.startswith("["):
        alone = _alone(view) if len(cards) == 1 else {}
        return {"devices.type": "cuda", "devices.select": cards, **alone}, "rank i uses the i-th of these"
    count = int(names[0])
    if not 1 <= count <= 4096:
        raise UsageError(f"{count} processes cannot be started", hint="write a number from 1 to 4096")
    alone = {**_alone(view), **ONE} if count == 1 else {}
    if allocation(view.facts):
        return {"devices.type": "cuda", "devices.select": count, **alone}, "a process on each"
    return {**CPU, "nodes.processes_per_node": count, **alone}, NO_ACCELERATOR


def _machines(view: View) -> tuple[str, str]:
    count, address = view.get("nodes.count"), view.get("nodes.rendezvous")
    if count > 1 and address != "auto":
        return f"{count} {address}", view.base.name
    return f"{max(count, 2)} {view.facts.hostname}:{PORT}", "this machine as the first"


def _read_machines(view: View, text: str) -> Read:
    count, _, address = text.partition(" ")
    if not count.isdecimal() or not address.strip():
        raise UsageError(f"{text!r} is not a number with an address", hint=f"write 2 {view.facts.hostname}:{PORT}")
    if int(count) < 2:
        raise UsageError(f"{count} is not several machines", hint="write 2 or more, or go back with <")
    sets: Settings = {"nodes.count": int(count), "nodes.rendezvous": address.strip()}
    return sets, f"start it on each of the {count} machines; they meet at {address.strip()}"


# How the model is spread over the processes, and who starts them.

AUTO = "auto"
OFFLOADS = ("strategy.offload_optimizer", "strategy.offload_param")


def _spreading(view: View) -> Iterator[str]:
    yield (
        f"{pluralize(view.ranks, 'process', 'es')} train one model. ddp is the fastest while the model fits on one "
        "GPU; the others divide it, which takes memory off each GPU and adds traffic between them."
    )
    yield (
        "How large a model may be is counted from the memory of the smallest GPU, less 2 GiB: 18 bytes for each "
        "parameter (mixed precision, AdamW), divided as the strategy divides them. Activations come on top."
    )
    if view.get("program.kind") in UNCONFIGURED:
        yield "A script of kind torch does this by itself: choose what it does."


def _strategies(view: View) -> Iterator[AnswerOption]:
    memory = min((gpu.memory_total for gpu in view.used_cards), default=None)
    if view.builtin and memory is not None:
        note = "the plan takes the quickest that fits, by an estimate of memory and time"
        yield AnswerOption(AUTO, note, {"strategy.kind": AUTO}, note)
    for name in view.values("strategy.kind"):
        if name == AUTO:
            continue
        note = reason = what = view.meaning("strategy.kind", name)
        if memory is not None:
            size = format_parameters(largest(name, view.ranks, memory))
            note = f"up to {size} parameters; {what[:1].lower()}{what[1:]}"
            reason = f"{what}; room for about {size} parameters before activations"
        if name != "single":
            yield AnswerOption(name, note, {"strategy.kind": name}, reason)


def _best_strategy(view: View) -> tuple[str, str]:
    """ddp while the model is known to fit or nothing is known of it, else the first that divides it enough."""
    if view.base.path and view.get("strategy.kind") != "single":
        return as_recipe(view, "strategy.kind")
    if view.engine:
        return view.engine, "the script runs on DeepSpeed's engine"
    sizes = {name: view.get(f"model.{name}") for name in ("kind", "hidden_size", "layers", "vocab_size")}
    size, cards = parameters(sizes) if view.builtin else None, view.used_cards
    if size is None and cards and view.builtin:  # a model of the Hub, say
        return AUTO, "the plan takes the quickest that fits"
    if size is None or not cards:
        return "ddp", "the fastest while the model fits"
    memory = min(gpu.memory_total for gpu in cards)
    # Each next one divides more and so has more traffic.
    fitting = (name for name in ("ddp", "zero2", "fsdp") if largest(name, view.ranks, memory) >= size)
    return next(fitting, "fsdp"), f"the model has {format_parameters(size)} parameters"


def _shardings(view: View) -> Iterator[AnswerOption]:
    key = "strategy.sharding"
    for name in SHARDING:  # of both versions of FSDP
        note = view.meaning(key, name)
        yield AnswerOption(name, note, {key: name, "strategy.offload": False}, f"{name} {note}".strip())
    first = SHARDING[0]
    note = f"{first}, with the shards in CPU memory; slower"
    reason = "shards live in CPU memory: the least device memory, slower steps"
    yield AnswerOption("offload", note, {key: first, "strategy.offload": True}, reason)


def _read_wrapping(view: View, text: str) -> Read:
    if text.replace("_", "").isdecimal():
        return {"strategy.auto_wrap": "size", "strategy.min_params": int(text)}, "units of this size or more"
    names = [name.strip() for name in text.strip("[]").split(",")]
    if not all(name.isidentifier() for name in names):
        hint = "write them with commas between: BertLayer,BertPooler"
        raise UsageError(f"{text!r} is not a list of class names", hint=hint)
    return {"strategy.auto_wrap": "transformer", "strategy.wrap_classes": names}, "the classes of the model's blocks"


def _offloads(view: View) -> Iterator[AnswerOption]:
    """Nothing; the optimizer's state to each place; state and parameters, where the stage divides both."""
    optimizer, parameter = (
        [place for place in view.values(key) if place != "none"] if view.declared(key) else [] for key in OFFLOADS
    )
    nothing = {key: "none" for key in OFFLOADS if view.declared(key)}
    yield AnswerOption("none", "everything stays on the GPUs", nothing, "nothing is offloaded")
    for place in optimizer:
        reason = f"optimizer state lives on {place.upper()}: slower, and room on the GPUs"
        yield AnswerOption(place, f"optimizer state to {place.upper()}", {**nothing, OFFLOADS[0]: place}, reason)
    for place in parameter:
        if place in optimizer:
            what, sets = f"optimizer state and parameters to {place.upper()}", dict.fromkeys(OFFLOADS, place)
            reason = f"optimizer state and parameters live on {place.upper()}: the slowest, the least on the GPUs"
            yield AnswerOption(f"{place}-all", what, sets, reason)


def _offload(view: View) -> tuple[str, str]:
    default = next((each.word for each in _offloads(view) if view.agrees(each.sets)), "none")
    return default, view.base.name if default != "none" else "the fastest"


def _launchers(view: View) -> Iterator[AnswerOption]:
    for choice in as_schema(view, "launcher.kind"):
        note = LAUNCHERS[choice.word].HELP if choice.word in LAUNCHERS else choice.note
        yield AnswerOption(choice.word, note, choice.sets, f"{choice.word} {note}")


# What it trains on.

# By the ending of a file: the kind of data that reads it.
DATA_KINDS: Mapping[str, str] = {".npy": "tokens"}
WILD = frozenset("*?[")
# What `save_to_disk` of Hugging Face's datasets leaves in a folder, and what that kind of data reads.
SAVED = ("dataset_dict.json", "state.json")


def _read_data(view: View, text: str) -> Read:
    if text == "python-stdlib":
        return {"data.kind": "text", "data.path": text}, "source code that every Python brings along"
    # A pattern begins at the first part with a wildcard in it; what is above is the folder.
    parts = text.split("/")
    wild = next((index for index, part in enumerate(parts) if WILD & {*part}), len(parts))
    pattern = "/".join(parts[wild:])
    folder = "/".join(parts[:wild]) or ("/" if text.startswith("/") else ".")
    if ROWS.search(pattern) or any(view.files.exists(absolute(f"{text}/{name}", view.cwd)) for name in SAVED):
        return {"data.kind": "dataset", "data.path": folder}, view.meaning("data.kind", "dataset")
    if pattern:
        return {"data.kind": "text", "data.path": folder, "data.include": pattern}, "every file that fits the pattern"
    kind = next((kind for ending, kind in DATA_KINDS.items() if text.endswith(ending)), "text")
    kind = "dataset" if ROWS.search(text) else kind
    try:
        head = view.files.read(absolute(text, view.cwd))
        if kind == "text" and view.fine_tunes:  # by a tokenizer; bytes are trained on as they are
            getincrementaldecoder("utf-8")().decode(head)
    except IsADirectoryError as error:
        raise UsageError(f"{text} is a folder", hint=f"name files in it: {text.rstrip('/')}/**/*.txt") from error
    except UnicodeDecodeError as error:
        hint = "name rows (.jsonl, .json, .csv, .tsv, .parquet, .arrow), or text in UTF-8"
        raise UsageError(f"{text} is not UTF-8 text (byte {error.start})", hint=hint) from error
    except OSError:
        pass  # the planner says what is wrong with a file
    return {"data.kind": kind, "data.path": text}, view.meaning("data.kind", kind)


def _read_rows(view: View, text: str) -> Read:
    path, *named = re.split(r"\s+(?=[A-Za-z_]+=)", text)
    columns = {"data.columns": dict(each.split("=", 1) for each in named)} if named else {}
    if columns or ROWS.search(path) or fine_tuning.is_of_rows(view, path):
        return fine_tuning.read_rows(view, {"data.kind": "dataset", "data.path": path, **columns})
    return _read_data(view, path)


# How it trains.


def _is_asked(view: View, key: str) -> bool:
    """Whether the program sees a setting that fine-tuning has a default of its own for."""
    return not view.fine_tunes and view.reaches(key)


EVERY = "efficiency.gradient_checkpointing.every"
SAVE = "checkpoint.every_steps"
STEPS = 500  # what the quickstart takes: minutes, not hours
KEEPS_ITS_BATCH = ("hf",)  # DeepSpeed's engine needs sizes in its file, and others are not told
# `64/8`, `64/auto`, `/8`, or `64` alone.
_PAIR = re.compile(r"(?P<first>\d*)\s*/\s*(?P<second>\d+|auto)|(?P<only>\d+)")
# `500`, `500/250`, `3 epochs`, `1.5 epochs/1000`.
_LENGTH = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>steps?|epochs?)?(?:\s*/\s*(?P<save>\d+))?")


def _format(view: View) -> tuple[str, str]:
    if view.base.path:
        return as_recipe(view, "precision.dtype")
    if cards := view.used_cards:  # the oldest decides: all ranks compute in one format
        oldest = min(cards, key=lambda gpu: gpu.compute_capability)
        return fast_format(cards), f"found: {oldest.name}"  # what auto would be
    return "fp32", "the fastest on a CPU" if view.device == "cpu" else "safe everywhere"


def _batches(view: View) -> Iterator[AnswerOption]:
    if view.get("program.kind") in KEEPS_ITS_BATCH:
        yield AnswerOption("own", "the script's own sizes: it is told none", {}, "")


def _batch(view: View) -> tuple[str, str]:
    if view.get("program.kind") in KEEPS_ITS_BATCH:
        return "own", "nothing else is known of the script"
    if view.base.path and (plan := view.outcome.plan) and plan.batch.global_ is not None:
        micro = "auto" if plan.batch.search else plan.batch.micro
        return f"{plan.batch.global_}/{micro}", view.base.name
    each = max(32 // view.ranks, 8) if view.builtin else 8
    return f"{each * view.ranks}/{each}", "a start"


def _read_batch(view: View, text: str) -> Read:
    found = _PAIR.fullmatch(text)
    if not found:
        raise UsageError(f"{text!r} is not a batch", hint="write samples per step/samples per pass: 64/8")
    total, micro = found["only"] or found["first"], found["second"]
    if micro == "auto":
        if not total:
            raise UsageError("nothing says how many samples a step takes", hint="write 64/auto")
        sets: Settings = {"batch.global": int(total), "batch.micro": "auto"}
        return sets, "the largest pass that fits in memory is found at the start"
    if not micro:
        return {"batch.global": int(total)}, f"{total} samples per step over {pluralize(view.ranks, 'process', 'es')}"
    if not total:
        return {"batch.micro": int(micro)}, f"{micro} samples in one pass"
    sets = {"batch.global": int(total), "batch.micro": int(micro)}
    solved = solve(Sides(int(total), int(micro), ranks=view.ranks)) if int(micro) else None
    if not solved or not solved.accumulation:
        return sets, ""
    passes, processes = pluralize(solved.accumulation, "pass", "es"), pluralize(view.ranks, "process", "es")
    return sets, f"{total} = {micro} per pass x {passes} x {processes}"


def _recomputing(view: View) -> Iterator[AnswerOption]:
    reason = "activations are computed again in backward: less memory, about a quarter more time"
    yield AnswerOption("no", "the fastest while the batch fits", {EVERY: False}, "the batch fits")
    yield AnswerOption("yes", "much less memory, about a quarter more time", {EVERY: True}, reason)


def _recomputes(view: View) -> tuple[str, str]:
    setting = view.declared(EVERY)
    default = "yes" if setting and not takes_switch(setting) and view.get(EVERY) else "no"
    return default, view.base.name or "the fastest"


def _length(view: View) -> tuple[str, str]:
    steps, epochs, save = (view.get(key) for key in ("train.steps", "train.epochs", SAVE))
    if steps is not None or epochs is not None:
        return (f"{steps}/{save}" if steps is not None else f"{epochs:g} epochs/{save}"), view.base.name
    if view.fine_tunes:
        return f"{fine_tuning.EPOCHS} epochs", "usual"
    return f"{STEPS}/{STEPS // 2}", "a first try"


def _read_length(view: View, text: str) -> Read:
    found = _LENGTH.fullmatch(text)
    if not found:
        raise UsageError(
            f"{text!r} is not a length", hint="write steps/steps between savings: 500/250, or 3 epochs/1000"
        )
    sets: dict[str, object] = {}
    if (found["unit"] or "").startswith("epoch"):
        count = float(found["count"])
        sets["train.epochs"] = int(count) if count.is_integer() else count
        if view.get("train.steps") is not None:
            sets["train.steps"] = None
    elif "." in found["count"]:
        raise UsageError(f"{found['count']} steps is not a whole number", hint="write whole steps, or 1.5 epochs")
    else:
        sets["train.steps"] = int(found["count"])
    save = int(found["save"]) if found["save"] else None
    if save is not None:
        sets[SAVE] = save
    return sets, f"a run of {text.partition('/')[0].strip()}{'' if found['unit'] else ' steps'}, {_saved(save)}"


def _read_saving(view: View, text: str) -> Read:
    if not text.isdecimal():
        raise UsageError(f"{text!r} is not a number of steps", hint="write a whole number, 0 for never")
    return {SAVE: int(text)}, _saved(int(text))


def _saved(steps: int | None) -> str:
    return f"saved every {pluralize(steps, 'step')}" if steps else "saved at its end"


TOPICS: tuple[Topic, ...] = (
    Topic(
        "program",
        ("program.kind",),
        "What do you want to do?",
        "trainkit's own trainer reads the whole recipe. A script of yours is started unedited, in as many "
        "processes as you choose, and gets what its kind says.",
        open=lambda view: True,
        choices=_wishes,
        default=_wish,
        expected="the kind of your script, where its source does not tell: hf, accelerate, deepspeed or torch",
        read=_read_wish,
        planned=False,  # the first question is shown before planning is even imported
    ),
    Topic(
        "command",
        ("program.script", "program.module"),
        "Which script, with which arguments?",
        "What you would type behind `python`: train.py --epochs 3, or -m package.module. The words reach the "
        "program exactly as they are; quote them as in a shell.",
        open=lambda view: not view.builtin,
        default=_command,
        expected="train.py --lr 0.1",
        read=_read_command,
        explains=("program.script", "program.module", "program.args"),
    ),
    Topic(
        "rows",
        ("data.path", "data.kind", "data.target"),
        "Which file or folder holds your data?",
        "Chats, prompts with answers, labelled texts, sources with targets, or texts, which are recognised by the "
        "names of their columns: rows in .jsonl, .json, .csv, .tsv, .parquet or .arrow, a folder of them, a data set "
        "of the Hub (owner/name), or text files (notes/**/*.txt).",
        open=lambda view: view.fine_tunes and not view.get("data.mix"),
        default=lambda view: (str(view.get("data.path")), view.base.name) if view.base.path else ("", ""),
        expected="chats.jsonl, or rows.csv prompt=question completion=answer where its columns have other names",
        read=_read_rows,
        explains=("data.path",),
    ),
    Topic(
        "model",
        ("model.path",),
        "Which model learns from it?",
        "A folder as save_pretrained writes it, or a name of the Hugging Face Hub, from which it is downloaded once "
        "before the run. What is offered needs no permission there, and fits this machine with adapters.",
        open=lambda view: view.fine_tunes,
        choices=fine_tuning.models,
        default=fine_tuning.model,
        expected="a folder, or a name of the Hub (owner/name)",
        read=fine_tuning.read_model,
    ),
    Topic(
        "template",
        ("data.chat_template",),
        "How does a chat become one text? The tokenizer has no template.",
        "A base model has seen no chats, and any template will do; its export brings it along.",
        open=fine_tuning.needs_template,
        choices=fine_tuning.templates,
        default=fine_tuning.template,
        expected="a file with a Jinja template",
        read=fine_tuning.read_template,
    ),
    Topic(
        "method",
        ("peft.kind",),
        "Are all weights trained, or adapters beside them?",
        "Adapters (LoRA) take far less memory, forget less of what the model knows, and are a small file; all weights "
        "learn more from much data.",
        open=lambda view: view.fine_tunes,
        choices=fine_tuning.methods,
        default=fine_tuning.method,
    ),
    Topic(
        "where",
        ("devices.type", "devices.select", "nodes.processes_per_node", "nodes.count", "nodes.rendezvous"),
        "Where does it run?",
        _machine,
        open=lambda view: True,
        choices=_places,
        default=_place,
        expected="a number of GPUs (without any, of processes), a list (0,2), or free 2",
        read=_read_place,
        explains=("devices.type", "devices.select", "nodes.processes_per_node", "nodes.count"),
    ),
    Topic(
        "machines",
        ("nodes.rendezvous",),
        "How many machines, and where do they meet?",
        "They meet at a port of the first machine, by a name that all of them know. Start the same command on each; a "
        "scheduler's variables or --node-rank say which is which.",
        open=lambda view: int(view.get("nodes.count")) > 1,
        default=_machines,
        expected="4 host:29500",
        read=_read_machines,
        explains=("nodes.count", "nodes.rendezvous"),
    ),
    Topic(
        "strategy",
        ("strategy.kind",),
        "How is the model spread over the processes?",
        _spreading,
        open=lambda view: view.needs_strategy,
        choices=_strategies,
        default=_best_strategy,
    ),
    Topic(
        "sharding",
        ("strategy.sharding", "strategy.offload"),
        "What is sharded, and where is it kept?",
        choices=_shardings,
        default=lambda view: (
            ("offload", view.base.name) if view.get("strategy.offload") else as_recipe(view, "strategy.sharding")
        ),
    ),
    Topic(
        "wrapping",
        ("strategy.auto_wrap", "strategy.wrap_classes"),
        "Which modules are units?",
        "A unit is gathered, used and freed as a whole: blocks are a good size. Type class names (BertLayer, "
        "LlamaDecoderLayer) for a model whose blocks are not known, or a number for the smallest unit.",
        default=lambda view: (
            ",".join(view.get("strategy.wrap_classes")) or str(view.get("strategy.auto_wrap")),
            view.base.name,
        ),
        open=lambda view: _is_asked(view, "strategy.auto_wrap"),  # of transformers' models the blocks are known
        expected="class names, or a number",
        read=_read_wrapping,
        explains=("strategy.auto_wrap", "strategy.wrap_classes", "strategy.min_params"),
    ),
    Topic(
        "offload",
        OFFLOADS,
        "What leaves the GPUs?",
        "State that lives outside the GPU makes room for a larger model; each step then moves it. First the "
        "optimizer's, then the parameters.",
        choices=_offloads,
        default=_offload,
    ),
    Topic(
        "nvme",
        ("strategy.nvme_path",),
        "In which folder on a fast disk?",
        open=lambda view: "nvme" in map(view.get, OFFLOADS),
        default=lambda view: (str(view.get("strategy.nvme_path") or ""), view.base.name),
        expected="/local_nvme",
        read=lambda view, text: ({"strategy.nvme_path": text}, "a folder on a local NVMe disk"),
    ),
    Topic(
        "launcher",
        ("launcher.kind",),
        "Who starts the processes?",
        "auto is right unless a program or a habit requires another; the same processes start under each.",
        # On several machines torchrun's agents start the processes, whichever launcher is named.
        open=lambda view: view.ranks > 1 and int(view.get("nodes.count")) == 1,
        choices=_launchers,
        default=lambda view: as_recipe(view, "launcher.kind", "nothing requires another"),
    ),
    Topic(
        "data",
        ("data.path", "data.kind", "data.target"),
        "What text does it train on?",
        "A text file, a folder with a pattern (corpus/**/*.txt), rows in JSON lines (*.jsonl), a folder of rows "
        "(rows/*.parquet), or token ids (*.npy). python-stdlib is 12 MB of source code that every Python brings "
        "along: good for a first try.",
        open=lambda view: (
            view.builtin
            and not view.fine_tunes
            and view.get("data.kind") == "text"
            and not isinstance(view.get("data.path"), list)
        ),
        default=lambda view: as_recipe(view, "data.path", "always there"),
        expected="corpus.txt",
        read=_read_data,
        explains=("data.path", "data.include"),
    ),
    Topic(
        "precision",
        ("precision.dtype",),
        "Which number format does it compute in?",
        "The format of forward and backward. 16 bits are about twice as fast on GPUs that have units for them; "
        "weights and the optimizer's state stay in fp32. bf16 needs compute capability 8.0 (Ampere) or newer.",
        open=lambda view: _is_asked(view, "precision.dtype"),
        default=_format,
    ),
    Topic(
        "batch",
        ("batch.micro", "batch.global", "batch.accumulation"),
        lambda view: f"How many samples per step/per pass, on {pluralize(view.ranks, 'process', 'es')}?",
        "64/8 means 64 samples per optimizer step, in passes of 8 samples on each process; the passes that are "
        "still missing are accumulated. The first number is for the model's sake, the second for the memory's: "
        "make it as large as fits. 64/auto finds that out at the start, and 64 alone is passes of at most 8.",
        open=lambda view: _is_asked(view, "batch.micro"),
        choices=_batches,
        default=_batch,
        expected="64/8, 64/auto, or 64",
        read=_read_batch,
        explains=("batch.global", "batch.micro"),
    ),
    Topic(
        "checkpointing",
        (EVERY,),
        "Is memory so tight that activations are computed twice?",
        "A batch that fits needs no technique that saves memory. Where it does not fit, this is the first one to try.",
        open=lambda view: _is_asked(view, EVERY),
        choices=_recomputing,
        default=_recomputes,
        explains=(EVERY, "efficiency.gradient_checkpointing.selective"),
    ),
    Topic(
        "length",
        ("train.steps", "train.epochs"),
        lambda view: f"How long does it train{'' if view.fine_tunes else ', and how often is it saved (steps)'}?",
        "500/250 trains 500 steps and saves after 250 and at the end; 3 epochs/1000 counts passes over the data. "
        "Without the slash it is saved at the end alone.",
        open=lambda view: view.builtin,
        default=_length,
        expected="500/250, or 3 epochs/1000",
        read=_read_length,
        explains=("train.steps", "train.epochs", SAVE),
    ),
    Topic(
        "output",
        ("output.root",),
        "In which folder are its runs saved?",
        open=lambda view: view.fine_tunes,
        default=fine_tuning.output,
        expected="runs",
        read=fine_tuning.read_output,
    ),
    Topic(
        "saving",
        (SAVE,),
        "Save after how many steps?",
        "0 leaves it to the program.",
        open=lambda view: not view.builtin and view.reaches(SAVE),
        default=lambda view: as_recipe(view, SAVE) if view.base.path else (str(STEPS), "usual"),
        expected="500, or 0",
        read=_read_saving,
        explains=(SAVE, "checkpoint.keep", "checkpoint.resume"),
    ),
)
