"""The folder that state is swapped to, and what a checkpoint of it may set. Real runs are in e2e/test_nvme."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strategy_runs import Case, write_settings

from trainkit.errors import TrainingError
from trainkit.trainer.parallel.swapping import COUNTERS, load_swapped, save_swapped, swap_folder, swap_space
from trainkit.trainer.settings import Settings, read_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    strategy = {"kind": "zero3", "offload_optimizer": "nvme", "nvme_path": str(tmp_path / "disk")}
    return read_settings(write_settings(tmp_path / "run", Case(strategy, ranks=1), tmp_path / "corpus"))


def test_the_folder_is_ours_alone_and_gone_afterwards(settings: Settings) -> None:
    folder = swap_folder(settings)
    assert folder is not None
    with swap_space(settings):
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "state").write_text("x")
    assert not list(folder.parent.iterdir())


@pytest.mark.parametrize("planted", ["link", "file", "another user's"])
def test_what_somebody_has_put_in_its_place_is_not_used(
    settings: Settings, planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = swap_folder(settings)
    assert folder is not None
    folder.parent.mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    if planted == "link":
        folder.symlink_to(tmp_path / "theirs")
    elif planted == "file":
        folder.touch()
    else:
        folder.mkdir()
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with (
        pytest.raises(TrainingError, match=r"strategy\.nvme_path: .* cannot be used: another user's"),
        swap_space(settings),
    ):
        pass
    assert (tmp_path / "theirs").exists()


def engine(**counters: int) -> Any:
    """One without groups of parameters, whose buffers and counters are all that is saved."""
    zero = SimpleNamespace(
        checkpoint_event_prologue=lambda: None, checkpoint_event_epilogue=lambda: None, fp16_groups=[], loss_scaler=1.0
    )
    return SimpleNamespace(optimizer=zero, module=torch.nn.Module(), **{**dict.fromkeys(COUNTERS, 0), **counters})


def test_a_checkpoint_sets_the_counters_and_nothing_else_of_the_engine(tmp_path: Path) -> None:
    save_swapped(engine(global_steps=7, micro_steps=14), tmp_path, 0)
    path = tmp_path / "swapped/0.pt"
    saved = torch.load(path)
    saved["counters"]["optimizer"] = "forged"
    torch.save(saved, path)
    loaded = engine()
    load_swapped(loaded, tmp_path, 0)
    assert {name: getattr(loaded, name) for name in COUNTERS} == {
        **dict.fromkeys(COUNTERS, 0),
        "global_steps": 7,
        "micro_steps": 14,
    }
    assert loaded.optimizer.fp16_groups == []
