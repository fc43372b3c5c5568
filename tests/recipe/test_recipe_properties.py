"""Mutated recipes: whatever a text says, it resolves or it is refused with diagnostics; never anything else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.made_up_recipes import MemoryFiles
from trainkit.cli.diagnostics import render_diagnostics
from trainkit.cli.file_system import FileSystem
from trainkit.colour import Colour
from trainkit.errors import RecipeError
from trainkit.recipe.flags import flags
from trainkit.recipe.resolve import resolve
from trainkit.recipe.resolved import Request
from trainkit.recipe.schema.fields import schema
from trainkit.recipe.yaml_reader import compose
from trainkit.recipe.yaml_writer import resolved_yaml

SHIPPED = {name: Path(path).read_text(encoding="utf-8") for name, path in FileSystem().shipped().items()}
FULL = (
    "extends: [strategy/fsdp, precision/bf16]\nname: run-${model.layers}\ntrain: {steps: 3, seed: 1}\n"
    "batch: {global: 8, micro: 4}\nenv: {NCCL_DEBUG: WARN}\nenv_from+: [HOME]\ndata:\n  path: [a, b]\n"
    "program:\n  args: {a: 1.10, b: true}\nstrategy: {kind: zero3, offload_param: cpu}\noptimizer: {lr: 3e-4}\n"
)
TEXTS = [*SHIPPED.values(), FULL]
PIECES = st.sampled_from(
    [
        "\t",
        "\n",
        " ",
        "  ",
        ":",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "'",
        '"',
        "#",
        "&a ",
        "*a",
        "!",
        "!!python/object:x ",
        "%",
        "@",
        "|",
        ">",
        "${",
        "${name}",
        "${oc.env:X}",
        "${oc.env:X,1}",
        "}",
        "\x00",
        "\x85",
        "\u2028",
        "\ufeff",
        "é",
        "\U0001d4b3",
        "null",
        "no",
        "010",
        "1:30",
        ".inf",
        ".nan",
        "-1",
        "1e999",
        "9" * 30,
        "+: ",
        "!: ",
        "<<: ",
        "? ",
        "---\n",
        "extends: ",
        "strategy/zero2",
        "kind: ddp\n",
        "batch: 3\n",
        "[[[[",
    ]
)
BOUNDED = settings(derandomize=True, suppress_health_check=list(HealthCheck))


def attempt(text: str | bytes, **request: Any) -> None:
    """Resolve; whatever comes must be a recipe that can be written back, or diagnostics that can be shown."""
    names = {name: f"/shipped/{name}.yaml" for name in SHIPPED}
    contents = {names[name]: content for name, content in SHIPPED.items()} | {"/w/r.yaml": text}
    files = MemoryFiles(contents, names)
    try:
        resolved = resolve(Request("r.yaml", "/w", **request), files)
    except RecipeError as error:
        assert any(each.severity == "error" for each in error.diagnostics)
        assert all(each.what and each.origin for each in error.diagnostics)
        render_diagnostics(error.diagnostics, Colour(sys.stdout, {"FORCE_COLOR": "1"})).encode("utf-8", "strict")
        return
    again = resolve(Request("r.yaml", "/w"), MemoryFiles({"/w/r.yaml": resolved_yaml(resolved)}))
    assert again.recipe.model_copy(update={"batch": resolved.recipe.batch}) == resolved.recipe


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 8)))
        text = text[:start] + draw(PIECES) + text[end:]
    return text


@BOUNDED
@given(mutated())
def test_a_mutated_recipe_is_a_recipe_or_refused(text: str) -> None:
    attempt(text)


@BOUNDED
@given(st.binary(max_size=200))
def test_any_bytes_are_a_recipe_or_refused(data: bytes) -> None:
    attempt(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["${name}", "auto", "zero3", "a.b"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["kind", "a+", "b!"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@BOUNDED
@given(
    st.dictionaries(st.sampled_from([*schema().keys, "extends", "nonsense"]), VALUES, max_size=4),
    st.sampled_from(["", "+", "!"]),
)
def test_any_value_at_any_key_is_accepted_or_refused(given_: dict[str, Any], modifier: str) -> None:
    tree: dict[str, Any] = {"train": {"steps": 1}}
    for key, value in given_.items():
        target: Any = tree
        *sections, name = key.split(".")
        for section in sections:
            below = target.setdefault(section, {})
            target = target[section] = below if isinstance(below, dict) else {}
        target[name + modifier] = value
    attempt(yaml.safe_dump(tree, allow_unicode=True))


WORDS = st.one_of(
    st.builds("--{}".format, st.sampled_from(list(flags()))),
    st.builds(
        "--{}={}".format,
        st.sampled_from(list(flags())),
        st.sampled_from(["1", "true", "x", "", "r.yaml", "${name}", "[1"]),
    ),
    st.builds("{}{}={}".format, st.sampled_from(schema().keys), st.sampled_from(["", "+", "!"]), st.text(max_size=6)),
    st.sampled_from(
        ["1", "true", "full_shard auto_wrap", "r.yaml", "-1", "--", "-x", "x=", "=x", ".=1", "a..b=1", "bf16"]
    ),
    st.text(max_size=6),
)


@BOUNDED
@given(st.lists(WORDS, max_size=4), st.lists(st.text(max_size=5), max_size=2))
def test_any_words_on_the_command_line_are_accepted_or_refused(words: list[str], arguments: list[str]) -> None:
    attempt(FULL, overrides=tuple(words), arguments=tuple(arguments))


@BOUNDED
@given(
    st.dictionaries(
        st.builds(
            "TRAINKIT__{}".format,
            st.sampled_from([key.replace(".", "__").upper() for key in schema().keys] + ["", "__", "ENV__A=B"]),
        ),
        st.text(max_size=8) | PIECES,
        max_size=3,
    )
)
def test_any_environment_is_accepted_or_refused(environ: dict[str, str]) -> None:
    attempt(FULL, environ=environ)


@BOUNDED
@given(mutated())
def test_both_yaml_parsers_agree_on_what_they_accept(text: str) -> None:
    fast, pure = compose(text), compose(text, loader=yaml.SafeLoader)
    if not fast.errors and not pure.errors:
        assert repr(fast.tree) == repr(pure.tree)


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_to_mutate_are_sound(text: str) -> None:
    attempt(text)
    assert not compose(text).errors
