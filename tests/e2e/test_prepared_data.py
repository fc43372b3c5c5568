"""Rows become token ids before ranks start: once for all of them, and one that is wrong ends the run there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Trainkit

RECIPE = (
    "version: 1\nname: rows\ndevices: {{type: cpu}}\nstrategy: {{kind: ddp}}\nnodes: {{processes_per_node: 2}}\n"
    "model: {{layers: 1, heads: 1, hidden_size: 8}}\n"
    "data: {{path: {path}, sequence_length: 32}}\nbatch: {{global: 8, micro: 2}}\ntrain: {{steps: 2}}\n"
)
LONG = {"text": "many words " * 500}


def runs(folder: Path) -> list[Path]:
    return sorted((folder / "runs/rows").glob("*/"))


BEHIND = {
    "a number": ({"text": 7}, "field 'text' is no text but a number"),
    "no object": ([1], "is not a JSON object"),
}


@pytest.mark.parametrize("kind", BEHIND)
def test_a_wrong_row_behind_those_of_the_plan_ends_a_run_before_its_ranks_start(
    kind: str, trainkit: Trainkit, tmp_path: Path
) -> None:
    row, message = BEHIND[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*[LONG] * 60, row, *[LONG] * 9]))
    assert path.stat().st_size > 1 << 18
    (tmp_path / "r.yaml").write_text(RECIPE.format(path="rows.jsonl"))
    assert trainkit("plan", "r.yaml").returncode == 0
    done = trainkit("run", "r.yaml")
    assert done.returncode == 2, done.stderr
    assert (done.stdout + done.stderr).count(f"{path}:61") == 1, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    [run] = runs(tmp_path)
    assert not list(run.glob("logs/rank-*")), "no rank was started"
    assert not list(run.glob("metrics.jsonl"))


def test_a_mended_file_is_prepared_again_and_a_second_run_finds_it_ready(
    trainkit: Trainkit, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} of these"}) + "\n" for number in range(80)))
    (tmp_path / "r.yaml").write_text(RECIPE.format(path="rows.jsonl"))
    said = []
    for _ in range(2):
        done = trainkit("run", "r.yaml")
        assert done.returncode == 0, done.stderr
        said.append(done.stdout + done.stderr)
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs(tmp_path)]
    assert len(summaries) == 2
    prepared = list(Path(clean_environment["HOME"], ".cache/trainkit/prepared").glob("*/meta.json"))
    assert len(prepared) == 1
