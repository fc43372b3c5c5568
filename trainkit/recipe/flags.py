"""The command line's named flags as one table: most read off the schema, the rest with a reader of their own."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

from trainkit.errors import Diagnostic, Origin
from trainkit.recipe.assignment import Assignment, layer_of, read_value
from trainkit.recipe.layer import ARGUMENTS, Layer
from trainkit.recipe.paths import FileChecks
from trainkit.recipe.schema.fields import Setting, schema
from trainkit.recipe.schema.launching import program_argv
from trainkit.recipe.secrets import MASK, is_secret_name, mask_line
from trainkit.recipe.short_flags import OFF, ON, SPECIAL, Flag, ParsedFlag, setting_reader, switch_reader
from trainkit.recipe.suggestions import did_you_mean, nearest_key
from trainkit.recipe.validate import choices, refused, takes_switch


@cache
def flags() -> Mapping[str, Flag]:
    """Every named flag by its name with underscores, in alphabetical order."""
    derived = [_derived(setting) for setting in schema().all_settings() if setting.flag]
    return dict(sorted({flag.name: flag for flag in (*derived, *SPECIAL)}.items()))


def flag_reference(width: int = 100) -> str:
    """All flags as text of at most `width` columns: what each takes, what it means, which recipe keys it sets."""
    indent = " " * 6
    lines: list[str] = []
    for flag in flags().values():
        meaning = f"{flag.help} [{flag.unit}]" if flag.unit else flag.help
        lines.append(f"  {flag.usage}")
        for part in (meaning, f"sets {', '.join(flag.keys)}"):
            lines += textwrap.wrap(part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return "".join(f"{line}\n" for line in lines)


def _derived(setting: Setting) -> Flag:
    usage, read = f"--{setting.flag}", switch_reader(setting.key)
    if not takes_switch(setting):
        options = [str(choice) for choice in choices(setting.annotation)]
        metavar = "|".join(options) if 1 < len(options) <= 6 else setting.key.rpartition(".")[2].upper()
        usage, read = f"{usage} {metavar}", setting_reader(setting.key)
    return Flag(usage, (setting.key,), setting.description, read, setting.unit)


_DOTTED = re.compile(r"(?P<key>[A-Za-z_][^\s=]*?)(?P<modifier>[+!]?)=(?P<value>.*)", re.DOTALL)
_TRUE_FALSE = (*ON, *OFF)
# By the key that they decide: groups of flags; those of one group go together, those of different groups do not.
_RIVALS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "precision.dtype": (("bf16",), ("fp16",), ("mixed_precision",)),
    "strategy.kind": (("fsdp", "fsdp_config", "use_fsdp"), ("deepspeed",)),
    "schedule.warmup_steps": (("warmup_steps",), ("warmup_ratio",)),
    "nodes.processes_per_node": (("nproc_per_node",), ("num_processes",), ("num_gpus",)),
}
# By a flag, how the names of those begin that refine or overrule it.
_AFTER: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("fsdp_",),
    "use_fsdp": ("fsdp_",),
    "eval_steps": ("eval_strategy", "evaluation_strategy"),
    "save_steps": ("save_strategy",),
}


@dataclass(frozen=True)
class _Word:
    """One override: a flag with what it took, or a dotted key.

    typed: its words on the command line. wrong: what is wrong with it, and what to write.
    """

    typed: tuple[str, ...]
    flag: Flag | None = None
    key: str = ""
    value: str | None = None
    modifier: str = ""
    wrong: tuple[str, str] | None = None


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that are no overrides (a recipe, a key), and the overrides with what their flags take, in order."""
    plain: list[str] = []
    overrides: list[str] = []
    for each in _split(words):
        (overrides if each.key or each.typed[0].startswith("--") else plain).extend(each.typed)
    return plain, overrides


def assignments(words: Sequence[str]) -> list[tuple[tuple[str, ...], str, str, str]]:
    """Overrides one by one: the words as typed, and of ``key+=value`` its key, modifier and text; empty of a flag."""
    return [(each.typed, each.key, each.modifier, each.value or "") for each in _split(words)]


def width(words: Sequence[str], ends: Callable[[Sequence[str]], bool]) -> int:
    """How many words the override takes with which these begin.

    ends: whether the words after it begin something else, such as a program. They are then not its value, if the flag
    can do without one.
    """
    first = next(_split(words))
    requires = first.flag is not None and first.flag.takes == "value"
    return 1 if len(first.typed) > 1 and not requires and ends(words[1:]) else len(first.typed)


def override_layers(
    words: Sequence[str], strength: int, cwd: str, files: FileChecks, current: Callable[[str], Any]
) -> tuple[list[Layer], list[Diagnostic]]:
    """One layer for each override, in order and of one strength, with errors and warnings.

    current: the value of a key in the weaker layers, for flags that take something back.
    """
    split = _in_order(list(_split(words)))
    found = [_error(each.typed[0], strength, *each.wrong) for each in split if each.wrong]
    used = [each for each in split if not each.wrong]
    given = frozenset(each.flag.name for each in used if each.flag)
    # Other words of this line, on which a flag's meaning may depend: they are no layer yet.
    typed: dict[str, Any] = {f"--{each.flag.name if each.flag else each.key}": each.value for each in used}
    typed |= {each.key: read_value(each.key, each.value or "", _origin("", strength))[0] for each in used if each.key}
    found += _rivals(used, strength)
    layers = []
    for each in used:
        name, read = (each.flag.name, each.flag.read) if each.flag else ("", setting_reader(each.key, each.modifier))
        origin = _origin(" ".join(each.typed), strength, each.key)
        use = ParsedFlag(
            name, each.value, origin, cwd, files, lambda key: typed[key] if key in typed else current(key), given
        )
        assignments, diagnostics = read(use)
        if each.key.partition(".")[0] == "extends":
            problem = use.error("a flag cannot change `extends`", "use --with PRESET", key="extends")
            assignments, diagnostics = [], [problem]
        found += diagnostics
        if assignments:  # a layer each, so that `explain` shows a flag that a later one on the line replaces
            layers.append(layer_of("flag", strength, cwd, assignments))
    return layers, found


def argument_layer(arguments: Sequence[str], strength: int, cwd: str, current: Callable[[str], Any]) -> Layer:
    """The layer of the arguments for the program: they follow what the weaker layers give under `program.args`."""
    given = current(ARGUMENTS)
    before = program_argv(given) if isinstance(given, Mapping) else given if isinstance(given, list) else []
    shown = mask_line(" ".join(arguments))
    origin = Origin("command line", strength, "words behind --", length=len(shown), text=shown)
    return layer_of("command line", strength, cwd, [Assignment(ARGUMENTS, [*before, *arguments], origin)])


def _split(words: Sequence[str]) -> Iterator[_Word]:
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        dotted = _DOTTED.fullmatch(word.removeprefix("--"))
        if dotted and (not word.startswith("--") or "." in dotted["key"]):
            key, modifier, value = dotted.groups()
            no_key = (f"{key[:80]!r} is not a key", "write section.setting=value")
            yield _Word((word,), None, key, value, modifier, no_key if ".." in key or key.endswith(".") else None)
        elif word.startswith("--") and word != "--":
            yield _flag(word, remaining)
        else:
            hint = "write key=value, or quote the words of one flag"
            yield _Word((word,), wrong=(f"{word[:80]!r} is neither a flag nor key=value", hint))


def _flag(word: str, remaining: list[str]) -> _Word:
    """A flag with its value, which is taken off the remaining words where it is one of them."""
    name, equals, text = word[2:].partition("=")
    name = name.replace("-", "_")
    flag, negated = flags().get(name), False
    if flag is None and name.startswith("no_"):
        flag = flags().get(name[3:])
        flag, negated = (flag, True) if flag and flag.takes == "switch" and not equals else (None, False)
    if flag is None:
        # What follows is most likely its value: not to be reported a second time.
        takes = remaining and not equals and not remaining[0].startswith("--") and not _DOTTED.fullmatch(remaining[0])
        takes = takes and not remaining[0].endswith((".yaml", ".yml"))
        return _Word((word, remaining.pop(0)) if takes else (word,), wrong=_unknown_flag(name))
    value = "false" if negated else text if equals else _next(flag, remaining)
    wrong = None
    if flag.takes == "value" and value is None:
        wrong = f"--{name} requires a value", f"write {flag.usage}"
    elif flag.takes == "switch" and value is not None and value.lower() not in _TRUE_FALSE:
        hint = f"write --{name}, --{name}=true or --{name}=false"
        wrong = f"--{name} takes true or false, not {value[:40]!r}", hint
    return _Word((word,) if equals or negated or value is None else (word, value), flag, value=value, wrong=wrong)


def _next(flag: Flag, remaining: list[str]) -> str | None:
    """The next word where it is this flag's value; it is then taken off the list."""
    if not remaining:
        return None
    word = remaining[0]
    if flag.takes == "switch":
        takes = word.lower() in _TRUE_FALSE
    elif flag.takes == "optional":
        takes = not word.startswith("-") and not _DOTTED.fullmatch(word)
    else:
        takes = not word.startswith("--")
    return remaining.pop(0) if takes else None


def _unknown_flag(name: str) -> tuple[str, str]:
    if name in ("set", "override", "overrides"):
        return f"unknown flag --{name}", "settings are written without dashes: train.steps=100"
    if known := refused("precision.dtype", name):  # formats are flags of their own, as --bf16
        return f"unknown flag --{name}: {known[0]}", known[1]
    hint = did_you_mean(name, flags(), "", "--")
    if not hint and (key := nearest_key(name)) in schema().settings:
        hint = f"did you mean {key}=…?"
    hint = hint or "`trainkit run --help` lists the flags; arguments of your program go after `--`"
    return f"unknown flag --{name[:80]}", hint


def _in_order(words: list[_Word]) -> list[_Word]:
    """`--fsdp_config` refines `--fsdp`, and `--save_strategy no` overrules its steps: each counts after that."""
    for first, later in _AFTER.items():
        end = max((place + 1 for place, each in enumerate(words) if each.flag and each.flag.name == first), default=0)
        waits = [each.flag is not None and each.flag.name.startswith(later) for each in words[:end]]
        words = [word for _, word in sorted(zip(waits, words, strict=False), key=itemgetter(0))] + words[end:]
    return words


def _rivals(words: list[_Word], strength: int) -> Iterator[Diagnostic]:
    """An error where flags of different names decide the same: one of them would be dropped in silence."""
    # Only a switch can also take something back.
    named = [
        (each.flag.name, " ".join(each.typed))
        for each in words
        if each.flag and not (each.flag.takes == "switch" and (each.value or "").lower() in OFF)
    ]
    for key, groups in _RIVALS.items():
        group_of = {name: group for group in groups for name in group}
        used = [(name, typed) for name, typed in named if name in group_of]
        for name, typed in used[1:]:
            first = used[0][0]
            if group_of[name] != group_of[first]:
                what = f"--{first} and --{name} contradict each other"
                yield _error(typed, strength, what, "keep one of the two", key)
                break


def _error(typed: str, strength: int, what: str, hint: str, key: str = "") -> Diagnostic:
    return Diagnostic("error", what, key, _origin(typed, strength), hint=hint)


def _origin(typed: str, strength: int, key: str = "") -> Origin:
    shown = mask_line(typed)
    if key and is_secret_name(key.rpartition(".")[2]):
        shown = f"{typed.partition('=')[0]}={MASK}"
    shown = shown[:200]
    return Origin("flag", strength, shown, length=max(len(shown), 1), text=shown)
