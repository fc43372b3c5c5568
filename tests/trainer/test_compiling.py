"""torch.compile: the table of backends against the installed torch, whole and per block, and its time apart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.trainer.training import MakeSettings, trained
from trainkit.errors import TrainingError
from trainkit.recipe.schema import Compile
from trainkit.tools.compile_backends import GONE, LISTED
from trainkit.trainer.__main__ import keep_compiled
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.gpt import build_gpt
from trainkit.trainer.models.hf import Transformer
from trainkit.trainer.perf.efficiency import checkpoint_blocks, compile_model, listed_backends
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import prepared_model


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    """torch counts how often it compiles a function anew, and gives up at a limit that other tests may have used up."""
    torch.compiler.reset()


def compiled(make_settings: MakeSettings, **changes: Any) -> Settings:
    return make_settings(
        train={"steps": 4}, eval={"every_steps": 0}, efficiency={"compile": {"enabled": True, **changes}}
    )


def test_the_table_lists_the_backends_of_the_installed_torch() -> None:
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if version not in LISTED:
        pytest.skip(f"nothing is written down of torch {version}")
    assert LISTED[version] == set(listed_backends())
    assert not LISTED[version] & GONE.keys()
    assert {replacement for replacement, _ in GONE.values()} <= LISTED[version]


def test_compile_time_is_told_from_the_time_of_steps(make_settings: MakeSettings) -> None:
    """The first line's window holds the compilation, and its rate does not."""
    plain = trained(make_settings(train={"steps": 4}, eval={"every_steps": 0}))
    found = trained(compiled(make_settings, backend="aot_eager"))
    lines, outcome = found.lines, found.result
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    spent = lines[0]["compile_seconds"]
    assert spent > 0.05
    assert outcome["compile_seconds"] >= spent
    # With the time of compiling, the first window would be as long as what elapsed by its end.
    assert lines[0]["seconds"] < lines[0]["elapsed"] - 0.5 * spent
    assert outcome["samples_per_second"] > outcome["samples"] / outcome["train_seconds"]
    assert "compile_seconds" not in plain.lines[0]


# torch hides this warning of its own where warnings are not made errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_per_block_compiles_the_blocks_and_not_the_model(make_settings: MakeSettings) -> None:
    whole = prepared_model(compiled(make_settings, backend="aot_eager", scope="model"))
    blocks = prepared_model(compiled(make_settings, backend="aot_eager"))
    assert whole._compiled_call_impl is not None
    assert blocks._compiled_call_impl is None
    assert all(block._compiled_call_impl is not None for block in blocks.blocks)
    plain = trained(make_settings(train={"steps": 4}, eval={"every_steps": 0})).losses
    by_blocks = trained(compiled(make_settings, backend="aot_eager", scope="blocks")).losses
    assert by_blocks == pytest.approx(plain, rel=1e-6)


def graphs_of_a_step(model: Model) -> int:
    """How many graphs torch compiles in a forward and backward pass."""
    torch.compiler.reset()
    counters.clear()
    tokens = torch.arange(16)[None]
    model(tokens, tokens).backward()
    assert not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["gpt", "hf"])
@pytest.mark.parametrize("recomputed", [{}, {"every": True}, {"every": True, "selective": True}])
def test_blocks_are_compiled_once_for_a_model_of_any_depth(
    kind: str, recomputed: dict[str, Any], make_settings: MakeSettings, tmp_path: Path
) -> None:
    def model_of(layers: int, **compiling: Any) -> Model:
        settings = make_settings(model={"layers": layers}, efficiency={"gradient_checkpointing": recomputed})
        torch.manual_seed(0)
        model: Model
        if kind == "gpt":
            model = build_gpt(settings.recipe)
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": layers}
            transformers = pytest.importorskip("transformers")
            inner = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, use_cache=False, **sizes))
            model = Transformer(inner)
        if recomputed:
            asked = settings.recipe.efficiency.gradient_checkpointing
            checkpoint_blocks(model.blocks, asked, dropout=False, compiled=bool(compiling))
        if compiling:
            compile_model(model, Compile(enabled=True, **compiling), "single")
        return model

    counts, tokens = [], torch.arange(16)[None]
    for layers in (2, 8):
        model = model_of(layers, backend="aot_eager")
        counts.append(graphs_of_a_step(model))
        plain = model_of(layers)
        plain(tokens, tokens).backward()
        for each, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert each.grad is not None
            assert other.grad is not None
            assert torch.allclose(each.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert counts == [1, 1]


def test_a_name_that_is_gone_runs_with_what_stands_in_for_it(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: asked.append(options))
    prepared_model(compiled(make_settings, backend="nvfuser", dynamic=True, scope="model"))
    assert asked == [{"backend": "inductor", "dynamic": True}]


def test_an_unknown_backend_is_answered_with_those_that_exist(make_settings: MakeSettings) -> None:
    with pytest.raises(TrainingError, match="indcutor is not one of") as caught:
        prepared_model(compiled(make_settings, backend="indcutor"))
    assert "inductor" in caught.value.diagnostics[0].hint
    assert "TESTING_ONLY" not in caught.value.diagnostics[0].hint


@pytest.mark.parametrize("home", ["cache", "none", "file", "shut"])
def test_what_is_compiled_is_kept_in_the_users_cache_or_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if home != "none":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
    if home == "file":
        (tmp_path / "file").touch()
    if home == "shut":
        monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write everywhere
    keep_compiled(tmp_path / "run")
    own = {"cache": tmp_path / "cache/trainkit/inductor"}
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own.get(home, tmp_path / "run/compiled"))


def test_a_folder_that_a_person_names_for_what_is_compiled_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled(tmp_path / "run")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
