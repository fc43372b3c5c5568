"""What is asked of those who train a model on data of their own: the data, the model, the method, the length."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.errors import RecipeError, UsageError
from trainkit.hub.splits import READ
from trainkit.machine.selection import allocation
from trainkit.recipe.hub_name import ROWS, is_repository
from trainkit.recipe.paths import absolute
from trainkit.text import GIB, format_memory, pluralize
from trainkit.tools.builtin.inputs import LOOKING_AHEAD
from trainkit.tools.builtin.memory import RESERVED, SINGLE_FORMAT, WEIGHTS, format_parameters, largest
from trainkit.wizard.question import Answer, AnswerOption, Settings, View, as_recipe

if TYPE_CHECKING:
    from trainkit.data.seen import SeenData

CAUSAL, WRITING, LABELLING, MASKED = "causal_lm", "seq2seq_lm", "sequence_classification", "masked_lm"
TASKS = (LABELLING, CAUSAL, WRITING)  # of rows that several can learn from, the first


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model of the Hub that needs no permission. size: its parameters."""

    name: str
    size: float
    note: str
    task: str = CAUSAL


MODELS = (
    OfferedModel("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135e9, "chats, English"),
    OfferedModel("HuggingFaceTB/SmolLM2-360M-Instruct", 0.362e9, "chats, English"),
    OfferedModel("Qwen/Qwen2.5-0.5B-Instruct", 0.494e9, "chats, 29 languages"),
    OfferedModel("Qwen/Qwen2.5-1.5B-Instruct", 1.54e9, "chats, 29 languages"),
    OfferedModel("Qwen/Qwen3-4B-Instruct-2507", 4.02e9, "chats, 100 languages"),
    OfferedModel("Qwen/Qwen2.5-7B-Instruct", 7.62e9, "chats, 29 languages"),
    OfferedModel("distilbert/distilbert-base-uncased", 0.066e9, "labels, English", LABELLING),
    OfferedModel("FacebookAI/roberta-base", 0.125e9, "labels, English", LABELLING),
    OfferedModel("FacebookAI/roberta-large", 0.355e9, "labels, English", LABELLING),
    OfferedModel("google-t5/t5-small", 0.06e9, "a text from a text", WRITING),
    OfferedModel("google/flan-t5-base", 0.248e9, "a text from a text", WRITING),
    OfferedModel("google/flan-t5-large", 0.783e9, "a text from a text", WRITING),
)
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")  # as names say it: `Llama-3.1-8B`
LARGE = 1e9  # bytes of weights from which adapters alone are proposed
EPOCHS, SAMPLES, EVALUATE = 3, 16, 50
STEPS = 10  # of an epoch at least, for few rows teach little in few steps


# The data.


def is_of_rows(view: View, text: str) -> bool:
    """Whether a folder holds rows, or is none and may be a data set of the Hub."""
    place = absolute(text, view.cwd)
    try:
        view.files.read(place)
    except IsADirectoryError:
        endings = (*READ, *(f"{each}.*" for each in READ[2:]))  # also compressed
        return any(view.files.holds(place, f"**/*{each}") for each in endings)
    except FileNotFoundError:
        return "/" in text and is_repository(text) and not posixpath.splitext(text)[1]
    except OSError:
        pass  # the planner says what is wrong with a file
    return False


def read_rows(view: View, sets: Settings) -> tuple[Settings, str]:
    """What a path of rows sets, and what was found there: the format, and the first rows. Raises UsageError."""
    path = str(sets["data.path"])
    if ROWS.search(path) and not view.facts.origin and not view.files.exists(absolute(path, view.cwd)):
        raise UsageError(f"there is no file {path}", hint="check the path, relative to the working folder")
    faults = {}
    for task in TASKS:
        asks = {} if task == CAUSAL else {"model.task": task}
        try:
            seen = view.supposing({**sets, **asks}).seen
        except RecipeError as error:
            raise UsageError(*error.diagnostics) from error
        if seen.fault is None:
            return ({**sets, **asks} if seen.form else sets), _found(seen)  # the task follows from what is known
        faults[task] = seen.fault
    what, hint = faults[CAUSAL]
    raise UsageError(what, hint=f"{hint}; here behind the path: {path} PART=COLUMN")


def _found(seen: SeenData) -> str:
    if seen.form is None:  # of the Hub, or in a table
        return "rows whose format is decided before the ranks start"
    rows = f"{pluralize(seen.rows, 'row')} of " if seen.rows is not None else ""
    return f"{rows}{seen.form.described}"


def form(view: View) -> str:
    """The format of the rows; empty where it is not known."""
    try:
        found = view.seen.form
    except RecipeError:
        return ""
    return found.name if found else ""


def _rows(view: View) -> int | None:
    try:
        return view.seen.rows
    except RecipeError:
        return None


# The model.


def memory(view: View) -> float:
    """Bytes of the smallest GPU that the run may use, or of the machine."""
    cards = allocation(view.facts) if view.device == "cuda" else ()
    return min((gpu.memory_total for gpu in cards), default=view.facts.memory_total or 8 * GIB)


def needed(view: View, size: float, *, adapters: bool) -> float:
    """Bytes that weights, gradients and optimizer state take on one device, before activations."""
    mixed = view.device == "cuda"
    whole = largest("single", 1, RESERVED + GIB, mixed=mixed)  # parameters in one GiB
    return RESERVED + size * ((WEIGHTS if mixed else SINGLE_FORMAT) if adapters else GIB / whole)


def _fitting(view: View) -> Iterator[OfferedModel]:
    task, most = view.get("model.task") or CAUSAL, memory(view)
    tasks = {CAUSAL, WRITING} if form(view) in ("pair", "alpaca", "completion") else {task}
    if "model.task" not in view.chosen and view.kind("data") == "dataset" and not form(view):
        tasks = {*TASKS}  # rows of any format
    alike = [each for each in MODELS if each.task in tasks]
    yield from (each for each in alike if needed(view, each.size, adapters=True) <= most)


def models(view: View) -> Iterator[AnswerOption]:
    """Some of the Hub that fit this machine, by their size."""
    for each in _fitting(view):
        note = f"{format_parameters(each.size)} parameters, {each.note}; from the Hub"
        yield AnswerOption(each.name, note, _named(view, each.name, each.task), f"{each.note}, and fits here")


def model(view: View) -> tuple[str, str]:
    """On GPUs the largest that leaves half of the memory to activations, elsewhere the smallest."""
    if isinstance(named := view.get("model.path"), str):
        return named, view.base.name
    offered = [each for each in _fitting(view) if each.task == (view.get("model.task") or CAUSAL)]
    if not offered:
        return "", ""
    roomy = [each for each in offered if 2 * needed(view, each.size, adapters=True) <= memory(view)]
    if view.device == "cuda" and roomy:
        return roomy[-1].name, f"fits {format_memory(int(memory(view)))} with room for its activations"
    return offered[0].name, "the smallest"


def _named(view: View, name: str, task: str) -> Settings:
    sets: dict[str, object] = {"model.path": name}
    if task != (view.get("model.task") or CAUSAL):
        sets["model.task"] = task
    return sets


def read_model(view: View, text: str) -> tuple[Settings, str]:
    """A folder, or a name of the Hub. Raises UsageError."""
    there = view.files.exists(absolute(text, view.cwd))
    if not there and (not is_repository(text) or text.startswith((".", "/", "~"))):
        what = f"there is no folder {text}, and the Hub has no such names"
        raise UsageError(what, hint="write a folder as save_pretrained writes it, or owner/name")
    return _named(view, text, _task(view, text)), f"from {'this folder' if there else 'the Hub'}"


def _task(view: View, path: str) -> str:
    """What a model is made for, with these rows: what they ask for, by the table, or by its config.json."""
    asked = view.get("model.task") or CAUSAL
    if asked != CAUSAL:
        return str(asked)
    if offered := next((each.task for each in MODELS if each.name == path), ""):
        return offered
    described = view.supposing({"model.path": path}).resolved.described.model
    if described.get("is_encoder_decoder"):
        return WRITING
    if described.get("model_type") in LOOKING_AHEAD and not described.get("is_decoder"):
        texts = form(view) == "text" or (view.kind("data") == "text" and "data.path" in view.chosen)
        return MASKED if texts else LABELLING
    return CAUSAL


def kinds_of_given(view: View) -> Settings:
    """What follows from a model, rows or both that are given, as answers would set it: the task, that they are rows."""
    path, model = view.given.get("data.path"), view.given.get("model.path")
    if not view.builtin or not (isinstance(path, str) or isinstance(model, str)):
        return {}
    kind: Settings = {}
    said = view.base.path or view.given.keys() & {"data.kind", "data.include"}
    if isinstance(path, str) and view.fine_tunes and not said and is_of_rows(view, path):
        kind = {"data.kind": "dataset"}
        view = view.supposing(kind)
    sets: Settings = {}
    with contextlib.suppress(UsageError, RecipeError):  # planning says what is wrong with them
        if isinstance(path, str) and view.kind("data") == "dataset":
            sets = read_rows(view.supposing({"model.kind": "hf"}), {"data.path": path})[0]
        if isinstance(model, str):
            sets = {**sets, **read_model(view.supposing(sets), model)[0]}
    return {**kind, **{key: value for key, value in sets.items() if key == "model.task"}}


def _parameters(view: View) -> float | None:
    """Of the chosen model: by its files, by the table, or as its name says."""
    name = str(view.get("model.path") or "")
    try:
        seen = view.seen.model
    except RecipeError:
        return None
    known = seen.parameters if seen else next((each.size for each in MODELS if each.name == name), None)
    if known is None and (said := _SIZE.search(name.rpartition("/")[2])):
        known = float(said[1]) * (1e9 if said[2] in "Bb" else 1e6)
    return known


def _bytes(view: View) -> float | None:
    size, seen = _parameters(view), view.seen.model
    each = 4 if seen and seen.format == "fp32" else 2
    return size * each if size is not None else None


# The method.


def methods(view: View) -> Iterator[AnswerOption]:
    size = _parameters(view)

    def takes(*, adapters: bool) -> str:
        return f"; {format_memory(int(needed(view, size, adapters=adapters)))} before activations" if size else ""

    note = "small adapters beside the weights, which stay as they are"
    yield AnswerOption("lora", f"{note}{takes(adapters=True)}", {"peft.kind": "lora"}, note)
    note = "all weights are trained"
    yield AnswerOption("full", f"{note}{takes(adapters=False)}", {"peft.kind": "none"}, note)


def method(view: View) -> tuple[str, str]:
    if view.base.path:
        return ("lora" if view.get("peft.kind") == "lora" else "full"), view.base.name
    size = _bytes(view)
    if size is None or size < LARGE:
        return "full", "its weights are small" if size is not None else "its size is not known"
    return "lora", f"its weights are {size / 1e9:.1f} GB"


# The template.


def needs_template(view: View) -> bool:
    """Whether rows are chats, and the model's tokenizer is known to have no template for them."""
    if not view.fine_tunes or form(view) not in ("messages", "conversations", "alpaca"):
        return False
    described = view.resolved.described
    return (view.get("model.task") or CAUSAL) == CAUSAL and described.chats is False


def templates(view: View) -> Iterator[AnswerOption]:
    notes = {
        "chatml": "<|im_start|>role … <|im_end|>, as Qwen's and many others",
        "llama3": "<|start_header_id|>role<|end_header_id|> … <|eot_id|>, as Llama 3's",
        "alpaca": "### Instruction: … ### Response: …, for one question and answer",
    }
    for name, note in notes.items():
        yield AnswerOption(name, note, {"data.chat_template": name}, f"the tokenizer has none: {note}")


def template(view: View) -> tuple[str, str]:
    return ("alpaca", "your rows are its") if form(view) == "alpaca" else ("chatml", "the most usual")


def read_template(view: View, text: str) -> tuple[Settings, str]:
    return {"data.chat_template": text}, "a Jinja template of your own"


# How long, and where to.


def unasked(view: View) -> Iterator[Answer]:
    """What a fine-tuning has that nobody is asked about, unless it is given or the base's."""
    if not view.fine_tunes or view.base.path:
        return
    if view.get("eval.every_steps") == 0 and "eval.every_steps" not in view.given:
        yield Answer("", "", {"eval.every_steps": EVALUATE}, f"every {EVALUATE} steps, and at its end")
    if not any(key.startswith("batch.") for key in view.chosen):
        samples = SAMPLES if (rows := _rows(view)) is None else min(max(rows // STEPS, 1), SAMPLES)
        each = max(samples // view.ranks, 1)
        sets: dict[str, object] = {"batch.global": each * view.ranks}
        reason = f"{pluralize(each * view.ranks, 'sample')} in a step"
        if view.device == "cuda" and each > 1:
            sets["batch.micro"], reason = "auto", f"{reason}, in passes as large as fit"
        yield Answer("", "", sets, reason)


def output(view: View) -> tuple[str, str]:
    return as_recipe(view, "output.root", "a folder here")


def read_output(view: View, text: str) -> tuple[Settings, str]:
    return {"output.root": text}, "runs, with checkpoints"
