"""What a shell offers behind the cursor, from an index that `scripts/renew` makes: to load the commands takes too long.

Nothing is imported here that needs more than the standard library; only the variants of a recipe need YAML.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

INDEX = os.path.join(os.path.dirname(__file__), "completion.json")  # noqa: PTH118, PTH120 - pathlib takes time to load
_WHOLE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./_-")  # bash takes as they are
_IN_DOUBLE = '\\"$`'
Offers = dict[str, str]  # word -> help; a word that ends in `=`, `.` or `/` goes on


class Line(NamedTuple):
    """A command line up to the cursor. table: the index. given: words that are no options, overrides or their values;
    values: of the options so far; current: the word at the cursor.
    """

    table: Mapping[str, Any]
    command: Mapping[str, Any]
    given: Sequence[str]
    values: Mapping[str, str]
    current: str


def complete(words: Sequence[str], current: str) -> tuple[Offers, str]:
    """What the current word may become, and what the shell itself is to add: "files", "folders" or nothing.

    words: before the current one, without the program's name.
    """
    with open(INDEX, encoding="utf-8") as file:  # noqa: PTH123
        index = json.load(file)
    command, rest = index, list(words)
    while "commands" in command:
        own = list(takewhile(lambda word: word.startswith("-"), rest))
        if len(own) == len(rest):
            names = {name: each["help"] for name, each in command["commands"].items()}
            return _fitting(_helps(command["options"]) if current.startswith("-") else names, current), ""
        command, rest = command["commands"].get(rest[len(own)], {"options": {}, "takes": []}), rest[len(own) + 1 :]
    offers, files = _of_command(index, command, rest, current)
    return _fitting(offers, current), files


def _fitting(offers: Mapping[str, str], current: str) -> Offers:
    """Those that the current word begins. What a terminal would obey is not offered: names of files may hold it."""
    fitting = {word: text for word, text in offers.items() if word.startswith(current) and word.isprintable()}
    return {word: text if text.isprintable() else "" for word, text in fitting.items()}


def _of_command(
    index: Mapping[str, Any], command: Mapping[str, Any], words: Sequence[str], current: str
) -> tuple[Offers, str]:
    takes_recipe, given, values, awaited = "recipe" in command, list[str](), dict[str, str](), ""
    for word in words:
        if awaited:
            values[awaited], awaited = word, ""
            continue
        name, equals, value = word.partition("=")
        if word == "--" or (takes_recipe and _begins_program(word, index)):
            return {}, "files"
        if name.startswith("-") and (takes := _takes(name, index, command)) is not None:
            awaited = name if takes and not equals else ""
            values[name] = value
        elif not (equals and takes_recipe) and not word.startswith("-"):
            given.append(word)
    line = Line(index, command, given, values, current)
    if awaited:
        return _offers(_takes(awaited, index, command), line)
    name, equals, value = current.partition("=")
    if current.startswith("-") and equals:
        offers, files = _offers(_takes(name, index, command), line._replace(current=value))
        return {f"{name}={word}": text for word, text in offers.items()}, files
    if current.startswith("-"):
        flags = _flags(current, index) if takes_recipe and current.startswith("--") else {}
        return {**_helps(command["options"]), **flags}, ""
    if takes_recipe and equals:
        return _values(line, name, value)
    kinds = command["takes"]
    behind = kinds[-1] if command.get("repeats") else ""
    offers, files = _offers(kinds[len(given)] if len(given) < len(kinds) else behind, line)
    if takes_recipe and (given or "." in current):
        offers |= _keys(line, "=")
    return offers, files


def _helps(options: Mapping[str, Any]) -> Offers:
    return {name: each["help"] for name, each in options.items()}


def _takes(name: str, index: Mapping[str, Any], command: Mapping[str, Any]) -> Any:
    """What follows an option or a flag: a kind, values, or "" for nothing. None for what the command does not have."""
    if name in command["options"]:
        return command["options"][name]["takes"]
    flag = index["flags"].get(name[2:].replace("-", "_")) if "recipe" in command and name.startswith("--") else None
    return flag and flag["takes"]


def _flags(current: str, index: Mapping[str, Any]) -> Offers:
    """The flags, spelled with dashes where the current word is."""
    dashed = "-" in current[2:]
    named = ((name.replace("_", "-") if dashed else name, each["help"]) for name, each in index["flags"].items())
    return {f"--{name}": text for name, text in named}


def _begins_program(word: str, index: Mapping[str, Any]) -> bool:
    return word == "-m" or word.endswith(tuple(index["scripts"])) or os.path.basename(word) in index["launchers"]  # noqa: PTH119


def _offers(kind: Any, line: Line) -> tuple[Offers, str]:
    """What is offered of a kind, or of a list of values."""
    if isinstance(kind, list):
        return dict.fromkeys(kind, ""), ""
    if kind in ("files", "folders"):
        return {}, kind
    return KINDS[kind](line) if kind in KINDS else {}, ""


def _values(line: Line, key: str, value: str) -> tuple[Offers, str]:
    """Of a setting."""
    known = line.table["keys"].get(key.rstrip("+!"), {"takes": []})
    offers, files = _offers(known["takes"], line._replace(current=value))
    return {f"{key}={word}": text for word, text in offers.items()}, files or known.get("reads", "")


def _keys(line: Line, end: str) -> Offers:
    """Keys of the recipe up to their next dot, sections first. end: what stands behind a whole key."""
    sections, keys = Offers(), Offers()
    for key, known in line.table["keys"].items():
        if key.startswith(line.current):
            head, dot, _ = key[len(line.current) :].partition(".")
            if dot or known.get("open"):
                section = line.current + head
                sections[f"{section}."] = line.table["sections"].get(section, known["help"])
            if not dot:
                keys[f"{key}{end}"] = known["help"]
    return {**sections, **keys}


def _runs(line: Line) -> Offers:
    """Names, then short ids of the newest first, and whole ids where one is begun; run directories of a path."""
    if "/" in line.current:
        return _paths(line.current)
    found = sorted(_run_directories(line.values.get("--root") or "runs"), reverse=True)
    counts = Counter(name for _, name in found)
    names = {name: f"the newest of {count} runs" if count > 1 else "a run" for name, count in counts.items()}
    short = {re.sub(r"^\d{8}-\d{6}-", "", run): f"{name} {run}" for run, name in found}
    return {**names, **short, **(dict(found) if line.current else {})}


def _run_directories(root: str) -> Iterator[tuple[str, str]]:
    """The id and the name of each run below a root."""
    for parent in _folder(os.path.expanduser(root)):  # noqa: PTH111
        for each in _folder(parent.path):
            if _is_run(each.path):
                yield each.name, parent.name


def _is_run(path: str) -> bool:
    return all(os.path.isfile(f"{path}/{name}") for name in ("plan.json", "recipe.yaml"))  # noqa: PTH113


def _folder(path: str) -> list[os.DirEntry[str]]:
    """What a folder holds, by name; nothing where it cannot be read."""
    with suppress(OSError, ValueError), os.scandir(path) as found:
        return sorted(found, key=lambda each: each.name)
    return []


def _paths(current: str, suffixes: tuple[str, ...] = ()) -> Offers:
    """Folders and files with these suffixes. A run directory is whole: a recipe itself."""
    folder, slash, start = current.rpartition("/")
    found = Offers()
    for each in _folder(os.path.expanduser(f"{folder}{slash}") or "."):  # noqa: PTH111
        if each.name.startswith(".") and not start.startswith("."):
            continue
        if os.path.isdir(each.path):  # noqa: PTH112 - False where it may not be looked at
            found[f"{folder}{slash}{each.name}{'' if _is_run(each.path) else '/'}"] = ""
        elif each.name.endswith(suffixes or "/"):
            found[f"{folder}{slash}{each.name}"] = ""
    return found


def _recipes(line: Line) -> Offers:
    """Shipped names, recipes and run directories; scripts and launchers where the command takes a program for one."""
    index = line.table
    programs = tuple(index["scripts"]) if line.command.get("recipe") == "program" else ()
    launchers = dict.fromkeys(index["launchers"] if programs and line.current else (), "a launcher")
    return {**index["recipes"], **_paths(line.current, (".yaml", ".yml", *programs)), **launchers}


def _variants(line: Line) -> Offers:
    """Of the recipe of the line, and of the files that it extends."""
    from trainkit.cli.file_system import FileSystem
    from trainkit.recipe.yaml_reader import compose_bytes

    files, pages, seen = FileSystem(), [("", each) for each in line.given[:1]], set[str]()
    found = Offers()
    while pages:
        folder, word = pages.pop()
        shipped = files.shipped()
        path = shipped.get(f"recipes/{word}") or shipped.get(word) or f"{folder}{word}"
        path = f"{path}/recipe.yaml" if _is_run(path) else path
        if path in seen:
            continue
        seen.add(path)
        tree: Any = {}
        with suppress(OSError):
            tree = compose_bytes(files.read(path)).tree
        tree = tree if isinstance(tree, dict) else {}
        extended = tree.get("extends") or []
        start, slash, _ = path.rpartition("/")
        pages += [(start + slash, str(each)) for each in (extended if isinstance(extended, list) else [extended])]
        if isinstance(named := tree.get("variants"), dict):
            found |= {
                str(name): str(each.get("description") or "") for name, each in named.items() if isinstance(each, dict)
            }
    return found


def _listed(line: Line) -> Offers:
    """Names with commas between."""
    before, comma, _ = line.current.rpartition(",")
    return {f"{before}{comma}{name}": text for name, text in _variants(line).items()}


# Kind of word -> what is offered.
KINDS: Mapping[str, Callable[[Line], Offers]] = {
    "recipe": _recipes,
    "preset": lambda line: {**line.table["presets"], **_paths(line.current, (".yaml", ".yml"))},
    "machine": lambda line: {**line.table["machines"], **_paths(line.current, (".yaml", ".yml", ".json"))},
    "shipped": lambda line: {
        **line.table["recipes"],
        **line.table["presets"],
        **{f"machines/{name}": text for name, text in line.table["machines"].items()},
    },
    "variant": _variants,
    "variants": _listed,
    "run": _runs,
    "source": lambda line: {**_runs(line), **_paths(line.current)},
    "name": lambda line: dict.fromkeys(
        (name for _, name in _run_directories(line.values.get("--root") or "runs")), "runs of this name"
    ),
    "key": lambda line: _keys(line, ""),
    "setting": lambda line: _values(line, *line.current.split("=", 1))[0] if "=" in line.current else _keys(line, "="),
}


def main(arguments: Sequence[str]) -> None:
    """Answer a shell: a line with what it is to do itself, then a line for each word.

    arguments: the shell; of bash the line up to the cursor and what it would replace, of others the words.
    """
    shell, *rest = arguments
    if shell == "bash":
        words, typed, quote = split(rest[0])
        offers, files = complete(words[1:-1], words[-1])
        head = _unquoted_head(typed, rest[1])
        found = [quoted(word[len(head) :], quote) for word in offers]
    else:
        offers, files = complete(rest[:-1], rest[-1])
        found = [f"{word}\t{text}" for word, text in offers.items()]
    goes_on = all(word.endswith(("=", ".", "/")) for word in offers)
    options = ["nospace"] if offers and goes_on else []
    lines = [" ".join([*options, *filter(None, [files])]), *found]
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))


def split(line: str) -> tuple[list[str], str, str]:
    """The words of a line of bash up to the cursor, without their quotes; the last as it is typed, and the quote that
    is open in it.
    """
    words, word, quote, start, at = list[str](), "", "", 0, 0
    inside = False
    while at < len(line):
        char = line[at]
        if char == "\\" and quote != "'" and (not quote or line[at + 1 : at + 2] in {*_IN_DOUBLE, "\n"}):
            word, at, inside = word + line[at + 1 : at + 2], at + 1, True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "'\"":
            quote, inside = char, True
        elif char in " \t\n":
            words += [word] if inside or word else []
            word, start, inside = "", at + 1, False
        else:
            word += char
        at += 1
    return [*words, word], line[start:], quote


def _unquoted_head(typed: str, replaced: str) -> str:
    """The part of the current word in front of what bash replaces: it breaks words at `=` and `:` too."""
    head = typed[: len(typed) - len(replaced)] if typed.endswith(replaced) else ""
    return split(head)[0][-1]


def quoted(word: str, quote: str) -> str:
    """A word as bash takes it, behind an open quote or none."""
    if quote == "'":
        return word.replace("'", "'\\''")
    if quote == '"':
        return "".join(f"\\{char}" if char in _IN_DOUBLE else char for char in word)
    home = "~" if word.startswith("~/") else ""
    return home + "".join(char if char in _WHOLE or char.isalnum() else f"\\{char}" for char in word[len(home) :])
