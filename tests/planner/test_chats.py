"""Chats that the tokenizer has no template for are refused in the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.data.formats import FORMATS, RowFormat
from trainkit.data.seen import SeenData
from trainkit.recipe.resolved import Asked, Resolved
from trainkit.tools.builtin.inputs import chats_need_a_template

Solve = Callable[..., Resolved]
RECIPE = """version: 1
train: {steps: 1}
data:
  kind: dataset
  path: chats.jsonl
  tokenizer: /words
"""
CHATS = "chats (messages: a list of {role, content})"
TOLD = f"the rows of data.path are {CHATS}, and the tokenizer /words has no chat template"


def seen(name: str, *roles: str) -> SeenData:
    form = next(each for each in FORMATS if each.name == name)
    return SeenData(RowFormat(form, {role: role for role in roles}))


MESSAGES, TEXTS = seen("messages", "messages"), seen("text", "text")


@pytest.mark.parametrize(
    ("files", "refuses"),
    [
        ({"tokenizer_config.json": "{}"}, True),
        ({"tokenizer_config.json": '{"chat_template": null}'}, True),
        ({"tokenizer.json": "{}"}, True),
        ({"tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, False),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}"}, False),
        # what the libraries are to judge
        ({"tokenizer_config.json": "{}", "additional_chat_templates": ""}, False),
        ({"config.json": "{}"}, False),
        ({"tekken.json": "{}"}, False),
        ({"tokenizer_config.json": "no JSON"}, False),
        ({"tokenizer_config.json": "[]"}, False),
    ],
)
def test_a_tokenizer_without_a_template_is_refused(files: dict[str, str], refuses: bool, solve: Solve) -> None:
    folder = {"/words": "", **{f"/words/{name}": text for name, text in files.items()}}
    found = list(chats_need_a_template(Asked(solve({"r.yaml": RECIPE, **folder}), {}, seen=MESSAGES)))
    assert [each.what for each in found] == [TOLD] * refuses
    assert all(each.origin is not None and each.origin.line == 5 for each in found)
    resolved = solve({"r.yaml": RECIPE, **folder})
    assert list(chats_need_a_template(Asked(resolved, {}, seen=TEXTS))) == []
    own = solve({"r.yaml": RECIPE + "  chat_template: chatml\n", **folder})
    assert list(chats_need_a_template(Asked(own, {}, seen=MESSAGES))) == []


def test_chats_of_bytes_are_refused(solve: Solve) -> None:
    resolved = solve({"r.yaml": RECIPE.replace("  tokenizer: /words\n", "")})
    (found,) = chats_need_a_template(Asked(resolved, {}, seen=MESSAGES))
    assert found.key == "data.tokenizer" and "bytes have no chat template" in found.what


def test_a_tokenizer_that_is_not_on_this_disk_is_not_judged(solve: Solve) -> None:
    assert list(chats_need_a_template(Asked(solve({"r.yaml": RECIPE}), {}, seen=MESSAGES))) == []
