"""Secrets: found by whole words in names, refused, and shown nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainkit.cli.diagnostics import render_diagnostics
from trainkit.errors import Diagnostic, RecipeError
from trainkit.recipe.layers.secrets import is_secret_name, mask, mask_line, mask_words
from trainkit.recipe.resolved import Resolved

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
SHORT = "train: {steps: 3}\n"
SECRET = "hf_AbCd1234"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "password",
        "db.password",
        "DB_PASSWORD_PROD",
        "apikey",
        "apiKey",
        "api-key",
        "hfToken",
        "TOKEN1",
        "TOKEN_2",
        "client_secret",
        "credentials",
        "PASSWD",
        "secret",
        "key",
        "token",
        "HTTPAuth",
    ],
)
def test_names_that_say_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_name",
        "max_tokens",
        "max_new_tokens",
        "num_key_value_heads",
        "keyboard",
        "monkey",
        "TOKENIZERS_PARALLELISM",
        "pad_token",
        "eos_token",
        "text_key",
        "PASSWORD_FILE",
        "token_count",
        "secretary",
        "NCCL_DEBUG",
        "",
        "_",
        "AWS_ACCESS_KEY_ID",
    ],
)
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        (f"env: {{HF_TOKEN: {SECRET}, A: 1}}\n", "r.yaml:1:17", "list HF_TOKEN under env_from"),
        (f"env:\n  HF_TOKEN: '{SECRET}'\n", "r.yaml:2:13", "list HF_TOKEN under env_from"),
        (f"env:\n  HF_TOKEN: >-\n    {SECRET}\n    {SECRET}\n", "r.yaml:2:13", "env_from"),
        ("env: {DB_PASSWORD: 12345678}\n", "r.yaml:1:20", "env_from"),
        (f"program: {{args: {{api-key: {SECRET}}}}}\n", "r.yaml:1:27", "list API_KEY under env_from"),
        (f"program: {{args: [--x, '--token={SECRET}']}}\n", "r.yaml:1:23", "env_from"),
        (f"program: {{args: [--token, {SECRET}, --x]}}\n", "r.yaml:1:27", "env_from"),
        (f"env!: {{HF_TOKEN: {SECRET}}}\n", "r.yaml:1:18", "env_from"),
    ],
)
def test_a_secret_that_is_written_out_is_refused_and_shown_nowhere(
    refuse: Refuse, text: str, place: str, remedy: str
) -> None:
    errors = refuse(text + SHORT)
    assert [each.origin.place if each.origin else "" for each in errors] == [place]
    assert remedy in errors[0].hint
    for shown in (render_diagnostics(errors), str(errors), str(RecipeError(errors))):
        assert SECRET not in shown
        assert "12345678" not in shown


@pytest.mark.parametrize(
    "request_", [{"overrides": (f"env.HF_TOKEN={SECRET}",)}, {"environ": {"TRAINKIT__ENV__HF_TOKEN": SECRET}}]
)
def test_a_secret_on_the_command_line_or_in_a_variable_is_masked_too(refuse: Refuse, request_: dict[str, Any]) -> None:
    errors = refuse(SHORT, **request_)
    assert "HF_TOKEN is a secret by its name" in errors[0].what
    assert SECRET not in str(errors)


def test_a_secret_is_masked_in_errors_about_other_things(refuse: Refuse) -> None:
    for text in (
        f"hf_token: {SECRET}\n",
        f"env: {{HF_TOKEN: {SECRET}, A: [1]}}\n",
        f"env: {{HF_TOKEN: {SECRET}\n",
        f"env: {{HF_TOKEN: {SECRET}, HF_TOKEN: 2}}\n",
        f"env: {{HF_TOKEN: [{SECRET}]}}\n",
    ):
        errors = refuse(text + SHORT)
        assert errors
        assert SECRET not in render_diagnostics(errors) + str(errors)


def test_a_secret_in_a_weaker_layer_is_refused_although_it_is_replaced(refuse: Refuse) -> None:
    files = {"r.yaml": f"extends: a.yaml\n{SHORT}env!: {{A: x}}\n", "a.yaml": f"env: {{HF_TOKEN: {SECRET}}}\n"}
    (error,) = refuse(files)
    assert error.origin is not None
    assert error.origin.source == "a.yaml"


def test_harmless_names_and_empty_values_pass(solve: Solve) -> None:
    text = (
        "env: {TOKENIZERS_PARALLELISM: 'false', HF_TOKEN: ''}\n"
        "program: {args: {max_tokens: 5, pad_token: x, use_token: true}}\n"
    )
    assert solve(text + SHORT).recipe.env["HF_TOKEN"] == ""


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("append_concat_token", "False"), ("num_keys", "3"), ("use_auth_token", "True"), ("token_type_key", "x"),
        ("span_key", "end_date"), ("n_keys", "1e3"),
        ("placeholder_token", "<cat-toy2>"), ("new_token", "<new1>+<new2>"),
        ("token", "true"), ("hub_token", "none"), ("password", "no"),
    ],
)  # fmt: skip
def test_switches_numbers_and_plain_words_are_none(solve: Solve, word: str, value: str) -> None:
    text = f"program: {{kind: torch, module: t, args: [--{word}, '{value}']}}\n"
    assert solve(text).recipe.program.args == [f"--{word}", value]
    assert mask_words([f"--{word}", value, f"--{word}={value}"]) == [f"--{word}", value, f"--{word}={value}"]
    assert mask_line(f"--{word} {value}") == f"--{word} {value}"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("api_key", "abc"), ("token", "abc"), ("password", "secret"), ("db_password", "12345678"), ("hf_token", "x"),
        ("my_token", "hf_AbCd1234"), ("span_key", "a" * 20), ("sort_by_key", "0123456789ab"),
    ],
)  # fmt: skip
def test_what_may_be_a_credential_stays_one(refuse: Refuse, word: str, value: str) -> None:
    errors = refuse(f"program: {{kind: torch, module: t, args: [--{word}, '{value}']}}\n")
    assert errors[0].what == f"the value of --{word} in program.args is a secret by its name, written out in the recipe"
    assert f"list {word} under program.public" in errors[0].hint
    assert mask_words([f"--{word}", value]) == [f"--{word}", "***"]


def test_a_name_under_program_public_is_no_secret(solve: Solve, refuse: Refuse) -> None:
    text = "program: {kind: torch, module: t, args: {span_key: SPAN_2b}}\n"
    assert refuse(text)[0].key == "program.args.span_key"
    assert solve(text.replace("args:", "public: [span_key], args:")).recipe.program.args == {"span_key": "SPAN_2b"}


def test_lines_and_words_are_masked() -> None:
    assert mask("x") == "***"
    assert mask_line("env: {HF_TOKEN: abc, A: 1}") == "env: {HF_TOKEN: ***, A: 1}"
    assert mask_line("  api_key: a b c") == "  api_key: ***"
    assert mask_line("max_tokens: 4  # the token count") == "max_tokens: 4  # the token count"
    words = ["run", "--token", "abc", "--api-key=abc", "env.HF_TOKEN=abc", "--seed", "3"]
    assert mask_words(words) == ["run", "--token", "***", "--api-key=***", "env.HF_TOKEN=***", "--seed", "3"]


@pytest.mark.timeout(20)  # trying every shorter name in a word would take 20 minutes
@pytest.mark.parametrize("unit", ["a", "A", "a.", "é-", "a ", "token ", "token: 'x' [", "-token x {"])
def test_the_time_to_mask_a_line_grows_with_its_length_and_no_faster(unit: str) -> None:
    line = unit * (200_000 // len(unit))
    assert "bcd" not in mask_line(f"{line} --token=bcd")


def test_the_caret_below_a_secret_does_not_tell_its_length(refuse: Refuse) -> None:
    (error,) = refuse(f"env: {{HF_TOKEN: {SECRET}}}\n" + SHORT)
    assert render_diagnostics([error]).splitlines()[2] == "    | " + " " * 16 + "^^^"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["a", "a ", "a=", "a_", "--a", "token ", "key: ", "'", '"x', "{", "token: {", "- "])
def test_a_line_of_any_length_is_masked_in_time_that_grows_with_it(piece: str) -> None:
    line = piece * 200_000  # hours, if it grew with the square
    assert len(mask_line(line)) <= len(line)
    assert len(mask_words([line])[0]) <= len(line)


def test_of_a_file_that_is_no_text_nothing_is_shown(refuse: Refuse) -> None:
    files = {"r.yaml": "extends: environ.yaml\n" + SHORT, "environ.yaml": f"DATABASE=//u:{SECRET}@h\0HOME=/root\0"}
    errors = refuse(files)
    assert "NUL byte" in errors[0].what
    assert SECRET not in render_diagnostics(errors)


@pytest.mark.parametrize("listed", ["-1e+308", "abc", "{a: 1}", "true"])
def test_what_is_no_list_of_harmless_names_is_an_error(refuse: Refuse, listed: str) -> None:
    errors = refuse(f"program: {{kind: torch, module: t, public: {listed}}}\n")
    assert "program.public" in {each.key for each in errors}
