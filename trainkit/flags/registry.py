"""The command line's named flags as one table: most read off the schema, the rest with a reader of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainkit.flags.flag import Flag, setting_reader, switch_reader
from trainkit.flags.phases import PHASES
from trainkit.flags.readers import SPECIAL
from trainkit.recipe.schema.fields import Setting, schema
from trainkit.recipe.validation.type_errors import choices, takes_switch


@dataclass(frozen=True)
class FlagHelp:
    """What help and reference text say of a flag."""

    flag: str  # with dashes, and what it takes
    keys: tuple[str, ...]
    help: str
    unit: str


@cache
def flags() -> Mapping[str, Flag]:
    """Every named flag by its name with underscores."""
    table = {setting.flag: _derived(setting) for setting in schema().all_settings() if setting.flag}
    table.update({flag.name: flag for flag in (*SPECIAL, *PHASES)})
    return dict(sorted(table.items()))


def flag_reference(width: int = 100) -> str:
    """All flags as text of at most `width` columns: what each takes, what it means, which recipe keys it sets."""
    return "".join(f"  {each.flag}\n{_indented(each, width)}\n" for each in flag_table())


def _indented(flag: FlagHelp, width: int) -> str:
    unit = f" [{flag.unit}]" if flag.unit else ""
    parts = (f"{flag.help}{unit}", f"sets {', '.join(flag.keys)}")
    indent = " " * 6
    return "\n".join(
        textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for part in parts
    )


def flag_table() -> tuple[FlagHelp, ...]:
    """All flags with what they take, the keys they set, help and unit, in alphabetical order."""
    return tuple(FlagHelp(_usage(flag), flag.keys, flag.help, flag.unit) for flag in flags().values())


def _usage(flag: Flag) -> str:
    metavar = flag.metavar or "VALUE"
    return {"value": f"--{flag.name} {metavar}", "switch": f"--{flag.name}", "optional": f"--{flag.name} [{metavar}]"}[
        flag.takes
    ]


def _derived(setting: Setting) -> Flag:
    if takes_switch(setting):
        return Flag(
            setting.flag, "switch", (setting.key,), setting.description, switch_reader(setting.key), setting.unit
        )
    options = [str(choice) for choice in choices(setting.annotation)]
    metavar = "|".join(options) if 1 < len(options) <= 6 else setting.key.rpartition(".")[2].upper()
    return Flag(
        setting.flag, "value", (setting.key,), setting.description, setting_reader(setting.key), setting.unit, metavar
    )
