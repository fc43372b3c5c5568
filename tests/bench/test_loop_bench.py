"""scripts/bench/loop: its four loops do the same work, also a second time, and it sees one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.loaded_scripts import SCRIPTS, run_script

pytestmark = pytest.mark.e2e
# Runs the script as it is, and then compares with a loop that clips gradients to another norm.
DRIVER = """\
import dataclasses, runpy, sys, tempfile
from pathlib import Path
script = sys.argv.pop(1)
names = runpy.run_path(script)
code = names["main"]()
def clips_less(parts, rows):
    recipe = parts.settings.recipe
    changed = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_grad_norm": 100.0})})
    settings = dataclasses.replace(parts.settings, recipe=changed)
    return right(dataclasses.replace(parts, settings=settings), rows)
loops = names["LOOPS"]
right = loops["bare PyTorch"]
loops["bare PyTorch"] = clips_less
import torch
def formats(parts):
    parts = dataclasses.replace(parts, settings=dataclasses.replace(parts.settings, dtype="bf16"),
                                autocast=torch.autocast("cpu", dtype=torch.bfloat16))
    mark = parts.model.blocks[0].register_forward_pre_hook(lambda *_: seen[-1].add(torch.is_autocast_enabled("cpu")))
    for _ in range(2):
        for make in loops.values():
            seen.append(set())
            make(parts, names["Rows"](parts))()
    mark.remove()
seen = []
with tempfile.TemporaryDirectory() as folder:
    names["write_text"](Path(folder) / "corpus")
    formats(names["built_parts"](Path(folder), "0.1M", 1, every=1, lr=3e-3))
    distance, _ = names["compared"](names["built_parts"](Path(folder), "0.1M", 4, every=1, lr=3e-3))
print([sorted(each) for each in seen], file=sys.stderr)
print(distance["bare PyTorch"], file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One pair of the smallest size, and a comparison with a wrong loop."""
    folder = tmp_path_factory.mktemp("loop")
    words = [str(SCRIPTS / "bench/loop"), "--size", "0.1M", "--pairs", "1", "--steps", "20", "--json"]
    return subprocess.run(
        [sys.executable, "-c", DRIVER, *words], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )


def told(done: subprocess.CompletedProcess[str]) -> Any:
    """The JSON that it printed, between what DeepSpeed says of itself."""
    return json.JSONDecoder().raw_decode(done.stdout, done.stdout.index("{"))[0]


def test_the_four_loops_give_the_same_losses_and_save_the_same_bytes(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stderr
    (size,) = told(run)["sizes"]
    assert size["distance"].keys() == {"bare PyTorch", "Accelerate", "HF Trainer"}
    assert max(size["distance"].values()) < 1e-6
    assert size["saved"]["built-in"] > 1e6
    assert len(set(size["saved"].values())) == 1


def test_every_loop_computes_in_16_bits_each_time_that_it_is_asked_to(run: subprocess.CompletedProcess[str]) -> None:
    assert run.stderr.splitlines()[-2] == str([[True]] * 8)


def test_a_single_pair_gives_ratios_and_no_interval(run: subprocess.CompletedProcess[str]) -> None:
    (size,) = told(run)["sizes"]
    assert all(ratio["median"] > 0 and ratio["interval"] is None for ratio in size["ratios"].values())


def test_a_loop_that_clips_otherwise_is_seen_by_its_losses(run: subprocess.CompletedProcess[str]) -> None:
    assert float(run.stderr.splitlines()[-1]) > 1e-4


def test_where_logits_are_the_cost_the_built_in_loop_needs_less_memory(tmp_path: Path) -> None:
    words = ("--size", "50,000 tokens", "--pairs", "1", "--steps", "2", "--json")
    done = run_script("bench/loop", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (size,) = told(done)["sizes"]
    assert max(size["distance"].values()) < 1e-6
    assert all(size["saved"]["built-in"] < 0.5 * each for name, each in size["saved"].items() if name != "built-in")
