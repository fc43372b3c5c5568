"""What a proof is made of: cases, where they run, the processes that they start, what is found, and its report."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import nvml

from trainkit import __version__

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Variables of a launch around the kit; trainkit's own are settings of recipes.
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE = 20.0  # seconds that a child has to end after TERM
LONGEST = 4000  # characters of a log that are kept
RUN_GRACE = 10  # seconds that trainkit gives the ranks of a run

Curve = Mapping[str, list[float | None]]  # loss, norm and eval, in the order of the steps
Check = Callable[["Case", "Place", float], "Outcome"]  # the float: seconds it may take


class Children:
    """The processes that cases have started. Each leads a session of its own, and none outlives the kit."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ending = False

    def start(self, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a program in the log's folder; both its streams go to the log. RuntimeError while all are ended."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, log.open("wb") as output:
            if self._ending:
                raise RuntimeError("the kit is being ended")
            process = subprocess.Popen(
                argv,
                cwd=log.parent,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def wait(self, process: subprocess.Popen[bytes], limit: float) -> int:
        """Its exit code. TimeoutExpired after `limit` seconds, when it is gone all the same."""
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise
        finally:
            self._running.discard(process)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """TERM, which trainkit passes on to what it runs, and KILL for a program that does not heed it."""
        for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
            if process.poll() is None:
                os.killpg(process.pid, number)
                try:
                    process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
        self._running.discard(process)

    def end_all(self) -> None:
        """End what runs; nothing starts any more."""
        with self._lock:
            self._ending = True
            running = [*self._running]
        for process in running:
            self.end(process)


@dataclass(frozen=True)
class Place:
    """Where cases run.

    card: UUID of the card that is proven, empty on a CPU; memory: its GiB; curves, foreseen: of the runs so far, by
    case: their losses, and what their plans had foreseen beside what was measured
    """

    scratch: Path
    device: str
    tiny: bool
    card: str = ""
    memory: float = math.inf
    several: bool = False  # cards in this machine: the others are kept out of sight
    children: Children = field(default_factory=Children)
    curves: dict[str, Curve] = field(default_factory=dict)
    foreseen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def folder(self, name: str, part: str = "") -> Path:
        """A case's own folder, or that of a part of it."""
        path = self.scratch / "runs" / slug(name) / slug(part)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def said(self, name: str) -> str:
        """The end of what a case's processes have said so far."""
        folder = self.scratch / "runs" / slug(name)
        logs = (*folder.glob("output.txt"), *sorted(folder.glob("*/output.txt")))
        return "\n".join(log.read_text(errors="replace")[-LONGEST:] for log in logs)

    def environment(self, folder: Path, **more: str) -> dict[str, str]:
        """Own locks for a folder, so that cases at once do not meet; home and caches in the scratch folder."""
        for each in ("locks", "home", "tmp"):
            (self.scratch / each).mkdir(exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in OF_LAUNCHERS and not name.startswith(("TRAINKIT_", "XDG_"))
        }
        if self.several:
            kept["CUDA_VISIBLE_DEVICES"] = self.card
        if self.device == "cpu":
            kept["OMP_NUM_THREADS"] = "1"
        extensions = {"TORCH_EXTENSIONS_DIR": str(self.scratch / "extensions")}
        return {
            **extensions,
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *packages()]),
            "PYTHONUSERBASE": site.getuserbase(),  # which would follow the home
            "HOME": str(self.scratch / "home"),
            "TMPDIR": str(self.scratch / "tmp"),
            "XDG_CACHE_HOME": str(self.scratch / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),  # warmed for what is timed
            "TORCHINDUCTOR_COMPILE_THREADS": "4",
            "HF_HUB_OFFLINE": "1",
            "TRAINKIT_CARD_LOCKS": str(self.scratch / "locks" / slug(str(folder))),
            **more,
        }


def slug(name: str) -> str:
    """A name as that of a folder."""
    return "".join(each if each.isalnum() else "-" for each in name)


def packages() -> list[str]:
    """The caller's PYTHONPATH, as seen from any folder."""
    return [str(Path(each).absolute()) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


@dataclass
class Outcome:
    """What a case has shown. ok: None where it was left out, and `found` says why."""

    group: str
    name: str
    ok: bool | None
    expected: str
    found: str
    table: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """One thing to prove.

    phase: 1 facts, 2 right or wrong (several at once), 3 timed (one at a time, the card idle)
    turn: within a phase; cases of one turn are over before those of the next begin
    seconds: what it takes on a card; it starts only where as many are left
    words: of trainkit's command line; like: the case with whose losses its own are compared, relative to `tolerance`
    needs: packages without which it is left out; memory: GiB of a card that it needs
    """

    phase: int
    group: str
    name: str
    check: Check
    seconds: float = 15.0
    expected: str = ""
    turn: int = 1
    on_cpu: bool = False
    words: tuple[str, ...] = ()
    like: str = ""
    tolerance: float = 0.0
    exit_code: int = 0
    needs: tuple[str, ...] = ()
    memory: float = 4.0

    @property
    def title(self) -> str:
        """``group/name``."""
        return f"{self.group}/{self.name}"

    def outcome(self, ok: bool | None, found: str, log: str = "", **table: Any) -> Outcome:
        """An outcome of this case."""
        return Outcome(self.group, self.name, ok, self.expected, found, table, log)


# What a proof leaves: results.json with everything, and its tables for people in results.md.

VERSION = 1  # of results.json
PACKAGES = (
    "torch", "triton", "transformers", "accelerate", "deepspeed", "bitsandbytes", "peft", "torch-optimi", "numpy",
)  # fmt: skip
MARKS: Mapping[bool | None, str] = {True: "yes", False: "NO", None: "-"}
HEADS = ("case", "right", "seconds", "found", "expected")  # of a group's table


def head(place: Place) -> dict[str, Any]:
    """What results.json says besides its cases."""
    found = {"trainkit": __version__, "python": sys.version.split()[0]}
    found |= {"driver": nvml.driver()} if place.card else {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {
        "results_version": VERSION,
        "card": nvml.name(place.card) if place.card else "cpu",
        "versions": found,
        "device": place.device,
        "tiny": place.tiny,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def read_results(path: Path) -> dict[str, Any]:
    """The results of an earlier call. ValueError for what is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("results_version") != VERSION:
        raise ValueError(f"{path} is no results.json of this kit (version {VERSION})")
    return found


def write_results(folder: Path, found: Mapping[str, Any]) -> None:
    """Write results.json and results.md, each whole or not at all."""
    for name, text in (("results.json", json.dumps(found, indent=1) + "\n"), ("results.md", markdown(found))):
        new = folder / f".{name}.new"
        new.write_text(text)
        os.replace(new, folder / name)  # noqa: PTH105


def markdown(found: Mapping[str, Any]) -> str:
    """A summary, what is wrong, then a table for each group and each measurement."""
    cases: Sequence[Mapping[str, Any]] = found["cases"]
    counts = {mark: sum(each["ok"] is mark for each in cases) for mark in (True, False, None)}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    counted = f"{counts[True]} right, {counts[False]} wrong, {counts[None]} left out"
    parts = [
        f"# Proof on {found['card']}",
        f"{counted}; {found['date']}, {found['seconds']:.0f} s. {versions}.",
    ]
    if found["tiny"] or found["device"] != "cuda":
        parts.append("The smallest sizes, or no card: this shows that the kit works, and nothing of a card.")
    wrong = [f"- **{each['group']}/{each['name']}**: {each['found']}" for each in cases if each["ok"] is False]
    parts += ["## Wrong\n\n" + "\n".join(wrong)] if wrong else []
    for group in dict.fromkeys(each["group"] for each in cases):
        rows = [each for each in cases if each["group"] == group]
        cells = ((e["name"], MARKS[e["ok"]], e["seconds"], e["found"], e["expected"]) for e in rows)
        parts.append(f"## {group}\n\n{table(HEADS, cells)}")
        parts += [part for each in rows for part in tables(each)]
    return "\n\n".join(parts) + "\n"


def tables(case: Mapping[str, Any]) -> Iterator[str]:
    """What a case has measured, where that is a list of rows."""
    for name, content in case["table"].items():
        if isinstance(content, list) and content and isinstance(content[0], Mapping):
            heads = list(dict.fromkeys(head for each in content for head in each))
            cells = ([each.get(head) for head in heads] for each in content)
            yield f"### {case['name']}: {name}\n\n{table(heads, cells)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *([cell(value) for value in each] for each in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """One value, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str("" if value is None else value).replace("|", "/").replace("\n", " ")[:200]
