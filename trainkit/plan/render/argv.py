"""Words of a command line as a shell would read them, run-time variables written as the caller likes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator

from trainkit.plan.model import Text, Variable


def quoted(word: Text, write: Callable[[Variable], str]) -> str:
    """One word: literal parts quoted where needed, variables as `write` gives them."""
    return "".join(shlex.quote(part) if isinstance(part, str) else write(part) for part in word.parts) or "''"


def named(variable: Variable) -> str:
    """A variable for people: ``<run_dir>``."""
    return f"<{variable.value}>"


def lines(words: Iterable[str], width: int, indent: str = "") -> Iterator[str]:
    """Words packed into lines of at most `width` columns, joined by backslashes; a longer word has its own.

    indent: put before every line but the first.
    """
    line = ""
    for word in words:
        if line.strip() and len(line) + 1 + len(word) > width - 2:
            yield f"{line} \\"
            line = f"{indent}{word}"
        else:
            line = f"{line} {word}" if line else word
    yield line
