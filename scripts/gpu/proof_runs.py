"""Runs of trainkit: start one, read what it left, compare its losses with those of another."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof import LONGEST, RUN_GRACE, Case, Curve, Outcome, Place

BASE = """\
version: 1
name: proof
batch: {global: 16, micro: 8, eval_micro: 8}
model: {layers: 4, heads: 4, hidden_size: 256}
data: {kind: random, samples: 256, low: 0, high: 256, sequence_length: 256}
optimizer: {name: adamw_torch, lr: 1.0e-3, weight_decay: 0.1}
schedule: {name: cosine, warmup_steps: 2}
train: {steps: 12, max_grad_norm: 0.5, seed: 3}
eval: {every_steps: 6, batches: 4}
logging: {every_steps: 1}
"""
TINY = ("model.layers=2", "model.hidden_size=32", "model.heads=2", "data.sequence_length=32", "batch.global=4",
        "batch.micro=2", "batch.eval_micro=2")  # fmt: skip
SHIPPED = "recipe:"  # before the name of a shipped recipe, as the first of a case's words


@dataclass(frozen=True)
class Run:
    """A run that is over. output: what its terminal would have shown; folder: its run directory, if it made one."""

    code: int
    output: str
    folder: Path | None
    summary: dict[str, Any]
    lines: list[dict[str, Any]]

    @property
    def steps(self) -> list[tuple[int, float | None, float | None]]:
        """Step, loss and norm of the gradients of each step."""
        return [(line["step"], line["loss"], line["grad_norm"]) for line in self.lines if "loss" in line]

    @property
    def curve(self) -> Curve:
        """All that is compared."""
        return {
            "loss": [loss for _, loss, _ in self.steps],
            "norm": [norm for _, _, norm in self.steps],
            "eval": [line["eval_loss"] for line in self.lines if "eval_loss" in line],
        }

    @property
    def log(self) -> str:
        """The end of what it and its first rank have said."""
        ranks = sorted(self.folder.glob("attempts/*/logs/rank-0.err")) if self.folder else []
        return "\n".join(text[-LONGEST:] for text in (self.output, *(read(path) for path in ranks)))


def command(case: Case, place: Place, root: Path, extra: Sequence[str] = ()) -> list[str]:
    """The words of trainkit's command line for a case."""
    card = () if any(each.startswith("devices.when_busy") for each in extra) else ("devices.when_busy=warn",)
    device = card if place.device == "cuda" else ("--with", "devices/cpu")
    first = (case.words or ("",))[0]
    if first.startswith(SHIPPED):
        words = [first.removeprefix(SHIPPED), *device, *case.words[1:]]
    else:
        tiny = TINY if place.tiny else ()
        words = [str(written(place.scratch / "proof.yaml", BASE)), *device, *tiny, *case.words]
    return ["run", *words, f"output.root={root}", f"launcher.grace_seconds={RUN_GRACE}", *extra]


def written(path: Path, text: str) -> Path:
    """A file with this text; several threads may ask for it at once."""
    if not path.exists():
        path.write_text(text)
    return path


def trainkit(place: Place, words: Sequence[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start trainkit from this checkout. environ: more variables."""
    argv = [sys.executable, "-m", "trainkit", *words]
    return place.children.start(argv, log, place.environment(log.parent, **environ))


def launch(case: Case, place: Place, limit: float, part: str = "", extra: Sequence[str] = (), **environ: str) -> Run:
    """Run a case's recipe to its end. part: names one of several runs of a case."""
    root = place.folder(case.title, part)
    process = trainkit(place, command(case, place, root, extra), root / "output.txt", **environ)
    return read_run(place.children.wait(process, limit), root)


def read_run(code: int, root: Path) -> Run:
    """What a run left under its root."""
    folders = sorted(path.parent for path in root.glob("*/*/plan.json"))
    folder = folders[-1] if folders else None
    summary = read(folder / "summary.json") if folder else ""
    lines = read(folder / "metrics.jsonl").splitlines() if folder else []
    return Run(
        code,
        read(root / "output.txt"),
        folder,
        json.loads(summary) if summary else {},
        [json.loads(line) for line in lines],
    )


def read(path: Path) -> str:
    """The text of a file; nothing of one that is not there."""
    return path.read_text(errors="replace") if path.exists() else ""


def figures(run: Run) -> dict[str, Any]:
    """What the summary of a run tells that a table shows. Memory in bytes."""
    memory = (run.summary.get("memory") or [{}])[0]
    names = ("samples_per_second", "final_loss", "mfu", "compile_seconds", "skipped_steps", "wall_seconds")
    return {
        **{name: run.summary.get(name) for name in names},
        **{name: memory.get(name) for name in ("peak_allocated", "peak_reserved", "anatomy")},
        "nvml": next(iter((run.summary.get("gpu_memory_occupied") or {}).values()), None),
    }


def distance(first: Curve, second: Curve) -> float:
    """Largest relative difference of losses, norms and evaluation losses; infinite where one is missing."""
    far = 0.0
    for name in ("loss", "norm", "eval"):
        if len(first[name]) != len(second[name]):
            return math.inf
        for one, other in zip(first[name], second[name], strict=True):
            if one is None or other is None:
                return math.inf
            far = max(far, abs(one - other) / max(abs(one), 1e-9))
    return far


def run_and_compare(case: Case, place: Place, limit: float) -> Outcome:
    """It ends as expected, on the right device, with finite losses, near to those of the case that it is like."""
    run = launch(case, place, limit)
    if run.code != case.exit_code:
        return case.outcome(False, f"exit code {run.code}", run.log)
    if case.exit_code:
        return refused(case, run)
    place.curves[case.title] = run.curve
    problems = [] if run.summary.get("device") == place.device else [f"it ran on {run.summary.get('device')}"]
    if not run.curve["loss"] or not all(each is not None and math.isfinite(each) for each in run.curve["loss"]):
        problems.append("losses are no numbers")
    said, far = f"final loss {run.summary.get('final_loss')}", None
    if case.like:
        if case.like not in place.curves:
            return case.outcome(None, f"{case.like}, with which it is compared, has not ended well")
        far = distance(place.curves[case.like], run.curve)
        said += f", {far:.1e} from {case.like}"
        if not far <= case.tolerance:
            problems.append(f"losses differ by {far:.1e} from {case.like}, allowed {case.tolerance:.0e}")
    log = run.log if problems else ""
    return case.outcome(not problems, "; ".join(problems) or said, log, distance=far, **figures(run))


def refused(case: Case, run: Run) -> Outcome:
    """A refusal says why, and makes no run directory."""
    reason = next((line.strip() for line in run.output.splitlines() if line.strip().startswith("why:")), "")
    problems = [] if reason else ["no reason is given"]
    problems += ["a run directory was made"] if run.folder else []
    return case.outcome(not problems, "; ".join(problems) or f"exit code {run.code}, {reason}", run.log)
