"""What a script starts is what Bash starts of it, or the script is refused; never anything else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.convert.bash_judge import Start, judged
from tests.convert.idioms import IDIOMS
from trainkit.convert.command import starts_program
from trainkit.convert.shell.evaluating import Script, Started, evaluate
from trainkit.convert.shell.marks import WHOLE
from trainkit.convert.shell.rewriting import UnreadError

pytestmark = pytest.mark.cli
ROOT = Path(__file__).parents[2]
# What is refused, and why.
REFUSED = {
    "if py else": "depends on how `python -c",
    "cd missing": "there is no folder",
    "cd missing go on": "there is no folder",
    "xargs": "for each thing that it finds",
    "find exec": "for each thing that it finds",
}
FILES = {
    "x.py": "", "sub/x.py": "", "a.json": "{}", "b.json": "{}", "env.sh": "export FROM_ENV=7\nLOCALV=5\n",
    "hosts": "h1\nh2\n# c\nh3\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with some files, as on the machine where a script is started."""
    made = tmp_path / "here"
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


def said(started: Started, environ: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """A command as a pattern: folder, variables and words, with what the environment has in place of what is open."""

    def settled(text: str) -> str:
        while (made := WHOLE.sub(lambda found: environ.get(found[1]) or value(found), text)) != text:
            text = made
        return re.escape(text.replace(str(folder), "@here")).replace("\\\f", ".+")

    def value(found: re.Match[str]) -> str:
        return "\f" if found[1].startswith("#") else found[2] or ""

    given = {**environ, "PATH": "$PATH"}
    made = {name: WHOLE.sub(lambda found: given.get(found[1]) or value(found), text) for name, text in started.exported}
    added = [f"{name}={settled(text)}" for name, text in sorted(made.items()) if environ.get(name) != text]
    first, *words = map(settled, started.words)
    return started.folder, *added, first.rpartition("/")[2], *words


def told(start: Start) -> tuple[str, ...]:
    """What Bash has started, alike."""
    return start.folder, *(f"{name}={value}" for name, value in start.added), *start.words


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_starts_what_bash_starts(name: str, folder: Path) -> None:
    text, given, own = IDIOMS[name]
    environ = {"HOME": "/home/u", **own}
    real = [each for each in map(told, judged(text, folder, given, environ)) if starts_program(each[1:])]
    before = sorted(folder.rglob("*"))
    script = Script(text, "go.sh", given, {}, str(folder), environ, starts_program, lambda path: Path(path).is_dir())
    try:
        found = evaluate(script)
    except UnreadError as error:
        assert REFUSED[name] in error.what
        return
    finally:
        assert sorted(folder.rglob("*")) == before
    assert name not in REFUSED
    ours = [said(each, environ, folder) for each in found.started]
    assert len(ours) == len(real), (ours, real)
    for mine, theirs in zip(ours, real, strict=True):
        assert len(mine) == len(theirs) and all(map(re.fullmatch, mine, theirs)), (mine, theirs)


@pytest.mark.parametrize("which", [[], pytest.param(["endless"], marks=pytest.mark.campaign)])
def test_no_hostile_script_does_anything(which: list[str], tmp_path: Path) -> None:
    spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--net"]
    spaces += ["--map-root-user"] if os.getuid() else []
    argv = [*spaces, sys.executable, "-m", "tests.convert.hostile", str(tmp_path), *which]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.stderr.startswith("unshare: "):
        pytest.skip(f"this machine grants no namespaces: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == {}
    assert found["tried"] > (10 if which else 150)
