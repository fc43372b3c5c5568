"""Data goes one way: the pure core reaches no edge, and only the trainer imports the training libraries."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.loaded_scripts import script

ROOT = Path(__file__).parents[1]

PURE = (
    "trainkit.distribution",
    "trainkit.decode",
    "trainkit.errors",
    "trainkit.rule",
    "trainkit.text",
    "trainkit.batch",
    "trainkit.optimizers",
    "trainkit.lora",
    "trainkit.recipe",
    "trainkit.hub.references",
    "trainkit.hub.cache",
    "trainkit.machine.facts",
    "trainkit.machine.selection",
    "trainkit.launch_plan",
    "trainkit.tools",
    "trainkit.foresight",
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
    "trainkit.machine.probe", "trainkit.machine.host", "trainkit.machine.gpus",
)  # fmt: skip
TRAINING_LIBRARIES = ("torch", "deepspeed", "accelerate", "transformers", "numpy")
FORBIDDEN = (*EDGES, *TRAINING_LIBRARIES)
STDLIB_ONLY = ("trainkit.runner.rank.__main__", "trainkit.runner.rank.wrapper", "trainkit.runner.supervisor.guardian")


house = script("house")
MODULES: Mapping[str, Path] = house.MODULES


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


def calls(module: str, names: tuple[str, ...]) -> set[str]:
    tree = ast.parse(MODULES[module].read_text())
    found = (node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return set(found) & set(names)


IMPURE = (
    "trainkit.convert.shell",
    "trainkit.foresight.traces",
    "trainkit.foresight.measured",
)  # Bash, a process, files


def test_the_pure_core_reaches_no_edge() -> None:
    wrong = []
    for module in (name for name in MODULES if house.within(name, PURE) and not house.within(name, IMPURE)):
        wrong += [(module, name) for name in reached(module, everywhere=True) if house.within(name, FORBIDDEN)]
        wrong += [(module, name) for name in calls(module, ("open", "print", "input", "exec", "eval", "__import__"))]
    assert not wrong


def test_nothing_outside_the_trainer_imports_a_training_library() -> None:
    # What prepares data runs where the trainer does, before it.
    started = tuple(f"trainkit.data.{name}" for name in ("packing", "prepare", "prepared", "ready", "report"))
    outside = [name for name in MODULES if not house.within(name, ("trainkit.trainer", *started))]
    reaching = ((module, name) for module in outside for name in reached(module, everywhere=False))
    assert not [pair for pair in reaching if house.within(pair[1], TRAINING_LIBRARIES)]


def test_what_runs_in_every_rank_and_in_the_guardian_needs_the_standard_library_alone() -> None:
    wrong = []
    for module in STDLIB_ONLY:
        names = reached(module, everywhere=True)
        inner = {found for name in names for found in (name, name.rpartition(".")[0]) if found in MODULES}
        for each in (module, *(inner - {"trainkit"})):
            found = {name.split(".")[0] for name in reached(each, everywhere=True)}
            wrong += [(module, each, name) for name in found - {*sys.stdlib_module_names, "trainkit"}]
    assert not wrong


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
    assert len([name for name in MODULES if house.within(name, PURE)]) > 30


@pytest.mark.cli
def test_planning_loads_no_training_library_and_no_terminal_library() -> None:
    code = "import sys, trainkit.planner.build, trainkit.machine.probe as p; p.probe(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {*TRAINING_LIBRARIES, "typer", "rich", "omegaconf"}


def test_arrows_go_down_only() -> None:
    assert not house.upward()


def test_modules_import_each_other_in_no_circle() -> None:
    """Imports for type checkers count: they too say that one module cannot be read without the other."""
    assert not house.circles()


# Modules that play the same part in sibling folders have the same name.
ROLES = {"__init__.py", "__main__.py", "fields.py", "program.py", "launcher.py", "importer.py", "exporter.py",
         "support.py", "registry.py", "base.py", "rules.py"}  # fmt: skip


def test_no_name_of_a_file_stands_for_three_things() -> None:
    names = Counter(path.name for path in MODULES.values())
    assert not {name for name, count in names.items() if count > 2} - ROLES


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


def test_no_two_test_files_have_one_name() -> None:
    # Without packages pytest takes the second for the first and collects neither: `scripts/test --all` ends at once.
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
