"""Files that settings name: read with positions, relative to the layer that names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
DEEPSPEED = '{\n  "zero_optimization": {"stage": 2}\n}\n'


def recipe(config: str) -> str:
    return f"strategy: {{kind: zero2, config: {config}}}\n"


@pytest.mark.parametrize(
    ("files", "request_"),
    [
        ({"r.yaml": "extends: sub/a.yaml\n", "sub/a.yaml": recipe("ds.json"), "sub/ds.json": DEEPSPEED}, {}),
        (
            {"r.yaml": "", "sub/ds.json": DEEPSPEED},
            {"overrides": ("strategy.kind=zero2", "strategy.config=sub/ds.json")},
        ),
        (
            {"r.yaml": recipe("./x.json"), "sub/ds.json": DEEPSPEED},
            {"environ": {"TRAINKIT__STRATEGY__CONFIG": "sub/ds.json"}},
        ),
        ({"r.yaml": "", "sub/ds.json": DEEPSPEED}, {"overrides": ("--deepspeed", "sub/ds.json")}),
    ],
)
def test_an_attachment_is_read_relative_to_its_layer(
    solve: Solve, files: dict[str, str], request_: dict[str, object]
) -> None:
    files = files | {"r.yaml": files["r.yaml"] + "train: {steps: 1}\n"}
    resolved = solve(files, **request_)
    attachment = resolved.attachments["strategy.config"]
    assert attachment.path == "/w/sub/ds.json"
    assert attachment.tree == {"zero_optimization": {"stage": 2}}
    assert (
        attachment.origins["zero_optimization.stage"].line,
        attachment.origins["zero_optimization.stage"].column,
    ) == (2, 34)
    assert resolved.tree["strategy"]["config"] == "/w/sub/ds.json"
    assert resolved.history["strategy.config"][-1].value == "/w/sub/ds.json"


def test_an_absolute_path_stays_and_a_replaced_one_is_not_read(solve: Solve) -> None:
    files = {"r.yaml": "extends: a.yaml\ntrain: {steps: 1}\n" + recipe("/d/ds.json"), "a.yaml": recipe("gone.json")}
    assert solve(files | {"/d/ds.json": DEEPSPEED}).attachments["strategy.config"].path == "/d/ds.json"
    assert not solve(files | {"r.yaml": "extends: a.yaml\ntrain: {steps: 1}\nstrategy: {kind: ddp}\n"}).attachments


@pytest.mark.parametrize(
    ("content", "place", "words"),
    [
        (None, "r.yaml:1:33", "there is no file ds.json"),
        ('{"a": [1}', "ds.json:1:9", "not closed"),
        ("[1]", "ds.json:1:1", "requires a file with a mapping"),
        ('{"a": 1, "a": 2}', "ds.json:1:10", "given twice"),
    ],
)
def test_an_attachment_that_cannot_be_used_is_an_error_at_its_place(
    refuse: Refuse, content: str | None, place: str, words: str
) -> None:
    files = {"r.yaml": recipe("ds.json") + "train: {steps: 1}\n"}
    (error,) = refuse(files if content is None else files | {"ds.json": content})
    assert error.origin is not None
    assert error.origin.place == place
    assert words in error.what


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("data: {path: [there.txt, gone.txt, sub]}\n", {"data.path": ("gone.txt", "sub")}),
        ("data: {path: python-stdlib}\ncheckpoint: {resume: auto}\n", {}),
        ("checkpoint: {resume: gone}\n", {"checkpoint.resume": ("gone",)}),
        ("data: {path: /w/there.txt}\n", {}),
        ("data: {path: gone.txt}\nprogram: {kind: torch, module: m}\n", {}),
    ],
)
def test_inputs_of_the_trainer_that_are_not_there_are_noted(
    solve: Solve, text: str, absent: dict[str, tuple[str, ...]]
) -> None:
    resolved = solve({"r.yaml": f"train: {{steps: 3}}\n{text}", "there.txt": "x"})
    assert resolved.absent == absent


def test_places_in_an_attached_file_are_named_as_seen_from_the_working_folder(solve: Solve) -> None:
    files = {"r.yaml": "extends: sub/a.yaml\n", "sub/a.yaml": recipe("ds.json"), "sub/ds.json": DEEPSPEED}
    attachment = solve(files, overrides=("--max_steps", "3")).attachments["strategy.config"]
    assert attachment.origins["zero_optimization.stage"].place == "sub/ds.json:2:34"
    resolved = solve({"r.yaml": "train: {steps: 3}\n", "ds.json": DEEPSPEED}, overrides=("--deepspeed", "ds.json"))
    assert resolved.attachments["strategy.config"].origins["zero_optimization.stage"].place == "ds.json:2:34"


def test_a_default_has_no_place_of_its_own(solve: Solve) -> None:
    resolved = solve("train: {steps: 3}\n")
    assert resolved.given("train.max_grad_norm") is None
    nearby, given = resolved.origin("train.max_grad_norm"), resolved.given("train.steps")
    assert nearby is not None
    assert given is not None
    assert (nearby.place, given.place) == ("r.yaml:1:8", "r.yaml:1:16")
