"""How the model is spread over ranks, and how it trains.

The strategy, what it shards, wraps and offloads, the launcher; number format, batch, activation checkpointing, length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from trainkit.frameworks.registry import LAUNCHERS
from trainkit.machine.facts import Gpu
from trainkit.planner.advice.memory import in_words, largest, parameters
from trainkit.planner.dtype import AMPERE
from trainkit.recipe.validation.type_errors import takes_switch
from trainkit.text import counted
from trainkit.wizard.planner_check import UNCONFIGURED, check, needs_strategy, reaches, used_cards
from trainkit.wizard.question import AnswerError, Choice, Question, Settings, Topic, View, offered

OFFLOADS = ("strategy.offload_optimizer", "strategy.offload_param")
NVME = "strategy.nvme_path"
EVERY = "efficiency.gradient_checkpointing.every"
SAVE = "checkpoint.every_steps"
STEPS = 500  # what the quickstart takes: minutes, not hours
FORMATS = {
    "fp32": "single precision throughout",
    "fp16": "16 bits with loss scaling, for cards before Ampere",
    "bf16": "16 bits without loss scaling, for Ampere and later",
    "auto": "bf16 where every card has it, else fp32",
}
# `64/8`, `64/auto`, `/8`, or `64` alone.
_PAIR = re.compile(r"(?P<first>\d*)\s*/\s*(?P<second>\d+|auto)|(?P<only>\d+)")
# `500`, `500/250`, `3 epochs`, `1.5 epochs/1000`.
_LENGTH = re.compile(r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>steps?|epochs?)?(?:\s*/\s*(?P<save>\d+))?")


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
        for name in view.values(key)
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
        default, source = "bf16" if oldest.compute_capability >= AMPERE else "fp16", f"found: {oldest.name}"
    formats = offered(view, "precision.dtype", lambda name: FORMATS.get(name, ""))
    return Question("Which number format does it compute in?", (why,), formats, default, source)


def _batch(view: View) -> Question:
    why = (
        "64/8 means 64 samples per optimizer step, in passes of 8 samples on each process; the passes that are "
        "still missing are accumulated. The first number is for the model's sake, the second for the memory's: "
        "make it as large as fits. 64/auto finds that out at the start, and 64 alone is passes of at most 8."
    )
    text = f"How many samples per step/per pass, on {counted(view.ranks, 'process', 'es')}?"
    each = max(32 // view.ranks, 8) if view.builtin else 8
    default, source = f"{each * view.ranks}/{each}", "a start"
    if view.base.path and (plan := check(view).plan):
        micro = "auto" if plan.batch.search else plan.batch.micro
        default, source = f"{plan.batch.global_}/{micro}", view.base.name
    return Question(text, (why,), (), default, source, "64/8, 64/auto, or 64")


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
