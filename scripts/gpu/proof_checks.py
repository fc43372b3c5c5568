"""Checks of a case: by the losses of its run, by resuming, memory, sharing, naming a card, and measurements."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvml import used
from proof import HERE, LONGEST, RUN_GRACE, Case, Check, Curve, Outcome, Place

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
GIVEN_BACK = 64 << 20  # bytes that may be missing on a card after a run
CALLER = "CALLER="  # as the first of a case's words: what the caller's CUDA_VISIBLE_DEVICES is


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
    run = read_run(place.children.wait(process, limit), root)
    if run.code == 0 and (told := run.summary.get("foresight")):
        place.foreseen[f"{case.title}{f' ({part})' if part else ''}"] = told
    return run


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


def measured(what: str, *words: str) -> Check:
    """A measurement in a process of its own (`measure.py`), which writes one JSON object."""

    def check(case: Case, place: Place, limit: float) -> Outcome:
        folder = place.folder(case.title)
        answer = folder / "answer.json"
        argv = [sys.executable, str(HERE / "measure.py"), what, *words, "--device", place.device]
        argv += ["--answer", str(answer), *(["--tiny"] if place.tiny else [])]
        environ = place.environment(folder, CUDA_DEVICE_ORDER="PCI_BUS_ID")
        code = place.children.wait(place.children.start(argv, folder / "output.txt", environ), limit)
        log = read(folder / "output.txt")[-LONGEST:]
        if not answer.exists():
            return case.outcome(False, f"exit code {code}", log)
        told = json.loads(answer.read_text())
        problems, said = told.pop("problems"), told.pop("said")
        return case.outcome(not problems, "; ".join([*problems, said]), log if problems else "", **told)

    return check


def resumed(case: Case, place: Place, limit: float) -> Outcome:
    """The second half after a resume against an uninterrupted run: the numbers of all its steps."""
    until = time.monotonic() + limit
    whole = launch(case, place, limit, "whole", ["checkpoint.every_steps=6", "checkpoint.keep=0"])
    if whole.code or not whole.folder:
        return case.outcome(False, f"exit code {whole.code}", whole.log)
    saved = next(whole.folder.glob("checkpoints/step-*6"), None)
    if saved is None:
        return case.outcome(False, "there is no checkpoint of step 6", whole.log)
    again = launch(case, place, until - time.monotonic(), "again", [f"checkpoint.resume={saved}"])
    theirs = [step for step in whole.steps if step[0] > 6]
    equal = again.steps == theirs and len(theirs) == 6
    far = furthest(again, whole)
    found = "bit-equal" if equal else f"exit code {again.code}, losses differ by {far:.1e}"
    # Without train.deterministic kernels may add in any order: then it is told, not required.
    needed = "train.deterministic=true" in case.words
    ok = equal or (not needed and far < 1e-2)
    return case.outcome(ok, found, "" if ok else again.log, bit_equal=equal, distance=far)


def furthest(run: Run, whole: Run) -> float:
    """Largest relative difference of losses in the steps of `run`; infinite where there are none, or none like them."""
    losses = {step: loss for step, loss, _ in whole.steps}
    pairs = [(loss, losses.get(step)) for step, loss, _ in run.steps]
    if not pairs or any(one is None or other is None for one, other in pairs):
        return math.inf
    return max(abs(one - other) / abs(other) for one, other in pairs if one is not None and other is not None)


def out_of_memory(case: Case, place: Place, limit: float) -> Outcome:
    """The run ends with 1 and says what to do; the card is free again at once."""
    before = used(place.card)
    run = launch(case, place, limit)
    time.sleep(1.0)
    taken = used(place.card) - before
    problems = [] if run.code == 1 else [f"exit code {run.code}"]
    problems += [] if "memory ran out" in run.output and "next: batch.micro=" in run.output else ["no hint"]
    problems += [f"{taken >> 20} MiB are still taken"] if taken > GIVEN_BACK else []
    said = "; ".join(problems) or "exit code 1, a hint, memory given back"
    return case.outcome(not problems, said, run.log if problems else "", still_taken=taken)


def peak_below(gib: float) -> Check:
    """A run's memory on the card, with what CUDA takes for itself, is below that of the card that a recipe names."""

    def check(case: Case, place: Place, limit: float) -> Outcome:
        run = launch(case, place, limit)
        if run.code:
            return case.outcome(False, f"exit code {run.code}", run.log)
        told = figures(run)
        taken = told["nvml"] or 0
        said = f"{taken / 2**30:.1f} GiB of {gib} taken"
        ok = 0 < taken < gib * 2**30
        return case.outcome(ok, said, "" if ok else run.log, **told)

    return check


FORESEEN = {"allocated": (0.01, 0.03), "reserved": (0.02, 0.05)}  # mean and largest error that is allowed, of a GPU


def foreseen(case: Case, place: Place, limit: float) -> Outcome:
    """What the plans of all runs so far had foreseen beside what these took. limit: it takes no time."""
    del limit
    told, problems = dict(place.foreseen), []
    said = [f"{len(told)} runs"]
    for name in ("allocated", "reserved", "total", "step"):
        errors = sorted((each["error"][name], title) for title, each in told.items() if name in each["error"])
        if not errors:
            continue
        mean = sum(abs(error) for error, _ in errors) / len(errors)
        most, title = max(errors, key=lambda each: abs(each[0]))
        said.append(f"{name}: mean {mean:.1%}, largest {most:+.1%} ({title})")
        bounds = FORESEEN.get(name)
        if place.device == "cuda" and bounds and (mean > bounds[0] or abs(most) > bounds[1]):
            problems.append(f"{name} beyond {bounds[0]:.0%} and {bounds[1]:.0%}")
    if not told:
        problems.append("no run had an estimate")
    return case.outcome(not problems, "; ".join([*problems, *said]), foreseen=told)


def estimated_micro(case: Case, place: Place, limit: float) -> Outcome:
    """`batch.micro: auto` is decided by the estimate, and the run has room for it."""
    run = launch(case, place, limit)
    if run.code or not run.folder:
        return case.outcome(False, f"exit code {run.code}", run.log)
    batch = json.loads(read(run.folder / "plan.json"))["batch"]
    told = figures(run)
    problems = [] if "by its estimate" in batch["note"] else [f"it was not: {batch['note']}"]
    said = f"micro {batch['micro']}, {(told['nvml'] or 0) / 2**30:.1f} of {place.memory:.1f} GiB taken"
    return case.outcome(not problems, "; ".join([*problems, said]), **told)


def searched(case: Case, place: Place, limit: float) -> Outcome:
    """`batch.micro: auto` finds a size whose training stays below the limit, and remembers it."""
    until = time.monotonic() + limit
    first = launch(case, place, limit, "first")
    search = first.summary.get("micro_search") or {}
    if first.code or not search:
        return case.outcome(False, f"exit code {first.code}, no search", first.log)
    again = launch(case, place, until - time.monotonic(), "again")
    told = figures(first)
    problems, peak, most = [], told["peak_reserved"] or 0, search.get("limit_bytes") or math.inf
    if (again.summary.get("micro_search") or {}).get("source") != "remembered":
        problems.append("it was not remembered")
    if peak > most:
        problems.append(f"training reserved {peak >> 20} MiB, the limit was {int(most) >> 20}")
    said = f"micro {search['micro']}, {len(search['tried'])} tried in {search.get('seconds')} s"
    log = again.log if problems else ""
    return case.outcome(not problems, "; ".join([*problems, said]), log, search=search, **told)


def two_runs(case: Case, place: Place, limit: float) -> Outcome:
    """A second run on a held card is refused with who holds it; with `when_busy: warn` both run; TERM saves."""
    until, root, locks = time.monotonic() + limit, place.folder(case.title), str(place.scratch / "locks" / "two")
    endless = ["train.steps=100000", "eval.every_steps=0", "checkpoint.every_steps=50000", "logging.every_steps=50"]
    words = command(case, place, root, endless)
    first = trainkit(place, words, root / "output.txt", TRAINKIT_CARD_LOCKS=locks)
    problems: list[str] = []
    try:
        wait_for(lambda: any(root.glob("*/*/metrics.jsonl")), 60)
        refused = launch(case, place, 60, "refused", ["devices.when_busy=refuse"], TRAINKIT_CARD_LOCKS=locks)
        if refused.code != 4 or "held by" not in refused.output:
            problems.append(f"second run: exit code {refused.code}: {refused.output.strip()[-200:]}")
        beside = launch(case, place, until - time.monotonic(), "beside", TRAINKIT_CARD_LOCKS=locks)
        problems += [f"run beside it with when_busy warn: exit code {beside.code}"] if beside.code else []
        problems += [] if holder_shown(place, locks) else ["trainkit env gpus shows no holder"]
    finally:
        first.send_signal(signal.SIGTERM)
        code = place.children.wait(first, 60)
    problems += [f"first run after TERM: exit code {code}"] if code != 128 + signal.SIGTERM else []
    problems += [] if any(root.glob("*/*/checkpoints/step-*/manifest.json")) else ["TERM saved no checkpoint"]
    log = read(root / "output.txt")[-LONGEST:] if problems else ""
    return case.outcome(not problems, "; ".join(problems) or "refused, shared, stopped and saved as said", log)


def holder_shown(place: Place, locks: str) -> bool:
    """Whether `trainkit env gpus` says who holds the card."""
    folder = place.folder("trainkit env gpus")
    process = trainkit(place, ["env", "gpus", "--json"], folder / "output.txt", TRAINKIT_CARD_LOCKS=locks)
    code = place.children.wait(process, 60)
    told = json.loads(read(folder / "output.txt"))["gpus"] if code == 0 else []
    return any(each["uuid"] == place.card and each["held_by"] for each in told)


def wait_for(there: Callable[[], bool], seconds: float) -> None:
    """Look until it is there. TimeoutExpired after so many seconds."""
    until = time.monotonic() + seconds
    while not there():
        if time.monotonic() > until:
            raise subprocess.TimeoutExpired("what was waited for", seconds)
        time.sleep(0.2)


def shown_card(case: Case, place: Place, limit: float) -> Outcome:
    """A program under a launcher sees exactly the card that the plan names, by UUID, as cuda:0."""
    root = place.folder(case.title)
    words, environ = program_command(case, place, root)
    process = trainkit(place, words, root / "output.txt", **environ)
    code, output = place.children.wait(process, limit), read(root / "output.txt")
    if code != case.exit_code:
        return case.outcome(False, f"exit code {code}", output[-LONGEST:])
    if code:
        return case.outcome(True, f"exit code {code}: {first_error(output)}")
    return seen(case, place, root, output)


def program_command(case: Case, place: Place, root: Path) -> tuple[list[str], dict[str, str]]:
    """The words that run the program, and the variables of their caller."""
    words = [each.format(uuid=place.card, short=place.card[:12]) for each in case.words]
    environ = {"CUDA_VISIBLE_DEVICES": words.pop(0).removeprefix(CALLER)} if words[0].startswith(CALLER) else {}
    program = f"version: 1\nname: seen\nprogram: {{kind: torch, script: {HERE / 'seen_card.py'}}}\n"
    recipe = str(written(place.scratch / "seen.yaml", program))
    words += [f"output.root={root}", f"launcher.grace_seconds={RUN_GRACE}", "devices.when_busy=warn"]
    return ["run", recipe, *words], environ


def first_error(output: str) -> str:
    """The first line of a diagnostic."""
    return next((line for line in output.splitlines() if "error:" in line), "")[:160]


def seen(case: Case, place: Place, root: Path, output: str) -> Outcome:
    """What the program said of its card, against NVML."""
    texts = [output, *(read(path) for path in root.glob("*/*/attempts/*/logs/rank-0.out"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith('{"torch_uuid"')]
    if not lines:
        return case.outcome(False, "the program did not say what it sees", output[-LONGEST:])
    told = lines[0]
    order = "FASTEST_FIRST" if "devices.order=fastest" in case.words else "PCI_BUS_ID"
    wrong = [
        f"{name} is {told[name]}"
        for name, right in (("torch_uuid", place.card), ("count", 1), ("order", order), ("sum", 8.0))
        if told[name] != right
    ]
    return case.outcome(not wrong, "; ".join(wrong) or f"CUDA_VISIBLE_DEVICES={told['visible']}", **told)
