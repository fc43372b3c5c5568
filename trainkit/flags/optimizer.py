"""HF's flags for the optimizer that are not read as they stand: `--optim` and `--optim_args`."""

from __future__ import annotations

from dataclasses import replace

from trainkit.errors import Diagnostic
from trainkit.flags.flag import Outcome, Use, setting_reader
from trainkit.optimizers import OPTIMIZERS
from trainkit.recipe.layers.assignment import Assignment

_FORM = "write it as name=value,name=value, for example momentum=0.9,nesterov=true"


def optim(use: Use) -> Outcome:
    """HF has two names for some optimizers."""
    name = next((name for name, each in OPTIMIZERS.items() if use.value in each.hf_aliases), use.value)
    return setting_reader("optimizer.name")(replace(use, value=name))


def optim_args(use: Use) -> Outcome:
    """Each argument is one entry of optimizer.args; those that a file gives besides stay."""
    assignments: list[Assignment] = []
    found: list[Diagnostic] = []
    seen: set[str] = set()
    for part in (use.value or "").split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name.isidentifier():
            found.append(use.error(f"--optim_args: {part!r} is no argument", _FORM, key="optimizer.args"))
        elif name in seen:
            found.append(use.error(f"--optim_args gives {name} twice", "keep one of the two", key="optimizer.args"))
        else:
            seen.add(name)
            made, problems = setting_reader(f"optimizer.args.{name}")(replace(use, value=value))
            assignments += made
            found += problems
    return assignments, found
