"""How it trains: number format, batch, activation checkpointing, length, savings."""

from __future__ import annotations

import re

from trainkit.planner.dtype import fast_format
from trainkit.recipe.validation.type_errors import takes_switch
from trainkit.text import counted
from trainkit.wizard.planner_check import check, reaches, used_cards
from trainkit.wizard.question import AnswerError, Choice, Question, Settings, Topic, View, offered

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
