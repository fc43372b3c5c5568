"""What a checkpoint's pickles may hold: data, and nothing that runs when it is read."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.runner.rundir.checkpoints import checksum
from trainkit.trainer.checkpoint import safe_loading
from trainkit.trainer.checkpoint.manifest import described_files, read_manifest
from trainkit.trainer.checkpoint.resuming import load
from trainkit.trainer.checkpoint.safe_loading import only_data, unpickled
from trainkit.trainer.randomness import generator_states, restore_generator_states
from trainkit.trainer.settings import Settings, World
from trainkit.trainer.setup import assemble

MakeSettings = Callable[..., Settings]


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_generators_go_on_from_their_states() -> None:
    states = generator_states()
    drawn = random.random(), np.random.random(), float(torch.rand(()))
    restore_generator_states(states)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == drawn


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_data_of_every_protocol_is_read(protocol: int) -> None:
    array = np.arange(6, dtype=np.uint32)
    read = unpickled(pickle.dumps({"array": array, "path": Path("a/b")}, protocol))
    assert read["array"].tolist() == array.tolist()
    assert read["path"] == Path("a/b")


def test_what_another_python_wrote_is_refused_and_not_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(safe_loading._NAMES, "pathlib._elsewhere", ("PosixPath",))
    with pytest.raises(pickle.UnpicklingError, match=r"_elsewhere\.PosixPath is not in this Python"):
        unpickled(b"cpathlib._elsewhere\nPosixPath\n.")


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_that_names_a_function_is_refused_before_it_runs(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="mkdir is no data"):
        unpickled(pickle.dumps({"python": Harm(tmp_path / "done")}, protocol))
    with pytest.raises(pickle.UnpicklingError, match="is no data"):  # of what the module imports itself
        unpickled(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    assert not (tmp_path / "done").exists()


def test_metadata_and_weights_that_would_run_something_are_refused(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/.metadata").write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    with pytest.raises(pickle.UnpicklingError), only_data(tmp_path / "state"):
        pass
    torch.save({"loss_scaler": Harm(tmp_path / "done")}, tmp_path / "0.pt")
    with pytest.raises(pickle.UnpicklingError), only_data():
        torch.load(tmp_path / "0.pt", weights_only=False)  # as DeepSpeed asks for it
    assert not (tmp_path / "done").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_checkpoint_with_harm_in_it_is_refused_in_one_line(make_settings: MakeSettings, tmp_path: Path) -> None:
    parts = assemble(make_settings(), World(), torch.device("cpu"))
    parts.checkpoints.save(1, parts.strategy)
    assert parts.checkpoints.root is not None
    folder = parts.checkpoints.root / "step-00000001"
    (folder / "generators-0.pickle").write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    content = {**read_manifest(folder), "files": described_files(folder, World())}
    (folder / "manifest.json").write_text(json.dumps({**content, "checksum": checksum(content)}))
    with pytest.raises(TrainingError, match=r"holds more than data, and is not read: .*mkdir is no data"):
        load(folder, parts.checkpoints.identity, parts.strategy, World())
    assert not (tmp_path / "done").exists()
