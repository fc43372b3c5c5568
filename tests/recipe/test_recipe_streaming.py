"""Streamed data in a recipe: what goes together, and mistakes inside the list of sources, at their places."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import DatasetData

HEAD = "version: 1\ntrain: {steps: 1}\n"
STREAM = HEAD + "data:\n  kind: dataset\n  streaming: true\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("data: {kind: dataset, mix: [{path: a}]}", "data: mix requires streaming: true"),
        ("data: {kind: dataset, streaming: true, path: a, mix: [{path: a}]}", "path and mix each name the data"),
        ("data: {kind: dataset, streaming: true}", "path must name a file of rows"),
        ("data: {kind: dataset, streaming: true, mix: [{path: a, weight: 0}]}", "the weights in mix sum to 0"),
        ("data: {kind: dataset, path: a, shuffle_buffer: 5}", "data.shuffle_buffer requires data.streaming: true"),
        ("data: {kind: dataset, path: a, validation_rows: 5}", "data.validation_rows requires data.streaming: true"),
        (
            "data: {kind: dataset, path: a, streaming: true, validation_fraction: 0.1}",
            "share of data whose size is known",
        ),
        ("data: {kind: dataset, path: a, streaming: true}\ntrain: {epochs: 1}", "data.streaming requires train.steps"),
        ("data: {kind: dataset, path: a, streaming: true}\npredict: all", "predict.split all is for every training"),
        ("data: {kind: text, streaming: true}", "data.kind text has no setting 'streaming'"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, what: str, refuse: Callable[..., list[Diagnostic]]) -> None:
    found = refuse((HEAD if "train:" not in text else "version: 1\n") + text + "\n")
    assert any(what in each.what for each in found), [each.what for each in found]


def test_all_that_does_not_go_together_is_said_at_once(refuse: Callable[..., list[Diagnostic]]) -> None:
    found = refuse(
        "version: 1\nmodel: {kind: gpt, hidden_size: 10, heads: 4, moe: {experts: 1, every: 9}}\ndata:\n"
        "  {kind: dataset, path: b, mix: [{path: a, split: x}], columns: {x: y}, workers: 0, prefetch_factor: 2, "
        "shuffle_buffer: -1}\n"
    )
    said = "; ".join(each.what for each in found)
    for what in (
        "mix requires streaming: true",
        "data.streaming requires train.steps",
        "path and mix each name the data",
        "columns has no part 'x'",
        "prefetch_factor 2 is for loader processes",
        "data.shuffle_buffer must be a whole number",
        "top_k 2 is more than there are experts",
        "hidden_size 10 is not divisible by heads 4",
    ):
        assert said.count(what) == 1, said


@pytest.mark.parametrize(
    ("source", "what", "column", "hint"),
    [
        ("{path: a, wieght: 2}", "data.mix.1 has no setting 'wieght'", 24, "did you mean weight?"),
        ("{path: a, weight: -1}", "data.mix.1.weight must be a number (0 or more), not -1", 24, "write a number"),
        ("{path: a, weight: x}", "data.mix.1.weight must be a number (0 or more), not the text 'x'", 24, "write"),
        ("{weight: 2}", "data.mix.1: path must name the data of each source of mix", 6, "change"),
        ("a.jsonl", "data.mix.1 must be a mapping, not the text 'a.jsonl'", 6, "write a mapping"),
    ],
)
def test_a_mistake_in_a_source_is_one_message_at_its_place(
    source: str, what: str, column: int, hint: str, refuse: Callable[..., list[Diagnostic]]
) -> None:
    (found,) = refuse(STREAM + f"  mix:\n  - {{path: b}}\n  -  {source}\n")
    assert found.what == what
    assert found.origin is not None
    assert (found.origin.line, found.origin.column) == (8, column)
    assert found.hint.startswith(hint)


def test_paths_of_a_mixture_are_read_like_others(solve: Callable[..., Resolved]) -> None:
    text = STREAM + "  mix:\n  - {path: '~/a.jsonl'}\n  - {path: ['${name}.jsonl', b.jsonl], weight: 2}\n"
    found = solve(text, environ={"HOME": "/home/me"})
    assert isinstance(found.recipe.data, DatasetData)
    assert [each.path for each in found.recipe.data.mix] == ["/home/me/a.jsonl", ["run.jsonl", "b.jsonl"]]
    assert found.absent["data.mix"] == ("/home/me/a.jsonl", "run.jsonl", "b.jsonl")
