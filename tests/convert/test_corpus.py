"""Files and lines of tests/corpus: what import writes, plan accepts on a machine that fits; else import says why."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.loaded_scripts import script
from trainkit.convert.command import starts_program
from trainkit.convert.shell import read_shell
from trainkit.convert.shell.evaluating import Script
from trainkit.errors import UsageError

pytestmark = pytest.mark.cli
ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
# What cannot be imported, and why, by the place in the corpus.
REFUSED = {
    "deepspeed/onebit.json": "optimizer.type OnebitAdam has no counterpart",
    "deepspeed/lamb.json": "optimizer.type Lamb has no counterpart",
}


SURVEY = script("survey")
CASES: dict[str, Any] = {case.place: case for case in SURVEY.cases(CORPUS)}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty home, and the caller's folder again at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    yield


@pytest.mark.parametrize("place", sorted(CASES.keys() - REFUSED.keys()))
def test_what_import_writes_is_planned(place: str, tmp_path: Path) -> None:
    found = SURVEY.on_any(CASES[place], ["8xh100", "1x4090"], tmp_path)
    assert found.outcome == "plans", f"{found.said}\n{found.recipe}"


@pytest.mark.parametrize("place", sorted(REFUSED))
def test_what_cannot_be_imported_says_why(place: str, tmp_path: Path) -> None:
    found = SURVEY.on_any(CASES[place], ["8xh100", "1x4090"], tmp_path)
    assert found.outcome == "import refuses"
    assert REFUSED[place] in found.said
    assert not found.recipe


STARTERS = ("torchrun", "accelerate", "deepspeed", "python")
TEXT_TOOLS = ("basename", "bash", "cat", "dirname", "head", "mkdir", "tr", "wc")
REFERENCE = re.compile(r"\$\{oc\.env:(\w+)(?:,([^}]*))?\}")


def stubs(folder: Path) -> Path:
    """A folder of commands in which launchers note their words, nothing else does anything, and text tools are real."""
    bin_, log = folder / "bin", folder / "log"
    bin_.mkdir()
    note = f"#!/bin/bash\n{{ printf '%s\\0' \"${{0##*/}}\" \"$@\"; printf '\\1\\0'; }} >> {log}\n"
    does = {
        **dict.fromkeys(STARTERS, note),
        "python": note.replace("\n", '\n[[ "$1" == -c ]] && { echo gpu; exit; }\n', 1),  # asked for the number of cards
        "srun": '#!/bin/bash\nwhile [[ "$1" != bash ]]; do shift; done\nexec "$@"\n',
        "scontrol": "#!/bin/bash\n",
        "conda": "#!/bin/bash\n",
        "tee": "#!/bin/bash\ncat >/dev/null\n",
    }
    for name, text in does.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    for name in TEXT_TOOLS:
        (bin_ / name).symlink_to(shutil.which(name) or name)
    return bin_


@pytest.mark.parametrize("script", sorted({Path(place).name for place in CASES if place.startswith("scripts/")}))
def test_the_words_read_of_a_script_are_those_that_bash_gives_the_launcher(script: str, tmp_path: Path) -> None:
    shutil.copytree(CORPUS / "scripts", tmp_path / "work" / "scripts")
    environ = {"PATH": str(stubs(tmp_path)), "HOME": str(tmp_path), "CARDS": "8"}
    words = ["bash", f"scripts/{script}"]
    subprocess.run(words, cwd=tmp_path / "work", env=environ, capture_output=True, timeout=20, check=False)
    ran = [each.split("\0")[:-1] for each in (tmp_path / "log").read_text().split("\1\0")[:-1]]

    text = (CORPUS / "scripts" / script).read_text()
    for line in range(1, text.count("\n") + 2) if f"scripts/{script}" in REFUSED else [None]:
        with contextlib.suppress(UsageError):
            found = read_shell(Script(text, starts_program, f"scripts/{script}"), line)
            read = [REFERENCE.sub(lambda match: match[2] or "", word) for word in found.words]
            start = next(place for place, word in enumerate(read) if word in STARTERS)
            mine = [word for word in read[start:] if word]
            assert mine in [[word.replace(str(tmp_path / "work"), ".") for word in each if word] for each in ran]
            return
    assert len(ran) > 1  # of several commands, none of which is the only one on its line


def test_the_survey_finds_every_kind_of_case() -> None:
    kinds = {case.kind for case in CASES.values()}
    assert kinds == {"deepspeed file", "accelerate file", "shell script", "line"}
