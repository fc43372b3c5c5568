"""The command line's named flags as one table: most read off the schema, the rest with a reader of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import cache

from trainkit.flags.flag import Flag, setting_reader, switch_reader
from trainkit.flags.special import SPECIAL
from trainkit.recipe.schema.fields import Setting, schema
from trainkit.recipe.validation.type_errors import choices, takes_switch


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
