"""What a checkpoint's pickles may hold: data, and nothing that runs when it is read."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from tests.trainer.training import MakeSettings, parts_of
from trainkit.errors import TrainingError
from trainkit.runner.rundir.listing import checksum
from trainkit.trainer.checkpoint import safe_loading
from trainkit.trainer.checkpoint.manifest import described_files, read_manifest
from trainkit.trainer.checkpoint.resuming import load
from trainkit.trainer.checkpoint.safe_loading import StateReader, only_data, unpickled
from trainkit.trainer.parallel.single_and_ddp import quiet
from trainkit.trainer.randomness import generator_states, restore_generator_states
from trainkit.trainer.settings import World


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self._path),)


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))


def pickled_states(protocol: int) -> bytes:
    """As older checkpoints hold them."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return pickle.dumps(states, protocol)


@pytest.mark.parametrize(
    "states", [generator_states, partial(pickled_states, 2), partial(pickled_states, 4)], ids=["JSON", "2", "4"]
)
def test_generators_go_on_from_their_states(states: Callable[[], bytes]) -> None:
    saved, expected = states(), draw()
    restore_generator_states(saved)
    assert draw() == expected


def test_the_generator_of_mps_goes_on_too_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)  # in place of a Mac's
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", generator.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generator.set_state)
    states = generator_states()
    drawn = torch.rand(4, generator=generator).tolist()
    restore_generator_states(states)
    assert torch.rand(4, generator=generator).tolist() == drawn
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    restore_generator_states(states)  # of a Mac, read elsewhere
    assert torch.rand(4, generator=generator).tolist() != drawn


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_data_of_every_protocol_is_read(protocol: int) -> None:
    array = np.arange(6, dtype=np.uint32)
    read = unpickled(pickle.dumps({"array": array, "path": Path("a/b")}, protocol))
    assert read["array"].tolist() == array.tolist()
    assert read["path"] == Path("a/b")


def test_what_another_python_wrote_is_refused_and_not_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(safe_loading._NAMES, "pathlib._elsewhere", ("PosixPath",))
    with pytest.raises(pickle.UnpicklingError, match=r"_elsewhere\.PosixPath is missing in this Python"):
        unpickled(b"cpathlib._elsewhere\nPosixPath\n.")


@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_that_names_a_function_is_refused_before_it_runs(protocol: int, tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError, match="mkdir is not plain data"):
        unpickled(pickle.dumps({"python": Harm(tmp_path / "done")}, protocol))
    with pytest.raises(pickle.UnpicklingError, match="is not plain data"):  # of what the module imports itself
        unpickled(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("name", [".metadata", "__0.metadata"])
def test_metadata_that_would_run_something_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    with pytest.raises((FileNotFoundError, pickle.UnpicklingError)):
        state_dict_loader.load({"x": torch.zeros(1)}, storage_reader=StateReader(tmp_path))
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("place", ["../outside.distcp", "/etc/hostname", "gone", "", "."])
def test_metadata_that_leads_out_of_the_folder_is_refused(place: str, tmp_path: Path) -> None:
    state, inside = {"x": torch.zeros(1)}, tmp_path / "state"
    with quiet():
        state_dict_saver.save(state, checkpoint_id=inside)
    shutil.copy(inside / "__0_0.distcp", tmp_path / "outside.distcp")
    found = StateReader(inside).read_metadata()
    assert found.storage_data
    for each in found.storage_data.values():
        each.relative_path = place
    (inside / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(pickle.UnpicklingError, match="not a file beside it"):
        StateReader(inside)


def test_weights_that_would_run_something_are_refused(tmp_path: Path) -> None:
    torch.save({"loss_scaler": Harm(tmp_path / "done")}, tmp_path / "0.pt")
    with pytest.raises(pickle.UnpicklingError), only_data():
        torch.load(tmp_path / "0.pt", weights_only=False)  # as DeepSpeed asks for it
    assert not (tmp_path / "done").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_a_compressed_archive_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(8)}, tmp_path / "0.pt")
    with zipfile.ZipFile(tmp_path / "0.pt") as archive, zipfile.ZipFile(tmp_path / "1.pt", "w", 8) as bomb:
        for part in archive.infolist():
            bomb.writestr(part.filename, archive.read(part) + bytes(2**20 if "/data/" in part.filename else 0))
    with pytest.raises(pickle.UnpicklingError, match="compressed"), only_data():
        torch.load(tmp_path / "1.pt")
    with only_data():
        assert torch.load(tmp_path / "0.pt")["x"].numel() == 8


# `Path.open = _codecs.encode`: a state may be given to a class, and then sets its attributes.
ON_A_CLASS = b"\x80\x04\x8c\x07pathlib\x8c\x04Path\x93N}(\x8c\x04open\x8c\x07_codecs\x8c\x06encode\x93u\x86b."
ON_A_FUNCTION = b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93}\x8c\x01a\x8c\x01bsb."
# An array of objects, of a type whose state says that it is none: its bytes are taken for addresses.
OF_ADDRESSES = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01\x85cnumpy\ndtype\n"
    b"U\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08AAAAAAAAtb."
)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (ON_A_CLASS, "a state of Path is not plain data"),
        (OF_ADDRESSES, "an array of 'O8' is not plain data"),
        (ON_A_FUNCTION, "a state of function is not plain data"),
        (b"\x80\x04\x8c\x07_codecs\x8c\x06encode\x93\x8c\x01a\x8c\x03bz2\x86R.", "the codec 'bz2' is not plain data"),
        (b"\x80\x04(", "damaged"),
    ],
)
def test_what_is_allowed_cannot_be_misused(content: bytes, what: str) -> None:
    before = Path.open
    with pytest.raises(pickle.UnpicklingError, match=what):
        unpickled(content)
    assert Path.open is before


@pytest.mark.parametrize("harm", [{"numpy": ["MT19937", [0] * 624, 10**6, 0, 0.0]}, {"python": 3}, {"torch": [0]}])
def test_states_of_generators_that_are_none_are_refused(harm: dict[str, Any]) -> None:
    with pytest.raises(pickle.UnpicklingError):
        restore_generator_states(json.dumps({**json.loads(generator_states()), **harm}).encode())


def test_a_checkpoint_with_harm_in_it_is_refused_in_one_line(make_settings: MakeSettings, tmp_path: Path) -> None:
    parts = parts_of(make_settings())
    parts.checkpoints.save(1, parts.strategy)
    parts.checkpoints.wait()
    assert parts.checkpoints.root is not None
    folder = parts.checkpoints.root / "step-00000001"
    (folder / "generators-0.pickle").write_bytes(pickle.dumps(Harm(tmp_path / "done")))
    content = {**read_manifest(folder), "files": described_files(folder, World())}
    (folder / "manifest.json").write_text(json.dumps({**content, "checksum": checksum(content)}))
    with pytest.raises(
        TrainingError, match=r"is refused, because it holds more than plain data: .*mkdir is not plain data"
    ):
        load(folder, parts.checkpoints.identity, parts.strategy, World())
    assert not (tmp_path / "done").exists()
