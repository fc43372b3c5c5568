"""Notebooks: those of the documentation run as they stand, and an interrupt of a cell ends its run in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
for needed in ("nbclient", "ipykernel", "cloudpickle"):
    pytest.importorskip(needed)

# In a process of its own: the client's event loop and sockets are not this test's.
EXECUTE = """
import json, sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=600, startup_timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
# Smaller than printed, through a layer that any user may use.
SMALL = {
    "TRAINKIT__MODEL__HIDDEN_SIZE": "16",
    "TRAINKIT__MODEL__LAYERS": "1",
    "TRAINKIT__DATA__SEQUENCE_LENGTH": "16",
    "TRAINKIT__EVAL__BATCHES": "1",
}


@pytest.fixture
def executed(tmp_path: Path, clean_environment: dict[str, str]) -> Any:
    """`executed(notebook)` gives the outputs of its code cells."""

    def execute(notebook: Path, **environ: str) -> list[list[dict[str, Any]]]:
        done = tmp_path / "executed.ipynb"
        process = subprocess.run(
            [sys.executable, "-c", EXECUTE, str(notebook), str(done)],
            cwd=tmp_path,
            env={**clean_environment, "IPYTHONDIR": str(tmp_path / "ipython"), **environ},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        cells = json.loads(done.read_text())["cells"]
        return [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]

    return execute


def text_of(outputs: Sequence[dict[str, Any]], kind: str = "text/plain") -> str:
    """All texts of one kind in the outputs of a cell."""
    return "".join("".join(each["data"].get(kind, "")) for each in outputs if "data" in each)


def test_the_notebook_of_a_first_run(executed: Any) -> None:
    loaded, planned, estimated, ran, summary, records, runs, report, answer, wrong = executed(NOTEBOOKS[0], **SMALL)
    assert text_of(loaded) == "(20, 0.003)"
    assert text_of(planned).startswith("Plan of quickstart")
    assert "fits" in text_of(estimated)
    assert [each["output_type"] for each in ran] == ["display_data"], "one picture, which is renewed"
    picture = text_of(ran, "text/html")
    assert "<b>done</b>" in picture
    assert "<polyline" in picture
    assert "Use it   trainkit generate " in picture, "the last lines of what the command line says"
    assert text_of(summary).startswith("('done', 20, ")
    assert text_of(records).startswith("[(18, ")
    assert "quickstart" in text_of(runs)
    assert text_of(report, "text/html").startswith("<iframe srcdoc=")
    assert len(text_of(answer)) > 2
    assert [each["ename"] for each in wrong] == ["RecipeError"]
    shown = "\n".join(wrong[0]["traceback"])
    assert "next: did you mean optimizer." in shown or "next: " in shown
    assert "site-packages" not in shown
    assert "trainkit/api" not in shown


def test_the_notebook_of_a_function_on_two_ranks(executed: Any) -> None:
    used, defined, ran, plan, printed, runs = executed(NOTEBOOKS[1])
    assert text_of(used).startswith("tensor(")
    assert defined == []
    picture = text_of(ran, "text/html")
    assert "<b>done</b>" in picture
    assert "<polyline" in picture
    assert text_of(plan).split()[:4] == ["('torchrun',", "2,", "{'step':", "60,"]
    assert text_of(printed).startswith("['2 ranks, weights [[")
    assert "ddp" in text_of(runs)


INTERRUPTED = """
import os, signal, threading
import trainkit
run = trainkit.run("held.py", "devices.type=cpu")
next(iter(run))
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
run.wait()
"""


def test_an_interrupted_cell_ends_its_run_in_order(executed: Any, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text("import time, trainkit\ntrainkit.log(1, loss=1.0)\ntime.sleep(600)\n")
    first, second, third = executed(notebook(tmp_path, INTERRUPTED, "(run.state, run.exit_code)", "run"))
    assert [each["ename"] for each in first if each["output_type"] == "error"] == ["KeyboardInterrupt"]
    assert text_of(second) == "('cancelled', 130)"
    assert "<b>cancelled</b>" in text_of(third, "text/html")


SWEEP = """
import trainkit
trainkit.sweep("own.yaml", {"optimizer.lr": [2, 3]}, folder="found")
"""
HELD_SWEEP = """
import glob, os, signal, threading, time

def interrupt():
    while not glob.glob("runs/held/*/metrics.jsonl"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
trainkit.sweep("own.yaml", {"optimizer.lr": [9, 2]}, "name=held")
"""
ENDED = """
[each.state.word for each in trainkit.runs("held")]
"""
RATED = """
import os, pathlib, re, time, trainkit
rate = float(re.search(r"lr: (\\S+)", pathlib.Path(os.environ["TRAINKIT_RECIPE"]).read_text())[1])
trainkit.log(1, eval_loss=rate)
while rate == 9:
    time.sleep(0.02)
"""
OWN = """
version: 1
name: own
program: {kind: torch, script: program.py, reads_recipe: true}
devices: {type: cpu}
launcher: {kind: python, grace_seconds: 5}
"""


def test_a_sweep_shows_how_far_it_is_and_its_table_and_an_interrupt_ends_it(executed: Any, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "program.py").write_text(RATED)
    (tmp_path / "own.yaml").write_text(OWN)
    swept, interrupted, states = executed(notebook(tmp_path, SWEEP, HELD_SWEEP, ENDED))
    assert [each["output_type"] for each in swept] == ["display_data", "execute_result"]
    assert "trial 1: done, loss 3.0000" in text_of(swept, "text/html")
    assert text_of(swept[1:]).splitlines()[-1] == "best: trial 0, loss 2.0000: lr=2"
    assert [each["ename"] for each in interrupted if each["output_type"] == "error"] == ["KeyboardInterrupt"]
    assert text_of(states) == "['cancelled']"


def notebook(folder: Path, *sources: str) -> Path:
    """A notebook of these cells, which may fail."""
    cells: list[dict[str, Any]] = [
        {"cell_type": "code", "id": str(number), "execution_count": None, "outputs": [], "source": source,
         "metadata": {"tags": ["raises-exception"]}}
        for number, source in enumerate(sources)
    ]  # fmt: skip
    file = folder / "made.ipynb"
    file.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return file
