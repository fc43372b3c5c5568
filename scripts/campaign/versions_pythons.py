"""What Pythons there are for scripts/campaign/versions, and the torch that environments get from them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# Debian builds torch without libuv, and torchrun's stores ask for it whatever USE_LIBUV says: where the store becomes
# known to all others, and what to add there.
STORE = ("distributed", "__init__.py")
BECOMES_KNOWN = "        Work as _Work,\n    )\n"
WITHOUT_LIBUV = """
    def _without_libuv(made):
        return lambda *words, **named: made(*words, **{**named, "use_libuv": False})

    TCPStore.__init__ = _without_libuv(TCPStore.__init__)
"""
TORCH = ("torch", "torchgen", "functorch")  # what a torch is on disk, beside its metadata
NAME = re.compile(r"[A-Za-z0-9._-]+")

# Run by each interpreter: what it is, and the torch that it has, if any.
ASK = """
import importlib.metadata as m, json, platform, sys
try: torch = m.distribution("torch")
except m.PackageNotFoundError: torch = None
print(json.dumps({
    "version": platform.python_version(), "executable": sys.executable,
    "torch": torch and torch.version, "site": torch and str(torch.locate_file("")),
    "requires": [] if torch is None else torch.requires or [],
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python, and the torch that environments of it get. site: the folder that torch lies in; None without one."""

    version: str
    executable: str
    torch: str | None = None
    site: str | None = None
    requires: Sequence[str] = ()

    @property
    def minor(self) -> str:
        """As in `3.11`."""
        return ".".join(self.version.split(".")[:2])


def interpreters(paths: Sequence[str]) -> list[Interpreter]:
    """Those at the paths, or those that are found; what is missing is said."""
    candidates = [*paths] or [*_found()]
    asked: dict[str, Interpreter] = {}
    for path in candidates:
        if found := _ask(path):
            asked.setdefault(found.minor, found)
    own = _ask(sys.executable)
    if own and own.torch and own.minor in asked and asked[own.minor].torch is None:
        base = asked[own.minor]
        asked[own.minor] = replace(own, version=base.version, executable=base.executable)
    missing = [each for each in PYTHONS if each not in asked]
    if missing:
        print(f"not found: Python {', '.join(missing)}; name them with --python PATH…", flush=True)
    return [asked[each] for each in sorted(asked, key=lambda minor: int(minor.split(".")[1]))]


def _ask(path: str) -> Interpreter | None:
    done = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
    return Interpreter(**json.loads(done.stdout)) if done.returncode == 0 else None


def _found() -> Iterator[str]:
    """Where each Python may be: the path, and pyenv."""
    for each in PYTHONS:
        if path := shutil.which(f"python{each}"):
            yield path
        yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{each}.*/bin/python")))


def needs_of_torch(python: Interpreter) -> Iterator[str]:
    """What torch itself requires, but for CUDA."""
    for each in python.requires:
        name = NAME.match(each)
        if name and "extra" not in each and not name[0].startswith(("nvidia", "triton", "cuda", "optree")):
            yield each


def link_torch(python: Interpreter, folder: Path) -> None:
    """Links to torch and its metadata in the environment's site folder."""
    assert python.site
    site = next((folder / "lib").glob("python3*/site-packages"))
    for source in Path(python.site).iterdir():
        if source.name == "torch" and "debian" in (python.torch or ""):
            link_but(source, site / source.name, STORE)
            module = site.joinpath(source.name, *STORE)
            text = module.read_text()
            assert text.count(BECOMES_KNOWN) == 1
            module.write_text(text.replace(BECOMES_KNOWN, BECOMES_KNOWN + WITHOUT_LIBUV))
        elif source.name in TORCH or re.match(r"torch-.*\.(?:dist|egg)-info$", source.name):
            (site / source.name).symlink_to(source)


def link_but(source: Path, target: Path, path: Sequence[str]) -> None:
    """Make a folder of links to all in another but the file at the path below it, which is copied."""
    if not path:
        shutil.copyfile(source, target)
        return
    target.mkdir()
    for each in source.iterdir():
        if each.name not in (path[0], "__pycache__"):
            (target / each.name).symlink_to(each)
    link_but(source / path[0], target / path[0], path[1:])
