"""What campaigns share: options, an order that shows every pair of values early, cases beside one another, children."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from circumstances import circumstances  # noqa: E402

C = TypeVar("C")  # a campaign's case


CORES = os.cpu_count() or 1


def options(doc: str | None, *, cases: str = "0 for all", workers: int = CORES) -> argparse.ArgumentParser:
    """The command line of a campaign of cases. workers: how many at once if nobody says; 0: always one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0, help="0 for no limit")
    parser.add_argument("--cases", type=int, default=0, help=cases)
    parser.add_argument("--seed", type=int, default=0)
    if workers:
        parser.add_argument("--workers", type=int, default=workers)
    keep_option(parser)
    return parser


def keep_option(parser: argparse.ArgumentParser) -> None:
    """Where what was found stays."""
    parser.add_argument("--keep", type=lambda text: Path(text).absolute(), default=Path("found").absolute())


def words(text: str) -> tuple[str, ...]:
    """The value of an option that takes several, with commas between."""
    return tuple(text.split(","))


def end_of(minutes: float) -> float:
    """When so many minutes are over; 0 of them never are."""
    return time.monotonic() + minutes * 60 if minutes else float("inf")


def pairs_first(whole: list[C], seed: int) -> Iterator[C]:
    """Every case, those first that show most pairs of values that have not been seen."""
    random.Random(seed).shuffle(whole)
    left = [(case, pairs(case)) for case in whole]
    unseen = set[Any]().union(*(shown for _, shown in left))
    while unseen:
        best = max(range(len(left)), key=lambda place: len(left[place][1] & unseen))
        case, shown = left.pop(best)
        unseen -= shown
        yield case
    yield from (case for case, _ in left)


def pairs(case: Any) -> frozenset[Any]:
    """Every two values of a case, which is a dataclass."""
    return frozenset(itertools.combinations(asdict(case).items(), 2))


def try_cases(
    name: str, asked: argparse.Namespace, cases: Iterable[C], attempt: Callable[[C, Path], tuple[str, list[str]]],
    scratch_above: str | None = None,
) -> int:  # fmt: skip
    """Try cases until the time is over, each in a folder of its own; print the table. 1 where any failed, or none ran.

    attempt: what a case counts as, and what is wrong. The folder of one that failed is kept.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it made is removed
    print(circumstances(), flush=True)
    began, end = time.monotonic(), end_of(asked.minutes)
    tried, failed = Counter[str](), Counter[str]()
    numbered, lock = enumerate(itertools.islice(cases, asked.cases or None)), threading.Lock()

    def work(scratch: Path) -> None:
        while time.monotonic() < end:
            with lock:
                number, case = next(numbered, (-1, None))
            if case is None:
                return
            folder = scratch / str(number)
            folder.mkdir()
            label, wrong = attempt(case, folder)
            tried[label] += 1
            failed[label] += bool(wrong)
            if wrong:
                print(f"{case}: {'; '.join(wrong)}", flush=True)
                unkept = shutil.ignore_patterns("tmp", "*.img")
                kept = asked.keep / f"{name}-{asked.seed}-{number}"
                shutil.copytree(folder, kept, dirs_exist_ok=True, symlinks=True, ignore=unkept)
            shutil.rmtree(folder, ignore_errors=True)

    with tempfile.TemporaryDirectory(prefix=f"trainkit-{name}-", dir=scratch_above) as folder:
        Path(folder).chmod(0o755)  # a case may be of another user
        with ThreadPoolExecutor(asked.workers) as pool:
            for done in [pool.submit(work, Path(folder)) for _ in range(asked.workers)]:
                done.result()
    for label, count in sorted(tried.items()):
        print(f"{count:5} {label}" + (f", {failed[label]} failed" if failed[label] else ""))
    print(f"{tried.total()} cases, {failed.total()} failed, {(time.monotonic() - began) / 60:.0f} minutes")
    return 1 if failed.total() or not tried else 0


FINE = (0, 1, 2, 4)  # exit codes of trainkit that are an answer


@dataclass(frozen=True)
class Ended:
    """A child. code: its exit code, negative for a signal; taken: bytes above what it began with."""

    code: int
    said: str
    taken: int

    def over(self, most: int) -> str:
        """`too slow`, or `too large` for so many bytes; empty where it kept to its limits."""
        if self.code in (-signal.SIGXCPU, -signal.SIGALRM):
            return "too slow"
        return "too large" if self.code == -signal.SIGKILL or self.taken > most or "MemoryError" in self.said else ""


def in_child(
    call: Callable[[], int], folder: Path, environ: Mapping[str, str], *, seconds: int, wall: float, data: int = 0
) -> Ended:
    """A call in a fork of this process, in folder/work; what it prints goes to folder/said.

    environ: all that it has. seconds: of processor time; wall: by the clock, for what waits uses none (then its code is
    SIGALRM's); data: bytes that it may allocate, 0 for no limit.
    """
    (folder / "work").mkdir(parents=True, exist_ok=True)
    (folder / "said").unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            _child(call, folder, environ, seconds, data)
        finally:
            os._exit(71)  # it could not be set up
    waiting = select.poll()
    waiting.register(fd := os.pidfd_open(pid), select.POLLIN)
    in_time = waiting.poll(wall * 1000)
    os.close(fd)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    code = os.waitstatus_to_exitcode(status) if in_time else -signal.SIGALRM
    said, began = (folder / "said", folder / "resident")
    before = int(began.read_text()) if began.exists() else 0
    return Ended(code, said.read_text(errors="replace") if said.exists() else "", used.ru_maxrss * 1024 - before)


def _child(call: Callable[[], int], folder: Path, environ: Mapping[str, str], seconds: int, data: int) -> None:
    out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder / "work")
    tempfile.tempdir = None  # which the campaign's own process has found by now
    os.environ.clear()
    os.environ.update(environ)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if data:
        size = _pages(0) + data
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))  # what it maps of files is free
    for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # Not the parent's: what that maps of libraries is in a child only when it is used there.
    (folder / "resident").write_text(str(_pages(1)))
    code = 70
    try:
        code = call()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - whatever it is, it is what the campaign looks for
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _pages(field: int) -> int:
    """Bytes of this process: 0 for all addresses, 1 for what is in memory (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def changed(draw: random.Random, tree: Any, odd: Sequence[Any]) -> Any:
    """A tree of JSON in which one to three places are deleted or hold something odd."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randrange(1, 4)):
        holder: Any = tree
        while isinstance(holder, dict | list) and holder:
            name = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            if draw.random() < 0.3 or not isinstance(holder[name], dict | list) or not holder[name]:
                if draw.random() < 0.15:
                    del holder[name]
                else:
                    holder[name] = copy.deepcopy(draw.choice(odd))
                break
            holder = holder[name]
    return tree
