"""What is installed: a name of trainkit's own, releases that were tested, and hints for the interpreter in use."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from trainkit.distribution import NAME, RELEASES, install, is_install

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[Requirement]] = {
    name: [*map(Requirement, lines)] for name, lines in PROJECT["optional-dependencies"].items()
}
FOR_USERS = [each for name, several in EXTRAS.items() if name not in ("test", "docs") for each in several]
LIMITED = [*map(Requirement, PROJECT["dependencies"]), *FOR_USERS]
# Their minor releases take away what trainkit uses.
BREAKING = {"torch", "transformers", "tokenizers", "accelerate", "deepspeed", "peft", "bitsandbytes", "safetensors"}


def bound(requirement: Requirement, operator: str) -> str:
    (found,) = (each.version for each in requirement.specifier if each.operator == operator)
    return found


def pinned(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / "scripts" / file).read_text().splitlines()
    rows = (line.split("==") for line in lines if not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in rows}


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == NAME
    assert re.sub(r"[-_.]+", "", NAME).lower() != "trainkit"  # somebody else's on the public index
    assert PROJECT["scripts"] == {"trainkit": "trainkit.__main__:main"}


def test_nothing_says_to_install_a_trainkit_from_an_index() -> None:
    files = [ROOT / "README.md", *(ROOT / ".github").glob("*.md")]
    for folder in ("trainkit", "docs", "scripts", "configs", "recipes"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wrong = re.compile(rf"trainkit\[|pip3? install (?:-\S+ )*['\"]?(?:trainkit|{NAME})\b")
    found = [str(path.relative_to(ROOT)) for path in files if wrong.search(path.read_text(errors="replace"))]
    assert len(files) > 300 and found == []


def test_what_the_package_says_to_install_is_for_an_interpreter() -> None:
    # A pip of whichever Python comes first on PATH; what an image is built with is the exception.
    bare = re.compile(r"(?<!-m )(?<!\{pip\} )(?<!\{host\.pip\} )\bpip install\b")
    comments = re.compile(r"`pip install`|as `pip")
    lines = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "trainkit").rglob("*.py")
        for line in path.read_text().splitlines()
        if bare.search(line) and not comments.search(line)
    ]
    assert lines == []


def test_hints_name_the_releases_that_the_extras_allow() -> None:
    by_name: dict[str, set[tuple[str, str]]] = {}
    for each in FOR_USERS:
        by_name.setdefault(each.name, set()).add((bound(each, ">="), bound(each, "<")))
    assert {name: min(several, key=lambda each: Version(each[0])) for name, several in by_name.items()} == RELEASES
    for several in by_name.values():
        assert len({untested for _, untested in several}) == 1


@pytest.mark.parametrize("requirement", LIMITED, ids=lambda each: each.name)
def test_an_upper_bound_is_the_release_after_the_one_that_is_tested(requirement: Requirement) -> None:
    tested, above = pinned()[requirement.name], bound(requirement, "<")
    assert requirement.specifier.contains(tested)
    parts = above.split(".")
    known = tested.split(".")[: len(parts)]
    assert parts == [*known[:-1], str(int(known[-1]) + 1)]
    assert len(parts) > 1 or requirement.name not in BREAKING


def test_the_last_transformers_4_is_within_the_bounds() -> None:
    older, bounds = pinned("transformers-4.txt"), {each.name: each.specifier for each in EXTRAS["hf"]}
    assert "transformers" in older and all(bounds[name].contains(version) for name, version in older.items())


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (("peft",), "'peft>=0.15,<0.22'"),
        (("transformers>=5",), "'transformers>=5,<5.24'"),
        (("torch>=2.12", "numpy"), "'torch>=2.12,<2.14' 'numpy>=1.26,<3'"),
        (("deepspeed>=0.16",), "'deepspeed>=0.19.4,<0.19.9' 'ninja>=1.11.1,<2'"),
        (("transformers<5.3", "torch==2.9.*", "shfmt-py"), "'transformers<5.3' 'torch==2.9.*' shfmt-py"),
    ],
)
def test_a_command_has_the_interpreter_and_the_releases(packages: tuple[str, ...], words: str) -> None:
    assert install("/opt/venv/bin/python", *packages) == f"/opt/venv/bin/python -m pip install {words}"
    assert install("/my env/bin/python", *packages) == f"'/my env/bin/python' -m pip install {words}"
    assert is_install(install("/my env/bin/python", *packages))
    assert not is_install(f"install both of one release: {install('python', *packages)}")


def test_training_installs_where_deepspeed_does_not() -> None:
    assert {each.name for each in EXTRAS["deepspeed"]} == {"deepspeed", "ninja"}
    others = chain.from_iterable(several for name, several in EXTRAS.items() if name != "deepspeed")
    assert not {"deepspeed", "ninja"} & {each.name for each in others}
    assert {"tokenizers", "jinja2", "zstandard"} <= {each.name for each in EXTRAS["hf"]}


@pytest.mark.parametrize("name", ["test", "check"])
def test_the_tests_have_every_package_that_they_are_about(name: str) -> None:
    (line,) = re.findall(r"^scripts/environment (train .*)$", (ROOT / "scripts" / name).read_text(), re.MULTILINE)
    assert set(line.split()) == EXTRAS.keys() - {"qlora"}  # of which `optimizers` and `hf` have everything
