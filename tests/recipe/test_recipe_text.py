"""Reading text: positions, hostile input, and the traps of YAML 1.1."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from trainkit.recipe.yaml_reader import Dialect, compose, compose_bytes
from trainkit.recipe.yaml_writer import comment

LOADERS = [yaml.SafeLoader, pytest.param(getattr(yaml, "CSafeLoader", yaml.SafeLoader), id="C")]
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE = {
    "object": ("a: !!python/object:os.system {}\n", (1, 4), "tag"),
    "call": ("a: !!python/object/apply:os.system ['true']\n", (1, 4), "tag"),
    "own tag": ("a: !mine 1\n", (1, 4), "tag"),
    "laughs": (LAUGHS, (5, 12), "aliases expand"),
    "brackets": ("[" * 50_000, (1, 33), "nested more than 32"),
    "braces": ("{a: " * 50_000, (1, 129), "nested more than 32"),
    "dashes": ("- " * 50_000, (1, 65), "nested more than 32"),
    "questions": ("? " * 50_000, (1, 3), "key must be a text"),
    "recursion": ("a: &x [1, *x]\n", (1, 11), "contains it"),
    "undefined alias": ("a: *x\n", (1, 4), "defined nowhere"),
    "tab": ("a:\n\tb: 1\n", (2, 1), "tab"),
    "two documents": ("a: 1\n---\nb: 2\n", (2, 1), "second document"),
    "duplicate": ("a: 1\nb: 2\na: 3\n", (3, 1), "given twice"),
    "number as key": ("a: 1\n2: 3\n", (2, 1), "must be a text"),
    "word as key": ("no: 3\n", (1, 1), "true or false"),
    "list as key": ("? [1, 2]\n: 3\n", (1, 3), "must be a text"),
    "open list": ("a: 1\nb: [1, 2\n", (2, 4), "not closed"),
    "open quote": ("a: 'x\n", (1, 4), "never closed"),
    "two colons": ("a: b: c\n", (1, 5), "no mapping can begin"),
    "control character": ("a: 1\nb: \x01\n", (2, 4), "U+0001"),
    "endless number": (f"a: {'9' * 5000}\n", (1, 4), "too long"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_gives_one_error_at_its_place(name: str, loader: Any) -> None:
    text, (line, column), words = HOSTILE[name]
    errors = compose(text, loader=loader).errors
    assert len(errors) == 1
    assert words in errors[0].what
    # The pure parser finds some of these a few characters further on.
    if loader is not yaml.SafeLoader or name not in ("open list", "open quote", "two colons"):
        assert (errors[0].mark.line, errors[0].mark.column) == (line, column)


def test_bytes_that_are_no_text_are_refused_with_line_and_column() -> None:
    cases = {
        b"a: 1\nb: \xff\n": ((2, 4), "0xff is not valid UTF-8"),
        b"a: 1\n\0": ((2, 1), "NUL"),
        "a: 1\n".encode("utf-16"): ((1, 4), "NUL"),
        b"\xef\xbb\xbfa: \xc3": ((1, 5), "0xc3"),
    }
    for data, (mark, words) in cases.items():
        (problem,) = compose_bytes(data).errors
        assert words in problem.what
        assert (problem.mark.line, problem.mark.column) == mark


def test_ten_megabytes_are_refused_without_being_parsed() -> None:
    (problem,) = compose_bytes(b"a: [" + b"1, " * 3_400_000).errors
    assert "10,200,004 bytes" in problem.what  # and nothing is said of the bracket that is never closed


def test_a_byte_order_mark_and_windows_line_ends_are_read() -> None:
    document = compose_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert document.tree == {"a": 1, "b": 2}
    assert document.values["b"][:2] == (2, 4)


@pytest.mark.parametrize("loader", LOADERS)
def test_every_value_and_key_has_its_position(loader: Any) -> None:
    document = compose("a:\n  b: [1, é, 2]\n  'c d': \"x\"\n", loader=loader)
    assert document.tree == {"a": {"b": [1, "é", 2], "c d": "x"}}
    assert {key: mark[:2] for key, mark in document.values.items() if key} == {
        "a": (2, 3),
        "a.b": (2, 6),
        "a.b.0": (2, 7),
        "a.b.1": (2, 10),
        "a.b.2": (2, 13),
        "a.c d": (3, 10),
    }
    assert document.keys["a.c d"] == (3, 3, 5)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0b11", 3),
        ("-7", -7),
        ("~", None),
        ("", None),
        ("True", True),
        ("2026-11-20", "2026-11-20"),
        ("1.2.3", "1.2.3"),
        ("0o10", "0o10"),
        ("08", "08"),
        ("e5", "e5"),
        ("'3e-4'", "3e-4"),
        ("y", "y"),
        ("=", "="),
    ],
)
def test_scalars_mean_what_a_reader_expects(written: str, value: object) -> None:
    document = compose(f"a: {written}\n")
    assert document.tree == {"a": value}
    assert type(document.tree["a"]) is type(value)
    assert not document.warnings


@pytest.mark.parametrize(
    ("written", "value", "words"),
    [
        ("12:00:00", 43200, "base 60"),
        ("1:30", 90, "base 60"),
        ("010", 8, "base 8"),
        ("no", False, "false"),
        ("yes", True, "true"),
        ("on", True, "true"),
        ("Off", False, "false"),
    ],
)
def test_yaml_traps_are_warned_of_at_their_place(written: str, value: object, words: str) -> None:
    document = compose(f"x: 1\na: {written}\n")
    assert document.tree["a"] == value
    (warning,) = document.warnings
    assert words in warning.what
    assert warning.mark == (2, 4, len(written))
    assert f'"{written}"' in warning.hint


def test_quoted_words_are_no_traps() -> None:
    assert not compose("a: 'no'\nb: \"12:00:00\"\nc: '010'\n").warnings


def test_aliases_are_copies_and_merge_keys_give_way() -> None:
    document = compose("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\ne: *x\n")
    assert document.tree["d"] == {"b": 1, "c": 3}
    assert document.tree["e"] == document.tree["a"]
    assert document.tree["e"] is not document.tree["a"]


def test_json_is_read_with_positions() -> None:
    document = compose('{\n\t"a": {"b": [true, null, 1e5]}\n}\n')
    assert document.tree == {"a": {"b": [True, None, 1e5]}}
    assert document.values["a.b.2"][:2] == (2, 26)


def test_verbatim_places_keep_the_characters_as_written() -> None:
    dialect = Dialect(verbatim={"env": (bool, int, float), "args": (int, float)})
    document = compose("env: {A: 1.10, B: 010, C: no}\nargs: {a: 3e-4, b: true, c: [1.0, on]}\nd: 1.10\n", dialect)
    assert document.tree == {
        "env": {"A": "1.10", "B": "010", "C": "no"},
        "args": {"a": "3e-4", "b": True, "c": ["1.0", "on"]},
        "d": 1.1,
    }
    assert not document.warnings


def test_several_errors_in_one_text_are_all_found() -> None:
    assert [each.mark.line for each in compose("a: 1\na: 2\n3: 4\nb: !x 1\n").errors] == [2, 3, 4]


def test_a_comment_holds_nothing_that_a_terminal_would_obey() -> None:
    assert comment("level a\u202eb\x1b[2J", 80, "  ") == ["  # level a\ufffdb\ufffd[2J"]
