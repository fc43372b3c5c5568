"""scripts/bench/size: its programs measure what they say, on small models, and it sees what would be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from strategy_runs import CASES

from tests.loaded_scripts import script

pytestmark = pytest.mark.e2e
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture(scope="module")
def size() -> Any:
    return script("bench/size")


def test_the_sparse_folder_of_a_llama_has_its_weights_and_takes_no_room(size: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    base = tmp_path / "base"
    nbytes = size.llama_folder(base, CONFIG)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False))
    (path,) = base.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(each.shape) for name, each in model.state_dict().items()}
    assert nbytes == 2 * sum(each.numel() for each in model.parameters())
    assert path.stat().st_blocks * 512 < nbytes / 4


@pytest.mark.needs("transformers>=5.10")  # older releases read whole tensors
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (4, "fake")])
def test_a_rank_that_is_placed_has_asked_for_its_share_of_the_folder_and_holds_it(
    ranks: int, backend: str, size: Any, tmp_path: Path
) -> None:
    nbytes = size.llama_folder(tmp_path / "base", CONFIG)
    found = size.placed(tmp_path, "fsdp", tmp_path / "base", ranks, backend)
    assert len(found) == (1 if backend == "fake" else ranks)
    assert all((each.asked, each.own) == (nbytes / ranks, 2 * nbytes / ranks) for each in found)
    assert all(each.highest > 0 and each.mapped > 0 for each in found)


def test_checkpoints_are_timed_beside_copies_and_the_last_is_not(size: Any, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "train": {"steps": 3},
        "eval": {"every_steps": 0},
        "checkpoint": {"every_steps": 1, "asynchronous": True},
    }
    logs = size.trained(tmp_path, CASES["fsdp"].changed(**changes), "stall")
    found = [json.loads(log.splitlines()[-1]) for log in logs]
    assert [len(rank) for rank in found] == [2, 2]
    assert all(save > 0 and copy > 0 for rank in found for save, copy in rank)


def test_a_run_that_is_killed_while_it_saves_has_lost_nothing(
    size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "KILLS", 2)
    measured = size.kills(tmp_path).measured
    assert measured.startswith("2 kills, ")
    assert " 0 lost; " in measured and measured.endswith(" 0 with another loss")


def test_a_step_that_gives_another_loss_the_second_time_is_seen(size: Any, tmp_path: Path) -> None:
    rows = [(1, 2.0), (2, 1.5), (2, 1.5), (3, 1.0), (3, 1.1)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in rows) + '{"step": 4, "lo')
    assert size.repeated(path) == (2, 1)
