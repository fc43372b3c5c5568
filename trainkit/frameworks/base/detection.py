"""What kind of program a script is, as its source tells, or else the flags behind its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainkit.frameworks.base.argv_reader import script_flags
from trainkit.frameworks.base.draft import ImportContext
from trainkit.frameworks.registry import PROGRAMS
from trainkit.recipe.layers.paths import absolute


@dataclass(frozen=True, slots=True)
class DetectedKind:
    """kind: of the program, empty where nothing tells. by: what tells. remark: why it is not another."""

    kind: str = ""
    by: str = ""
    remark: str = ""


def program_kind(
    context: ImportContext, argv: Sequence[str], otherwise: str = "torch", *, module: bool = False
) -> DetectedKind:
    """What kind of program a script or module with these arguments is; `otherwise` where nothing tells."""
    source = DetectedKind() if module else kind_by_source(context, argv[0])
    if source.kind:
        return source
    kind, flag = _kind_by_flags(argv)
    if kind:
        return DetectedKind(kind, f"--{flag}", "" if kind == "hf" else source.remark)
    return DetectedKind(otherwise, "", source.remark or _doubt(argv[1:]))


def kind_by_source(context: ImportContext, script: str) -> DetectedKind:
    """What the script uses; nothing where it cannot be read, or is no Python."""
    try:
        tree = ast.parse(context.files.read(absolute(script, context.cwd)))
    except (OSError, SyntaxError, ValueError):
        return DetectedKind()
    used = set(_used(tree))
    # The registry's order is from the outermost library: Trainer uses the others by itself.
    for kind, program in PROGRAMS.items():
        found = sorted(used & program.DETECTION.imports)
        parsers = program.DETECTION.parsers
        if found and parsers and not {name.rpartition(".")[2] for name in used} & parsers:
            one = min(parsers)
            return DetectedKind(remark=f"{script} uses {found[0]} without {one}: Trainer's flags do not reach it.")
        if found:
            return DetectedKind(kind, found[0])
    return DetectedKind()


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


def _kind_by_flags(argv: Sequence[str]) -> tuple[str, str]:
    """The kind and the flag that tells; empty where none does."""
    flags = {each.name: each for each in script_flags(argv[1:]) if each.name}
    for kind, program in PROGRAMS.items():
        found = sorted(program.DETECTION.flags & flags.keys())
        # transformers' examples come in pairs: run_glue.py on Trainer, run_glue_no_trainer.py on Accelerator().
        if found and (kind != "hf" or "no_trainer" not in argv[0]):
            return kind, found[0]
        if kind == "hf" and "deepspeed" in flags and flags["deepspeed"].values:
            return "hf", "deepspeed"  # Trainer's takes a file, DeepSpeed's own is a switch
    return "", ""


def _doubt(argv: Sequence[str]) -> str:
    """A remark on a flag that a library has too; empty without one."""
    for flag in script_flags(argv):
        for kind, program in PROGRAMS.items():
            if flag.name in program.DETECTION.shared:
                library = program.DETECTION.library
                return (
                    f"--{flag.name} is also a flag of {library}: import with --kind {kind} where the script is on it."
                )
    return ""
