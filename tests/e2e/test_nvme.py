"""ZeRO offload: to NVMe (files) and to CPU memory, on one rank and on two, trained, resumed and exported."""

from __future__ import annotations

import ctypes.util
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strategy_runs import Case, Curve, finish, largest_difference, read_curve, write_corpus, write_settings

from tests.conftest import Trainkit
from tests.warm_ranks import run_case, start_ranks

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(900),  # of which the op may take minutes to compile
    pytest.mark.skipif(
        ctypes.util.find_library("aio") is None or not Path("/usr/include/libaio.h").exists(),
        reason="libaio or its header is not installed, and DeepSpeed's NVMe op is linked with it",
    ),
]

ROOT = Path(__file__).parents[2]
LOSS = 1e-6
# DeepSpeed swaps nothing smaller than a mebibyte.
WIDE: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "heads": 2, "hidden_size": 384},
    "data": {"sequence_length": 8, "include": "*.txt"},
    "train": {"steps": 4},
    "eval": {"every_steps": 4, "batches": 2},
}
ZERO3 = {"kind": "zero3"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def async_io(extension_cache: Path) -> Iterator[subprocess.CompletedProcess[str]]:
    """The op, built as a run's preparation builds it, for every rank that these tests start."""
    with (extension_cache / "test.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(extension_cache))
        yield subprocess.run(
            [sys.executable, "-m", "trainkit.trainer.perf.build_ops", "--ops", "async_io"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    return run_case(tmp_path_factory.mktemp("alone") / "run", Case({"kind": "single"}, 1).changed(**WIDE), corpus)


def to_nvme(folder: Path, *names: str) -> dict[str, Any]:
    return {**ZERO3, **dict.fromkeys(names, "nvme"), "nvme_path": str(folder)}


def test_the_op_is_built_quietly_and_found_the_second_time_without_torch(
    async_io: subprocess.CompletedProcess[str], extension_cache: Path
) -> None:
    assert (async_io.returncode, async_io.stdout, async_io.stderr) == (0, "", "")
    assert list(extension_cache.rglob("async_io.so"))
    again = (
        "import sys; from trainkit.trainer.perf.build_ops import main\n"
        "assert main(['--ops', 'async_io']) == 0; print('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", again], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


OFFLOADS: dict[str, dict[str, Any]] = {
    "zero1, state to CPU": {"kind": "zero1", "offload_optimizer": "cpu"},
    "zero2, state to CPU": {"kind": "zero2", "offload_optimizer": "cpu"},
    "zero3, all to CPU": {"kind": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"},
    "zero3, weights to NVMe": {"kind": "zero3", "offload_param": "nvme"},
    "zero3, state to NVMe": {"kind": "zero3", "offload_optimizer": "nvme"},
}


@pytest.mark.parametrize("way", OFFLOADS)
def test_every_way_to_offload_works_on_one_rank_and_changes_no_loss(
    way: str, alone: Curve, corpus: Path, tmp_path: Path
) -> None:
    where = {"nvme_path": str(tmp_path / "disk")} if "nvme" in OFFLOADS[way].values() else {}
    curve = run_case(tmp_path / "run", Case({**OFFLOADS[way], **where}, 1).changed(**WIDE), corpus)
    assert len(curve.losses) == 4
    assert largest_difference(alone.losses, curve.losses) <= LOSS
    assert largest_difference(alone.eval_losses, curve.eval_losses) <= LOSS


def test_weights_in_16_bits_are_swapped_in_16_bits(corpus: Path, tmp_path: Path) -> None:
    half: dict[str, dict[str, Any]] = {**WIDE, "precision": {"dtype": "bf16"}}
    plain, swapped = (
        run_case(tmp_path / name, Case(strategy, 1).changed(**half), corpus)
        for name, strategy in (("plain", ZERO3), ("swapped", to_nvme(tmp_path / "disk", "offload_param")))
    )
    assert swapped.losses == plain.losses


def test_two_ranks_swap_all_to_files_that_are_gone_afterwards_and_resume_bit_equal(
    alone: Curve, corpus: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    case = Case(to_nvme(disk, "offload_optimizer", "offload_param"), 2)
    case = case.changed(**{**WIDE, "checkpoint": {"every_steps": 2, "keep": 0}})
    ranks = start_ranks(write_settings(tmp_path / "whole", case, corpus), 2)
    seen: set[str] = set()
    while any(rank.poll() is None for rank in ranks):
        # os.walk, for files and folders vanish at the end
        seen |= {os.path.join(folder, name) for folder, _, names in os.walk(disk) for name in names}  # noqa: PTH118
        time.sleep(0.02)
    assert finish(ranks) == [0, 0], (tmp_path / "whole/rank-0.log").read_text()
    whole = read_curve(tmp_path / "whole")
    assert largest_difference(alone.losses, whole.losses) <= LOSS
    for rank in ("rank0", "rank1"):
        assert any(f"/zero_stage_3/float32params/{rank}/" in path for path in seen)
        assert any(f"/zero_stage_3/optimizer/{rank}/exp_avg_sq-" in path for path in seen)
    assert list(disk.iterdir()) == []

    saved = tmp_path / "whole/checkpoints/step-00000002"
    resumed = run_case(tmp_path / "resumed", case, corpus, resume=saved)
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
    assert resumed.norms == {step: whole.norms[step] for step in (3, 4)}
    assert resumed.eval_losses == whole.eval_losses
    _exported_weights_are_those_of_the_run(tmp_path, corpus, whole)


def _exported_weights_are_those_of_the_run(folder: Path, corpus: Path, whole: Curve) -> None:
    """A single process that starts from the exported weights has the loss with which the run ended."""
    command = [sys.executable, "-m", "trainkit.trainer.checkpoint"]
    words = ["--checkpoint", str(folder / "whole/checkpoints/step-00000004"), "--destination", str(folder / "out")]
    subprocess.run([*command, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    settings = write_settings(folder / "read", Case({"kind": "single"}, 1).changed(**WIDE), corpus)
    program = (
        "import sys, torch; from pathlib import Path; from safetensors.torch import load_file\n"
        "from trainkit.trainer.settings import World, read_settings; from trainkit.trainer.setup import assemble\n"
        "parts = assemble(read_settings(Path(sys.argv[2])), World(), torch.device('cpu'))\n"
        "parts.model.load_state_dict(load_file(sys.argv[1]))\n"
        "print(parts.evaluation.measured(parts.strategy, parts.eval_autocast)['loss'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "out/model.safetensors"), str(settings)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert float(done.stdout) == pytest.approx(whole.eval_losses[4], rel=LOSS)


def test_a_run_to_nvme_builds_its_op_first_and_clears_away_what_a_killed_one_left(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    abandoned = disk / "trainkit-20200101-killed/zero_stage_3"
    abandoned.mkdir(parents=True)
    (disk / "trainkit-20200101-killed.lock").touch()
    (disk / "of-the-user").mkdir()
    words = [
        "strategy.kind=zero3",
        "strategy.offload_optimizer=nvme",
        f"strategy.nvme_path={disk}",
        "model.hidden_size=512",
    ]
    done = trainkit("run", str(tiny_recipe), *words, "nodes.processes_per_node=1", timeout=300)
    assert done.returncode == 0, done.stderr
    plan = json.loads(next((tmp_path / "runs/tiny").glob("*/plan.json")).read_text())
    assert [each["title"] for each in plan["preparations"]] == ["build DeepSpeed ops"]
    assert [path.name for path in disk.iterdir()] == ["of-the-user"]
