"""The pictures of the pages: real commands and screens of trainkit's, drawn into docs/pictures.

A terminal's output becomes an SVG with the reader's own monospaced font; the report's page is photographed by Chromium;
the chart of a bench is that of the figures which scripts/bench/measured.py keeps, as `trainkit bench` draws it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from chromium import Chromium  # noqa: E402
from measured import SMALL_TABLE, read_rows  # noqa: E402

from trainkit import bench  # noqa: E402
from trainkit.cli.live.drawing import Look  # noqa: E402
from trainkit.cli.live.reading import LiveRun  # noqa: E402
from trainkit.cli.live.screen import WatchScreen  # noqa: E402
from trainkit.runner.rundir.layout import RunLayout  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
COLUMNS = 100
LARGEST = 150_000  # bytes of a picture
# Which commands are drawn, and which lines of the output; None are all.
COMMANDS: tuple[tuple[str, tuple[str, ...], slice], ...] = (
    ("plan", ("plan", "quickstart", "--with", "strategy/ddp", "--on", "8xh100"), slice(0, 37)),
    ("estimate", ("estimate", "gpt-1.3b", "--on", "1x4090", "--quick"), slice(None)),
    ("mistakes", ("check", "wrong.yaml"), slice(None)),
    ("import", ("import", "torchrun", "--nproc_per_node", "2", "train.py", "--lr", "0.1"), slice(None)),
)
CHART = ("base", "accumulation", "checkpointing", "bf16", "all", "adafactor", "all-adafactor")
MACHINE = "a CPU of 2 cores"  # on which the kept figures were measured
RUN = ("run", "quickstart", "train.steps=200", "eval.every_steps=40")
WRONG = 'version: 1\nextends: strategy/fdsp\noptmizer: {lr: 1.0e-3}\ntrain: {steps: "300"}\n'
_FONTS = re.compile(r"\s*@font-face \{.*?\}\n", re.DOTALL)  # from another site


def draw(names: list[str]) -> None:
    """Draw the pictures of these names again, or all; minutes, as `run` trains (and gives watch and report, too).

    SystemExit for an unknown name.
    """
    known = [*(name for name, _, _ in COMMANDS), "bench", "run"]
    if unknown := {*names} - {*known}:
        sys.exit(f"error: no picture {', '.join(sorted(unknown))}\n  next: name one of {', '.join(known)}")
    chosen = names or known
    with tempfile.TemporaryDirectory(prefix="trainkit-pictures-") as temporary:
        folder = Path(temporary)
        (folder / "wrong.yaml").write_text(WRONG, "utf-8")
        (folder / "train.py").write_text("import argparse\n", "utf-8")
        for name, words, lines in COMMANDS:
            if name in chosen:
                keep(f"{name}.svg", terminal(words, answer(words, folder)[lines]))
        if "bench" in chosen:
            keep("bench.svg", chart(folder))
        if "run" not in chosen:
            return
        keep("run.svg", terminal(RUN, shortened(answer(RUN, folder))))
        (run,) = map(RunLayout.of, map(str, (folder / "runs" / "quickstart").iterdir()))
        keep("watch.svg", asyncio.run(screen(run)))
        answer(("report",), folder)
        keep("report.webp", photograph(run.root / "report.html"))


def answer(words: tuple[str, ...], folder: Path) -> list[str]:
    """The lines that a command prints, in colour, in a folder and with an empty home."""
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", *words],
        cwd=folder,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "LC_ALL": "C.UTF-8",
            "FORCE_COLOR": "1",
            "COLUMNS": str(COLUMNS),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if not done.stdout:
        sys.exit(f"trainkit {' '.join(words)} prints nothing")
    return done.stdout.replace(f"{folder}/", "").splitlines()


def shortened(lines: list[str]) -> list[str]:
    """A run's lines without most of its steps, and its text that is drawn at the end."""
    steps = [number for number, line in enumerate(lines) if re.search(r"step +\d+/", line)]
    middle = set(steps[3:-2])
    kept = [line for number, line in enumerate(lines) if number not in middle or number == min(middle)]
    return ["  ⋮" if middle and line == lines[min(middle)] else line for line in kept]


def terminal(words: tuple[str, ...], lines: list[str]) -> str:
    """A terminal with a command and what it has printed, as SVG."""
    texts = [Text(f"$ trainkit {' '.join(words)}", style="bold"), *map(Text.from_ansi, lines)]
    width = max(COLUMNS, *(each.cell_len for each in texts))
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True)
    for each in texts:
        console.print(each)
    return console.export_svg(title="trainkit", unique_id=f"trainkit-{words[0]}")


async def screen(run: RunLayout) -> str:
    """The screen of `trainkit watch`, as SVG."""
    app = WatchScreen([LiveRun(run)], Look())
    async with app.run_test(size=(120, 36)) as pilot:
        for _ in range(20):
            await pilot.pause(0.1)
        return app.export_screenshot(title="trainkit watch")


def chart(folder: Path) -> str:
    """Memory and throughput of variants, as SVG, by the kept table of `trainkit bench`."""
    found, rows = read_rows(), []
    for row in map(found.__getitem__, CHART):
        rate, memory = float(row["samples_per_second"]), int(row["memory_bytes"])
        measured = bench.Measurement("ok", samples_per_second=rate, memory_bytes=memory)
        rows.append(bench.VariantRow(row["variant"], row["description"], (measured,)))
    bench.draw(bench.Comparison(SMALL_TABLE.stem, MACHINE, "rss", bench.compare(rows, "base")), folder)
    return (folder / "bench.svg").read_text("utf-8")


def photograph(page: Path) -> bytes:
    """The curves of a report's page, as WebP."""
    with Chromium() as browser:
        browser.open(page.as_uri(), 1200)
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        heading = "[...document.querySelectorAll('h2')].find(each => each.textContent === 'Curves')"
        top = browser.evaluate(f"{heading}.getBoundingClientRect().top + scrollY")
        clip = {"x": 0, "y": top - 20, "width": 1200, "height": 900, "scale": 1}
        shot = browser.call("Page.captureScreenshot", format="webp", quality=80, captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])


def keep(name: str, content: str | bytes) -> None:
    """Write a picture, without fonts of other sites. SystemExit for one that is too large."""
    found = _FONTS.sub("\n", content).encode() if isinstance(content, str) else content
    if len(found) > LARGEST:
        sys.exit(f"{name} has {len(found):,} bytes, and {LARGEST:,} are enough")
    (FOLDER / name).write_bytes(found)
    print(f"docs/pictures/{name}: {len(found):,} bytes")
