"""How the model is spread over ranks: the strategy, what it shards, wraps and offloads, and the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainkit.frameworks.registry import LAUNCHERS
from trainkit.machine.facts import Gpu
from trainkit.planner.advice.model_states import in_words, largest, parameters
from trainkit.recipe.schema.fields import schema
from trainkit.text import counted
from trainkit.wizard.question import Choice, MisreadError, Question, Settings, Topic
from trainkit.wizard.reach import DEAF, reaches
from trainkit.wizard.trial import cards_of, needs_strategy
from trainkit.wizard.view import View
from trainkit.wizard.weigh import put, weighed
from trainkit.wizard.words import declared, explained, meaning, values_of

OFFLOADS = ("strategy.offload_optimizer", "strategy.offload_param")
NVME = "strategy.nvme_path"


def _strategy(view: View) -> Question:
    names = [name for name in values_of("strategy.kind") if name != "single"]
    cards = cards_of(view) if view.device == "cuda" else ()
    offered = weighed(view, STRATEGY.keys, [_spread(view, name, cards) for name in names])
    why = (
        (
            f"{counted(view.ranks, 'process', 'es')} train one model. ddp is the fastest while the model fits on one "
            "card; the others divide it, which takes memory off each card and adds traffic between them."
        ),
        (
            "How large a model may be is counted from the memory of the smallest card, less 2 GiB: 18 bytes for each "
            "parameter (mixed precision, AdamW), divided as the strategy divides them. Activations come on top."
        ),
        *(
            ["A script of kind torch does this by itself: say what it does."]
            if view.get("program.kind") in DEAF
            else []
        ),
    )
    return put(
        "strategy", "How is the model spread over the processes?", why=why, offered=offered, wish=_best(view, cards)
    )


def _spread(view: View, name: str, cards: Sequence[Gpu]) -> Choice:
    what, room = meaning("strategy.kind", name), _room(view, name, cards)
    note = f"up to {room} parameters; {what[:1].lower()}{what[1:]}" if room else what
    reason = f"{what}; room for about {room} parameters before activations" if room else what
    return Choice(name, note, {"strategy.kind": name}, reason)


def _room(view: View, name: str, cards: Sequence[Gpu]) -> str:
    """The largest model, in words; empty where no card tells."""
    if not cards:
        return ""
    return in_words(largest(name, view.ranks, min(gpu.memory_total for gpu in cards)))


def _best(view: View, cards: Sequence[Gpu]) -> tuple[str, str]:
    """ddp while the model is known to fit or nothing is known of it, else the first that divides it enough."""
    if view.base.path and view.get("strategy.kind") != "single":
        return str(view.get("strategy.kind")), view.base.name
    sizes = {name: view.get(f"model.{name}") for name in ("kind", "hidden_size", "layers", "vocab_size")}
    size = parameters(sizes) if view.builtin else None
    if size is None or not cards:
        return "ddp", "the fastest while the model fits"
    memory = min(gpu.memory_total for gpu in cards)
    order = ("ddp", "zero2", "fsdp")
    fitting = (name for name in order if largest(name, view.ranks, memory) >= size)
    return next(fitting, "fsdp"), f"the model has {in_words(size)} parameters"


def _sharding(view: View) -> Question:
    names = values_of("strategy.sharding", "fsdp")
    plain = [_shard(name, offload=False) for name in names]
    offered = weighed(view, SHARDING.keys, [*plain, _shard(names[0], offload=True)])
    why = explained("strategy.sharding", "strategy.offload", view=view)
    default = "offload" if view.get("strategy.offload") else str(view.get("strategy.sharding"))
    return put(
        "sharding", "What is sharded, and where is it kept?", why=why, offered=offered, wish=(default, view.base.name)
    )


def _shard(name: str, *, offload: bool) -> Choice:
    sets = {"strategy.sharding": name, "strategy.offload": offload}
    if offload:
        note = f"{name}, with the shards in CPU memory; slower"
        return Choice("offload", note, sets, "shards live in CPU memory: the least device memory, slower steps")
    note = meaning("strategy.sharding", name, "fsdp")
    return Choice(name, note, sets, f"{name} {note}".strip())


def _wrapping(view: View) -> Question:
    names = values_of("strategy.auto_wrap", "fsdp")
    notes = {"transformer": "each transformer block, by the model's own class", "none": "the whole model at once"}
    floor = view.get("strategy.min_params")
    notes["size"] = f"modules of {floor:,} parameters or more" if isinstance(floor, int) else ""
    choices = [Choice(name, notes.get(name, ""), {"strategy.auto_wrap": name}, notes.get(name, "")) for name in names]
    why = (
        (
            "A unit is gathered, used and freed as a whole: blocks are a good size. Type class names (BertLayer, "
            "LlamaDecoderLayer) for a model whose blocks are not known, or a number for the smallest unit."
        ),
        *explained("strategy.auto_wrap", "strategy.wrap_classes", "strategy.min_params", view=view),
    )
    classes = view.get("strategy.wrap_classes")
    default = ",".join(classes) if classes else str(view.get("strategy.auto_wrap"))
    wish = (default, view.base.name)
    offered = weighed(view, WRAPPING.keys, choices)
    wanted = "class names, or a number"
    return put("wrapping", "Which modules are units?", why=why, offered=offered, wish=wish, wanted=wanted)


def _read_wrapping(view: View, text: str) -> tuple[Settings, str]:
    if text.replace("_", "").isdecimal():
        return {"strategy.auto_wrap": "size", "strategy.min_params": int(text)}, "units of this size or more"
    names = [name.strip() for name in text.strip("[]").split(",")]
    if not all(name.isidentifier() for name in names):
        raise MisreadError(
            f"{text!r} is no list of class names", "write them with commas between: BertLayer,BertPooler"
        )
    return {"strategy.auto_wrap": "transformer", "strategy.wrap_classes": names}, "the classes of the model's blocks"


def _offload(view: View) -> Question:
    offered = weighed(view, OFFLOAD.keys, _offloads(view.kind("strategy")))
    why = (
        (
            "State that lives outside the card makes room for a larger model; each step then moves it. First the "
            "optimizer's, then the parameters."
        ),
        *explained(*OFFLOADS, view=view),
    )
    found = next((each.word for each in offered if all(view.get(key) == value for key, value in each.sets.items())), "")
    source = view.base.name if found not in ("", "none") else "the fastest"
    return put("offload", "What leaves the cards?", why=why, offered=offered, wish=(found or "none", source))


def _offloads(kind: str) -> Iterator[Choice]:
    """Nothing; the optimizer's state to each place; state and parameters, where the stage divides both."""
    optimizer, parameter = (declared(key, kind) for key in OFFLOADS)
    nothing = {key: "none" for key, found in zip(OFFLOADS, (optimizer, parameter), strict=True) if found}
    yield Choice("none", "everything stays on the cards", nothing, "nothing is offloaded")
    for place in values_of(OFFLOADS[0], kind):
        if place != "none":
            reason = f"optimizer state lives on {place.upper()}: slower, and room on the cards"
            yield Choice(place, f"optimizer state to {place.upper()}", {**nothing, OFFLOADS[0]: place}, reason)
    for place in values_of(OFFLOADS[1], kind) if parameter else ():
        if place != "none" and place in values_of(OFFLOADS[0], kind):
            reason = f"optimizer state and parameters live on {place.upper()}: the slowest, the least on the cards"
            yield Choice(f"{place}-all", f"optimizer state and parameters to {place.upper()}",
                         dict.fromkeys(OFFLOADS, place), reason)  # fmt: skip


def _nvme(view: View) -> Question:
    why = ("A folder on a local NVMe disk, the same path on every machine.", *explained(NVME, view=view))
    default = str(view.get(NVME) or "")
    return Question("nvme", "In which folder on a fast disk?", why, (), default, view.base.name, "/local_nvme")


def _read_nvme(view: View, text: str) -> tuple[Settings, str]:
    return {NVME: text}, "a folder on a local NVMe disk"


def _launcher(view: View) -> Question:
    names = values_of("launcher.kind")
    choices = [
        Choice(name, _starts(name), {"launcher.kind": name}, f"{name} {_starts(name)}".strip()) for name in names
    ]
    why = (
        "auto is right unless a program or a habit wants another; the same processes start under each.",
        *explained("launcher.kind", view=view),
    )
    source = view.base.name or "nothing asks for another"
    offered = weighed(view, LAUNCHER.keys, choices)
    return put(
        "launcher", "Who starts the processes?", why=why, offered=offered, wish=(str(view.get("launcher.kind")), source)
    )


def _starts(name: str) -> str:
    return meaning("launcher.kind", name) or (LAUNCHERS[name].HELP if name in LAUNCHERS else "")


def _has(key: str) -> Callable[[View], bool]:
    """Whether the strategy has the setting and the program would see it."""
    return lambda view: declared(key, view.kind("strategy")) is not None and reaches(view, key)


def _launchable(view: View) -> bool:
    """On several machines torchrun's agents start the processes, whichever launcher is named."""
    return view.ranks > 1 and int(view.get("nodes.count")) == 1


def _on_nvme(view: View) -> bool:
    return bool(schema().settings.get(NVME)) and "nvme" in (view.get(key) for key in OFFLOADS)


STRATEGY = Topic("strategy", ("strategy.kind",), needs_strategy, _strategy)
SHARDING = Topic("sharding", ("strategy.sharding", "strategy.offload"), _has("strategy.sharding"), _sharding)
WRAPPING = Topic(
    "wrapping",
    ("strategy.auto_wrap", "strategy.wrap_classes"),
    _has("strategy.auto_wrap"),
    _wrapping,
    _read_wrapping,
)
OFFLOAD = Topic("offload", OFFLOADS, _has(OFFLOADS[0]), _offload)
NVME_PATH = Topic("nvme", (NVME,), _on_nvme, _nvme, _read_nvme)
LAUNCHER = Topic("launcher", ("launcher.kind",), _launchable, _launcher)
