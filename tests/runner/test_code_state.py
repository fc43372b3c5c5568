"""The state of the code that a run directory has: what git says of it, and that git is asked without danger."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Trainkit
from trainkit.runner.rundir import code_state
from trainkit.runner.rundir.code_state import CodeState, Looked, read_code, write_code
from trainkit.runner.rundir.layout import RunLayout

RECIPE = "program: {kind: torch, script: src/train.py}\n"
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """A repository with a script, the working folder, and git in it with nobody's configuration."""
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(work)

    def call(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", *author, *words], cwd=work, check=True, capture_output=True, text=True).stdout

    call("init", "-q")
    (work / "src/train.py").write_text("import torch\nlr = 1\n")
    call("add", ".")
    call("commit", "-qm", "one")
    return call


def looked(recipe: str = RECIPE) -> tuple[CodeState, RunLayout]:
    layout = RunLayout(Path.cwd().parent / "run")
    layout.root.mkdir(exist_ok=True)
    write_code(layout, recipe)
    found = read_code(layout)
    assert found is not None
    return found, layout


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Another program in the place of git."""
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_what_is_not_committed_is_in_the_run_directory_and_applies_again(git: Git) -> None:
    before = Path("src/train.py").read_text()
    Path("src/train.py").write_text(changed := "import torch\nlr = 2\nkey = self.keys(x)\nname = 'ü'\n")
    Path("new file.py").touch()
    Path("data.bin").touch()
    found, layout = looked()
    assert found.commit == git("rev-parse", "HEAD").strip()
    assert (found.branch, found.changed, found.untracked, found.git) == ("main", 1, ("new file.py",), "")
    assert found.sha256 == hashlib.sha256(changed.encode()).hexdigest()
    assert (found.script, found.repository) == (str(Path("src/train.py").absolute()), str(Path.cwd()))
    assert stat.S_IMODE(layout.diff.stat().st_mode) == 0o600
    git("checkout", "-q", ".")
    assert Path("src/train.py").read_text() == before
    git("apply", str(layout.diff))
    assert Path("src/train.py").read_text() == changed


def test_a_clean_repository_leaves_no_diff(git: Git) -> None:
    git("checkout", "-q", "--detach")
    found, layout = looked()
    assert str(found).endswith("no changes")
    assert found.branch == ""
    assert not layout.diff.exists()


def test_a_module_is_found_from_the_working_folder(git: Git) -> None:
    found, _ = looked("program: {kind: torch, module: src.train}\n")
    assert found.script == str(Path("src/train.py").absolute())
    found, _ = looked("program: {kind: torch, module: json.tool}\n")
    assert (found.script, found.sha256, found.branch) == ("", "", "main")


def test_a_diff_that_is_too_large_is_cut_at_a_line_and_that_is_said(git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_state, "LARGEST", 1000)
    Path("src/train.py").write_text("x = 1\n" * 10_000)
    found, layout = looked()
    assert found.diff_is_cut
    assert "at least 1 changed file" in str(found)
    assert 900 < layout.diff.stat().st_size <= 1000
    assert layout.diff.read_text().endswith("\n")


def test_secrets_in_a_diff_are_masked_and_counted(git: Git) -> None:
    Path("src/train.py").write_text('import torch\nlr = 1\napi_key = "not-to-be-seen"\n# token: not-to-be-seen\n')
    Path("run.sh").touch()
    git("add", ".")
    Path("run.sh").write_text("export HF_TOKEN=not-to-be-seen\n")
    found, layout = looked()
    assert found.masked_lines == 3
    assert "not-to-be-seen" not in layout.diff.read_text()
    assert "+api_key = ***" in layout.diff.read_text()


def test_the_body_of_a_private_key_is_masked_in_a_diff(git: Git) -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEnot-to-be-seen\nnot-to-be-seen==\n-----END RSA PRIVATE KEY-----\n"
    Path("src/train.py").write_text(f'import torch\nlr = 1\nKEY = """{key}"""\nlr = 2\n')
    Path("key.pem").write_text(key)
    git("add", ".")
    git("commit", "-qm", "two")
    Path("src/train.py").write_text("import torch\nlr = 1\n")
    Path("key.pem").write_text(key.replace("MIIE", "MIIF"))
    found, layout = looked()
    assert found.masked_lines == 7
    assert "not-to-be-seen" not in layout.diff.read_text()
    assert "-lr = 2" in layout.diff.read_text()
    assert "+***" in layout.diff.read_text()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'fatal: not a git repository (or any of the parent directories): .git' >&2; exit 128", "not in a git"),
        ("echo \"fatal: detected dubious ownership in repository at '/w'\" >&2; exit 128", "safe.directory"),
        ("echo 'fatal: something new' >&2; echo more >&2; exit 128", "git: something new"),
        ("kill -SEGV $$", "git: "),
        ("case \"$*\" in *toplevel*) echo /w;; *' diff --no'*) exit 129;; *) echo abc;; esac", "git diff"),
    ],
)  # fmt: skip
def test_git_that_misbehaves_is_named_and_the_digest_stays(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    stand_in(tmp_path / "bin", monkeypatch, script)
    found, layout = looked()
    assert said in found.git
    assert said in str(found)
    assert found.sha256
    assert not layout.diff.exists()


def test_without_git_the_digest_is_alone(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    found, _ = looked()
    assert found.git == "git cannot be started: no such file or directory"
    assert found.sha256


def test_git_that_is_not_done_in_time_is_left(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_state, "MOST_SECONDS", 0.5)
    stand_in(tmp_path / "bin", monkeypatch, f"echo $$ > {tmp_path}/pid\nexec sleep 600")
    found, _ = looked()
    assert found.git == "git took longer than 0.5 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_repository_without_a_commit_says_so(tmp_path: Path, git: Git) -> None:
    git("update-ref", "-d", "HEAD")
    found, _ = looked()
    assert (found.commit, found.branch, found.git) == ("", "main", "")
    assert "no commit yet (main)" in str(found)


def test_what_is_staged_before_the_first_commit_is_in_the_diff(git: Git) -> None:
    git("update-ref", "-d", "HEAD")
    Path("b.py").write_text("b = 1\n")
    git("add", "b.py")
    Path("b.py").write_text("b = 2\n")
    found, layout = looked()
    assert (found.changed, found.untracked) == (2, ())
    assert "no commit yet (main), 2 changed files (code.diff)" in str(found)
    assert "+b = 2\n" in layout.diff.read_text()


def test_a_submodule_is_said_to_be_not_looked_into(git: Git, tmp_path: Path) -> None:
    git("clone", "-q", ".", str(tmp_path / "other"))
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "other"), "inner")
    git("commit", "-qm", "two")
    Path("inner/src/train.py").write_text("changed\n")
    found, _ = looked()
    assert (found.changed, found.submodules) == (0, 1)
    assert str(found).endswith("no changes outside submodules, 1 submodule not inspected")
    git("submodule", "--quiet", "deinit", "--force", "inner")
    assert str(looked()[0]).endswith("no changes"), "there is nothing in it"


@pytest.mark.parametrize(("number", "said"), [(100, " 100 untracked .py files"), (101, "at least 100 untracked .py")])
def test_untracked_files_are_at_least_those_that_are_named(git: Git, number: int, said: str) -> None:
    for each in range(number):
        Path(f"{each}.py").touch()
    found, _ = looked()
    assert (len(found.untracked), found.untracked_is_cut) == (100, number > 100)
    assert said in str(found)
    assert ("at least" in str(found)) == found.untracked_is_cut


def test_nothing_that_a_repository_names_is_run(git: Git, tmp_path: Path) -> None:
    """Filters, textconv, an external diff, hooks, fsmonitor: each would leave a file."""
    names = ("clean", "process", "textconv", "external", "driver", "hook", "fsmonitor")
    commands = {name: tmp_path / f"{name}.sh" for name in names}
    for name, path in commands.items():
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/{name}.ran\ncat\n")
        path.chmod(0o755)
    hooks = Path(".git/own-hooks")
    hooks.mkdir()
    (hooks / "post-index-change").symlink_to(commands["hook"])
    Path("a.txt").write_text("a\n")
    git("add", ".")
    git("commit", "-qm", "two")
    Path(".git/info/attributes").write_text("*.txt filter=own diff=own\n*.py diff=other filter=odd\n")
    for key, value in {
        "filter.own.clean": commands["clean"], "filter.odd.process": commands["process"], "filter.odd.required": "true",
        "diff.own.textconv": commands["textconv"], "diff.other.command": commands["driver"],
        "core.fsmonitor": commands["fsmonitor"], "core.hooksPath": hooks.absolute(),
    }.items():  # fmt: skip
        git("config", key, str(value))
    Path("a.txt").write_text("b\n")
    Path("src/train.py").write_text("lr = 3\n")
    os.utime(Path(".git/info/attributes"), (1, 1))
    found, layout = looked()
    assert (found.changed, found.git) == (2, "")
    assert "+b" in layout.diff.read_text()
    assert not list(tmp_path.glob("*.ran"))
    subprocess.run(["git", "diff", "HEAD"], check=False, capture_output=True)  # git by itself runs them
    assert {path.stem for path in tmp_path.glob("*.ran")} >= {"clean", "process", "fsmonitor"}


def test_a_filter_that_cannot_be_left_out_keeps_git_from_being_asked(git: Git) -> None:
    git("config", "filter.a=b.clean", "false")
    found, layout = looked()
    assert "filter.a=b.clean" in found.git
    assert found.commit
    assert not layout.diff.exists()


def test_many_runs_of_one_folder_ask_git_once(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("src/other.py").write_text("")
    stand_in(tmp_path / "bin", monkeypatch, f"echo asked >> {tmp_path}/log\necho fatal: not a git repository\nexit 128")
    shared: Looked = {}
    for name in ("train", "other"):
        layout = RunLayout(tmp_path / name)
        layout.root.mkdir()
        write_code(layout, f"program: {{script: src/{name}.py}}\n", shared)
        found = read_code(layout)
        assert found is not None
        assert Path(found.script).stem == name
    assert (tmp_path / "log").read_text() == "asked\n"


def test_a_run_has_the_state_of_its_code_and_shows_it_in_a_line(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("print(1)\n")
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=tmp_path, check=True)
    done = trainkit("run", "program.script=show.py", "program.kind=torch", "devices.type=cpu")
    assert done.returncode == 0, done.stderr
    digest = hashlib.sha256(b"print(1)\n").hexdigest()
    shown = trainkit("runs", "show").stdout
    line = f"show.py sha256 {digest[:12]}, no commit yet (main), 1 untracked .py file\n"
    assert next(each for each in shown.splitlines(keepends=True) if each.startswith("code: ")).endswith(line)
    code = json.loads(trainkit("runs", "show", "--json").stdout)["code"]
    assert (code["sha256"], code["untracked"]) == (digest, ["show.py"])
