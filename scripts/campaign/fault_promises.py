"""What is promised of a run that met a fault, as the campaign `faults` judges it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fault_kinds import Fault
from tiny_runs import PATIENCE, STEPS, Run, damaged_checkpoints, digests, losses, read_object

NEVER = ("Traceback (most recent call last)", "bug in trainkit")
NAME_OF_OTHER = "20200101-000000-abcdef"


def bystander(root: Path) -> tuple[Path, dict[str, str]]:
    """A run directory of somebody else, with checksums of its files."""
    folder = root / "bystander" / NAME_OF_OTHER
    for name in (
        "checkpoints/step-00000002/manifest.json",
        "metrics.jsonl",
        "attempts/1/logs/rank-0.out",
        "status.json",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} of another run\n")
    os.sync()  # a power cut may take what is younger
    return folder, digests(folder)


def after_fault(run: Run, fault: Fault, code: int) -> list[str]:
    """What is not as promised when the run has ended, while the fault is still there."""
    wrong, text = [], run.text()
    if code not in fault.codes:
        wrong.append(f"exit code {code}, and not {sorted(fault.codes)}")
    elif code == -signal.SIGKILL:
        code, text = 128 + signal.SIGKILL, text + str(run.status().get("why"))
    wrong += [f"it says {each!r}" for each in NEVER if each in text]
    if code and fault.says and not any(each in text for each in fault.says):
        wrong.append(f"no word of {' or '.join(fault.says)}")
    if code and fault.path and str(run.root) not in text:
        wrong.append("it names no path")
    return wrong + (of_records(run, code) if fault.records else [])


def of_records(run: Run, code: int) -> list[str]:
    """What status.json and summary.json say that they should not."""
    wrong, status = [], run.status()
    if status and (status.get("state"), status.get("exit_code")) != ("ended", code):
        wrong.append(f"status.json says {status.get('state')}, {status.get('exit_code')}")
    summary = read_object(run.directory(), "summary.json")
    if status and not summary and "summary.json could not be written" not in run.text():
        wrong.append("there is no summary.json, and nobody says why")
    return wrong


def of_files(before: Mapping[Path, Mapping[str, str]]) -> list[str]:
    """What is not as promised of the files once the fault is gone. before: of the checkpoints that were whole."""
    return [f"{path} was damaged" for path, files in before.items() if digests(path) != files]


def of_losses(run: Run, reference: Mapping[int, float]) -> list[str]:
    """The losses that a run has written and that one without a fault has not."""
    known = losses(run.directory())
    return [
        f"step {step}: {loss} in place of {reference[step]}" for step, loss in known.items() if loss != reference[step]
    ]


def after_resume(root: Path, scratch: Path, strategy: str, reference: Mapping[int, float], first: Run) -> list[str]:
    """What is not as promised once the fault is gone: the list of runs, and a run that resumes."""
    wrong = damaged_checkpoints(first.directory())
    argv = [sys.executable, "-m", "trainkit", "runs", "list", "--root", str(root)]
    listed = subprocess.run(argv, cwd=scratch, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if listed.returncode:
        wrong.append(f"runs list ends with {listed.returncode}: {listed.stderr[-300:]}")
    leftovers = [path.name for path in (scratch / "tmp").iterdir()]
    if leftovers:
        wrong.append(f"left in the temporary folder: {leftovers}")
    shutil.rmtree(scratch / "tmp")
    if first.process.returncode == 0 and len(losses(first.directory())) == STEPS and not wrong:
        return []  # nothing is left to train
    second = Run(root, scratch, strategy)
    try:
        if second.process.wait(PATIENCE):
            return [*wrong, f"the run that resumes ended with {second.process.returncode}: {second.text()[-300:]}"]
        known = losses(second.directory()) or losses(first.directory())
        done = "nothing is left to train" in second.text()  # and metrics are missing
        said = any(each in first.text() for each in ("metrics.jsonl cannot be written", "directory was removed"))
        if done and len(losses(first.directory())) < STEPS and not said:
            wrong.append("lines of the metrics are missing, and nobody says why")
        if max(known, default=0) != STEPS and not done:
            wrong.append(f"the last step is {max(known, default=0)}")
        wrong += of_losses(second, reference)
    except subprocess.TimeoutExpired:
        wrong.append("the run that resumes did not end")
    finally:
        second.end()
    return wrong
