"""Chats that the tokenizer has no template for are refused in the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.recipe.resolved import Asked, Resolved
from trainkit.tools.builtin.inputs import chats_need_a_template

Solve = Callable[..., Resolved]
RECIPE = """version: 1
train: {steps: 1}
data:
  kind: jsonl
  path: chats.jsonl
  messages_field: messages
  tokenizer: /words
"""
TOLD = "data.messages_field: the tokenizer /words has no chat template"


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
    found = list(chats_need_a_template(Asked(solve({"r.yaml": RECIPE, **folder}), {})))
    assert [each.what for each in found] == [TOLD] * refuses
    assert all(each.origin is not None and each.origin.line == 6 for each in found)
    plain = RECIPE.replace("messages_field: messages", "field: text")
    assert list(chats_need_a_template(Asked(solve({"r.yaml": plain, **folder}), {}))) == []


def test_a_tokenizer_that_is_not_on_this_disk_is_not_judged(solve: Solve) -> None:
    assert list(chats_need_a_template(Asked(solve({"r.yaml": RECIPE}), {}))) == []
