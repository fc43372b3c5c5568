"""The file system for the commands: files by path, the recipes and presets that are shipped, and files to write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from trainkit.errors import MachineError, UsageError, refusal
from trainkit.files import open_regular, publish

_HANDED = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
MODELINE = "# yaml-language-server: $schema="  # the comment that leads editors to a schema
MACHINES = "machines"  # profiles to plan for (`--on`), which no recipe extends


class FileSystem:
    """Satisfies :class:`trainkit.recipe.paths.FileChecks`."""

    def read(self, path: str) -> bytes:
        """The file's bytes, cut one byte above what a recipe may have. Raises OSError."""
        from trainkit.recipe.yaml_reader import MAX_BYTES  # with yaml, which no command needs that reads nothing

        try:
            # A FIFO would wait for its other end; what the caller's shell has opened (`<(command)`) has one.
            handed = path.startswith(_HANDED) and stat.S_ISFIFO(Path(path).stat().st_mode)
            with Path(path).open("rb") if handed else os.fdopen(open_regular(path, links=True), "rb") as stream:
                return stream.read(MAX_BYTES + 1)  # a device or a huge file must not be read to its end
        except ValueError as error:  # a NUL byte in the name
            raise FileNotFoundError(path) from error

    def exists(self, path: str) -> bool:
        """Whether there is something at the path, as far as the system lets us look."""
        # False, and no error, for a closed folder, a name that is too long, a NUL byte in it.
        return os.path.exists(path)  # noqa: PTH110

    def holds(self, folder: str, pattern: str) -> bool:
        """Whether a file in the folder matches, as the trainer looks for them; True of what is no folder."""
        root = Path(folder)
        try:
            return not root.is_dir() or any(each.is_file() for each in root.glob(pattern))
        except (OSError, ValueError, NotImplementedError):  # what may not be read; no pattern; an absolute one
            return False

    @cache  # noqa: B019 - there is one for each command
    def shipped(self) -> Mapping[str, str]:
        """Presets as ``strategy/fsdp``, recipes as ``recipes/quickstart``."""
        found, root = {}, shipped_root()
        for folder, prefix in ((root / "configs", ""), (root / "recipes", "recipes/")):
            for path in folder.rglob("*"):
                if path.suffix in (".yaml", ".yml") and path.parent.name != MACHINES and path.is_file():
                    found[prefix + path.relative_to(folder).with_suffix("").as_posix()] = str(path)
        return dict(sorted(found.items()))


class ReadOnce(FileSystem):
    """For a command that resolves a recipe again while it goes on: each file is what it was when it was first read."""

    def __init__(self) -> None:
        self._read: dict[str, bytes] = {}

    def read(self, path: str) -> bytes:
        """The file's bytes, as `FileSystem` reads them."""
        if path not in self._read:
            self._read[path] = super().read(path)
        return self._read[path]


def shipped_root() -> Path:
    """The folder that holds configs/ and recipes/: inside the installed package, or the top of a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parent


def modeline() -> str:
    """The first line of a recipe that an editor checks: where the installed JSON Schema is."""
    return MODELINE + (shipped_root() / "configs" / "recipe.schema.json").as_uri()


def working_folder() -> str:
    """The folder that relative paths start from. Raises MachineError where it has been removed meanwhile."""
    try:
        return os.getcwd()  # noqa: PTH109 - as text, as the pure core takes it
    except FileNotFoundError as error:
        raise MachineError("the working folder no longer exists", hint="cd to a folder that exists") from error


def write_file(target: Path, text: str, hint: str) -> None:
    """Write a file whole or not at all, with the folders above it. Raises as `writing` does."""
    with writing(target, hint):
        target.parent.mkdir(parents=True, exist_ok=True)
        publish(target, text, flush=True)


@contextmanager
def writing(target: Path, hint: str) -> Iterator[None]:
    """In this context an OSError is a MachineError where the system cannot, a UsageError where the path is to blame."""
    try:
        yield
    except OSError as error:
        what = f"{target} cannot be written: {error.strerror}"
        if refused := refusal(error):
            raise MachineError(what, hint=refused[1]) from error
        raise UsageError(what, hint=hint) from error
