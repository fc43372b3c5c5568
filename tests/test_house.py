"""Data goes one way: the pure core reaches no edge, and only the trainer imports the training libraries."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainkit"

PURE = (
    "trainkit.decode",
    "trainkit.errors",
    "trainkit.text",
    "trainkit.optimizers",
    "trainkit.architectures",
    "trainkit.lora",
    "trainkit.recipe",
    "trainkit.flags",
    "trainkit.hub.names",
    "trainkit.hub.cache",
    "trainkit.machine.facts",
    "trainkit.machine.selection",
    "trainkit.machine.versions",
    "trainkit.plan",
    "trainkit.frameworks",
    "trainkit.planner",
    "trainkit.convert",
    "trainkit.wizard",
)
# Files, processes, clocks, chance, terminals. Paths as strings are posixpath's business.
EDGES = (
    "os", "sys", "io", "pathlib", "glob", "shutil", "tempfile", "platform",
    "subprocess", "multiprocessing", "asyncio", "socket", "signal", "importlib",
    "time", "datetime", "random", "secrets", "uuid", "logging", "typer", "rich", "pynvml",
    "trainkit.cli", "trainkit.runner", "trainkit.trainer",
    "trainkit.machine.probe", "trainkit.machine.probes",
)  # fmt: skip
TRAINING_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "numpy")
STDLIB_ONLY = ("trainkit.runner.rank.__main__", "trainkit.runner.rank.wrapper", "trainkit.runner.supervisor.entry")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Names that run-time imports bind: at module level, or inside functions too. TYPE_CHECKING blocks never run."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports(node, everywhere=everywhere)


def reached(module: str, *, everywhere: bool) -> set[str]:
    return set(imports(ast.parse(MODULES[module].read_text()), everywhere=everywhere))


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def calls(module: str, names: tuple[str, ...]) -> set[str]:
    tree = ast.parse(MODULES[module].read_text())
    found = (node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return set(found) & set(names)


IMPURE = ("trainkit.convert.shell",)  # Bash reads shell scripts


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, PURE) and not within(name, IMPURE)])
def test_the_pure_core_reaches_no_edge(module: str) -> None:
    assert not {name for name in reached(module, everywhere=True) if within(name, (*EDGES, *TRAINING_LIBRARIES))}
    assert not calls(module, ("open", "print", "input", "exec", "eval", "__import__"))


@pytest.mark.parametrize("module", [name for name in MODULES if not within(name, ("trainkit.trainer",))])
def test_nothing_outside_the_trainer_imports_a_training_library(module: str) -> None:
    assert not {name for name in reached(module, everywhere=False) if within(name, TRAINING_LIBRARIES)}


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_what_runs_in_every_rank_and_in_the_guardian_needs_the_standard_library_alone(module: str) -> None:
    own = {name for name in reached(module, everywhere=True) if not within(name, ("trainkit",))}
    assert {name.split(".")[0] for name in own} <= set(sys.stdlib_module_names)
    for name in reached(module, everywhere=True):
        for inner in (name, name.rpartition(".")[0]):
            if inner in MODULES and inner != "trainkit":
                other = {found.split(".")[0] for found in reached(inner, everywhere=True)}
                assert other <= {*sys.stdlib_module_names, "trainkit"}


def test_the_walk_sees_what_it_is_meant_to_see() -> None:
    source = """
import os
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import torch
def later():
    import subprocess
class Thing:
    import random
try:
    from rich import console
except ImportError:
    pass
"""
    assert set(imports(ast.parse(source), everywhere=False)) == {"os", "typing.TYPE_CHECKING", "random", "rich.console"}
    assert "subprocess" in set(imports(ast.parse(source), everywhere=True))
    assert len([name for name in MODULES if within(name, PURE)]) > 30


@pytest.mark.cli
def test_planning_loads_no_training_library_and_no_terminal_library() -> None:
    code = "import sys, trainkit.planner.build, trainkit.machine.probe as p; p.probe(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {*TRAINING_LIBRARIES, "typer", "rich", "omegaconf"}


# The rooms of the house from the ground up; each uses only those below it, imports for type checkers included.
FLOORS = (
    ("decode", "errors", "text", "lazy", "optimizers", "architectures", "lora", "refusals", "stamps"),
    ("files",),
    ("recipe",),
    ("machine", "flags", "hub"),
    ("plan",),
    ("frameworks", "schedulers"),
    ("planner",),
    ("convert", "runner", "verify"),
    ("trainer", "bench", "jobs"),
    ("doctor", "wizard"),
    ("cli",),
)


def floor(module: str) -> int:
    room = module.split(".")[1]
    return next(height for height, rooms in enumerate(FLOORS) if room in rooms)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("trainkit", "trainkit.__main__")])
def test_arrows_go_down_only(module: str) -> None:
    for name in annotated(module):
        other = module_of(name)
        if other is None or other == "trainkit":
            continue
        inside = other.split(".")[1] == module.split(".")[1]
        assert inside or floor(other) < floor(module), f"{module} -> {other}"


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports for type checkers count: they too say that one module cannot be read without the other."""
    uses = {name: {found for each in annotated(name) if (found := module_of(each))} - {name} for name in MODULES}
    while free := {name for name, used in uses.items() if not used & uses.keys()}:
        uses = {name: used for name, used in uses.items() if name not in free}
    assert not uses, f"a circle lies among {sorted(uses)}"


# Modules that play the same part in sibling folders have the same name.
ROLES = {"__init__.py", "__main__.py", "fields.py", "program.py", "launcher.py", "importer.py", "exporter.py",
         "support.py", "registry.py"}  # fmt: skip


def test_no_name_of_a_file_stands_for_three_things() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert not {name for name, count in names.items() if count > 2} - ROLES


def annotated(module: str) -> set[str]:
    """All names that a module imports, wherever it does."""
    tree = ast.parse(MODULES[module].read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return found | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def module_of(name: str) -> str | None:
    """The module that an imported name is, or lies in; a package's face is not what its modules import."""
    return next((each for each in (name, name.rpartition(".")[0]) if each in MODULES), None)


TOP = {
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "LICENSE", "README.md", "configs", "docs",
    "pyproject.toml", "recipes", "scripts", "tests", "trainkit",
}  # fmt: skip


@pytest.mark.cli
@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="only git knows what is committed")
def test_nothing_else_lies_at_the_top() -> None:
    argv = ["git", "-c", f"safe.directory={ROOT}", "ls-files"]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode:
        pytest.skip(f"git does not list this checkout: {listed.stderr}")
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} == TOP
