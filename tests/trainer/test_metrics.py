"""Metrics: JSON lines that any reader takes, a disk that is full, TensorBoard's event file."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from trainkit import metrics_file
from trainkit.metrics_file import JsonLines
from trainkit.trainer.loop import SignalRequests, train
from trainkit.trainer.metrics.writers import Metrics
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble


def test_what_is_no_finite_number_is_null_in_the_file(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl", pytest.fail)) as lines:
        lines.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "learning_rate": 0.5})
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1, "loss": null, "grad_norm": null, "learning_rate": 0.5}\n'


def test_a_second_attempt_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        with closing(JsonLines(tmp_path / "metrics.jsonl", pytest.fail)) as lines:
            lines.write({"step": step})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_costs_lines_and_one_warning_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_file, "open_regular", lambda path, flags: os.open("/dev/full", os.O_WRONLY))
    with caplog.at_level(logging.WARNING), closing(Metrics(tmp_path, [], main=True)) as metrics:
        metrics.write({"step": 1})
        metrics.write({"step": 2})
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/metrics.jsonl cannot be written, the run continues without it: No space left on device"
    ]


def test_what_has_taken_the_name_of_the_metrics_is_not_written_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "other")
    with caplog.at_level(logging.WARNING), closing(Metrics(tmp_path, [], main=True)) as metrics:
        metrics.write({"step": 1})
    assert "metrics.jsonl cannot be written, the run continues without it" in caplog.text
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on another process's files")
def test_lines_after_a_torn_one_are_whole(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told: list[str] = []
    with closing(JsonLines(tmp_path / "metrics.jsonl", told.append)) as lines:
        lines.write({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        try:
            lines.write({"step": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        lines.write({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step":\n{"step": 3}\n'


def test_tensorboard_gets_every_number_of_every_step(make_settings: Callable[..., Settings]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = make_settings(train={"steps": 3}, eval={"every_steps": 3}, logging={"report_to": ["tensorboard"]})
    with closing(Metrics(settings.run_dir, settings.recipe.logging.report_to, main=True)) as metrics:
        train(assemble(settings, World(), torch.device("cpu")), 0, metrics, SignalRequests())
    records = [json.loads(line) for line in (settings.run_dir / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(settings.run_dir / "tensorboard"))
    events.Reload()
    for name in ("loss", "learning_rate", "grad_norm", "eval_loss"):
        wanted = [(record["step"], pytest.approx(record[name])) for record in records if name in record]
        assert [(event.step, event.value) for event in events.Scalars(name)] == wanted
