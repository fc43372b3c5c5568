"""What a script's own source tells of its TrainingArguments: whether they can come from a command line at all."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

# Names with which a script makes them of a command line or a file (transformers, trl, alignment-handbook).
PARSERS = ("HfArgumentParser", "TrlParser", "parse_args_into_dataclasses", "from_dict", "set_training")
RESUMING = ("resume_from_checkpoint", "get_last_checkpoint")
ARGUMENTS = "TrainingArguments"  # the end of the name, as of Seq2SeqTrainingArguments


@dataclass(frozen=True, slots=True)
class MadeArguments:
    """The one call in a script that makes them. fields: its keywords; later: attributes that the script sets."""

    name: str
    line: int
    fields: Mapping[str, ast.expr]
    later: frozenset[str]

    def without_flag(self, field: str) -> str | None:
        """What the call says of a field that no flag can be behind; None where one may be."""
        if field in self.later:
            return None
        if field not in self.fields:
            return f"leaves {field} at its default"
        value = self.fields[field]
        return f"says {field}={ast.unparse(value)}" if _is_constant(value) else None


@lru_cache(maxsize=4)
def made_in_script(source: str) -> MadeArguments | None:
    """How a script makes them; None where it reads a command line for them, or where that cannot be told."""
    if ARGUMENTS not in source or any(name in source for name in PARSERS):
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    calls = list(_calls(tree))
    if len(calls) != 1 or calls[0].args or any(each.arg is None for each in calls[0].keywords):
        return None
    (call,) = calls
    fields = {each.arg: each.value for each in call.keywords if each.arg}
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    later = (node.attr for node in attributes if isinstance(node.ctx, ast.Store))
    if any(isinstance(node, ast.Name) and node.id == "setattr" for node in ast.walk(tree)):
        return None
    return MadeArguments(_name(call.func), call.lineno, fields, frozenset(later))


def resumes(source: str) -> bool:
    """Whether a script may go on from a checkpoint; one that is not known may."""
    return not source or any(name in source for name in RESUMING)


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Where such arguments are made; a class of the script's own, below them, is one too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func).endswith(ARGUMENTS))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_constant(value: ast.expr) -> bool:
    """Whether it is written out: a number, a word, or a list of such."""
    return all(
        isinstance(node, ast.Constant | ast.UnaryOp | ast.USub | ast.List | ast.Tuple | ast.Dict | ast.Load)
        for node in ast.walk(value)
    )
