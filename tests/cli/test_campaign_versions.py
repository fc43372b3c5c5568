"""Releases: what pyproject.toml declares is what the campaign runs, and what is too old or missing is named."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.conftest import Trainkit
from tests.loaded_scripts import script
from tests.tiers import lacks
from trainkit.__main__ import OLDEST
from trainkit.distribution import NAME
from trainkit.doctor.checks.packages import OLDEST as OLDEST_FOR_THE_DOCTOR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def versions() -> Any:
    return script("campaign/versions")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_the_minimum_of_every_dependency_is_read(versions: Any) -> None:
    table, declared = project(), versions.declared(ROOT)
    wanted: dict[str, list[str]] = {}
    for each in map(Requirement, chain(table["dependencies"], *table["optional-dependencies"].values())):
        minimum = next(limit.version for limit in each.specifier if limit.operator == ">=")
        wanted.setdefault(each.name.lower(), []).append(minimum)
    assert declared == {name: min(several, key=Version) for name, several in wanted.items()}
    assert declared["transformers"] == "4.50"  # and 5 for quantised weights
    assert len(declared) > 30


def test_a_dependency_without_a_minimum_is_an_error(versions: Any, tmp_path: Path) -> None:
    text = '[project]\nname = "x"\ndependencies = ["rich"]\n[project.optional-dependencies]\ntest = []\n'
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ValueError, match=r"rich in pyproject\.toml says no minimum"):
        versions.declared(tmp_path)


@pytest.mark.parametrize(
    ("version", "is_it"),
    [("2.6", True), ("2.6.0", True), ("2.6.0+debian", True), ("2.6.1", False), ("2.60", False), ("2", False)],
)
def test_a_minimum_has_been_run_where_that_very_release_was(versions: Any, version: str, is_it: bool) -> None:
    assert versions.is_release(version, "2.6") == is_it


@pytest.fixture
def prepared(versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one test, and its environment: a real one, in which nothing had to be installed."""
    work = tmp_path / "project"
    (work / "tests").mkdir(parents=True)
    (work / "pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["pytest>=7"]\n[project.optional-dependencies]\ntest = []\n'
        "[tool.pytest.ini_options]\nmarkers = ['unit: any']\n"
    )
    (work / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--tier')\n")
    monkeypatch.setattr(versions, "ROOT", work)
    (own,) = versions.interpreters([sys.executable])
    environment = next(versions.environments([own], work))
    folder = tmp_path / "kept" / environment.name
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "made-from").write_text(versions.made_from(environment, work))
    return work


@pytest.mark.parametrize(("body", "code", "failed"), [("pass", 0, "0 failed"), ("assert 0", 1, "1 failed")])
def test_an_environment_whose_test_fails_fails_the_campaign(
    versions: Any, prepared: Path, capsys: pytest.CaptureFixture[str], body: str, code: int, failed: str
) -> None:
    (prepared / "tests" / "test_one.py").write_text(f"def test_one():\n    {body}\n")
    kept = prepared.parent / "kept"
    words = ["--python", sys.executable, "--only", "core-oldest", "--keep", str(kept)]
    assert versions.main(words) == code
    said = capsys.readouterr().out
    assert f"1 environments, {failed}" in said
    assert ("failed: tests.test_one::test_one" in said) == bool(code)
    assert "declared minima that were not run here: pytest>=7" in said  # a newer one is installed
    assert re.search(rf"not found: Python (?!.*{sys.version_info[0]}\.{sys.version_info[1]})", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("core-oldest", "--tier", "torch"), "failed: no test was run"), (("core-newest",), "it cannot be made")],
)
def test_an_environment_that_ran_nothing_or_cannot_be_made_fails_the_campaign(
    versions: Any, prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...], said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(versions, "find_uv", lambda folder: "/bin/false")
    kept = str(prepared.parent / "kept")
    assert versions.main(["--python", sys.executable, "--keep", kept, "--only", *words]) == 1
    assert said in capsys.readouterr().out


def test_a_torch_without_libuv_is_linked_but_for_what_asks_for_it(versions: Any, tmp_path: Path) -> None:
    site, env = tmp_path / "dist-packages", tmp_path / "env"
    text = "if True:\n    from stores import (\n        TCPStore,\n        Work as _Work,\n    )\n"
    for name in ("torch/__init__.py", "torch/distributed/__init__.py", "torch/distributed/rpc.py", "rich.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "torch-2.6.dist-info").mkdir()
    (made := env / "lib" / "python3.13" / "site-packages").mkdir(parents=True)
    python = versions.Interpreter("3.13.5", "/usr/bin/python3.13", "2.6.0+debian", str(site))
    versions.link_torch(python, env)
    links = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_symlink()}
    assert links == {"torch/__init__.py", "torch/distributed/rpc.py", "torch-2.6.dist-info"}
    assert (site / "torch/distributed/__init__.py").read_text() == text
    (tmp_path / "stores.py").write_text(
        "class Work: pass\nclass TCPStore:\n"
        "    def __init__(self, port, use_libuv=True):\n        self.found = port, use_libuv\n"
    )
    program = "import torch.distributed as d; print(d.TCPStore(80).found, d.TCPStore(port=1, use_libuv=True).found)"
    (made / "torch/__init__.py").unlink()
    (made / "torch/__init__.py").touch()
    argv = [sys.executable, "-S", "-c", program]
    environ = {"PYTHONPATH": f"{made}{os.pathsep}{tmp_path}"}
    assert subprocess.check_output(argv, env=environ, text=True) == "(80, False) (1, False)\n"


def test_a_test_that_needs_another_release_is_skipped_and_says_why() -> None:
    assert lacks("pytest>=8") == lacks("python>=3.11") == ""
    assert re.fullmatch(r"needs pytest>=999, and [\d.]+ is installed", lacks("pytest>=999"))
    assert "needs python<3.11, and 3." in lacks("python<3.11")
    assert lacks("no-such-package>=1") == "needs no-such-package>=1, which is not installed"


def _compares_releases(call: ast.Call) -> bool:
    """Whether a skip depends on a release in another way than pytest.mark.needs."""
    name = ast.unparse(call.func)
    words = ast.unparse(call)
    by_release = re.search(r"__version__|version_info|at_least\(|metadata\.version|minversion", words)
    return name.split(".")[-1] in ("skipif", "skip", "importorskip", "xfail") and bool(by_release)


def test_every_test_that_depends_on_a_release_says_so_in_one_way() -> None:
    sample = ast.parse("pytest.mark.skipif(torch.__version__ < '3', reason='')").body[0]
    assert isinstance(sample, ast.Expr) and isinstance(sample.value, ast.Call) and _compares_releases(sample.value)
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and path != Path(__file__) and _compares_releases(node)
    ]
    assert not found, "use @pytest.mark.needs('package>=release')"


OLD_PYTHON = """
import runpy, sys
sys.version_info, sys.argv = (3, 10, 13, "final", 0), ["trainkit", *sys.argv[1:]]
runpy.run_module("trainkit", run_name="__main__")
"""


@pytest.mark.parametrize("words", [("--version",), ("check", "quickstart"), ("plan", "quickstart")])
def test_a_python_that_is_too_old_is_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OLD_PYTHON, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (4, "")
    assert "error: trainkit needs Python 3.11 or newer, and this is 3.10.13: " in done.stderr
    assert "  next: " in done.stderr and "Traceback" not in done.stderr


def test_an_old_python_reads_what_tells_it_so() -> None:
    for name in ("__init__", "__main__"):
        ast.parse((ROOT / "trainkit" / f"{name}.py").read_text(), feature_version=(3, 7))
    assert ">=" + ".".join(map(str, OLDEST)) == project()["requires-python"]
    assert ".".join(map(str, OLDEST)) == OLDEST_FOR_THE_DOCTOR


def metadata(folder: Path, name: str, version: str, *requires: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_dependency_that_is_missing_is_named(trainkit: Trainkit, tmp_path: Path, command: str) -> None:
    def call(*folders: Path) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, (*folders, ROOT)))
        return subprocess.run(  # -S: without the environment's packages
            [sys.executable, "-S", "-m", "trainkit", command, "quickstart"],
            env={"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = call()
    assert done.returncode == 4 and done.stderr.startswith("error: the module typer is not installed"), done.stderr
    assert done.stderr.endswith(f": {sys.executable} -m pip install -e {ROOT}\n")
    metadata(tmp_path / "packages", NAME, "0.1.0", "typer>=0.24", "omegaconf<3,>=2.3", "torch>=2.6; extra == 'x'")
    done = call(tmp_path / "packages")
    assert done.returncode == 4
    install = f"next: {sys.executable} -m pip install"
    assert f"error: trainkit requires typer>=0.24; it is not installed\n  {install} 'typer>=0.24'" in done.stderr
    assert "trainkit requires omegaconf<3,>=2.3; it is not installed" in done.stderr
    assert "torch" not in done.stderr and "2 errors" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("trainkit-bug")] == []


def test_a_dependency_that_is_too_old_is_named(trainkit: Trainkit, tmp_path: Path) -> None:
    metadata(tmp_path / "packages", NAME, "0.1.0", "typer>=0.24", "rich>=13")
    metadata(tmp_path / "packages", "typer", "0.12.5")
    (tmp_path / "packages" / "typer.py").write_text("Typer = BadParameter = object\n")
    done = trainkit("plan", "quickstart", environ={"PYTHONPATH": f"{tmp_path / 'packages'}{os.pathsep}{ROOT}"})
    assert (done.returncode, done.stdout) == (4, "")
    install = f"{sys.executable} -m pip install 'typer>=0.24'"
    assert done.stderr == f"error: trainkit requires typer>=0.24; 0.12.5 is installed\n  next: {install}\n"
