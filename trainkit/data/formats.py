"""What a row is, by its columns: a chat, a prompt with an answer, a text, a source with a target, or token ids."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from trainkit.data.chats import LEARNED
from trainkit.errors import TrainingError
from trainkit.recipe.schema import DatasetData, Recipe
from trainkit.recipe.suggestions import nearest
from trainkit.tasks import CAUSAL, LABELLING, MASKED, WRITING, task_of
from trainkit.text import join_names

if TYPE_CHECKING:
    from trainkit.data.files import SourceRow


@dataclass(frozen=True, slots=True)
class Format:
    """needs, may: the parts of a row, by the names that their columns have by themselves. what: in words."""

    name: str
    needs: tuple[str, ...]
    may: tuple[str, ...]
    what: str
    tasks: tuple[str, ...] = (CAUSAL,)


# In order: of a row that is several, the first counts.
FORMATS = (
    Format("messages", ("messages",), ("tools",), "chats (messages: a list of {role, content})"),
    Format("conversations", ("conversations",), ("tools", "system"), "chats (conversations: a list of {from, value})"),
    Format("alpaca", ("instruction", "output"), ("input", "system"), "instructions with answers", (CAUSAL, WRITING)),
    Format("completion", ("prompt", "completion"), ("tools",), "prompts with answers", (CAUSAL, WRITING)),
    Format("pair", ("source", "target"), (), "sources with targets", (WRITING, CAUSAL)),
    Format("label", ("text", "label"), (), "labelled texts", (LABELLING,)),
    Format("text", ("text",), (), "texts", (CAUSAL, MASKED)),
    Format("labelled_ids", ("input_ids", "label"), (), "labelled token ids", (LABELLING,)),
    Format("ids", ("input_ids",), ("labels",), "token ids", (CAUSAL, MASKED)),
)
CHATS = ("messages", "conversations", "alpaca", "completion", "pair")  # what a template may make one text of
PROMPTED = ("alpaca", "completion", "pair")
PREFERENCES = ("chosen", "rejected")
EXPECTED = {
    CAUSAL: "messages, conversations, instruction + output, prompt + completion, text, or input_ids",
    WRITING: "source + target, prompt + completion, or instruction + output",
    MASKED: "text, or input_ids",
    LABELLING: "text + label",
}
# Names that people give their columns, and the part that each most likely is.
FAMILIAR = {
    "question": "prompt", "query": "prompt", "context": "prompt", "answer": "completion", "response": "completion",
    "chat": "messages", "conversation": "messages", "dialog": "messages", "dialogue": "messages", "turns": "messages",
    "content": "text", "body": "text", "sentence": "text", "review": "text", "document": "text", "comment": "text",
    "class": "label", "category": "label", "sentiment": "label", "intent": "label",
    "article": "source", "summary": "target", "highlights": "target",
}  # fmt: skip
# Who speaks, in ShareGPT's words.
SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function": "tool", "developer": "developer",
}  # fmt: skip


CALL = "function_call"  # speaks for the assistant: what it says is a call of a tool


# Types of models (`model_type`) that keep texts in one sample apart where positions begin anew; each is held to it by
# a test. Others read on: recurrent ones, and those with an attention of their own.
KEEPS_APART = frozenset(
    (
        *("apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm"),
        *("glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe", "helium"),
        *("hunyuan_v1_dense", "llama", "llama4_text", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3"),
        *("olmoe", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
        *("stablelm", "starcoder2"),
    )
)


def packing_of(recipe: Recipe, model_type: str = "") -> str:
    """How rows fill samples: `isolated`, `dense` or `none`. model_type: of a model of transformers.

    Some tasks make a sample of each row, whatever `data.packing` says.
    """
    task = task_of(recipe)
    if task in (LABELLING, WRITING):
        return "none"
    asked = cast("DatasetData", recipe.data).packing
    if asked != "auto":
        return asked
    if task == MASKED:
        return "dense"
    return "isolated" if recipe.model.kind == "gpt" or model_type in KEEPS_APART else "none"


def is_packed_stream(recipe: Recipe) -> bool:
    """Whether every process that reads has to turn all rows into tokens, to know where its samples begin."""
    return getattr(recipe.data, "streaming", False) and packing_of(recipe) != "none"


class FormatError(TrainingError):
    """A row is of no format that its task can learn from. hint: what to do."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"data.path: {what}", hint=hint)
        self.what, self.hint = what, hint


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The format of a data set's rows. columns: the column of each part that there is."""

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that are read of the first row."""
        return tuple(self.columns.values())

    @property
    def sought(self) -> tuple[str, ...]:
        """The columns that are read where they are there: also those that the first row lacks."""
        found = (self.column(part) for part in (*self.format.needs, *self.format.may))
        return tuple(column for column in found if column is not None)

    def column(self, part: str) -> str | None:
        """The column of a part. One that need not be there is also taken where the first row does not have it."""
        by_itself = part in self.format.may and part not in self.columns.values()
        return self.columns.get(part, part if by_itself else None)

    @property
    def described(self) -> str:
        """``chats (messages: a list of {role, content})``, ``prompts with answers (question, answer)``."""
        return (
            self.format.what if "(" in self.format.what else f"{self.format.what} ({', '.join(self.columns.values())})"
        )


def recognised(
    present: Collection[str], given: Mapping[str, str], task: str = CAUSAL, *, where: str = "the row"
) -> RowFormat:
    """The format of rows with these columns. given: `data.columns`. FormatError says what there is and is expected."""
    has = f"{where} has {join_names(list(present), 8) or 'no column'}"
    for role, column in given.items():
        if column not in present and column.partition(".")[0] not in present:
            close = nearest(column, present)
            hint = f"did you mean {close}?" if close else "name a column that there is"
            raise FormatError(f"data.columns: there is no column {column!r} for {role}; {has}", hint)
    columns = {**{name: name for name in present if name not in given.values()}, **given}
    able = [each for each in FORMATS if {*given} <= {*each.needs, *each.may}]
    found = [each for each in able if {*each.needs} <= columns.keys()]
    if not given and {*PREFERENCES} <= {*present}:
        what = f"{has}: pairs of which one answer is preferred, and trainkit's own trainer learns from single answers"
        raise FormatError(
            what,
            "`trainkit cp dpo` is a recipe for TRL's trainer, which learns from them; or name the answer to learn: "
            "data.columns: {messages: chosen}",
        )
    for each in found:
        if task in each.tasks:
            return RowFormat(each, {role: columns[role] for role in (*each.needs, *each.may) if role in columns})
    if found:
        what = f"{has}: {found[0].what}, and model.task {task} learns from {EXPECTED[task]}"
        raise FormatError(what, _way_out(found[0], task))
    raise FormatError(f"{has}; expected {EXPECTED[task]}", _nearest(present, given, task))


def _way_out(found: Format, task: str) -> str:
    if task != LABELLING:
        return f"set model.task: {found.tasks[0]}" if found.tasks[0] != CAUSAL else "choose another model.task, or rows"
    return "name the label's column: data.columns: {label: …}" if "text" in found.needs else "choose rows with labels"


def _nearest(present: Collection[str], given: Mapping[str, str], task: str) -> str:
    """The format of the task that lacks the fewest parts, with a guess which columns they are."""
    free = [name for name in present if name not in given.values()]
    guesses = dict(given)
    parts = {part for each in FORMATS for part in each.needs}
    for name in free:
        role = name.lower() if name.lower() in parts else FAMILIAR.get(name.lower(), "")
        if role:
            guesses.setdefault(role, name)
    if task == WRITING:
        guesses = {{"prompt": "source", "text": "source", "completion": "target"}.get(role, role): name
                   for role, name in guesses.items()}  # fmt: skip
    formats = [each for each in FORMATS if task in each.tasks]
    best = max(formats, key=lambda each: len(guesses.keys() & {*each.needs}) / len(each.needs))
    named = ", ".join(f"{role}: {guesses.get(role, '…')}" for role in best.needs)
    lacks = [role for role in best.needs if role not in guesses]
    nearest_one = (
        f"the nearest is {best.what.partition(' (')[0]}" if len(lacks) < len(best.needs) else "name the columns"
    )
    return f"{nearest_one}: data.columns: {{{named}}}"


@dataclass(frozen=True, slots=True)
class Chat:
    """only_last: only the last answer is learned; the messages before it are its prompt."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    only_last: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A text that is learned, after one that is read. before is empty for a text alone."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Token ids. targets: as many, -100 where nothing is learned; None learns all."""

    ids: Sequence[int]
    targets: Sequence[int] | None = None


Content = Chat | Pair | Ready


def content_of(row: SourceRow, form: RowFormat, *, chats: bool, prefix: str = "") -> Content:
    """What a row holds. chats: whether prompts with answers are chats of one turn. TrainingError names the row."""
    columns, name = form.columns, form.name
    if name == "messages":
        return Chat(_messages(row, columns["messages"]), _tools(row, form))
    if name == "conversations":
        return Chat(_conversation(row, form), _tools(row, form))
    if name in ("ids", "labelled_ids"):
        targets = row.ids(columns["labels"]) if "labels" in columns else None
        if targets is None and row.value(form.column("labels")) is not None:
            raise row.wrong("it has labels, and the first row has none", "give labels to all rows, or to none")
        return Ready(row.ids(columns["input_ids"]), targets)
    if name in ("text", "label"):
        return Pair("", row.text(columns["text"]))
    system: list[dict[str, str]] = []
    tools = _tools(row, form)
    if name == "alpaca":
        prompt, answer = row.text(columns["instruction"]), row.text(columns["output"])
        if more := row.optional_text(form.column("input")):
            prompt = f"{prompt}\n\n{more}"
        if told := row.optional_text(form.column("system")):
            system = [{"role": "system", "content": told}]
    else:
        first, second = form.format.needs
        if isinstance(row.value(columns[first]), list):  # both are parts of a chat
            if not chats:
                raise row.wrong(f"field {columns[first]!r} {_OF_CHATS}", _WITHOUT)
            return Chat([*_messages(row, columns[first]), *_messages(row, columns[second])], tools, True)
        prompt, answer = row.text(columns[first]), row.text(columns[second])
    if chats:
        said = [*system, {"role": "user", "content": prefix + prompt}, {"role": "assistant", "content": answer}]
        return Chat(said, tools)
    for part, given in (("system", system), ("tools", tools)):
        if given:
            raise row.wrong(f"field {form.column(part)!r} {_OF_CHATS}", _WITHOUT)
    return Pair(prefix + prompt, answer)


_OF_CHATS = "is of a chat, and this row becomes a text without a template"
_WITHOUT = "write texts alone, or train it as chats: model.task causal_lm, and data.chat_template"


def _messages(row: SourceRow, column: str) -> Sequence[Mapping[str, Any]]:
    found = row.items(column)
    for place, message in enumerate(found, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            turns = isinstance(message, dict) and "from" in message
            hint = f"for turns of {{from, value}}: data.columns: {{conversations: {column}}}" if turns else ""
            raise row.wrong(f"field {column!r} is not a chat: message {place} is no {{role, content}}", hint)
        _require_known_answer(row, column, place, message["role"])
    return found


def _require_known_answer(row: SourceRow, column: str, place: int, role: str) -> None:
    """TrainingError for an answer by another name, which templates would write and nothing would learn."""
    if role != "assistant" and SPEAKERS.get(role.lower()) == "assistant":
        what = f"field {column!r}: message {place} is of role {role!r}, and only those of role 'assistant' are learned"
        raise row.wrong(what, "write 'assistant', or turns of {from, value} in a column conversations")


def _conversation(row: SourceRow, form: RowFormat) -> list[dict[str, Any]]:
    column = form.columns["conversations"]
    said: list[dict[str, Any]] = []
    if told := row.optional_text(form.column("system")):
        said.append({"role": "system", "content": told})
    for place, turn in enumerate(row.items(column), start=1):
        if isinstance(turn, dict) and isinstance(turn.get("role"), str):  # the other form under this name
            _require_known_answer(row, column, place, turn["role"])
            said.append(turn)
            continue
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or "value" not in turn:
            raise row.wrong(f"field {column!r} is not a chat: turn {place} is no {{from, value}}")
        learned = {key: turn[key] for key in LEARNED if key in turn}
        if turn["from"].lower() == CALL:
            said.append({"role": "assistant", "content": "", "tool_calls": _calls(row, column, turn, place), **learned})
            continue
        if (role := SPEAKERS.get(turn["from"].lower())) is None:
            known = ", ".join((*SPEAKERS, CALL))
            raise row.wrong(f"field {column!r}: turn {place} is from {turn['from']!r}", f"known are {known}")
        said.append({"role": role, "content": turn["value"], **learned})
    return said


def _calls(row: SourceRow, column: str, turn: Mapping[str, Any], place: int) -> list[dict[str, Any]]:
    """The calls of tools in a turn: one {name, arguments} or a list of them, also written as JSON."""
    found = turn["value"]
    try:
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError:
        found = None
    calls = found if isinstance(found, list) else [found]
    if not all(isinstance(each, dict) and isinstance(each.get("name"), str) and "arguments" in each for each in calls):
        raise row.wrong(f"field {column!r}: turn {place} is from {CALL!r}, and no {{name, arguments}} in JSON")
    return [{"type": "function", "function": {key: each[key] for key in ("name", "arguments")}} for each in calls]


def _tools(row: SourceRow, form: RowFormat) -> Sequence[Any] | None:
    """The tools that a chat may call: a list, or one written as JSON."""
    column = form.column("tools")
    found = row.value(column)
    if found in (None, "", []):
        return None
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise row.wrong(f"field {column!r} is not JSON: {error}") from error
    if not isinstance(found, list):
        raise row.wrong(f"field {column!r} is no list of tools")
    return found
