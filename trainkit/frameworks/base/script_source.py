"""What a Python script is built on, as its own source says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from trainkit.frameworks.base.draft import Desk
from trainkit.recipe.layers.paths import absolute

PARSERS = frozenset({"HfArgumentParser", "TrlParser"})  # which make TrainingArguments of a command line
BUILT_ON = {  # name in a library -> the kind of program that uses it
    **{f"transformers.{name}": "hf" for name in ("Trainer", "Seq2SeqTrainer")},
    **{f"transformers.{name}": "hf" for name in ("TrainingArguments", "Seq2SeqTrainingArguments")},
    "accelerate.Accelerator": "accelerate",
    "deepspeed.initialize": "deepspeed",
}
ORDER = ("hf", "accelerate", "deepspeed")  # the outermost first: Trainer uses the others by itself


@dataclass(frozen=True, slots=True)
class Built:
    """kind: of the program, empty where the source does not tell. by: what tells. remark: why it is not another."""

    kind: str = ""
    by: str = ""
    remark: str = ""


def built_on(desk: Desk, script: str) -> Built:
    """What the script uses; nothing where it cannot be read, or is no Python."""
    try:
        tree = ast.parse(desk.files.read(absolute(script, desk.cwd)))
    except (OSError, SyntaxError, ValueError):
        return Built()
    used = set(_used(tree))
    kinds = {BUILT_ON[name]: name for name in sorted(used & BUILT_ON.keys(), reverse=True)}
    if "hf" in kinds and not {name.rpartition(".")[2] for name in used} & PARSERS:
        name = kinds["hf"]
        return Built(remark=f"{script} uses {name} without HfArgumentParser: Trainer's flags do not reach it.")
    kind = next((each for each in ORDER if each in kinds), "")
    return Built(kind, kinds.get(kind, ""))


def _used(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported, or reached through an imported module."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module.partition('.')[0]}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            modules |= {each.asname or each.name: each.name for each in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield f"{modules[node.value.id]}.{node.attr}"
