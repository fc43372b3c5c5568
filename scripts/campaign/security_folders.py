"""Attacks by run directories of others, and in folders that others may write to, also while a run goes on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import security_content as hostile
import security_surfaces as attacks
from security_judge import Attack
from security_surfaces import SURFACES

_RECORDS = (
    "status.json",
    "plan.json",
    "summary.json",
    "result.json",
    "recipe.yaml",
    "metrics.jsonl",
    "cards.jsonl",
    "trainer.json",
    ".lock",
    "env.txt",
    "attempts/1/ranks/rank-0.json",
    "attempts/1/logs/rank-0.out",
    "attempts/1/logs/rank-0.err",
    "attempts/1/logs/launcher.log",
    "attempts/1/shown/rank-0.json",
    "checkpoints/step-00000003/manifest.json",
    "checkpoints/step-00000003/generators-0.json",
    "checkpoints/step-00000003",
    "checkpoints",
)


def _shared(draw: random.Random) -> Attack:
    what = draw.choice(tuple(_WRITERS))
    seed = draw.random()

    def prepare(folder: Path) -> None:
        inner = random.Random(seed)
        for name in inner.sample(_SHARED_NAMES, inner.randrange(1, 6)):
            path = folder / "work/shared" / name
            if not path.parent.is_symlink() and (path.parent.is_dir() or not path.parent.exists()):
                hostile.plant(inner, path, folder / "outside")

    return Attack("", what, prepare, attacks.answered(_WRITERS[what]))


_SHARED_NAMES = (
    "GPU-1",
    "trainkit-x.lock",
    "trainkit-x",
    "status.json",
    "metrics.jsonl",
    ".lock",
    "checkpoints/.tmp-step-00000001",
    "command.sh",
    "env.txt",
    "plan.json",
    "recipe.yaml",
    "trainkit-run-1.lock",
    "attempts/1/logs/rank-0.out",
    "cards.jsonl",
    "weights",
    ".weights.tmp",
    "corpus.lock",
    "cache",
)


def _cards(folder: Path) -> None:
    from trainkit.machine.card_locks import Cards, holder

    environ = {"TRAINKIT_CARD_LOCKS": str(folder / "work/shared")}
    holder("GPU-1", environ)
    cards = Cards(environ)
    if cards.take(["GPU-1"]) is None:
        cards.sign("me", "a run")
    cards.release()


def _records(folder: Path) -> None:
    from trainkit.files import publish, publish_or_overwrite, read_json, read_json_lines

    shared = folder / "work/shared"
    for name in ("status.json", "env.txt", "command.sh"):
        read_json(shared / name)
        list(read_json_lines(shared / name))
        for write in (publish, publish_or_overwrite):
            try:
                write(shared / name, "{}")
            except OSError:
                continue


def _run_files(folder: Path) -> None:
    from trainkit.runner.rundir.layout import RunLayout
    from trainkit.runner.rundir.listing import hold, is_running
    from trainkit.trainer.metrics.writers import JsonLines

    layout = RunLayout(folder / "work/shared")
    is_running(layout)
    try:
        os.close(hold(layout))
        JsonLines(layout.metrics).write({"step": 1})
    except OSError:
        return


def _swaps(folder: Path) -> None:
    from trainkit.trainer.parallel.swapping import clear_abandoned

    clear_abandoned(folder / "work/shared")


_WRITERS: dict[str, Callable[[Path], None]] = {
    "card locks": _cards,
    "records": _records,
    "run directory": _run_files,
    "swap folder": _swaps,
}


def _race(draw: random.Random) -> Attack:
    seed = draw.random()

    def prepare(folder: Path) -> None:
        (folder / "work/train.py").write_text("import time\nprint('hello')\ntime.sleep(0.3)\n")

    def call(folder: Path) -> int:
        racer = os.fork()
        if racer == 0:
            try:
                _plant_meanwhile(random.Random(seed), folder)
            finally:
                os._exit(0)
        words = [sys.executable, "-P", "-m", "trainkit", "run", "train.py"]
        try:
            root = str(Path(__file__).parents[2])
            environ = {**os.environ, "TRAINKIT_CARD_LOCKS": str(folder / "tmp"), "PYTHONPATH": root}
            done = subprocess.run(
                words, cwd=folder / "work", env=environ, capture_output=True, timeout=120, check=False
            )
        finally:
            os.kill(racer, 9)
            os.waitpid(racer, 0)
        os.write(1, done.stdout + done.stderr)
        return done.returncode

    return Attack("", "a run whose directory is changed meanwhile", prepare, call, starts=True, raw=True)


def _plant_meanwhile(draw: random.Random, folder: Path) -> None:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        for run in folder.glob("work/runs/*/*"):
            for name in draw.sample(_RECORDS[:16], 2):
                try:
                    path = run / name
                    if path.parent.is_dir():
                        path.unlink(missing_ok=True)
                        path.symlink_to(folder / "outside" / draw.choice(("secret.txt", "made")))
                except OSError:
                    continue
        time.sleep(0.02)


SURFACES |= {"shared folders": _shared, "races": _race}
