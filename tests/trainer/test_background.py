"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from tests.trainer.training import CPU, MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.trainer.__main__ import train_and_report
from trainkit.trainer.checkpoint import saving
from trainkit.trainer.checkpoint.manifest import generators_file, newest
from trainkit.trainer.loop import SignalRequests
from trainkit.trainer.parallel import single_and_ddp
from trainkit.trainer.randomness import generator_states
from trainkit.trainer.settings import World

SHORT: dict[str, Any] = {"train": {"steps": 6}, "eval": {"every_steps": 0}}


@pytest.mark.parametrize(
    ("asynchronous", "module", "name"),
    [(True, state_dict_saver, "save"), (False, saving, "described_files")],
    ids=["what is written from a copy", "the checksums of what training has waited for"],
)
def test_a_slow_disk_does_not_hold_up_training_and_what_it_gets_is_the_state_of_its_step(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, module: Any, name: str
) -> None:
    honest, steps_meanwhile, step = getattr(module, name), [], [0]

    def slow(*args: Any, **options: Any) -> Any:
        # At the end no step follows that a copy would let go on.
        ends = asynchronous and step[0] == 6
        assert threading.current_thread().name == ("MainThread" if ends else "checkpoint_0")
        began, deadline = step[0], time.monotonic() + 30
        while step[0] < min(began + 2, 6) and time.monotonic() < deadline:  # until training has gone on
            time.sleep(0.01)
        steps_meanwhile.append(step[0] - began)
        return honest(*args, **options)

    def counted(self: single_and_ddp.Engine, learning_rate: float) -> Any:
        norm = update(self, learning_rate)
        step[0] += 1
        return norm

    update = single_and_ddp.Engine.update
    monkeypatch.setattr(single_and_ddp.Engine, "update", counted)
    monkeypatch.setattr(module, name, slow)
    settings = make_settings(**SHORT, checkpoint={"every_steps": 3, "asynchronous": asynchronous})
    whole = trained(settings).losses
    assert steps_meanwhile == [2, 0]  # the end of a run waits for the last one
    before, end = sorted((settings.run_dir / "checkpoints").iterdir())
    assert (before.name, end.name) == ("step-00000003", "step-00000006")
    assert trained(dataclasses.replace(make_settings(**SHORT), resume=before)).losses == whole[3:]


def test_a_checkpoint_that_cannot_be_written_in_the_background_ends_the_run_in_words(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state_dict_saver, "save", fail)
    settings = make_settings(**SHORT, checkpoint={"every_steps": 3, "asynchronous": True})
    with pytest.raises(TrainingError, match=r"checkpoint of step 3 cannot be written .* No space left on device"):
        trained(settings)
    assert newest(settings.run_dir / "checkpoints") is None


class Unasked(SignalRequests):
    """Takes over no signals: they are the test runner's."""

    def listen(self, *numbers: signal.Signals) -> None:
        """Nothing."""


def test_a_run_that_fails_meanwhile_still_finishes_the_checkpoint_of_the_step_before(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = state_dict_saver.save

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.5)
        return honest(*args, **options)

    monkeypatch.setattr(state_dict_saver, "save", slow)
    exploding: dict[str, Any] = {"optimizer": {"lr": 1e12, "weight_decay": 1e12}, "schedule": {"warmup_steps": 0}}
    settings = make_settings(**SHORT, **exploding, checkpoint={"every_steps": 1, "asynchronous": True})
    with pytest.raises(TrainingError, match=r"at step 2"):
        train_and_report(settings, World(), CPU, Unasked())
    assert [path.name for path in (settings.run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_checkpoint_that_is_written_later_has_the_generators_states_of_its_step(make_settings: MakeSettings) -> None:
    settings = make_settings(**SHORT, checkpoint={"every_steps": 1, "asynchronous": True})
    parts, drawn = parts_of(settings), threading.Event()
    parts.checkpoints._thread.submit(drawn.wait, 60)  # what the checkpoint has to wait for
    states = generator_states()
    parts.checkpoints.save(1, parts.strategy)
    torch.rand(3)
    drawn.set()
    parts.checkpoints.wait()
    saved = generators_file(settings.run_dir / "checkpoints/step-00000001", 0).read_bytes()
    assert saved == states != generator_states()
