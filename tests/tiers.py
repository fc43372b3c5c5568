"""The tiers of the test suite, and what keeps each of them to its promise.

`unit` starts no process and imports no training library; it is what a bare `pytest` runs. `cli` calls the command line
and starts small processes, `torch` imports torch and the libraries around it, `cluster` submits jobs to a Slurm of its
own (as root and with Debian's packages, else it skips), `e2e` starts real launchers and ranks, `campaign` runs for
minutes to hours. A folder has a tier; a file or a test may name another: ``pytestmark = pytest.mark.torch``.

`smoke` is no tier of its own but a choice from `e2e` and `cluster`: what `scripts/test` runs of them (``SMOKE``).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import hypothesis
import psutil
import pytest
from packaging.requirements import Requirement  # comes with pytest

TIERS = ("unit", "cli", "torch", "cluster", "e2e", "campaign")
# Each launcher trains and is killed; a run of one process, one of DeepSpeed and a job of a scheduler go on bit-equal;
# one run hangs; what a user does first works. A node id stands here, or what a parametrised one begins with.
SMOKE = (
    *(
        f"e2e/test_plan_is_run.py::test_the_processes_that_start_are_those_of_the_bound_plan[{case}]"
        for case in ("python-1", "torchrun-2", "accelerate-2", "deepspeed-2")
    ),
    *(
        f"e2e/test_kill_matrix.py::test_a_signal_ends_everything_with_the_documented_code[{case}]"
        for case in (
            "python-TERM-trainkit-step",
            "torchrun-KILL-trainkit-step",
            "accelerate-TERM-launcher-step",
            "deepspeed-KILL-launcher-step",
        )
    ),
    *(
        f"e2e/test_train_through_launchers.py::test_an_interrupted_run_is_resumed_as_if_it_had_never_stopped[{case}]"
        for case in ("single", "zero2")
    ),
    "e2e/test_same_losses.py::test_a_strategy_gives_the_losses_and_norms_of_a_single_process[fsdp]",
    "e2e/test_in_force.py::test_ranks_that_do_something_else_end_the_run[fsdp-ddp",
    "e2e/test_torch_scripts.py::test_a_program_starts_in_the_folder_that_the_line_goes_to[torchrun",
    "e2e/test_hf_scripts.py::test_a_script_that_makes_its_arguments_itself_is_not_said_to_run_as_planned",
    "e2e/test_accelerate_scripts.py::test_one_process_computes_in_the_format_of_the_recipe[accelerate]",
    "trainer/test_packing.py::test_packed_texts_lose_the_same_on_any_number_of_ranks[ddp",
    "e2e/test_prepared_data.py::test_a_wrong_row_behind_those_of_the_plan_ends_a_run_before_its_ranks_start[a number]",
    "e2e/test_resume.py::test_usr1_saves_at_the_next_step_and_the_run_goes_on",
    "e2e/test_hangs.py::test_the_rank_that_holds_the_others_up_is_named_and_a_slow_one_is_not",
    "e2e/test_right_card.py::test_each_rank_has_the_chosen_card[torchrun select: [2, 0]]",
    "e2e/test_bad_input.py::test_a_loss_that_is_no_number_names_its_step_and_leaves_the_last_checkpoint",
    "e2e/test_export.py::test_exported_weights_have_the_evaluation_loss_of_the_run[fsdp]",
    "e2e/test_documentation.py::test_every_command_runs_as_printed_and_in_this_order[README]",
    "e2e/test_wizard_in_a_terminal.py::test_reasons_the_way_back_refusals_and_leaving_without_loss",
    "launch_plan/test_shell_script.py::test_the_script_runs_the_plan[torchrun-2]",
    "cluster/test_submitted.py::test_a_job_whose_time_is_up_goes_on_bit_equal_in_the_same_run_directory[ddp",
)
OF_FOLDER = {
    "cli": "cli",
    "runner": "cli",
    "doctor": "cli",
    "bench": "cli",
    "trainer": "torch",
    "verify": "torch",
    "cluster": "cluster",
    "e2e": "e2e",
}
# What a tier is about; where one of these is missing its tests skip, and say which.
LIBRARIES = {"torch": ("torch",), "cluster": ("torch",), "e2e": ("torch", "accelerate", "deepspeed", "transformers")}
HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "peft",
    "datasets",
    "numpy",
    "pyarrow",
    "safetensors",
    "huggingface_hub",
)
_MARK = re.compile(rf"^pytestmark = \[?\s*pytest\.mark\.({'|'.join(TIERS)})\b", re.MULTILINE)
_ANY_MARK = re.compile(rf"@pytest\.mark\.({'|'.join(TIERS)})\b")
TESTS = Path(__file__).parent
CHOICES = (*TIERS, "smoke")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tier unit,cli`: which tiers to run."""
    parser.addoption("--tier", default="", help=f"tiers to run, with commas between: {', '.join(CHOICES)}, or all")


def chosen(config: pytest.Config) -> frozenset[str]:
    """The tiers of this call: as asked for; a bare call is for `unit`; named files run but for campaigns."""
    asked = config.getoption("--tier")
    if asked:
        tiers = TIERS if asked == "all" else tuple(asked.split(","))
        if unknown := set(tiers) - set(CHOICES):
            raise pytest.UsageError(f"--tier knows {', '.join(CHOICES)} and all, not {', '.join(sorted(unknown))}")
        return frozenset(tiers)
    bare = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.getoption("-m")
    return frozenset(("unit",)) if bare else frozenset(TIERS) - {"campaign"}


def pytest_configure(config: pytest.Config) -> None:
    """More examples where everything is asked for, before a test file makes settings of its own from these."""
    if "e2e" in config.getoption("--tier"):
        hypothesis.settings.load_profile("thorough")


@cache
def tier_of(path: Path) -> str:
    """The tier of a test file."""
    named = _MARK.search(path.read_text())
    return named.group(1) if named else OF_FOLDER.get(path.relative_to(TESTS).parts[0], "unit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without a test of the chosen tiers is not even imported: torch alone would take seconds."""
    if not collection_path.name.startswith("test_") or TESTS not in collection_path.parents:
        return None
    tiers = {tier_of(collection_path), *_ANY_MARK.findall(collection_path.read_text())}
    if any(each.startswith(f"{collection_path.relative_to(TESTS).as_posix()}::") for each in SMOKE):
        tiers.add("smoke")
    return True if not tiers & chosen(config) else None


@cache
def missing(tier: str) -> str:
    """The libraries that a tier is about and that are not installed, for people."""
    return ", ".join(name for name in LIBRARIES.get(tier, ()) if importlib.util.find_spec(name) is None)


def lacks(requirement: str) -> str:
    """Why a requirement (`accelerate>=1.12`, `python>=3.12`) is not met here; empty where it is."""
    wanted = Requirement(requirement)
    try:
        installed = platform.python_version() if wanted.name == "python" else metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"needs {requirement}, which is not installed"
    fits = wanted.specifier.contains(installed, prereleases=True)
    return "" if fits else f"needs {requirement}, and {installed} is installed"


class _Skipped(pytest.Module):
    """A file whose imports would fail."""

    def collect(self) -> NoReturn:
        pytest.skip(f"not installed: {missing(tier_of(self.path))}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip a file as a whole where the libraries that it is about are missing."""
    if TESTS in module_path.parents and missing(tier_of(module_path)):
        return _Skipped.from_parent(parent, path=module_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, leave out those of other tiers, skip those whose libraries are missing."""
    wanted, left = chosen(config), []
    smoke: set[str] = set()
    for item in list(items):
        tier = next((mark.name for mark in item.iter_markers() if mark.name in TIERS), "") or tier_of(item.path)
        item.add_marker(tier)
        known = next((each for each in SMOKE if item.nodeid.removeprefix("tests/").startswith(each)), "")
        smoke.add(known)
        if tier not in wanted and not (known and "smoke" in wanted):
            items.remove(item)
            left.append(item)
        elif absent := missing(tier):
            item.add_marker(pytest.mark.skip(reason=f"not installed: {absent}"))
        elif unmet := [reason for mark in item.iter_markers("needs") for each in mark.args if (reason := lacks(each))]:
            item.add_marker(pytest.mark.skip(reason="; ".join(unmet)))
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.getoption("keyword")
    if whole and "smoke" in wanted and not missing("e2e") and (stale := sorted(set(SMOKE) - smoke)):
        raise pytest.UsageError(f"tests/tiers.py: SMOKE names tests that do not exist: {', '.join(stale)}")
    config.hook.pytest_deselected(items=left)
    # Longest first, so that the workers end together: launchers before units, and among the former those on DeepSpeed's
    # engine (test_accelerate_…, test_deepspeed_…, test_hf_…) last, for its op is being built meanwhile.
    order = {tier: place for place, tier in enumerate(reversed(TIERS))}
    files = {item.path: None for item in items}
    place = {path: -number if tier_of(path) == "e2e" else number for number, path in enumerate(sorted(files))}
    items.sort(key=lambda item: (order[tier_of(item.path)], place[item.path]))


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether everything is asked for (`scripts/test --all`): a test that else tries a part of its cases tries all."""
    return "e2e" in pytestconfig.getoption("--tier")


EXTENSIONS = "TRAINKIT_TEST_EXTENSIONS"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the op that DeepSpeed's engine needs on a CPU beside the tests, as each rank would wait for it."""
    config = session.config
    worker = "PYTEST_XDIST_WORKER" in os.environ
    # Not for a few files named by hand, which seldom need the op.
    asked = {"e2e", "smoke"} & set(config.getoption("--tier").split(","))
    if worker or not asked or config.option.collectonly or EXTENSIONS in os.environ or missing("e2e"):
        return
    folder = tempfile.TemporaryDirectory(prefix="trainkit-extensions-")
    os.environ[EXTENSIONS] = folder.name  # the workers inherit it
    build = subprocess.Popen(
        [sys.executable, "-m", "trainkit.trainer.perf.build_ops", "--ops", "shm_comm", "--device", "cpu"],
        cwd=TESTS.parent,
        env={**os.environ, "TORCH_EXTENSIONS_DIR": folder.name, "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        if build.poll() is None:  # ninja gives each compiler a group of its own, so the tree is ended one by one
            for process in (*psutil.Process(build.pid).children(recursive=True), psutil.Process(build.pid)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            build.wait()
        folder.cleanup()

    config.add_cleanup(end)


class _Refusing(importlib.abc.MetaPathFinder):
    """While a unit test runs, nothing imports a training library."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in HEAVY:
            raise AssertionError(f"a unit test imports {fullname}: mark it with pytest.mark.torch")
        return None


def _refused(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a unit test starts a process: mark it with pytest.mark.cli")


@pytest.fixture(autouse=True)
def _kept_to_its_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.node.get_closest_marker("unit") is None:
        yield
        return
    if chosen(request.config) == {"unit"}:
        loaded = sorted(set(HEAVY) & sys.modules.keys())
        assert not loaded, f"a file of unit tests imports {', '.join(loaded)}"
    finder = _Refusing()
    sys.meta_path.insert(0, finder)
    monkeypatch.setattr(subprocess, "_fork_exec", _refused, raising=False)
    monkeypatch.setattr(os, "fork", _refused)
    monkeypatch.setattr(os, "posix_spawn", _refused)
    yield
    sys.meta_path.remove(finder)
