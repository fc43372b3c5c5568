"""The state of the code at the start of a run: the script's digest and, in a repository, the commit and the changes.

git runs for a bounded time, and never executes what a repository's configuration names: no hook, no fsmonitor, no
filter, no external diff, no textconv (git-config(1), gitattributes(5)). If git fails, the reason is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import trainkit
from trainkit.decode import Between
from trainkit.files import publish, read_record, read_whole, write_json
from trainkit.machine.host import probe_packages
from trainkit.recipe.merge import value_at
from trainkit.recipe.secrets import mask_line, mask_private_keys
from trainkit.recipe.yaml_reader import compose_bytes
from trainkit.runner.rundir.layout import RunLayout
from trainkit.text import pluralize

MOST_SECONDS = 5.0  # for all calls of git
LARGEST = 1 << 20  # bytes of the diff
MOST_NAMES = 100  # of untracked files
LARGEST_INDEX = 1 << 24  # bytes of git's list of it, for some hundred thousand files
GITLINK = "160000 "  # the mode of a submodule in the index
SETTINGS = {
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.untrackedCache": "false",
    "core.quotePath": "false",
    "diff.autoRefreshIndex": "false",  # it writes to the repository
    "diff.relative": "false",
    "diff.submodule": "short",  # the other values run git there, with the submodule's configuration
    "protocol.allow": "never",  # else a partial clone fetches missing objects
}
DIFF = (
    *("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
# Parts of a line of Python that may be a secret: a string, a comment, a long word with a digit in it.
_TEXT = re.compile(r"""["'#]|(?<![\w-])(?=[\w-]*\d)[\w-]{20}""")


class CodeState(NamedTuple):
    """The content of code.json. untracked: Python files, at most MOST_NAMES. changed: files in the diff.

    submodules: those with files here; not inspected, because git would use their configuration. git: why it failed.
    packages, python: versions in trainkit's own interpreter, of the packages that decide what is computed.
    """

    trainkit: str
    script: str = ""
    sha256: str = ""
    repository: str = ""
    commit: str = ""
    branch: str = ""
    changed: Annotated[int, Between(0, 1 << 30)] = 0
    untracked: tuple[str, ...] = ()
    untracked_is_cut: bool = False
    submodules: Annotated[int, Between(0, 1 << 30)] = 0
    diff_is_cut: bool = False
    masked_lines: Annotated[int, Between(0, 1 << 30)] = 0
    git: str = ""
    packages: Mapping[str, str] = {}
    python: str = ""

    def __str__(self) -> str:
        found = [f"trainkit {self.trainkit}"]
        if self.sha256:
            found.append(f"{Path(self.script).name} sha256 {self.sha256[:12]}")
        if self.repository:
            commit = f"commit {self.commit[:12]}" if self.commit else "no commit yet"
            found.append(f"{commit} ({self.branch})" if self.branch else commit)
        if self.changed:
            least = "at least " if self.diff_is_cut else ""
            found.append(f"{least}{pluralize(self.changed, 'changed file')} (code.diff)")
        if self.untracked:
            least = "at least " if self.untracked_is_cut else ""
            found.append(f"{least}{pluralize(len(self.untracked), 'untracked .py file')}")
        if self.repository and not (self.changed or self.untracked or self.git):
            found.append("no changes outside submodules" if self.submodules else "no changes")
        if self.submodules:
            found.append(f"{pluralize(self.submodules, 'submodule')} not inspected")
        return ", ".join([*found, self.git] if self.git else found)


def read_code(layout: RunLayout) -> CodeState | None:
    """None for a run of an older release, or if the file is damaged."""
    return read_record(layout.code, CodeState)


Looked = dict[Path, tuple["CodeState", bytes]]  # by folder: git runs once for many runs


def write_code(layout: RunLayout, recipe_yaml: str, looked: Looked | None = None) -> None:
    """Write the state of the code of a recipe's program, as it is now.

    Only this user may read the diff: its lines may hold secrets in spite of the masks. Raises OSError.
    """
    program, cwd = value_at(compose_bytes(recipe_yaml.encode()).tree, "program"), Path.cwd()
    files = list[Path]()
    if isinstance(program, Mapping):
        base = cwd / str(program.get("folder") or "")
        if isinstance(name := program.get("script"), str):
            files = [base / name]
        elif isinstance(module := program.get("module"), str):
            path = base.joinpath(*module.split("."))
            files = [path.with_name(f"{path.name}.py"), path / "__main__.py"]
    script = next((path for path in files if path.is_file()), None)
    looked, folder = {} if looked is None else looked, script.parent if script else cwd
    if folder not in looked:
        looked[folder] = _ask(folder)
    state, diff = looked[folder]
    if script is not None:
        state = state._replace(script=str(script))
        with contextlib.suppress(OSError):  # the start of the program will report it
            state = state._replace(sha256=hashlib.sha256(read_whole(script, links=True)).hexdigest())
    if diff:
        publish(layout.diff, diff, mode=0o600)
    write_json(layout.code, state._asdict())


class _GitError(Exception):
    """git has failed. The text is the reason."""


class _Git:
    """git in a folder, with nothing executed that a repository's configuration names."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._until, self._settings = folder, time.monotonic() + MOST_SECONDS, dict(SETTINGS)

    def call(self, *words: str, most: int = 1 << 16, errors: int = subprocess.DEVNULL) -> tuple[int, bytes]:
        """Exit code and output; of more than `most` bytes the first, and one more. Raises _GitError."""
        settings = (word for name, value in self._settings.items() for word in ("-c", f"{name}={value}"))
        argv = ("git", "--no-optional-locks", *settings, "-C", str(self._folder), *words)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environ |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environ
            )
        except OSError as error:
            raise _GitError(f"git cannot be started: {(error.strerror or str(error)).lower()}") from error
        output, stdout = b"", process.stdout
        assert stdout is not None
        try:
            with stdout, selectors.DefaultSelector() as ready:
                ready.register(stdout, selectors.EVENT_READ)
                while len(output) <= most:
                    if not ready.select(max(self._until - time.monotonic(), 0)):
                        raise _GitError(f"git took longer than {MOST_SECONDS:g} s")
                    if not (chunk := os.read(stdout.fileno(), 1 << 16)):
                        with contextlib.suppress(subprocess.TimeoutExpired):  # it closes its output when it ends
                            process.wait(1)
                        break
                    output += chunk
        finally:
            process.kill()  # no effect if it has ended
            with contextlib.suppress(subprocess.TimeoutExpired):  # a disk may not respond
                process.wait(1)
        return process.returncode, output[: most + 1]

    def output(self, *words: str, most: int = 1 << 16) -> bytes:
        """The output of a call that must not fail. Raises _GitError."""
        code, output = self.call(*words, most=most)
        if code and len(output) <= most:
            raise _GitError(f"git {' '.join(words[:3])} ended with exit code {code}")
        return output

    def line(self, *words: str) -> str:
        """The first line of the output; empty if the call fails."""
        code, output = self.call(*words)
        return os.fsdecode(output).partition("\n")[0] if code == 0 else ""

    def disable_filters(self) -> None:
        """Without this, `diff` runs the configuration's filters for a file that looks changed."""
        _, output = self.call("config", "-z", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process|required)$")
        for name in filter(None, os.fsdecode(output).split("\0")):
            if "=" in name:
                raise _GitError(f"changes were not read from git: its configuration has {name!r}")
            self._settings[name] = "false" if name.endswith(".required") else ""


def _ask(folder: Path) -> tuple[CodeState, bytes]:
    """The state of a folder by git, and the diff of uncommitted changes. Raises nothing."""
    packages, python = probe_packages()["packages"], platform.python_version()
    state, diff, git = CodeState(trainkit.__version__, packages=packages, python=python), b"", _Git(folder)
    try:
        code, output = git.call("rev-parse", "--show-toplevel", errors=subprocess.STDOUT)
        text = os.fsdecode(output).strip()
        if code or not text:
            if "not a git repository" in text:
                raise _GitError("not in a git repository")
            if "dubious ownership" in text:
                raise _GitError("git refuses a repository of another user (safe.directory)")
            raise _GitError(f"git: {text.partition(chr(10))[0].removeprefix('fatal: ')[:200]}")
        top = text.rpartition("\n")[2]  # behind warnings
        commit = git.line("rev-parse", "--verify", "-q", "HEAD")
        state = state._replace(repository=top, commit=commit, branch=git.line("symbolic-ref", "-q", "--short", "HEAD"))
        git.disable_filters()
        index = os.fsdecode(git.output("-C", top, "ls-files", "-z", "--stage", most=LARGEST_INDEX)).split("\0")[:-1]
        links = {each.partition("\t")[2] for each in index if each.startswith(GITLINK)}
        state = state._replace(submodules=sum(os.path.lexists(os.path.join(top, link, ".git")) for link in links))
        since = "HEAD" if commit else git.line("hash-object", "-t", "tree", os.devnull)  # the empty tree
        output = git.output(*DIFF, since, "--", most=LARGEST)
        cut = len(output) > LARGEST
        output = output[: output.rfind(b"\n") + 1] if cut else output
        diff, masked = _masked(output)
        changed = output.count(b"\ndiff --git ") + output.startswith(b"diff --git ")
        state = state._replace(changed=changed, diff_is_cut=cut, masked_lines=masked)
        output = git.output("-C", top, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
        names = os.fsdecode(output).split("\0")[:-1]
        state = state._replace(untracked=tuple(names[:MOST_NAMES]), untracked_is_cut=len(names) > MOST_NAMES)
    except _GitError as why:
        state = state._replace(git=str(why))
    return state, diff


def _masked(diff: bytes) -> tuple[bytes, int]:
    """The diff without the values of secrets, and how many lines had one. A masked line does not apply as a patch.

    In Python the value is an expression (`key = self.keys(x)`), which is a secret only if it has a string.
    """
    lines, masked, python = [], 0, False
    text = os.fsdecode(diff)
    for line, keyless in zip(text.split("\n"), mask_private_keys(text).split("\n"), strict=True):
        if line.startswith("diff --git "):
            python = line.endswith((".py", ".pyi"))
        shown = keyless if python and not _TEXT.search(line) else mask_line(keyless)
        masked += shown != line
        lines.append(shown)
    return os.fsencode("\n".join(lines)), masked
