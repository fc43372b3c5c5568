"""Chats as text: a chat template rendered as transformers renders it, and which part of the text is learned."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.files import read_whole
from trainkit.text import join_names

if TYPE_CHECKING:
    import jinja2

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]
BUILT_IN = ("chatml", "llama3", "alpaca")
_TEMPLATES = Path(__file__).parent / "templates"
_LARGEST = 1 << 20  # bytes of a template's file
# Around what a template marks as the assistant's, until it is rendered; no chat can contain what is drawn at random.
_OPEN, _CLOSE = (f"\ufdd0{os.urandom(8).hex()}{side}" for side in "()")
# Keys of a message that say whether it is learned: 1 or true, and 0 or false. In OpenAI's files, and in others'.
LEARNED = ("weight", "train", "loss")
# Where messages keep their reasoning; templates read the first, or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# What a message may say in place of a content.
_SAID = ("tool_calls", "tool_responses", *_REASONING)

NO_STOP = "no special token ends an answer: the model does not learn to stop"
UNMARKED_STOP = (
    "the chat template's {% generation %} marks do not include a special token that ends an answer: "
    "the model does not learn to stop"
)
OTHER_PROMPT = (
    "the chat template puts something else before an answer than before the place where the model is to answer "
    "(as a system message or an opening <think>): what is learned is not quite what is asked later"
)
CUT_ANSWER = "the chat template leaves out a part of an answer, such as its reasoning: that part is not learned"
EMPTY_ANSWER = "an answer is empty: the model learns to say nothing there"
UNUSED_TOOLS = "the chat template has no place for tools: the model does not see them"


class ChatError(ValueError):
    """Why a chat cannot be trained on."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat as text. learned: the ranges of characters [start, end) that the model learns to write, ascending."""

    text: str
    learned: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template, rendered as transformers renders it."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str | list[str]],
        added: Collection[str],
        *,
        greedy: Collection[str] = (),
        for_tools: ChatTemplate | None = None,
    ) -> None:
        """special_tokens: bos_token, eos_token, … for the template. added: all added tokens of the tokenizer.

        greedy: those of them that include the whitespace after them. for_tools: the template for chats with tools.
        """
        self.source, self._special, self._for_tools = source, dict(special_tokens), for_tools
        self._ends = {*added, *(each for each in special_tokens.values() if isinstance(each, str) and each)}
        self._lengths = sorted({len(each) for each in self._ends})
        self._greedy = frozenset(greedy)
        self._template, self._marked, names = _compile(source)
        self._shows_tools = "tools" in names
        self._remarks: dict[str, None] = {}

    @classmethod
    def of(cls, tokenizer: Any, chosen: str | None) -> ChatTemplate:
        """The template for a tokenizer of transformers. chosen: `data.chat_template`, or None for its own."""
        special = {name: text for name, text in tokenizer.special_tokens_map.items() if text}
        added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
        details: dict[str, Any] = {"greedy": [text for text, token in added.items() if token.rstrip]}
        remarks: list[str] = []
        if chosen is None:
            sources = tokenizer.chat_template or {}
            sources = {"default": sources} if isinstance(sources, str) else sources
            if "default" not in sources:
                raise ChatError(
                    "the tokenizer has no chat template: set data.chat_template to one that is built in "
                    f"({join_names(BUILT_IN)}) or to a file"
                )
            source = sources["default"]
            if "tool_use" in sources:
                details["for_tools"] = cls(sources["tool_use"], special, added, **details)
        elif chosen in BUILT_IN:
            source, remarks = _built_in(chosen, special, added)
        else:
            try:
                source = read_whole(chosen, _LARGEST, links=True).decode()
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
                raise ChatError(
                    f"data.chat_template: {chosen} is not built in ({join_names(BUILT_IN)}) and no file to read: {why}"
                ) from error
        found = cls(source, special, added, **details)
        found._remarks.update(dict.fromkeys(remarks))
        return found

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to tell the user of this template and of the chats that `learnable` has seen, each thing once."""
        return tuple({**self._remarks, **(self._for_tools._remarks if self._for_tools else {})})

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None, *, prompt: bool) -> str:
        """The chat as text. prompt: followed by what makes the model answer."""
        if tools and self._for_tools:
            return self._for_tools.render(messages, tools, prompt=prompt)
        return self._printable(_checked(messages), tools, prompt=prompt)[1]

    def learnable(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None, *, only_last: bool = False
    ) -> list[Rendering]:
        """The texts to train on, in which each answer is learned once. only_last: only the last one is.

        An answer whose `weight` is 0 is not learned. It is one text, unless the template changes earlier messages when
        others follow: an answer that is changed has a text of its own, which ends with it.
        """
        if tools and self._for_tools:
            return self._for_tools.learnable(messages, tools, only_last=only_last)
        if tools and not self._shows_tools:
            self._remark(UNUSED_TOOLS)
        chat = _checked(messages)
        answers = _answers(chat)
        skipped = [place for place in answers if not _is_learned(messages[place], place + 1)]
        if any(not _says(chat[place]) for place in answers if place not in skipped):
            self._remark(EMPTY_ANSWER)
        chat, full, marks = self._printable(chat, tools, prompt=False)
        if self._marked:
            return [self._by_marks(chat, tools, full, marks, last=answers[-1] if only_last else None, skipped=skipped)]
        shared: list[tuple[int, int]] = []
        own: list[Rendering] = []
        # Of an answer: how much of its prompt is not written before it, and what is written around its text.
        around: tuple[int, str, str] | None = None
        for place in reversed(answers[-1:] if only_last else answers):
            if place in skipped:
                continue
            message = chat[place]
            content = message.get("content")
            text = content if isinstance(content, str) else ""
            plain = text.strip() == text != "" and message.keys() <= {"role", "content"}
            prompt = self._prompt(chat[:place], tools)
            if plain and around and prompt is not None:
                lead, head, tail = around
                answer, start = f"{head}{text}{tail}", len(prompt) - lead
                if full.startswith(prompt[:start]) and full.startswith(answer, start):
                    # Written as another answer was: its ends are where that one's were, without one more rendering.
                    shared.append((start, start + len(answer)))
                    continue
            upto = full if place == len(chat) - 1 else self._text(chat[: place + 1], tools, prompt=False)
            start = self._start(upto, prompt, chat[: place + 1], tools)
            answer = upto[start:]
            if not answer.strip() or any(name not in answer for name, _ in _calls(message)):
                raise ChatError(f"the chat template leaves out message {place + 1}, an answer, or its calls of tools")
            self._look_for_cuts(message, answer)
            stop = found = self._stop(upto, start, len(upto))
            # A token that ends every chat is not there when others follow.
            while found and not full.startswith(upto[: found[1]]):
                found = self._stop(upto, start, found[0])
            end = (found or stop or (start, len(upto)))[1]
            if not stop:
                self._remark(NO_STOP)
            if not found and (stop or not full.startswith(upto)):
                own.append(Rendering(upto, ((start, end),)))
                continue
            shared.append((start, end))
            if plain and text in answer and prompt and upto.startswith(prompt[:start]):
                head, _, tail = upto[start:end].partition(text)
                around = (len(prompt) - start, head, tail)
        whole = [Rendering(full, tuple(reversed(shared)))] if shared or not own else []
        return [*whole, *reversed(own)]

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> Rendering:
        """A chat as one text, all of which is learned. ChatError for a message that says it is not."""
        if tools and self._for_tools:
            return self._for_tools.whole(messages, tools)
        if tools and not self._shows_tools:
            self._remark(UNUSED_TOOLS)
        require_all_learned(messages)
        chat, text, _ = self._printable(_checked(messages), tools, prompt=False)
        for message in chat:
            self._look_for_cuts(message, text)
        if chat[-1]["role"] == "assistant" and not self._stop(text, 0, len(text)):
            self._remark(NO_STOP)
        return Rendering(text, ((0, len(text)),))

    def _by_marks(
        self,
        chat: list[Message],
        tools: Tools | None,
        text: str,
        marks: list[tuple[int, int]],
        *,
        last: int | None,
        skipped: Sequence[int],
    ) -> Rendering:
        """The chat as its template marks it.

        last: the place of the only answer that is learned. skipped: the places of answers that are not.
        """
        if skipped:  # an answer's marks are those that are there with it, and not before it
            counts = [len(self._marks(chat[:place], tools)) for place in range(len(chat))] + [len(marks)]
            spans = [range(counts[place], counts[place + 1]) for place in skipped]
            marks = [each for number, each in enumerate(marks) if not any(number in span for span in spans)]
            if not marks:
                return Rendering(text, ())
        if last:
            earlier = self._text(chat[:last], tools, prompt=False)
            marks = [each for each in marks if each[0] >= len(earlier)] if text.startswith(earlier) else marks[-1:]
        if not marks:
            raise ChatError("the chat template marks no part of it as the assistant's")
        if not self._stop(text, *marks[-1]):
            self._remark(UNMARKED_STOP)
        for message in chat:
            self._look_for_cuts(message, text)
        return Rendering(
            text, tuple((start, max(end, (self._stop(text, start, end) or (0, 0))[1])) for start, end in marks)
        )

    def _prompt(self, chat: list[Message], tools: Tools | None) -> str | None:
        """What makes the model answer after these messages; None where the template cannot, as after none."""
        try:
            return self._text(chat, tools, prompt=True)
        except ChatError:
            return None

    def _start(self, upto: str, prompt: str | None, chat: list[Message], tools: Tools | None) -> int:
        """Where the answer begins in a chat that ends with it, whose text is `upto`."""
        if prompt is not None and upto.startswith(prompt):
            return len(prompt)
        if prompt is not None:
            self._remark(OTHER_PROMPT)
        earlier = self._text(chat[:-1], tools, prompt=False) if prompt is not None and len(chat) > 1 else ""
        opening = prompt[len(earlier) :] if earlier and prompt and prompt.startswith(earlier) else ""
        # Two other answers in its place are the same up to where it begins.
        others = [self._text([*chat[:-1], _reworded(chat[-1], word)], tools, prompt=False) for word in ("Qa1", "Zb2")]
        start = _common(*others)
        if others[0] == others[1] or not upto.startswith(others[0][:start]):
            # As of calls of tools alone: as much of the opening as both have, in whole special tokens.
            start = _common(prompt, upto) if opening and prompt else 0
            while start > len(earlier) and (self._stop(upto, len(earlier), start) or (0, 0))[1] != start:
                start -= 1
            if start <= len(earlier):
                raise ChatError(
                    f"where the answer in message {len(chat)} begins is unknown: the chat template writes something "
                    "else before it than before the place where the model is to answer"
                )
        elif opening:
            # What the template writes between the opening and the text, as a tag, is the model's to write.
            found = upto.rfind(opening, upto.rfind(str(chat[-2].get("content")), 0, start) + 1, start)
            start = found + len(opening) if found >= 0 else start
        # So is white space, unless the prompt ends with it.
        written = len(upto[:start].rstrip())
        return start if prompt is None or prompt.endswith(upto[written:start]) else written

    def _stop(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Where the special token lies that, but for white space, ends a range; None if none does."""
        while end > start and text[end - 1].isspace():
            end -= 1
        for length in self._lengths:
            if length <= end - start and (token := text[end - length : end]) in self._ends:
                begin = end - length
                while token in self._greedy and end < len(text) and text[end].isspace():
                    end += 1
                return begin, end
        return None

    def _look_for_cuts(self, message: Message, shown: str) -> None:
        texts = (message.get(name) for name in ("content", "reasoning_content"))
        if message["role"] == "assistant" and any(
            isinstance(each, str) and each.strip() not in shown for each in texts
        ):
            self._remark(CUT_ANSWER)

    def _remark(self, remark: str) -> None:
        self._remarks[remark] = None

    def _printable(
        self, chat: list[Message], tools: Tools | None, *, prompt: bool
    ) -> tuple[list[Message], str, list[tuple[int, int]]]:
        """The chat in the first form that the template prints rightly, its text, and what the template marks."""
        failure: ChatError | None = None
        printed = []
        for form in _forms(chat):
            try:
                text, marks = _unmarked(self._raw(form, tools, prompt=prompt))
            except ChatError as error:
                failure = failure or error
                continue
            if not any(_misprinted(message, text) for message in form):
                return form, text, marks
            printed.append((form, text, marks))
        if not printed:
            assert failure
            raise failure
        return printed[0]

    def _text(self, chat: list[Message], tools: Tools | None, *, prompt: bool) -> str:
        raw = self._raw(chat, tools, prompt=prompt)
        return _unmarked(raw)[0] if self._marked else raw

    def _marks(self, chat: list[Message], tools: Tools | None) -> list[tuple[int, int]]:
        try:
            return _unmarked(self._raw(chat, tools, prompt=False))[1]
        except ChatError:  # as of no message
            return []

    def _raw(self, chat: list[Message], tools: Tools | None, *, prompt: bool) -> str:
        try:
            return self._template.render(
                messages=chat, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._special
            )
        except Exception as error:  # a template is a program and may raise anything
            raise ChatError(f"the chat template fails: {type(error).__name__}: {error}") from error


def learned_mask(offsets: Sequence[tuple[int, int]], learned: Sequence[tuple[int, int]]) -> bytes:
    """For each token 1 if it lies within a learned range and 0 otherwise. offsets: of the tokens' characters."""
    mask = bytearray(len(offsets))
    ranges = iter((*learned, (sys.maxsize, sys.maxsize)))
    start, end = next(ranges)
    for place, (first, last) in enumerate(offsets):
        while first >= end:
            start, end = next(ranges)
        if start <= first < last <= end:
            mask[place] = 1
    return bytes(mask)


def require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    """ChatError for a chat that no template can make learnable."""
    _answers(_checked(messages))


def require_all_learned(messages: Sequence[Mapping[str, Any]]) -> None:
    """ChatError for a chat of which a message says that it is not learned."""
    for number, message in enumerate(messages, 1):
        if not _is_learned(message, number):
            raise ChatError(
                f"message {number} says that it is not learned, and data.train_on_prompts learns all of a chat: "
                "leave one of them out"
            )


def _answers(chat: Sequence[Message]) -> list[int]:
    """The places of the assistant's messages."""
    answers = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
    if not answers:
        roles = join_names(list(dict.fromkeys(message["role"] for message in chat)))
        raise ChatError(f"it has no message of role assistant to learn from, but of {roles or 'nobody'}")
    return answers


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages without keys that are None, with their reasoning under the names that templates read."""
    chat = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ChatError(f"message {number} is not a mapping with a role")
        # `datasets` fills missing keys with None, which templates would print.
        kept = {name: value for name, value in message.items() if value is not None and name not in LEARNED}
        content = kept.get("content", "")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ChatError(f"message {number} has content other than text")
        if not isinstance(content, str | list):
            raise ChatError(f"message {number} has content other than text")
        if kept.get("content", []) == [] and not any(kept.get(name) for name in _SAID):
            others = join_names([name for name in kept if name not in ("role", "content")])
            raise ChatError(f"message {number} of role {kept['role']} has no content{others and f', but {others}'}")
        reasoning = next((kept[name] for name in _REASONING if name in kept), None)
        chat.append(kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning})
    return chat


def _says(message: Message) -> bool:
    """Whether a message has a text, in parts or as reasoning, too, or a call."""
    content = message.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    texts.append(message.get("reasoning_content"))
    return any(each and str(each).strip() for each in (*texts, message.get("tool_calls")))


def _is_learned(message: Mapping[str, Any], number: int) -> bool:
    """Whether an answer is learned, by what it says itself."""
    for name in LEARNED:
        value = message.get(name)
        if value is not None and value not in (0, 1):
            raise ChatError(f"message {number} has {name} {value!r}: an answer is learned (1) or not (0)")
        if value is not None and not value:
            return False
    return True


def _common(one: str, other: str) -> int:
    """How many characters both begin with."""
    return bisect.bisect_left(range(len(one)), True, key=lambda place: not other.startswith(one[: place + 1]))


def _reworded(message: Message, word: str) -> Message:
    """A message that says something else."""
    changed: Message = {
        name: word for name in ("content", *_REASONING) if isinstance(message.get(name), str) and message[name]
    }
    if isinstance(content := message.get("content"), list):
        changed["content"] = [{**part, "text": word} for part in content]
    return message | changed


def _forms(chat: list[Message]) -> Iterator[list[Message]]:
    """The chat as it is, then with texts for lists of parts and arguments as JSON for mappings, or the reverse.

    Templates take one or the other: tokenizers' and servers' documentation differ on both.
    """
    parts = any(isinstance(message.get("content"), list) for message in chat)
    calls = any(message.get("tool_calls") for message in chat)
    for joined, swapped in itertools.product((False, True)[: parts + 1], (False, True)[: calls + 1]):
        yield [_in_form(message, joined, swapped) for message in chat] if joined or swapped else chat


def _in_form(message: Message, joined: bool, swapped: bool) -> Message:
    changed: Message = {}
    if joined and isinstance(content := message.get("content"), list):
        changed["content"] = "\n".join(part["text"] for part in content)  # as vLLM does
    if swapped and message.get("tool_calls"):
        changed["tool_calls"] = [_swapped(call) for call in message["tool_calls"]]
    return message | changed


def _swapped(call: Any) -> Any:
    """A call of a tool with its arguments as a mapping where they were JSON, and the reverse."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _swapped(call["function"])}
    arguments: Any = call.get("arguments")
    if isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    with contextlib.suppress(TypeError, ValueError):
        if isinstance(read := json.loads(arguments), dict):
            return {**call, "arguments": read}
    return call


def _misprinted(message: Message, text: str) -> bool:
    """Whether a template has printed a list of parts or arguments as Python or JSON shows them, or left them out."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if parts and (str(parts) in text or any(part["text"].strip() not in text for part in parts)):
        return True
    for name, arguments in _calls(message):
        shown = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, str) else str(arguments)
        if name not in text or (arguments and shown in text):
            return True
    return False


def _calls(message: Message) -> Iterator[tuple[str, Any]]:
    """The names and arguments of a message's calls of tools."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError("one of its calls of tools has no name")
        yield function["name"], function.get("arguments")


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """A rendering without the marks in it, and the ranges between them."""
    if _OPEN not in text:
        return text, []
    pieces: list[str] = []
    ranges: list[tuple[int, int]] = []
    length = start = 0
    for piece in re.split(f"({re.escape(_OPEN)}|{re.escape(_CLOSE)})", text):
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            ranges.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), [(start, end) for start, end in ranges if start < end]


def _built_in(name: str, special: Mapping[str, Any], added: Collection[str]) -> tuple[str, list[str]]:
    """A built-in template for a tokenizer, and remarks on it.

    No token is added to the tokenizer: answers end with the template's own token if it is one, else with eos_token.
    """
    source = (_TEMPLATES / f"{name}.jinja").read_text("utf-8")
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name)
    if end in added:
        return source, []
    if not special.get("eos_token"):
        raise ChatError(
            f"data.chat_template: {name} cannot end an answer, for the tokenizer has no eos_token"
            + (f" and no token {end}" if end else "")
        )
    if end is None:
        return source, []
    remark = (
        f"the tokenizer has no token {end}: the marks of {name} are cut like other text, "
        f"and messages end with {special['eos_token']}"
    )
    return source.replace(f"'{end}'", "eos_token"), [remark]


def _compile(source: str) -> tuple[jinja2.Template, bool, set[str]]:
    """A template in transformers' environment, whether it marks what to learn, and the variables that it uses.

    https://huggingface.co/docs/transformers/chat_templating
    """
    import jinja2
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.meta
    import jinja2.runtime
    import jinja2.sandbox
    import jinja2.utils
    from jinja2 import nodes, parser

    marked = []

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}: what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked.append(line)
            around = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_OPEN, _CLOSE))
            return nodes.Scope([next(around), *body, next(around)]).set_lineno(line)

    class Namespace(jinja2.utils.Namespace):
        """Without names that may lead a template out of its sandbox, as in transformers."""

        def __init__(self, /, *pairs: Any, **values: Any) -> None:
            super().__init__()
            for name, value in dict(*pairs, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"{name!r} is not for templates")
            super().__setitem__(name, value)

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        def getattr(self, obj: Any, attribute: str) -> Any:
            """As the sandbox does, but without its detours for the keys of messages, for namespaces and for loops."""
            if type(obj) is dict and not hasattr(dict, attribute):
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
            if type(obj) in (Namespace, jinja2.runtime.LoopContext) and not attribute.startswith("_"):
                return getattr(obj, attribute) if hasattr(obj, attribute) else self.undefined(obj=obj, name=attribute)
            return super().getattr(obj, attribute)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=Namespace,
    )
    try:
        tree = environment.parse(source)
        return environment.from_string(source), bool(marked), jinja2.meta.find_undeclared_variables(tree)
    except jinja2.TemplateError as error:
        raise ChatError(f"the chat template is not valid: {error}") from error
