"""`${…}`: what it refers to, what stays literal, and every error at its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from trainkit.errors import Diagnostic
from trainkit.recipe import interpolation
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
SHORT = "train: {steps: 3}\n"


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("name: run-${model.layers}\n", "name", "run-4"),
        ("name: run-${train.steps}\n", "name", "run-3"),
        ("name: r\noutput: {root: 'out/${name}'}\n", "output.root", "out/r"),
        ("eval: {every_steps: '${train.steps}'}\n", "eval.every_steps", 3),
        ("optimizer: {lr: '${oc.env:LR,0.5}'}\n", "optimizer.lr", 0.5),
        ("optimizer: {lr: '${oc.env:RATE}'}\n", "optimizer.lr", 3e-4),
        ("batch: {micro: '${oc.env:MICRO}'}\n", "batch.micro", 8),
        ("name: '${oc.env:NUMBER}'\n", "name", "007"),
        ("data: {path: ['${name}', b]}\n", "data.path", ["run", "b"]),
        ("data: {cache: '${oc.env:GONE,null}'}\n", "data.cache", None),
        ("sample: {prompt: '\\${x}'}\n", "sample.prompt", "${x}"),
        ("output: {root: '${sample.prompt}'}\nsample: {prompt: '\\${x}'}\n", "output.root", "${x}"),
        (
            "name: 'a${data.kind}'\nsample: {prompt: '${output.root}'}\noutput: {root: '${name}'}\n",
            "sample.prompt",
            "atext",
        ),
        ("precision: '${oc.env:DTYPE}'\n", "precision.dtype", "bf16"),
        ("strategy: {kind: '${oc.env:KIND}'}\n", "strategy.kind", "zero2"),
    ],
)
def test_references_and_the_environment_are_resolved(solve: Solve, text: str, key: str, expected: Any) -> None:
    environ = {"RATE": "3e-4", "MICRO": "8", "NUMBER": "007", "DTYPE": "bf16", "KIND": "zero2"}
    value: Any = solve(text + SHORT, environ=environ).tree
    for part in key.split("."):
        value = value[part]
    assert value == expected
    assert type(value) is type(expected)


def test_program_arguments_and_the_environment_section_stay_literal(solve: Solve) -> None:
    text = "program: {args: {a: '${x}', b: ['${HOME}']}}\nenv: {A: '${B}'}\n"
    resolved = solve(text + SHORT)
    assert resolved.recipe.program.args == {"a": "${x}", "b": ["${HOME}"]}
    assert resolved.recipe.env == {"A": "${B}"}
    (warning,) = resolved.warnings
    assert (warning.key, warning.origin.place if warning.origin else "") == ("env.A", "r.yaml:2:10")
    assert "env_from" in warning.hint


def test_history_says_what_a_value_was_made_from(solve: Solve) -> None:
    resolved = solve(SHORT + "name: 'n-${oc.env:ID}'\n", environ={"ID": "7"})
    entry = resolved.history["name"][-1]
    assert (entry.value, entry.note) == ("n-7", "from n-${oc.env:ID}")
    assert entry.origin.layer == "environment variable ID, named in file r.yaml"
    assert entry.origin.place == "r.yaml:2:7"


def test_the_requests_environment_is_read_and_not_the_processs(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_TEST_ONLY", "x")
    assert os.environ["TRAINKIT_TEST_ONLY"] == "x"
    (error,) = refuse(SHORT + "name: ${oc.env:TRAINKIT_TEST_ONLY}\n")
    assert "TRAINKIT_TEST_ONLY, which is not set" in error.what


@pytest.mark.parametrize(
    "text",
    ["${oc.${name}:HF_TOKEN}", "${oc.env:${oc.env:WHICH}}", "${oc.decode:'\\${oc.env:HF_TOKEN}'}",
     "${ oc.env : HF_TOKEN }", "${oc.create:${oc.env:HF_TOKEN}}", "a${oc.${name}:HF_TOKEN}b"],
)  # fmt: skip
def test_no_way_to_write_it_puts_a_secret_into_the_recipe(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")  # of the process too
    environ = {"HF_TOKEN": "hf_secret", "WHICH": "HF_TOKEN"}
    found = refuse(f'{SHORT}name: env\noutput: {{root: "{text}"}}\n'.replace("\\", "\\\\"), environ=environ)
    assert "hf_secret" not in str(found)
    assert OmegaConf.create({"a": "${oc.env:HF_TOKEN}"}).a == "hf_secret"  # what others use is as it was


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        ("${optimizer.rl}", "'optimizer.rl', which is not there", "${optimizer.lr}?"),
        ("${oc.env:GONE}", "GONE, which is not set", "${oc.env:GONE,value}"),
        ("${name", "cannot be resolved", "\\${"),
        ("${no_such:1}", "cannot be resolved", "\\${"),
        ("${name}", "in a circle", "write one"),
        ("${env.A}", "which is not there", ""),
        ("${oc.env:HF_TOKEN}", "the value of HF_TOKEN", "env_from"),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_an_error_at_its_place(
    refuse: Refuse, value: str, words: str, hint: str
) -> None:
    (error,) = refuse(f"{SHORT}env: {{A: x}}\nname: '{value}'\n", environ={"HF_TOKEN": "hf_secret"})
    assert words in error.what
    assert hint in error.hint
    assert error.origin is not None
    assert error.origin.place == "r.yaml:3:7"
    assert "hf_secret" not in str(error)


def test_all_errors_are_reported_and_not_the_first_only(refuse: Refuse) -> None:
    text = "name: ${a}\noutput: {root: '${b}'}\nsample: {prompt: '${sample.prompt}'}\ndata: {include: '${oc.env:X}'}\n"
    assert [each.key for each in refuse(text + SHORT)] == ["name", "output.root", "sample.prompt", "data.include"]


def test_values_built_from_one_another_cannot_grow_without_bound(refuse: Refuse) -> None:
    items = ["'xxxxxxxxxx'"] + [f"'${{data.path[{n}]}}${{data.path[{n}]}}'" for n in range(60)]
    errors = refuse(f"{SHORT}data: {{path: [{', '.join(items)}]}}\n")
    assert "the value grows to" in errors[0].what


@pytest.mark.parametrize(
    "text",
    [
        "a ${train.steps} b",
        "${optimizer.lr}${devices.type}",
        "${optimizer.eps}-${train.max_grad_norm}",
        "${efficiency.compile.enabled}|${precision.tf32}",
        "x${data.cache}",
        "${sample.prompt}/it's",
        '"${train.steps}"',
        "${ train.steps } and ${train.steps}",
        "${data.path.0}+${data.path}",
        "\\${name} ${train.steps}",
        "${output.root}",
        "$5 ${train.steps}",
    ],
)
def test_texts_around_references_mean_what_omegaconf_makes_of_them(solve: Solve, text: str) -> None:
    plain = (
        "train: {steps: 3, max_grad_norm: 2.0}\ndata: {path: [p, q]}\nprecision: {tf32: true}\n"
        "optimizer: {lr: 1.0e-5, eps: 1.0e-8}\nefficiency: {compile: {enabled: false}}\n"
        "output: {root: r}\ndevices: {type: cpu}\nsample: {prompt: 'a b'}\n"
    )
    tree = {**yaml.safe_load(plain), "name": "n", "model": {"kind": text}}
    tree["data"]["cache"] = None
    expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    assert isinstance(expected, dict)
    resolved = solve(f"{plain}name: n\nenv_from: [{json.dumps(text)}]\n")
    assert resolved.recipe.env_from == [expected["model"]["kind"]]


def test_what_ten_thousand_texts_refer_to_is_asked_of_omegaconf_once(
    solve: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    honest = interpolation._Session._ask

    def ask(session: interpolation._Session, path: interpolation.Path, expression: str) -> Any:
        asked.append(expression)
        return honest(session, path, expression)

    monkeypatch.setattr(interpolation._Session, "_ask", ask)
    paths = "".join(f"    - '${{name}}/part-{number}'\n" for number in range(10_000))
    resolved = solve(f"{SHORT}name: corpus\ndata:\n  path:\n{paths}")
    assert resolved.recipe.data.model_dump()["path"][-1] == "corpus/part-9999"
    assert asked == ["${name}"]


@pytest.mark.cli
def test_omegaconf_is_imported_only_where_something_is_interpolated() -> None:
    code = (
        "import sys\n"
        "from tests.made_up_recipes import MemoryFiles\n"
        "from trainkit.recipe.resolve import resolve\n"
        "from trainkit.recipe.resolved import Request\n"
        "def go(text): resolve(Request('r.yaml', '/w'), MemoryFiles({'/w/r.yaml': text}))\n"
        "go('train: {steps: 1}\\nprogram: {args: {a: \"${x}\"}}\\n')\n"
        "assert not {'omegaconf', 'torch', 'typer', 'rich'} & set(sys.modules)\n"
        "go('train: {steps: 1}\\nname: r${train.steps}\\n')\n"
        "assert 'omegaconf' in sys.modules\n"
        "from omegaconf import OmegaConf\n"
        "assert not OmegaConf.has_resolver('trainkit_environ')\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)


@pytest.mark.parametrize("section", ["strategy", "optimizer", "efficiency"])
def test_a_section_is_not_another_one(refuse: Refuse, section: str) -> None:
    errors = refuse(f"{section}: '${{train}}'\n{SHORT}")
    assert [each.what for each in errors] == [f"{section}: is a section, and another one cannot be put in its place"]


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("output: {root: ~/runs}\n", "output.root", "/home/u/runs"),
        ("output: {root: '~'}\n", "output.root", "/home/u"),
        ("output: {root: ~other}\n", "output.root", "~other"),
        ("data: {path: [~/a, b]}\n", "data.path", ["/home/u/a", "b"]),
        ("sample: {prompt: ~/a}\n", "sample.prompt", "~/a"),
    ],
)
def test_a_tilde_before_a_path_is_the_home_folder(solve: Solve, text: str, key: str, expected: Any) -> None:
    value: Any = solve(text + SHORT, environ={"HOME": "/home/u"}).tree
    for part in key.split("."):
        value = value[part]
    assert value == expected


@pytest.mark.parametrize("depth", [30, 32, 60, 98, 900])
@pytest.mark.parametrize("value", ["${train.steps}", "${gone.name}", "1"])
@pytest.mark.parametrize(("opens", "closes"), [("{a: ", "}"), ("[", "]")])
def test_what_is_nested_deeply_is_refused(refuse: Refuse, depth: int, value: str, opens: str, closes: str) -> None:
    nested = f"{opens * depth}'{value}'{closes * depth}"
    mixed = f"{'[{a: ' * (depth // 2)}'{value}'{'}]' * (depth // 2)}"
    key = f"strategy.config.{'.'.join('a' * depth)}"
    for text in (nested, mixed):
        errors = refuse(f"train: {{steps: {text}}}\n")
        assert [each.what for each in errors if "nested more than 32 deep" in each.what] or depth < 32
        errors = refuse(f"data: {{mix: 1}}\n{SHORT}", overrides=(f"{key}={text if depth < 32 else value}",))
        assert [each.what for each in errors if "nested more than 32 deep" in each.what] or depth < 32
