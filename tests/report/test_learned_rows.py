"""Rows of a run's data in its report: with what was learned of them, or why there are none."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_up_runs import MakeRun
from tests.trainer.sources import lines
from trainkit.html_report.collect import collect
from trainkit.html_report.page import page
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo

pytestmark = pytest.mark.torch  # NumPy comes with the libraries around torch


def test_rows_are_found_from_any_folder_and_shown_until_they_are_gone(
    make_run: MakeRun, info: Callable[[RunLayout], RunInfo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainkit.data.prepare import prepare
    from trainkit.trainer.settings import read_settings

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [{"prompt": f"say {number}: ", "completion": f"<b>{number}</b>"} for number in range(9)]
    file = lines(tmp_path / "rows.jsonl", rows)
    layout = make_run("one", recipe={"data": {"kind": "dataset", "path": "rows.jsonl", "validation_fraction": 0.3}})
    settings = layout.root / "trainer.json"
    settings.write_text(json.loads(layout.plan.read_text())["files"]["trainer.json"])

    monkeypatch.chdir(tmp_path)
    time.sleep(2.1)  # until the file counts as settled
    prepare(read_settings(settings).recipe, layout.root, os.environ)
    monkeypatch.chdir("/")
    run = collect(info(layout), "one", os.environ)
    assert [[learned for _, learned in row] for row in run.rows] == [[False, True]] * 3
    assert "say 1: <mark>&lt;b&gt;1&lt;/b&gt;" in page([run], "one") or "say 0: <mark>" in page([run], "one")

    file.unlink()
    gone = collect(info(layout), "one", os.environ)
    assert gone.rows == []
    assert f"{file} does not exist" in page([gone], "one")
