"""What stands in words for what is known only when the program starts.

A variable is `START name END`, or `START name DEFAULT text END` where the script has something in its place; what a
command would have printed is `START #number END`. Private letters of Unicode, which no script has.
"""

from __future__ import annotations

import re

START, END, DEFAULT, BARE = "\ue000", "\ue001", "\ue002", "\ue003"
# What differs on each machine, and is given to it when it is started.
RANKS = frozenset({"NODE_RANK", "MACHINE_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "GROUP_RANK"})
_NAME = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)")
WHOLE = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)(?:{DEFAULT}([^{START}{END}{{}}]*))?{END}")
EMPTY = re.compile(f"{START}([^{START}{END}{DEFAULT}{BARE}]+)[{DEFAULT}{BARE}]{END}")  # of what is not set: no word
EMPTIES = re.compile(f"(?:{EMPTY.pattern})+")
BROKEN = re.compile(f"^[^{START}]*{END}|{START}[^{END}]*$")  # by blanks in a default


def opening(name: str, default: str | None = None) -> str:
    """What stands for a variable; default: what the script has in place of one that is not set."""
    return f"{START}{name}{END}" if default is None else f"{START}{name}{DEFAULT}{default}{END}"


def names_in(text: str) -> list[str]:
    """The names of what is open in a text, each once; of what is printed its number behind a `#`."""
    return [*dict.fromkeys(_NAME.findall(text))]


def is_open(text: str) -> bool:
    """Whether there is anything open in a text, whole or in part."""
    return START in text or END in text


def is_never_empty(text: str) -> bool:
    """Whether a text with something open in it is certainly not empty: a variable that the job or the caller has."""
    left = re.sub(f"{START}[^{END}]*{END}", "", text)
    return bool(left) or re.search(f"{START}(?!ARG\\d|#)[^{DEFAULT}{BARE}{END}]*{END}", text) is not None
