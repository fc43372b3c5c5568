"""How the model is spread over ranks: the strategy, what it shards, wraps and offloads; the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainkit.frameworks.base.fsdp_settings import SHARDING as EVERY_VERSION
from trainkit.frameworks.registry import LAUNCHERS
from trainkit.machine.facts import Gpu
from trainkit.planner.advice.memory import in_words, largest, parameters
from trainkit.text import counted
from trainkit.wizard.planner_check import ENGINES, UNCONFIGURED, needs_strategy, reaches, used_cards
from trainkit.wizard.question import AnswerError, Choice, Question, Settings, Topic, View, offered

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
