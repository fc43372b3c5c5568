"""trainkit bench with real runs: table, files and plot, with a variant that fails and one that cannot be planned."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
VARIANTS = """\
variants:
  bf16: {description: bfloat16 autocast, precision: bf16}
  greedy: {program: {kind: torch, script: greedy.py, reads_recipe: true}}
  odd: {strategy: {kind: ddp}, launcher: {kind: python}, nodes: {processes_per_node: 2}}
"""
# Smaller than shipped, through a layer that any user may use.
SMALL = {
    "TRAINKIT__MODEL__HIDDEN_SIZE": "16",
    "TRAINKIT__MODEL__LAYERS": "1",
    "TRAINKIT__MODEL__HEADS": "2",
    "TRAINKIT__DATA__SEQUENCE_LENGTH": "16",
    "TRAINKIT__TRAIN__STEPS": "2",
}


@pytest.fixture
def recipe(tiny_recipe: Path) -> Path:
    """The tiny recipe with a variant that works, one that runs out of memory, and one that no launcher can start."""
    tiny_recipe.write_text(tiny_recipe.read_text() + VARIANTS)
    (tiny_recipe.parent / "greedy.py").write_text("import sys; sys.exit('MemoryError: all of it')\n")
    return tiny_recipe


@pytest.mark.e2e
def test_a_bench_accounts_for_every_variant_and_fails_if_one_did(trainkit: Trainkit, recipe: Path) -> None:
    done = trainkit("bench", recipe.name, "--output", "found")
    assert done.returncode == 1, done.stderr
    head, *lines = done.stdout.splitlines()
    assert "peak RSS" in head
    assert [line.split()[0] for line in lines[:4]] == ["base", "bf16", "greedy", "odd"]
    assert "out of memory: MemoryError: all of it" in lines[2]
    assert "refused" in lines[3]
    assert "3 of 3  greedy" in done.stderr
    assert "left)" in done.stderr

    found = recipe.parent / "found"
    with (found / "bench.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "base": "ok",
        "bf16": "ok",
        "greedy": "out of memory",
        "odd": "refused",
    }
    assert rows["bf16"]["description"] == "bfloat16 autocast"
    data = {row["variant"]: row for row in json.loads((found / "bench.json").read_text())["rows"]}
    for name in ("base", "bf16"):
        (run,) = data[name]["runs"]
        summary = json.loads(Path(run["run_directory"], "summary.json").read_text())
        assert float(rows[name]["samples_per_second"]) == summary["samples_per_second"]
        assert int(rows[name]["memory_bytes"]) == summary["memory"][0]["rss"]
        assert float(rows[name]["final_loss"]) == summary["final_loss"]
    assert float(rows["base"]["relative_speed"]) == 1.0
    assert "bf16" in Path(data["bf16"]["runs"][0]["run_directory"], "recipe.yaml").read_text()
    check_plot(found, ["base", "bf16", "greedy", "odd", "out of memory", "refused"])
    page = (found / "report.html").read_text()
    assert all(f"<span>{name}</span></button>" in page for name in ("base", "bf16", "greedy"))
    assert "refused" in page.partition("<section")[2].partition("</section>")[0]  # the table comes first
    assert "MemoryError: all of it" in page


def check_plot(folder: Path, words: list[str]) -> None:
    """Whether both files are pictures; the SVG, whose text is text, holds the words."""
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")
    texts = [each.text for each in ElementTree.parse(folder / "bench.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert {*words, "samples per second", "Memory (less is better)"} <= {text for text in texts if text}


@pytest.mark.e2e
def test_repeated_runs_and_chosen_variants_are_reported_as_json(trainkit: Trainkit, recipe: Path) -> None:
    words = ("--only", "bf16", "--no-base", "--repeat", "2", "--no-plot", "--json")
    done = trainkit("bench", recipe.name, *words, "--hub_model_id=ada/tiny", "--hub_strategy=all")
    assert done.returncode == 0, done.stderr  # without a token for the Hub
    assert done.stderr.count("note: bench uploads nothing to ada/tiny\n") == 1
    (row,) = json.loads(done.stdout)["rows"]
    assert row["variant"] == "bf16"
    assert len({run["run_directory"] for run in row["runs"]}) == 2
    (folder,) = (recipe.parent / "runs" / "tiny").glob("bench-*")
    assert sorted(path.name for path in folder.iterdir()) == ["bench.csv", "bench.json", "report.html"]


@pytest.mark.e2e
def test_an_interrupt_ends_the_run_in_order_and_leaves_the_table_of_what_is_done(
    recipe: Path, clean_environment: dict[str, str]
) -> None:
    text = recipe.read_text().split("variants:")[0]
    recipe.write_text(f"{text}variants:\n  slow: {{train: {{steps: 1000000}}}}\n  late: {{}}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "trainkit", "bench", recipe.name, "--no-plot", "--output", "found"],
        cwd=recipe.parent,
        env=clean_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(recipe.parent / "runs" / "tiny", runs=2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGINT, err
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["base", "slow"]
    assert "interrupted" in out
    assert "not run: late" in out
    rows = json.loads((recipe.parent / "found" / "bench.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["ok", "interrupted"]


def wait_for_steps(parent: Path, runs: int) -> None:
    """Until so many runs have begun, and the latest of them has logged a step."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = sorted(path for path in parent.glob("*/metrics.jsonl") if path.stat().st_size)
        if len(found) >= runs and '"loss"' in found[-1].read_text():
            return
        time.sleep(0.1)
    raise AssertionError("no step was logged")


@pytest.mark.e2e
def test_the_shipped_table_runs_through_on_a_cpu(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("bench", "efficiency-table-small", "--output", "found", environ=SMALL, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    data = json.loads((tmp_path / "found" / "bench.json").read_text())
    assert len(data["rows"]) > 10
    assert all(row["samples_per_second"] > 0 and row["memory_bytes"] > 0 for row in data["rows"])
    losses = {row["variant"]: row["final_loss"] for row in data["rows"]}
    assert losses["accumulation"] == pytest.approx(losses["base"], rel=1e-4)
    assert losses["checkpointing"] == losses["accumulation"]
    check_plot(tmp_path / "found", [row["variant"] for row in data["rows"]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "tiny.yaml", "--only", "bf61"), "did you mean bf16?"),
        (("bench", "quickstart"), "no variants to compare"),
        (("bench",), "no recipe is named"),
        (("bench", "tiny.yaml", "--variant", "bf16"), "variant"),
        (("bench", "tiny.yaml", "--no-base", "--only", ","), "nothing is left to run"),
    ],
)
def test_a_bench_without_sense_is_refused(trainkit: Trainkit, recipe: Path, words: list[str], message: str) -> None:
    assert recipe.name == "tiny.yaml"
    done = trainkit(*words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_the_table_of_the_guides_is_a_valid_recipe_with_sound_rows(trainkit: Trainkit) -> None:
    done = trainkit("check", "efficiency-table", "efficiency-table-small")
    assert done.returncode == 0, done.stderr
    planned = trainkit("plan", "efficiency-table", "--variant", "accumulation", "devices.type=cpu")
    assert "Batch: 4 = 1" in planned.stdout, planned.stderr


def test_a_folder_that_cannot_be_made_is_said_before_anything_runs(trainkit: Trainkit, recipe: Path) -> None:
    done = trainkit("bench", recipe.name, "--output", f"{recipe.name}/inside")
    assert done.returncode == 4, done.stderr
    assert "--output" in done.stderr
    assert not (recipe.parent / "runs").exists()


def test_a_missing_plotting_package_is_said_before_anything_runs(trainkit: Trainkit, recipe: Path) -> None:
    # A finder that does not find the one package stands for an environment without it.
    hide = (
        "import importlib.machinery as m\n"
        "find = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = staticmethod(lambda n, *more: None if n == 'matplotlib' else find(n, *more))\n"
    )
    (recipe.parent / "site").mkdir()
    (recipe.parent / "site" / "sitecustomize.py").write_text(hide)
    root = str(Path(__file__).resolve().parents[2])
    done = trainkit("bench", recipe.name, environ={"PYTHONPATH": f"{recipe.parent / 'site'}:{root}"})
    assert done.returncode == 4, done.stderr
    assert f"{sys.executable} -m pip install 'matplotlib>=3.8,<4'" in done.stderr
    assert not (recipe.parent / "runs").exists()
