"""Runs on data that is read while they train: killed and started again, on other ranks, and refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from killed_runs import OPEN_END, every_line, lines_in, log_of, wait_for
from strategy_runs import CASES, finish, write_settings

from tests.conftest import Trainkit
from tests.warm_ranks import run_case, start_ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sources in several files, each many times as large as what is shuffled at once."""
    folder, chance = tmp_path_factory.mktemp("rows"), random.Random(0)
    for name in ("a-0", "a-1", "b-0"):
        rows = [{"text": " ".join(chance.choices(("def", "return", "x", "for", "(", ")"), k=chance.randint(2, 30)))}
                for _ in range(120)]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mix = [
        {"path": [str(folder / "a-0.jsonl"), str(folder / "a-1.jsonl")], "weight": 3.0},
        {"path": str(folder / "b-0.jsonl"), "weight": 1.0},
    ]
    settings = {"shuffle_buffer": 24, "validation_rows": 10, "sequence_length": 32}
    return {"kind": "dataset", "streaming": True, "mix": mix, **settings}


def test_a_run_that_is_killed_in_a_stream_goes_on_bit_equal_and_as_on_one_rank(
    data: dict[str, Any], tmp_path: Path
) -> None:
    case = CASES["ddp"].changed(
        **OPEN_END, model={"dropout": 0.1}, data={**data, "workers": 1}, eval={"every_steps": 4},
        checkpoint={"every_steps": 4, "keep": 2},
    )  # fmt: skip
    run_dir = tmp_path / "run"
    settings = write_settings(run_dir, case, tmp_path)
    for attempt in range(3):
        processes = start_ranks(settings, 2, TORCHELASTIC_RESTART_COUNT=str(attempt))

        def is_far(seen: int = lines_in(run_dir), step: int = 5 * (attempt + 1)) -> bool:
            """Even where a loaded machine has saved nothing since the run went on."""
            return lines_in(run_dir) > seen + 9 and max(every_line(run_dir)[0]) >= step

        wait_for(is_far, processes, 110.0)
        for process in processes:
            process.kill()
        finish(processes)
    assert "resumed from" in log_of(run_dir)
    assert "is read first" not in log_of(run_dir)
    losses, norms = every_line(run_dir)
    last = max(losses)
    assert last > 12
    whole = run_case(tmp_path / "whole", case.changed(train={"steps": last}, checkpoint={}), tmp_path)
    assert losses == {step: {whole.losses[step]} for step in range(1, last + 1)}
    assert norms == {step: {whole.norms[step]} for step in range(1, last + 1)}
    alone = CASES["single"].changed(**{**dict(case.changes or {}), "data": data, "train": {"steps": 9}})
    one = run_case(tmp_path / "alone", alone.changed(checkpoint={}), tmp_path)
    assert one.losses == pytest.approx({step: whole.losses[step] for step in range(1, 10)}, rel=1e-6)
    # From a checkpoint of two ranks on one, where what is left is read in another process.
    found = sorted((run_dir / "checkpoints").glob("step-*"))[0]
    went_on = run_case(tmp_path / "moved", alone.changed(train={"steps": last}, checkpoint={}), tmp_path, resume=found)
    assert went_on.losses == pytest.approx({step: whole.losses[step] for step in went_on.losses}, rel=1e-5)
    assert max(went_on.losses) == last


TORN = (
    "version: 1\ndevices: {type: cpu}\ntrain: {steps: 40}\nmodel: {layers: 1, heads: 1, hidden_size: 8}\n"
    "data: {kind: dataset, streaming: true, path: rows.jsonl, sequence_length: 16, packing: none, validation_rows: 5}\n"
)


def test_a_run_ends_at_the_row_that_is_torn_with_one_message(trainkit: Trainkit, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"text": "some words " * 800}) + "\n"
    path.write_text(row * 40 + '{"text": "torn')  # behind what a plan looks at
    (tmp_path / "r.yaml").write_text(TORN)
    done = trainkit("run", "r.yaml")
    assert done.returncode == 1
    assert f"data.path: {path}:41 is not JSON" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_torn_row_among_the_first_ends_the_plan(trainkit: Trainkit, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "some words"}\n' * 40 + '{"text": "torn')
    (tmp_path / "r.yaml").write_text(TORN)
    done = trainkit("plan", "r.yaml")
    assert done.returncode == 2
    assert done.stderr.count("error") == 1
    assert f"data.path: {path}:41 is not JSON" in done.stderr
