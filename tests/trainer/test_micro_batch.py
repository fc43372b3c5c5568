"""`batch.micro: auto`: the search, what it takes for too large, and that it leaves no trace in the training."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategy_runs import ROOT, Case, write_settings

from tests.trainer.training import CPU, MakeSettings, parts_of, trained
from trainkit.errors import TrainingError
from trainkit.machine.host import available_memory
from trainkit.trainer import setup
from trainkit.trainer.auto_batch import FoundMicroBatch, give_back, largest_fitting, search_summary
from trainkit.trainer.metrics.memory_breakdown import peak_resident, resident
from trainkit.trainer.models.gpt import Gpt
from trainkit.trainer.parallel.single_and_ddp import Engine
from trainkit.trainer.settings import Settings
from trainkit.trainer.setup import Parts, start_record

SHORT: dict[str, Any] = {"train": {"steps": 2}, "eval": {"every_steps": 0}}
SIZES = (1, 2, 4, 8, 16)
# About 9 MiB of activations for each sample, nearly all of them attention scores, and little to compute.
HEAVY: dict[str, Any] = {
    "model": {"layers": 1, "heads": 8, "hidden_size": 16, "dropout": 0.1},
    "data": {"sequence_length": 256},
    "efficiency": {"attention": "eager"},
    **SHORT,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def searching(make_settings: MakeSettings) -> MakeSettings:
    """Settings of a run that looks for its micro batch."""

    def make(**changes: Any) -> Settings:
        settings = make_settings(**{"batch": {"micro": "auto"}, **changes})
        batch = dataclasses.replace(settings.batch, micro=1, accumulation=16, search=SIZES)
        return dataclasses.replace(settings, batch=batch)

    return make


def found_in(settings: Settings | Parts) -> FoundMicroBatch:
    parts = parts_of(settings) if isinstance(settings, Settings) else settings
    assert parts.found is not None
    return parts.found


@given(sizes=st.sets(st.integers(1, 500), min_size=1), limit=st.integers(0, 500))
def test_the_search_finds_the_largest_that_fits_by_few_attempts(sizes: set[int], limit: int) -> None:
    ascending, asked = sorted(sizes), []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = largest_fitting(ascending, fits)
    below = bisect_right(ascending, limit)
    assert found == (ascending[below - 1] if below else None)
    assert len(asked) == len(set(asked))
    doublings = sum(1 for size in asked if size <= limit)
    assert all(size <= max(2 * max([limit, 1]), ascending[below] if below < len(ascending) else 0) for size in asked)
    assert doublings <= len(ascending)


def test_a_search_within_a_memory_bound_leaves_the_training_bit_equal_to_one_with_that_micro_batch(
    make_settings: MakeSettings, searching: MakeSettings
) -> None:
    give_back(CPU)  # of the tests before, which would hide what this one takes
    bound = resident() // 2**20 + 100
    parts = parts_of(searching(**HEAVY, batch={"micro": "auto", "memory_mib": bound}))
    found = found_in(parts)
    assert found.micro in SIZES[:-1]
    assert found.accumulation * found.micro == 16
    tried = {trial.micro: trial for trial in found.tried}
    assert tried[found.micro].fits
    over = tried[found.micro * 2]
    assert not over.fits
    assert over.peak_bytes > bound * 2**20 >= tried[found.micro].peak_bytes
    assert over.why.startswith("more than the limit on rank 0 (")
    assert peak_resident() < over.peak_bytes  # by now the training's own, which has not begun
    assert start_record(parts, 0)["micro_search"]["tried"][0]["micro"] == 1
    given_batch = dataclasses.replace(parts.settings.batch, search=())
    explicit = dataclasses.replace(make_settings(**HEAVY), batch=given_batch)
    assert explicit.batch.micro == found.micro
    assert trained(parts).losses == trained(explicit).losses


def test_what_was_found_is_remembered_for_the_same_settings_only(searching: MakeSettings, home: Path) -> None:
    first = found_in(searching())
    assert (first.source, first.micro) == ("searched", 16)
    assert first.remembered_in is not None
    (file,) = (home / "trainkit/micro-batches").iterdir()
    assert str(file) == first.remembered_in
    again = found_in(searching(train={"steps": 7}))
    assert (again.source, again.micro, again.tried) == ("remembered", 16, ())
    assert search_summary(again).endswith(f"remembered in {file}")
    assert found_in(searching(model={"hidden_size": 34})).source == "searched"
    file.write_text(file.read_text()[:40])  # torn
    assert found_in(searching()).source == "searched"


def test_a_run_that_is_resumed_takes_the_micro_batch_of_the_run_that_it_goes_on_from(
    searching: MakeSettings, home: Path
) -> None:
    first = parts_of(searching())
    (file,) = (home / "trainkit/micro-batches").iterdir()
    file.unlink()
    beside = first.settings.run_dir / "micro-batch.json"
    beside.write_text(beside.read_text().replace('"micro": 16', '"micro": 4'))  # as if found when memory was short
    checkpoint = first.settings.run_dir / "checkpoints/step-00000002"
    found = found_in(dataclasses.replace(searching(), resume=checkpoint))
    assert (found.source, found.micro) == ("remembered", 4)


def test_a_copy_whose_embeddings_bitsandbytes_keeps_in_32_bit_leaves_no_trace(searching: MakeSettings) -> None:
    parts = parts_of(searching(optimizer={"name": "adamw_bnb_8bit"}))
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    kept = [module for module, _, _ in manager.module_weight_config_triple]
    assert kept == [module for module in parts.model.modules() if isinstance(module, torch.nn.Embedding)]


def test_a_bound_that_not_one_sample_keeps_is_an_error_that_says_what_to_do(searching: MakeSettings) -> None:
    with pytest.raises(TrainingError, match="not even a micro batch of 1 fits: more than the limit on rank 0") as error:
        parts_of(searching(batch={"micro": "auto", "memory_mib": 1}))
    assert "gradient_checkpointing" in error.value.diagnostics[0].hint


TOO_LARGE = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 10485760 bytes",
    "CUDA error: invalid configuration argument\nCUDA kernel errors might be asynchronously reported",
)
PLACES = {
    "forward": (torch.nn.Embedding, "forward"),
    "backward": (Engine, "backward"),
    "update": (torch.optim.AdamW, "step"),
}


def failing(monkeypatch: pytest.MonkeyPatch, place: str, error: Exception, above: int) -> list[int]:
    """From now on steps of micro batches above a size fail in one place. Gives how often a model was drawn since."""
    seen, drawn = [0], [0]
    look, draw = Gpt.forward, setup.prepared_model
    kind, name = PLACES[place]
    really = getattr(kind, name)

    def forward(self: Gpt, tokens: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        seen[0] = len(tokens)
        return look(self, tokens, *more, **named)

    def fail(self: Any, *given: Any, **named: Any) -> Any:
        if seen[0] > above:
            if isinstance(self, torch.optim.Optimizer):  # its state is made in part
                self.state[self.param_groups[0]["params"][0]]["step"] = torch.zeros(())
            raise error
        return really(self, *given, **named)

    def count(settings: Settings, *more: Any) -> Any:
        drawn[0] += 1
        return draw(settings, *more)

    monkeypatch.setattr(Gpt, "forward", forward)
    monkeypatch.setattr(kind, name, fail)
    monkeypatch.setattr(setup, "prepared_model", count)
    return drawn


@pytest.mark.parametrize(
    ("place", "text"),
    [*(("forward", text) for text in TOO_LARGE), ("backward", TOO_LARGE[0]), ("update", TOO_LARGE[0])],
    ids=["forward", "cublas", "cudnn", "nccl", "launch", "backward", "update"],
)
def test_a_size_that_fails_is_too_large_and_the_search_goes_on_with_the_copy_that_it_has(
    make_settings: MakeSettings, searching: MakeSettings, monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    # The scaler of fp16 knows how far a step has come.
    settings = searching(precision={"dtype": "fp16"}, **SHORT)
    explicit = dataclasses.replace(
        make_settings(precision={"dtype": "fp16"}, **SHORT),
        batch=dataclasses.replace(settings.batch, micro=4, accumulation=4, search=()),
    )
    drawn = failing(monkeypatch, place, RuntimeError(text), above=4)
    parts = parts_of(settings)
    assert drawn == [2]  # the copy, and the one that trains
    found = found_in(parts)
    assert found.micro == 4
    assert [(tried.micro, tried.fits) for tried in found.tried] == [(1, True), (2, True), (4, True), (8, False)]
    assert found.tried[-1].why.startswith(("out of memory on rank 0", f"more than a kernel takes ({text[:40]}"))
    assert trained(parts).losses == trained(explicit).losses


def test_sizes_after_one_that_failed_are_tried_with_the_same_copy(
    searching: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = searching()
    batch = dataclasses.replace(settings.batch, search=tuple(range(1, 17)))
    drawn = failing(monkeypatch, "update", MemoryError(), above=5)
    found = found_in(dataclasses.replace(settings, batch=batch))
    assert (found.micro, drawn) == (5, [2])
    assert [tried.micro for tried in found.tried] == [1, 2, 4, 8, 6, 5]


@pytest.mark.parametrize(
    "text", [TOO_LARGE[2], TOO_LARGE[4], "mat1 and mat2 shapes cannot be multiplied"], ids=["cudnn", "launch", "shape"]
)
def test_what_need_not_be_the_size_stays_an_error_where_nothing_smaller_has_fitted(
    searching: MakeSettings, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    failing(monkeypatch, "forward", RuntimeError(text), above=0)
    with pytest.raises(RuntimeError, match=re.escape(text)):
        parts_of(searching())


SHORT_OF_MEMORY = """
import json, resource, sys
from dataclasses import asdict
from pathlib import Path
import torch
from trainkit.trainer import auto_batch, loop, setup
from trainkit.trainer.metrics.memory_breakdown import status_bytes
from trainkit.trainer.settings import World, read_settings
limit = status_bytes("VmData")["VmData"] + int(sys.argv[1]) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""
# One rank that does not know of the bound, and meets it.
UNAWARE = """
auto_batch.memory_limit = lambda device, asked: auto_batch.MemoryLimit(2**60, 2**60)
found = setup.assemble(read_settings(Path(sys.argv[3])), World(), torch.device("cpu")).found
print(json.dumps(asdict(found)))
"""
TRAINING = """
from trainkit.trainer.__main__ import main
sys.exit(main(sys.argv[2:]))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="the bound on private memory is Linux's")


def short_of_memory(code: str, spare_mib: int, corpus: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run with little memory beyond what a process with torch takes."""
    case = Case({"kind": "single"}, ranks=1).changed(**HEAVY, batch={"micro": "auto"})
    settings = write_settings(folder / "run", case, corpus)
    content = json.loads(settings.read_text())
    content["batch"] |= {"micro": 1, "accumulation": 16, "search": SIZES}
    settings.write_text(json.dumps(content))
    return subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY + code, str(spare_mib), "--settings", str(settings)],
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.e2e
@linux
def test_an_allocation_that_really_fails_makes_a_size_too_large(corpus_folder: Path, tmp_path: Path) -> None:
    done = short_of_memory(UNAWARE, 90, corpus_folder, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    failed = [trial for trial in found["tried"] if not trial["fits"]]
    assert failed
    assert all(trial["why"].startswith("out of memory on rank 0") for trial in failed)
    assert 1 <= found["micro"] < min(trial["micro"] for trial in failed)


@pytest.mark.e2e
@linux
def test_a_limit_on_the_process_is_kept_with_a_margin_and_the_run_comes_to_its_end(
    corpus_folder: Path, tmp_path: Path
) -> None:
    done = short_of_memory(TRAINING, 120, corpus_folder, tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert any(not trial["fits"] for trial in result["micro_search"]["tried"])
    assert result["micro_batch"] == result["micro_search"]["micro"] < 16
    assert result["steps"] == 2


def test_what_is_free_is_the_systems_estimate_or_what_a_cgroup_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_memory(tmp_path) == 4000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("3000000\n")
    (group / "memory.current").write_text("2500000\n")
    (group / "memory.stat").write_text("anon 2000000\ninactive_file 500000\n")
    assert available_memory(tmp_path) == 1_000_000
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 4000 * 1024
