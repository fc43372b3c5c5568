"""A data set of the user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Case, write_settings

from trainkit.errors import TrainingError
from trainkit.recipe.schema import Recipe, TargetData
from trainkit.trainer.data.target import open_source

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
import torch

class Rows:
    def __init__(self, size=40, seconds=0.0, highest=99, broken=-1):
        self.size, self.seconds, self.highest, self.broken = size, seconds, highest, broken
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(self.seconds)
        if index == self.broken:
            raise KeyError("no such row")
        ids = torch.arange(index, index + 9) % (self.highest + 1)
        return {"tokens": ids[:-1], "targets": ids[1:]}

def pair(first, second):
    return Rows(first), Rows(second)

def first_half(samples):
    return {"tokens": torch.stack([sample["tokens"] for sample in samples])[:, :4],
            "targets": torch.stack([sample["targets"] for sample in samples])[:, :4]}

def halved(samples):
    return {"tokens": samples[0]["tokens"][None]}

def listed(samples):
    return [samples]
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A recipe over the program above, which stands in the working folder under a name of its own."""
    module = f"rows_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{module}.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def recipe(name: str, collate: str | None = None, **args: Any) -> Recipe:
        data = {"kind": "target", "target": f"{module}:{name}", "args": args}
        return Recipe.model_validate({"data": data | ({"collate": f"{module}:{collate}"} if collate else {})})

    return recipe


def test_samples_of_the_users_own_become_batches_with_the_end_held_out(target: Callable[..., Recipe]) -> None:
    source = open_source(target("Rows"), Path())
    assert (len(source.train), len(source.validation)) == (38, 2)
    assert source.validation[[0]].inputs["tokens"].tolist() == [list(range(38, 46))]
    assert source.train[[3, 5]].counted == 16
    assert [len(each) for each in (open_source(target("pair", first=7, second=3), Path())).train[[0]].inputs.values()]
    assert len(open_source(target("pair", first=7, second=3), Path()).validation) == 3


def test_a_collate_function_makes_the_batch(target: Callable[..., Recipe]) -> None:
    batch = open_source(target("Rows", "first_half"), Path()).train[[3, 5]]
    assert batch.inputs["tokens"].tolist() == [[3, 4, 5, 6], [5, 6, 7, 8]]
    assert batch.counted == 8


@pytest.mark.parametrize(
    ("name", "collate", "args", "message"),
    [
        ("Gone", None, {}, "data.target: .*:Gone cannot be imported"),
        ("Rows", "gone", {}, "data.collate: .*:gone cannot be imported"),
        ("Rows", None, {"sise": 3}, "data.target: .*:Rows failed: TypeError: .*sise"),
        ("Rows", None, {"size": 0}, "data.target: .*:Rows gives no training sample"),
        ("Rows", None, {"broken": 3}, "data.target: .*:Rows failed: KeyError: 'no such row'"),
        ("Rows", "halved", {}, "data.collate: .*:halved gives tokens .1, 8. for 2 samples"),
        ("Rows", "listed", {}, "data.collate: a batch of .*:listed must be a mapping of tensors"),
    ],
)
def test_what_goes_wrong_in_the_users_code_names_it(
    name: str, collate: str | None, args: dict[str, int], message: str, target: Callable[..., Recipe]
) -> None:
    with pytest.raises(TrainingError, match=message):
        source = open_source(target(name, collate, **args), Path())
        for index in range(0, len(source.train) - 1, 2):
            source.train[[index, index + 1]]


def test_an_error_in_the_users_code_points_at_its_line(target: Callable[..., Recipe]) -> None:
    source = open_source(target("Rows", broken=3), Path())
    with pytest.raises(TrainingError) as caught:
        source.train[[3]]
    line = PROGRAM.splitlines().index('            raise KeyError("no such row")') + 1
    assert caught.value.diagnostics[0].hint.endswith(f".py:{line}")


def test_a_target_must_be_an_import_path() -> None:
    for wrong in ("rows.py", "rows", "rows:", ":Rows", "a b:c"):
        with pytest.raises(ValueError, match="target"):
            TargetData(target=wrong)
    with pytest.raises(ValueError, match="target must name the data set"):
        TargetData()


@pytest.mark.e2e
def test_workers_hide_a_slow_data_set_and_the_summary_says_what_waiting_costs(tmp_path: Path) -> None:
    (tmp_path / "slow_rows.py").write_text(PROGRAM)
    shares, said = [], []
    for workers in (0, 2):
        data = {"kind": "target", "target": "slow_rows:Rows", "args": {"seconds": 0.03}, "sequence_length": 32}
        case = Case({"kind": "single"}, ranks=1).changed(
            data={**data, "workers": workers}, train={"steps": 6}, eval={"every_steps": 0}
        )
        settings = write_settings(tmp_path / f"run-{workers}", case, tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "trainkit.trainer", "--settings", str(settings)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        shares.append(json.loads((settings.parent / "result.json").read_text())["data_wait_share"])
        said.append(done.stderr)
    assert shares[0] > 0.5
    assert shares[1] < shares[0]
    assert "of the training time was spent waiting for data" in said[0]
    assert "set data.workers to 2 or more" in said[0]
