"""What the model learns of a chat: masks made by hand, token by token, for the templates of twelve model families."""

from __future__ import annotations

import datetime
import re
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from trainkit.data import chats
from trainkit.data.chats import (
    CUT_ANSWER,
    EMPTY_ANSWER,
    NO_STOP,
    OTHER_PROMPT,
    UNMARKED_STOP,
    UNUSED_TOOLS,
    ChatError,
    ChatTemplate,
    Rendering,
    learned_mask,
)

pytestmark = pytest.mark.torch  # jinja2, tokenizers and transformers come with the libraries around torch

TEMPLATES = Path(__file__).parent / "chat_templates"
Chat = list[dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be kind."}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "Warm."}
CHATS: Mapping[str, Chat] = {
    "one": [user("Hi"), answer("Hello.")],
    "three": [user("Hi"), answer("Hello."), user("And?"), answer("Sure."), user("Hi"), answer("Bye.")],
    "system": [SYSTEM, user("Hi"), answer("Hello.")],
    "tools": [user("Rome?"), answer("", tool_calls=[CALL]), RESULT, answer("It is warm.")],
    "thinking": [
        *(user("Hi"), answer("Hello.", reasoning_content="Greet.")),
        *(user("And?"), answer("Sure.", reasoning_content="Agree.")),
    ],
}


@dataclass(frozen=True)
class Family:
    """A family of models: the special tokens of its tokenizers, and its chats by hand. What is in ⟦⟧ is learned."""

    special: Mapping[str, str]
    added: Sequence[str]
    expected: Mapping[str, Sequence[str]]  # of the chats that its template can show


def read_family(name: str) -> Family:
    """From its text beside the template, where `=== ` begins a part and `--- and` another text to train on."""
    parts = re.split(r"^=== (\w+)\n", (TEMPLATES / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]
    found = {title: text.removesuffix("\n") for title, text in zip(parts[::2], parts[1::2], strict=True)}
    special = dict(line.split(" ", 1) for line in found.pop("special").splitlines())
    added = found.pop("added").splitlines()
    return Family(special, added, {case: text.split("\n--- and\n") for case, text in found.items()})


FAMILIES = {path.stem: read_family(path.stem) for path in sorted(TEMPLATES.glob("*.txt"))}
# Mistral shows the system's message only before the last question. The prompt of DeepSeek-R1 ends with <think>, which
# no answer begins with, and it has no place for descriptions of tools.
REMARKS: Mapping[tuple[str, str], Sequence[str]] = {
    ("mistral", "system"): [OTHER_PROMPT],
    ("deepseek-r1", "one"): [OTHER_PROMPT],
    ("deepseek-r1", "three"): [OTHER_PROMPT],
    ("deepseek-r1", "system"): [OTHER_PROMPT],
    ("deepseek-r1", "tools"): [UNUSED_TOOLS, OTHER_PROMPT],
}
CASES = [(name, case) for name, family in FAMILIES.items() for case in family.expected]
# What ends an answer in each of them.
STOPS = {"gemma-3": ["<end_of_turn>"], "gpt-oss": ["<|return|>", "<|call|>"]}


class Today(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> Today:
        return cls(2026, 2, 3)


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "datetime", Today)


def template_of(name: str) -> ChatTemplate:
    family = FAMILIES[name]
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(source, family.special, [*family.added, *family.special.values()])


def tools_of(case: str) -> list[dict[str, Any]] | None:
    return [WEATHER] if case == "tools" else None


def cutter(added: Sequence[Any]) -> Any:
    """A tokenizer with one token for each byte, and the added ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(added))
    return made


def segments(expected: str) -> Iterator[tuple[str, bool]]:
    """A text by hand in pieces, and whether each is learned."""
    for piece in re.findall(r"⟦[^⟧]*⟧|[^⟦]+", expected):
        yield piece.strip("⟦⟧"), piece.startswith("⟦")


def by_hand(expected: Sequence[str], tokenizer: Any) -> list[list[tuple[int, int]]]:
    """Tokens and whether each is learned, from the pieces alone."""
    return [
        [
            (token, int(learned))
            for text, learned in segments(each)
            for token in tokenizer.encode(text, add_special_tokens=False).ids
        ]
        for each in expected
    ]


def by_program(found: Sequence[Rendering], tokenizer: Any) -> list[list[tuple[int, int]]]:
    def tokens(each: Rendering) -> list[tuple[int, int]]:
        cut = tokenizer.encode(each.text, add_special_tokens=False)
        return list(zip(cut.ids, learned_mask(cut.offsets, each.learned), strict=True))

    return [tokens(each) for each in found]


def tokenizer_of(name: str) -> Any:
    family = FAMILIES[name]
    return cutter(list(dict.fromkeys([*family.special.values(), *family.added])))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_exactly_the_tokens_that_were_chosen_by_hand_are_learned(name: str, case: str) -> None:
    template, tokenizer = template_of(name), tokenizer_of(name)
    found = template.learnable(CHATS[case], tools_of(case))
    assert by_program(found, tokenizer) == by_hand(FAMILIES[name].expected[case], tokenizer)
    assert list(template.remarks) == list(REMARKS.get((name, case), ()))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_each_answer_is_learned_once_with_its_stop_token_and_nothing_of_others(name: str, case: str) -> None:
    found = template_of(name).learnable(CHATS[case], tools_of(case))
    learned = [each.text[start:end] for each in found for start, end in each.learned]
    assert len(learned) == sum(message["role"] == "assistant" for message in CHATS[case])
    stops = STOPS.get(name, [FAMILIES[name].special["eos_token"]])
    assert all(each.endswith(tuple(stops)) for each in learned)
    others = [message["content"] for message in CHATS[case] if message["role"] != "assistant"]
    assert not [text for text in others for each in learned if text in each]
    for message in CHATS[case]:
        if message["role"] == "assistant":
            assert sum(message["content"] in each for each in learned if message["content"]) in (0, 1)


MISTAKES: Mapping[str, Callable[[int, int], tuple[int, int]]] = {
    "shifted by one": lambda start, end: (start + 1, end + 1),
    "without the stop token": lambda start, end: (start, end - 1),
    "with some of the prompt": lambda start, end: (start - 20, end),
    "empty": lambda start, end: (start, start),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_with_a_mistake_does_not_pass(name: str, mistake: str) -> None:
    tokenizer = tokenizer_of(name)
    for case, expected in FAMILIES[name].expected.items():
        found = template_of(name).learnable(CHATS[case], tools_of(case))
        wrong = [Rendering(each.text, tuple(MISTAKES[mistake](*ends) for ends in each.learned)) for each in found]
        assert by_program(wrong, tokenizer) != by_hand(expected, tokenizer)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "tools" not in family.expected])
def test_calls_that_a_template_would_leave_out_are_refused(name: str) -> None:
    with pytest.raises(ChatError, match=r"leaves out message 2, an answer|the chat template fails: .*take turns"):
        template_of(name).learnable(CHATS["tools"], [WEATHER])


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "thinking" not in family.expected])
def test_reasoning_that_a_template_leaves_out_is_remarked(name: str) -> None:
    template = template_of(name)
    found = template.learnable(CHATS["thinking"])
    assert not [each for each in found if "Greet." in each.text]
    assert CUT_ANSWER in template.remarks


def hf(name: str, source: str | None = None, **more: Any) -> Any:
    """A tokenizer of transformers for a family, with its template."""
    from transformers import PreTrainedTokenizerFast

    template = (TEMPLATES / f"{name}.jinja").read_text() if source is None else source
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(name), chat_template=template or None, **FAMILIES[name].special, **more
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Today)
    tokenizer = hf(name)
    template = ChatTemplate.of(tokenizer, None)
    compared = 0
    for case, chat in CHATS.items():
        for end in range(1, len(chat) + 1):
            for prompt in (False, True):
                tools = tools_of(case) and [
                    {**WEATHER, "function": {**WEATHER["function"], "description": "Météo <&>"}}
                ]
                try:
                    expected = tokenizer.apply_chat_template(
                        chat[:end], tools=tools, tokenize=False, add_generation_prompt=prompt
                    )
                except Exception:
                    continue  # the template refuses it
                assert template.render(chat[:end], tools, prompt=prompt) == expected
                compared += 1
    assert compared >= 20


def shown(found: Sequence[Rendering]) -> list[str]:
    """As in the texts by hand."""

    def marked(each: Rendering) -> str:
        text = each.text
        for start, end in reversed(each.learned):
            text = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
        return text

    return [marked(each) for each in found]


def made(source: str, *added: str, **more: Any) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"}, ["</s>", "<|im_end|>", *added], **more)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
PROMPTED = PLAIN + "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_the_last_answer_alone_is_learned_where_that_is_asked_for() -> None:
    chat = CHATS["three"]
    assert shown(template_of("zephyr").learnable(chat, only_last=True))[0].count("⟦Bye.</s>⟧") == 1
    (found,) = template_of("qwen3").learnable(chat, only_last=True)
    assert shown([found])[0].endswith(
        "Sure.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦<think>\n\n</think>\n\nBye.<|im_end|>⟧\n"
    )
    marked = ChatTemplate.of(hf("chatml", ""), "chatml")
    assert shown(marked.learnable(chat, only_last=True))[0].count("⟦") == 1
    assert shown(marked.learnable([*chat, user("So?")], only_last=True))[0].count("⟦Bye.<|im_end|>⟧") == 1


@pytest.mark.parametrize("key", chats.LEARNED)
@pytest.mark.parametrize("name", [*FAMILIES, "marked"])
def test_an_answer_of_weight_0_is_written_and_not_learned(name: str, key: str) -> None:
    template = ChatTemplate.of(hf("chatml", ""), "chatml") if name == "marked" else template_of(name)
    first, said, *others = CHATS["three"]
    expected = learned_pieces(template.learnable([first, said, *others]))
    chat = [first, said | {key: 1}, others[0], others[1] | {key: 0}, others[2], others[3] | {key: None}]
    found = template.learnable(chat)
    assert learned_pieces(found) == [each for each in expected if "Sure." not in each]
    assert len(expected) == 3 and all("Sure." in each.text for each in found if "Bye." in each.text)
    assert learned_pieces(template.learnable([message | {key: False} for message in chat])) == []
    with pytest.raises(ChatError, match=rf"message 2 has {key} 0\.5: an answer is learned \(1\) or not \(0\)"):
        template.learnable([user("Hi"), answer("Hello.", **{key: 0.5})])


def test_an_empty_answer_is_learned_and_remarked() -> None:
    for said, remarked in (
        (answer(" "), True),
        (answer(""), True),
        (answer("", weight=0), False),
        (answer("", tool_calls=[CALL]), False),
        (answer("", reasoning_content="Why."), False),
        ({"role": "assistant", "content": [{"type": "text", "text": "Hello."}]}, False),
    ):
        template = template_of("qwen3")
        template.learnable([user("Hi"), said, user("And?"), answer("Sure.")], [WEATHER])
        assert (EMPTY_ANSWER in template.remarks) == remarked, said


def learned_pieces(found: Sequence[Rendering]) -> list[str]:
    return [each.text[start:end] for each in found for start, end in each.learned]


def test_an_answer_that_is_changed_later_has_a_text_of_its_own_and_others_share_one() -> None:
    """Mistral describes tools before the last question only: no earlier answer is as it was."""
    chat = [*CHATS["three"][:2], *CHATS["tools"], user("So?"), answer("Go.")]
    found = shown(template_of("mistral").learnable(chat, [WEATHER]))
    learned = [re.findall("⟦(.*?)⟧", each) for each in found]
    call = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>'
    assert learned == [[" Go.</s>"], [" Hello.</s>"], [call], [" It is warm.</s>"]]
    assert found[1].startswith("<s>[AVAILABLE_TOOLS]")
    assert found[1].endswith("[INST] Hi[/INST]⟦ Hello.</s>⟧")
    # The chain of calls keeps its reasoning until the answer.
    again = {**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    chain = [
        user("Where?"),
        *({"role": "assistant", "thinking": "Ask.", "tool_calls": [CALL]}, RESULT),
        *({"role": "assistant", "thinking": "More.", "tool_calls": [again]}, RESULT),
        answer("Rome.", thinking="Good."),
    ]
    found = shown(template_of("gpt-oss").learnable(chain, [WEATHER]))
    tag = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
    assert [re.findall("⟦(.*?)⟧", each) for each in found] == [
        [f"<|channel|>analysis<|message|>{said}<|call|>"] if said.endswith("}") else [said]
        for said in (
            "<|channel|>analysis<|message|>Good.<|end|><|start|>assistant<|channel|>final<|message|>Rome.<|return|>",
            f'Ask.<|end|>{tag}{{"city": "Rome"}}',
            f'More.<|end|>{tag}{{"city": "Oslo"}}',
        )
    ]


def test_a_change_of_what_is_before_an_answer_is_noticed_where_it_changes_no_place() -> None:
    long = made("{{ 'long' if messages | length > 4 else 'less' }} " + PROMPTED)
    assert shown(long.learnable(CHATS["three"])) == [
        (
            "long <user>Hi</s>\n<assistant>Hello.</s>\n<user>And?</s>\n<assistant>Sure.</s>\n"
            "<user>Hi</s>\n<assistant>⟦Bye.</s>⟧\n"
        ),
        "less <user>Hi</s>\n<assistant>⟦Hello.</s>⟧\n",
        "less <user>Hi</s>\n<assistant>Hello.</s>\n<user>And?</s>\n<assistant>⟦Sure.</s>⟧\n",
    ]


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5", "gemma-3", "mistral", "deepseek-r1", "zephyr", "command-r"])
def test_a_chat_is_rendered_once_for_each_answer_and_a_few_times_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = template_of(name)
    rendering = unittest.mock.Mock(side_effect=template._raw)
    monkeypatch.setattr(template, "_raw", rendering)
    template.learnable([message for turn in range(10) for message in (user(f"{turn}?"), answer(f"{turn}!"))])
    assert rendering.call_count <= 1 + 10 + 4


def test_reasoning_within_an_answer_is_kept_or_its_loss_is_remarked() -> None:
    chat = [user("Hi"), answer("<think>\nGreet.\n</think>\n\nHello.")]
    qwen, deepseek = template_of("qwen3"), template_of("deepseek-r1")
    assert shown(qwen.learnable(chat))[0].endswith("⟦<think>\nGreet.\n</think>\n\nHello.<|im_end|>⟧\n")
    assert not qwen.remarks
    assert shown(deepseek.learnable(chat))[0].endswith("<｜Assistant｜>⟦\n\nHello.<｜end▁of▁sentence｜>⟧")  # noqa: RUF001
    assert CUT_ANSWER in deepseek.remarks


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3.1", "mistral", "gpt-oss", "deepseek-r1"])
def test_arguments_of_calls_may_be_json_or_a_mapping(name: str) -> None:
    said = {**CALL, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [user("Rome?"), answer("", tool_calls=[said]), RESULT, answer("It is warm.")]
    assert shown(template_of(name).learnable(chat, [WEATHER])) == list(FAMILIES[name].expected["tools"])


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_text_are_printed_as_text(name: str) -> None:
    chat = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in CHATS["one"]]
    assert shown(template_of(name).learnable(chat)) == list(FAMILIES[name].expected["one"])
    twice = [{**each, "content": [*each["content"], {"type": "text", "text": "Well?"}]} for each in chat]
    (found,) = template_of(name).learnable(twice)
    asked, said = re.findall(r"Hi\s?Well\?|Hello\.\s?Well\?", found.text)
    assert (asked, said) == (("HiWell?", "Hello.Well?") if name == "gemma-3" else ("Hi\nWell?", "Hello.\nWell?"))
    with pytest.raises(ChatError, match="message 1 has content other than text"):
        template_of(name).learnable([{"role": "user", "content": [{"type": "image"}]}, answer("A cat.")])


def test_answers_in_a_row_and_one_before_any_question_are_learned() -> None:
    chat = [answer("Welcome."), user("Hi"), answer("Hello."), answer("How are you?")]
    assert shown(template_of("chatml").learnable(chat)) == [
        (
            "<|im_start|>assistant\n⟦Welcome.<|im_end|>⟧\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n<|im_start|>assistant\n⟦How are you?<|im_end|>⟧\n"
        )
    ]
    assert shown(template_of("qwen2.5").learnable(chat))[0].count("⟦Welcome.<|im_end|>⟧\n<|im_start|>user") == 1


def test_missing_keys_filled_with_none_change_nothing() -> None:
    filled = [{**each, "tool_calls": None, "name": None, "reasoning_content": None} for each in CHATS["one"]]
    for name in FAMILIES:
        assert shown(template_of(name).learnable(filled, [])) == list(FAMILIES[name].expected["one"])
    named = made(
        PROMPTED.replace("{{ m.content }}", "{{ m.content }}{% if m.name is defined %} ({{ m.name }}){% endif %}")
    )
    assert shown(named.learnable(filled)) == ["<user>Hi</s>\n<assistant>⟦Hello.</s>⟧\n"]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([user("Hi")], "it has no message of role assistant to learn from, but of user"),
        ([], "it has no message of role assistant to learn from"),
        (["Hi"], "message 1 is not a mapping with a role"),
        ([user("Hi"), {"content": "Hello."}], "message 2 is not a mapping with a role"),
        ([user("Hi"), {"role": 3, "content": "Hello."}], "message 2 is not a mapping with a role"),
        ([user("Hi"), answer("", tool_calls=[{"type": "function"}])], "one of its calls of tools has no name"),
        ([user("Hi"), {"role": "assistant", "content": 5}], "message 2 has content other than text"),
        ([{"role": "user", "content": {"a": 1}}, answer("Hello.")], "message 1 has content other than text"),
        ([{"role": "user", "content": None}, answer("Hello.")], "message 1 of role user has no content"),
        (
            [user("Hi"), {"role": "assistant", "value": "Hello."}],
            "message 2 of role assistant has no content, but value",
        ),
        (
            [user("Hi"), {"role": "assistant", "content": [], "tool_calls": []}],
            "message 2 of role assistant has no content, but tool_calls",
        ),
        (
            [user("Hi"), {"role": "assistant", "content": None, "function_call": {}}],
            "has no content, but function_call",
        ),
    ],
)
def test_what_is_no_chat_to_learn_from_is_refused(chat: Any, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        template_of("zephyr").learnable(chat)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "the chat template is not valid: "),
        ("{{ raise_exception('take turns') }}", "the chat template fails: TemplateError: take turns"),
        ("{{ messages.append(1) }}", "the chat template fails: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "the chat template fails: SecurityError"),
        ("{% set n = namespace(__call__=1) %}", "the chat template fails: SecurityError"),
        ("{% generation %}{% endgeneration %}", "marks no part of it"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves out message 2"),
        ("{{ messages | length }}", "begins is unknown"),
    ],
)
def test_a_template_that_shows_no_answer_is_refused(source: str, message: str) -> None:
    with pytest.raises(ChatError, match=message):
        made(source).learnable(CHATS["one"])


def test_an_answer_that_nothing_ends_is_remarked() -> None:
    bare = made(PROMPTED.replace("</s>", ""))
    assert shown(bare.learnable(CHATS["one"])) == ["<user>Hi\n<assistant>⟦Hello.\n⟧"]
    assert bare.remarks == (NO_STOP,)
    assert len(bare.learnable(CHATS["three"])) == 1
    ended = made(PROMPTED)
    assert shown(ended.learnable(CHATS["one"])) == ["<user>Hi</s>\n<assistant>⟦Hello.</s>⟧\n"]
    assert not ended.remarks
    marked = made(PLAIN.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"))
    assert marked.learnable(CHATS["one"])[0].learned
    assert marked.remarks == (UNMARKED_STOP,)


def test_a_token_that_ends_every_chat_does_not_make_texts_of_their_own() -> None:
    """As Phi-3's <|endoftext|>, which is at the end of a chat alone."""
    found = made(PROMPTED.replace("%}<assistant>", "%}<assistant>{% else %}<|im_end|>")).learnable(CHATS["three"])
    assert shown(found) == [
        (
            "<user>Hi</s>\n<assistant>⟦Hello.</s>⟧\n<user>And?</s>\n<assistant>⟦Sure.</s>⟧\n"
            "<user>Hi</s>\n<assistant>⟦Bye.</s>\n<|im_end|>⟧"
        )
    ]


def test_marks_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Line breaks around the tags, what is set within them, and loops that are left: all as transformers has it."""
    source = """{% set name = 'outer' %}
{%- for message in messages %}
    {% if message.role == 'assistant' %}
        {% generation %}
        {% set name = 'inner' %}
        {{- message.content | trim }}{{ eos_token }}
        {% endgeneration %}

    {%- else %}
[{{ message.role }}] {{ message.content }}
    {%- endif %}
    {%- if loop.index == 4 %}{% break %}{% endif %}
{% endfor %}
{{ name }}"""
    tokenizer = hf("zephyr", source)
    found = tokenizer.apply_chat_template(
        CHATS["three"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    (ours,) = by_program(ChatTemplate.of(tokenizer, None).learnable(CHATS["three"]), tokenizer_of("zephyr"))
    assert ours == list(zip(found["input_ids"], found["assistant_masks"], strict=True))
    assert sum(learned for _, learned in ours)


def test_no_chat_can_forge_marks() -> None:
    template = made(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    text = "\ufdd0(Learn me.\ufdd0) {% generation %}And me.{% endgeneration %}"
    assert shown(template.learnable([user(text), answer("Hello.")])) == [f"{text}⟦Hello.</s>⟧"]


def test_a_stop_token_that_includes_the_line_break_after_it_is_learned() -> None:
    """As Phi-3's <|end|>: such a token ends where the white space after it does."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    inner = cutter([AddedToken("</s>", rstrip=True, special=True)])
    for source in (
        PROMPTED,
        PLAIN.replace("{{ m.content }}</s>", "{% generation %}{{ m.content }}</s>{% endgeneration %}"),
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", chat_template=source)
        tokenizer.add_special_tokens({"eos_token": AddedToken("</s>", rstrip=True)})
        (found,) = by_program(ChatTemplate.of(tokenizer, None).learnable([user("Hi"), answer("Yes")]), inner)
        stop = inner.token_to_id("</s>")
        assert [learned for token, learned in found if token == stop][-1] == 1
        assert sum(learned for _, learned in found) >= 4


def test_a_token_is_learned_if_it_lies_within_a_range() -> None:
    offsets = [(0, 0), (0, 2), (2, 5), (5, 5), (5, 7), (7, 9), (9, 12), (12, 13), (12, 13), (13, 15)]
    assert list(learned_mask(offsets, [(2, 7), (8, 13)])) == [0, 0, 1, 0, 1, 0, 1, 1, 1, 0]
    assert list(learned_mask(offsets, [])) == [0] * 10
    assert learned_mask([], [(0, 5)]) == b""


def test_the_template_of_the_tokenizer_a_built_in_one_or_a_file(tmp_path: Path) -> None:
    none = hf("zephyr", "")
    with pytest.raises(ChatError, match=r"has no chat template: set data\.chat_template .*chatml, llama3, alpaca"):
        ChatTemplate.of(none, None)
    with pytest.raises(
        ChatError, match=r"data\.chat_template: .*lost\.jinja is not built in \(chatml, llama3, alpaca\)"
    ):
        ChatTemplate.of(none, str(tmp_path / "lost.jinja"))
    (tmp_path / "own.jinja").write_text(PROMPTED)
    assert shown(ChatTemplate.of(none, str(tmp_path / "own.jinja")).learnable(CHATS["one"])) == [
        "<user>Hi</s>\n<assistant>⟦Hello.</s>⟧\n"
    ]
    several = hf("zephyr")
    several.chat_template = {"default": PROMPTED, "tool_use": PROMPTED + "{{ tools | tojson }}"}
    template = ChatTemplate.of(several, None)
    assert template.learnable(CHATS["one"])[0].text == "<user>Hi</s>\n<assistant>Hello.</s>\n"
    for tools in (None, [WEATHER]):
        ours = template.render(CHATS["one"], tools, prompt=False)
        assert ours == several.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
    assert '"weather"' in template.learnable(CHATS["one"], [WEATHER])[0].text


@pytest.mark.parametrize(
    ("name", "family", "expected"),
    [
        ("chatml", "chatml", "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"),
        ("chatml", "qwen2.5", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Hello.<|im_end|>⟧\n"),
        ("chatml", "zephyr", "<s><|im_start|>user\nHi</s>\n<|im_start|>assistant\n⟦Hello.</s>⟧\n"),
        (
            "llama3",
            "llama-3.1",
            (
                "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.<|eot_id|>⟧"
            ),
        ),
        (
            "llama3",
            "mistral",
            (
                "<s><|start_header_id|>user<|end_header_id|>\n\nHi</s>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello.</s>⟧"
            ),
        ),
        (
            "alpaca",
            "zephyr",
            (
                "<s>Below is an instruction that describes a task. Write a response that appropriately completes the "
                "request.\n\n### Instruction:\nHi\n\n### Response:\n⟦Hello.</s>⟧"
            ),
        ),
    ],
)
def test_a_built_in_template_ends_answers_with_a_token_of_the_tokenizer(name: str, family: str, expected: str) -> None:
    tokenizer = hf(family, "")
    template = ChatTemplate.of(tokenizer, name)
    assert shown(template.learnable(CHATS["one"])) == [expected]
    pieces = [text for text in template.remarks if "has no token <|" in text]
    assert len(pieces) == (family in ("zephyr", "mistral") and name != "alpaca")
    # What is exported is the template for this tokenizer, and transformers prints the same by it.
    tokenizer.chat_template = template.source
    for chat in (CHATS["three"], CHATS["system"]):
        for prompt in (False, True):
            ours = template.render(chat, prompt=prompt)
            assert ours == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        # A prompt is what comes before an answer.
        assert template.render(chat, prompt=False).startswith(template.render(chat[:-1], prompt=True))
    with pytest.raises(ChatError, match=f"{name} has no place for tools"):
        template.learnable(CHATS["one"], [WEATHER])
    with pytest.raises(ChatError, match=f"{name} has no place for calls of tools"):
        template.learnable(CHATS["tools"])


def test_a_built_in_template_needs_a_token_to_end_answers_with() -> None:
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=cutter([]))
    for name in ("chatml", "llama3", "alpaca"):
        with pytest.raises(ChatError, match=f"{name} cannot end an answer, for the tokenizer has no eos_token"):
            ChatTemplate.of(bare, name)


TEXTS = some.text(some.characters(exclude_categories=["Cs"]), max_size=12)


@given(turns=some.lists(some.tuples(TEXTS, TEXTS), min_size=1, max_size=4), marked=some.booleans())
def test_what_is_learned_is_the_answers_and_their_stop_tokens(turns: list[tuple[str, str]], marked: bool) -> None:
    family = FAMILIES["chatml"]
    source = (chats._TEMPLATES / "chatml.jinja") if marked else TEMPLATES / "chatml.jinja"
    template = ChatTemplate(source.read_text(), family.special, [*family.added, *family.special.values()])
    chat = [message for asked, said in turns for message in (user(asked), answer(said))]
    (found,) = template.learnable(chat)
    assert [found.text[start:end] for start, end in found.learned] == [f"{said}<|im_end|>" for _, said in turns]
    assert found.text == template.render(chat, prompt=False)
