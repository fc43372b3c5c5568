"""What a row is, by its columns: the formats of every task, by their own names and by others, and what is none."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from trainkit.data.files import SourceRow
from trainkit.data.formats import (
    FORMATS,
    Chat,
    FormatError,
    Pair,
    Ready,
    content_of,
    packing_of,
    recognised,
)
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe
from trainkit.tasks import CAUSAL, LABELLING, MASKED, WRITING

SAID = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]
TURNS = [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": "4"}]
# Of each format a row, and what it holds for a model of chats.
ROWS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "messages": ({"messages": SAID}, Chat(SAID)),
    "conversations": ({"conversations": TURNS}, Chat(SAID)),
    "alpaca": ({"instruction": "2+2=", "output": "4"}, Chat(SAID)),
    "completion": ({"prompt": "2+2=", "completion": "4"}, Chat(SAID)),
    "pair": ({"source": "2+2=", "target": "4"}, Chat(SAID)),
    "label": ({"text": "good", "label": 1}, Pair("", "good")),
    "text": ({"text": "words"}, Pair("", "words")),
    "labelled_ids": ({"input_ids": [1, 2], "label": 0}, Ready([1, 2])),
    "ids": ({"input_ids": [1, 2], "labels": [-100, 2]}, Ready([1, 2], [-100, 2])),
}


def row_of(fields: Mapping[str, Any], **more: Any) -> SourceRow:
    return SourceRow("a.jsonl:3", dict(fields), **more)


def test_every_format_has_a_row_here() -> None:
    assert [*ROWS] == [each.name for each in FORMATS]


@pytest.mark.parametrize("name", ROWS)
def test_a_format_is_known_by_its_columns_and_by_others_that_are_named(name: str) -> None:
    fields, content = ROWS[name]
    task = next(each for each in FORMATS if each.name == name).tasks[0]
    found = recognised(tuple(fields), {}, task)
    assert found.name == name
    assert content_of(row_of(fields), found, chats=True) == content
    given = {role: f"the {role}" for role in fields}
    renamed = {f"the {role}": value for role, value in fields.items()}
    other = recognised((*renamed, "id"), given, task)
    assert (other.name, set(other.read)) == (name, {*renamed})
    assert content_of(row_of({**renamed, "id": 7}), other, chats=True) == content


@pytest.mark.parametrize(
    ("columns", "task", "expected"),
    [
        (("messages", "text"), CAUSAL, "messages"),
        (("messages", "prompt", "completion"), CAUSAL, "messages"),
        (("conversations", "instruction", "output"), CAUSAL, "conversations"),
        (("instruction", "input", "output", "text"), CAUSAL, "alpaca"),
        (("prompt", "completion", "text"), CAUSAL, "completion"),
        (("text", "label"), CAUSAL, "text"),
        (("text", "label"), LABELLING, "label"),
        (("text", "label"), MASKED, "text"),
        (("text", "input_ids"), CAUSAL, "text"),
        (("input_ids", "label"), LABELLING, "labelled_ids"),
        (("source", "target", "text"), WRITING, "pair"),
        (("instruction", "output"), WRITING, "alpaca"),
        (("prompt", "completion"), WRITING, "completion"),
        (("chosen", "rejected", "messages"), CAUSAL, ""),
    ],
)
def test_of_several_formats_the_first_that_the_task_learns_from_counts(
    columns: Sequence[str], task: str, expected: str
) -> None:
    if expected:
        assert recognised(columns, {}, task).name == expected
    else:
        with pytest.raises(FormatError, match="preferred"):
            recognised(columns, {}, task)


def test_a_named_column_decides_among_formats_and_may_be_of_another_name_that_is_there() -> None:
    columns = ("text", "prompt", "completion")
    assert recognised(columns, {}).name == "completion"
    assert recognised(columns, {"text": "text"}).name == "text"
    assert recognised(("input", "output"), {"prompt": "input", "completion": "output"}).name == "completion"
    assert recognised(("en", "fr"), {"source": "en", "target": "fr"}, WRITING).name == "pair"
    nested = recognised(("translation",), {"source": "translation.en", "target": "translation.fr"}, WRITING)
    fields = row_of({"translation": {"en": "cat", "fr": "chat"}})
    assert content_of(fields, nested, chats=False, prefix="to French: ") == Pair("to French: cat", "chat")


def test_preference_pairs_are_refused_with_the_way_to_trl_and_may_be_learned_as_chats() -> None:
    with pytest.raises(FormatError) as caught:
        recognised(("prompt", "chosen", "rejected"), {})
    assert "one answer is preferred" in caught.value.what
    assert "`trainkit cp dpo` is a recipe for TRL's trainer" in caught.value.hint
    assert "data.columns: {messages: chosen}" in caught.value.hint
    assert recognised(("chosen", "rejected"), {"messages": "chosen"}).columns == {"messages": "chosen"}


@pytest.mark.parametrize(
    ("columns", "given", "task", "what", "hint"),
    [
        (("question", "answer"), {}, CAUSAL, "row 3 has question, answer; expected messages, conversations",
         "the nearest is prompts with answers: data.columns: {prompt: question, completion: answer}"),
        (("chat", "id"), {}, CAUSAL, "has chat, id", "data.columns: {messages: chat}"),
        (("Body", "id"), {}, CAUSAL, "has Body, id", "the nearest is texts: data.columns: {text: Body}"),
        (("review", "sentiment"), {}, LABELLING, "expected text + label",
         "the nearest is labelled texts: data.columns: {text: review, label: sentiment}"),
        (("article", "highlights"), {}, WRITING, "expected source + target",
         "data.columns: {source: article, target: highlights}"),
        (("prompt", "answer"), {}, CAUSAL, "has prompt, answer", "{prompt: prompt, completion: answer}"),
        (("a", "b"), {}, CAUSAL, "has a, b", "name the columns: data.columns: {"),
        ((), {}, CAUSAL, "has no column", "name the columns"),
        (("text",), {}, LABELLING, "texts, and model.task sequence_classification learns from text + label",
         "name the label's column: data.columns: {label: …}"),
        (("source", "target"), {}, MASKED, "sources with targets, and model.task masked_lm learns from text",
         "set model.task: seq2seq_lm"),
        (("text",), {"text": "txt"}, CAUSAL, "there is no column 'txt' for text", "did you mean text?"),
        (("words",), {"text": "nothing"}, CAUSAL, "there is no column 'nothing' for text", "name a column"),
    ],
)  # fmt: skip
def test_what_is_no_format_is_said_with_what_is_there_what_was_expected_and_a_line_to_paste(
    columns: Sequence[str], given: Mapping[str, str], task: str, what: str, hint: str
) -> None:
    with pytest.raises(FormatError) as caught:
        recognised(columns, given, task, where="a.jsonl: row 3")
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_a_hint_that_is_pasted_is_a_format() -> None:
    for columns, task in ((("question", "answer"), CAUSAL), (("review", "class"), LABELLING), (("chat",), CAUSAL)):
        with pytest.raises(FormatError) as caught:
            recognised(columns, {}, task)
        pasted = caught.value.hint.partition("data.columns: {")[2].rstrip("}")
        given = dict(each.split(": ") for each in pasted.split(", "))
        assert recognised(columns, given, task).read == columns


def test_prompts_with_answers_are_plain_texts_where_no_template_is_used() -> None:
    for name in ("alpaca", "completion", "pair"):
        fields = ROWS[name][0]
        found = recognised(tuple(fields), {}, CAUSAL)
        assert content_of(row_of(fields), found, chats=False) == Pair("2+2=", "4")
        assert content_of(row_of(fields), found, chats=False, prefix="do: ") == Pair("do: 2+2=", "4")


def test_an_instruction_has_its_input_behind_it_and_its_system_before_it() -> None:
    fields = {"instruction": "Add.", "input": "2+2", "output": "4", "system": "Be brief."}
    found = recognised(tuple(fields), {})
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add.\n\n2+2"}, SAID[1]]
    assert content_of(row_of(fields), found, chats=True) == Chat(said)
    for empty in ("", None):
        assert content_of(row_of({**fields, "input": empty, "system": empty}), found, chats=False) == Pair("Add.", "4")


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [
        (("instruction", "output"), {"input": "2+2"}, {"role": "user", "content": "2+2=\n\n2+2"}),
        (("instruction", "output"), {"system": "Be brief."}, {"role": "system", "content": "Be brief."}),
        (("conversations",), {"system": "Be brief."}, {"role": "system", "content": "Be brief."}),
    ],
)
def test_what_the_first_row_lacks_is_read_of_later_ones(
    first: tuple[str, ...], later: Mapping[str, Any], expected: Any
) -> None:
    found = recognised(first, {})
    content = content_of(row_of({**ROWS[found.name][0], **later}), found, chats=True)
    assert isinstance(content, Chat)
    assert content.messages[0] == expected
    assert {*later} <= {*found.sought}
    with_tools = row_of({"messages": SAID, "tools": [{"name": "f"}]})
    assert content_of(with_tools, recognised(("messages",), {}), chats=True) == Chat(SAID, [{"name": "f"}])
    mine = recognised(("instruction", "input"), {"output": "input"})  # which is no input then
    assert content_of(row_of({"instruction": "2+2=", "input": "4"}), mine, chats=True) == Chat(SAID)


def test_labels_that_the_first_row_lacks_are_refused_and_so_is_what_only_a_chat_can_say() -> None:
    with pytest.raises(TrainingError, match=r"a\.jsonl:3: it has labels, and the first row has none"):
        content_of(row_of(ROWS["ids"][0]), recognised(("input_ids",), {}), chats=False)
    for name, more in (
        ("alpaca", {"system": "Be brief."}),
        ("completion", {"tools": [{"name": "f"}]}),
        ("completion", {"prompt": SAID[:1], "completion": SAID[1:]}),
    ):
        fields = {**ROWS[name][0], **more}
        with pytest.raises(TrainingError, match=rf"a\.jsonl:3: field '{next(iter(more))}' is of a chat"):
            content_of(row_of(fields), recognised(tuple(fields), {}), chats=False)


def test_conversations_speak_in_the_names_of_sharegpt_and_may_hold_messages() -> None:
    found = recognised(("conversations", "system"), {})
    turns = [{"from": who, "value": "x"} for who in ("Human", "gpt", "tool", "bard", "observation", "chatgpt")]
    content = content_of(row_of({"conversations": turns, "system": "Be brief."}), found, chats=True)
    assert isinstance(content, Chat)
    roles = [each["role"] for each in content.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert content_of(row_of({"conversations": SAID}), found, chats=True) == Chat(SAID)
    with pytest.raises(TrainingError, match=r"a\.jsonl:3: field 'conversations': turn 1 is from 'narrator'") as caught:
        content_of(row_of({"conversations": [{"from": "narrator", "value": "x"}]}), found, chats=True)
    assert "known are human, user, gpt" in caught.value.diagnostics[0].hint


@pytest.mark.parametrize("several", [False, True])
def test_a_call_in_sharegpts_words_is_the_assistants(several: bool) -> None:
    call: dict[str, Any] = {"name": "add", "arguments": {"a": 2}}
    turns: list[dict[str, Any]] = [
        TURNS[0],
        {"from": "function_call", "value": json.dumps([call, call] if several else call), "weight": 0},
    ]
    found = recognised(("conversations",), {})
    content = content_of(row_of({"conversations": turns}), found, chats=True)
    assert isinstance(content, Chat)
    made = [{"type": "function", "function": call}] * (1 + several)
    assert content.messages[1] == {"role": "assistant", "content": "", "tool_calls": made, "weight": 0}
    for wrong in ("add(2)", "{}", "[1]", 3):
        with pytest.raises(TrainingError, match=r"turn 2 is from 'function_call', and no \{name, arguments\} in JSON"):
            content_of(row_of({"conversations": [TURNS[0], turns[1] | {"value": wrong}]}), found, chats=True)


def test_turns_keep_whether_they_are_learned() -> None:
    turns = [TURNS[0], TURNS[1] | {"weight": 0}]
    found = content_of(row_of({"conversations": turns}), recognised(("conversations",), {}), chats=True)
    assert found == Chat([SAID[0], SAID[1] | {"weight": 0}])


def test_columns_in_capitals_are_guessed_in_the_hint() -> None:
    with pytest.raises(FormatError) as refused:
        recognised(("Prompt", "Completion"), {})
    assert (
        refused.value.hint
        == "the nearest is prompts with answers: data.columns: {prompt: Prompt, completion: Completion}"
    )


def test_prompts_and_answers_may_be_parts_of_a_chat_of_which_the_last_answer_is_learned() -> None:
    fields = {"prompt": [*SAID, SAID[0]], "completion": [SAID[1]]}
    found = recognised(tuple(fields), {})
    assert content_of(row_of(fields), found, chats=True) == Chat([*SAID, *SAID], None, True)


def test_tools_are_a_list_or_one_written_as_json() -> None:
    found = recognised(("messages", "tools"), {})

    def tools_of(given: object) -> Any:
        content = content_of(row_of({"messages": SAID, "tools": given}), found, chats=True)
        assert isinstance(content, Chat)
        return content.tools

    assert tools_of([{"name": "f"}]) == tools_of('[{"name": "f"}]') == [{"name": "f"}]
    assert tools_of(None) is tools_of("") is tools_of([]) is None
    for given, message in (("[", "is not JSON"), ("{}", "is no list of tools"), ({"a": 1}, "is no list of tools")):
        with pytest.raises(TrainingError, match=rf"a\.jsonl:3: field 'tools' {message}"):
            tools_of(given)


def test_older_data_sets_hold_a_chat_as_a_mapping_of_lists() -> None:
    fields = {"messages": {"role": ["user", "assistant"], "content": ["2+2=", "4"]}}
    assert content_of(row_of(fields), recognised(("messages",), {}), chats=True) == Chat(SAID)


def test_a_list_may_be_a_text_in_json_and_labels_in_cells_are_numbers() -> None:
    found = recognised(("messages",), {})
    cell = '[{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]'
    for cells in (True, False):
        assert content_of(row_of({"messages": cell}, cells=cells), found, chats=True) == Chat(SAID)
        with pytest.raises(TrainingError, match="field 'messages' is not JSON"):
            content_of(row_of({"messages": "[1,"}, cells=cells), found, chats=True)
        with pytest.raises(TrainingError, match="field 'messages' is no list but a text"):
            content_of(row_of({"messages": "Hi"}, cells=cells), found, chats=True)
        with pytest.raises(TrainingError, match="field 'messages' is empty") as caught:
            content_of(row_of({"messages": "[]"}, cells=cells), found, chats=True)
        assert "skip_empty" not in caught.value.diagnostics[0].hint, "which skips no row with a text in it"
    assert row_of({"label": " 12"}, cells=True).label("label") == 12
    with pytest.raises(TrainingError, match="field 'label' has label -1, and labels begin at 0"):
        row_of({"label": "-1"}, cells=True).label("label")
    assert row_of({"label": "12"}).label("label") == "12"
    assert row_of({"label": "good"}, cells=True).label("label") == "good"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "field 'messages' is empty"),
        ({"messages": None}, "field 'messages' is no list but null"),
        ({"messages": "Hi"}, "field 'messages' is no list but a text"),
        ({"messages": [{"content": "Hi"}]}, "field 'messages' is not a chat: message 1 is no {role, content}"),
        ({"messages": ["Hi"]}, "field 'messages' is not a chat: message 1"),
        ({"messages": TURNS}, "field 'messages' is not a chat: message 1 is no {role, content}"),
        ({"messages": [*SAID, {"role": "Assistant", "content": "4"}]}, "field 'messages': message 3 is of role 'Ass"),
        ({"messages": [SAID[0], {"role": "gpt", "content": "4"}]}, "field 'messages': message 2 is of role 'gpt'"),
        ({}, "field 'messages' is missing"),
    ],
)
def test_a_row_of_no_chat_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError) as caught:
        content_of(row_of(fields), recognised(("messages",), {}), chats=True)
    assert f"data.path: a.jsonl:3: {message}" in str(caught.value)


def test_turns_of_sharegpt_under_the_other_name_are_shown_the_way() -> None:
    with pytest.raises(TrainingError) as caught:
        content_of(row_of({"messages": TURNS}), recognised(("messages",), {}), chats=True)
    pasted = caught.value.diagnostics[0].hint.partition("data.columns: ")[2]
    assert pasted == "{conversations: messages}"
    found = recognised(("messages",), {"conversations": "messages"})
    assert content_of(row_of({"messages": TURNS}), found, chats=True) == Chat(SAID)


@pytest.mark.parametrize(
    ("model", "model_type", "expected"),
    [
        ({"kind": "gpt"}, "", "isolated"),
        ({"kind": "hf", "architecture": "llama"}, "llama", "isolated"),
        ({"kind": "hf", "architecture": "mamba"}, "mamba", "none"),
        ({"kind": "hf", "architecture": "bert", "task": MASKED}, "bert", "dense"),
        ({"kind": "hf", "architecture": "bert", "task": LABELLING}, "bert", "none"),
        ({"kind": "hf", "architecture": "t5", "task": WRITING}, "t5", "none"),
        ({"kind": "target", "target": "a:b"}, "", "none"),
    ],
)
def test_texts_are_packed_where_the_model_keeps_them_apart(
    model: dict[str, Any], model_type: str, expected: str
) -> None:
    recipe = {"model": model, "data": {"kind": "dataset", "path": "a.jsonl"}}
    assert packing_of(Recipe.model_validate(recipe), model_type) == expected
