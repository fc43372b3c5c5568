"""Two ranks with different room take the same micro batch, and train as if it had been given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strategy_runs import CASES, finish, read_curve, write_corpus, write_settings

from tests.warm_ranks import start_ranks

HEAVY: dict[str, Any] = {
    "model": {"layers": 1, "heads": 8, "hidden_size": 16},
    "data": {"sequence_length": 384},
    "efficiency": {"attention": "eager"},
    "train": {"steps": 2},
    "eval": {"every_steps": 0},
}
# Rank 1 may take less than it has, and so little besides that it is the one which decides.
TIGHT_ON_RANK_1 = """
import os, sys
from trainkit.trainer import auto_batch, loop, setup
from trainkit.trainer.metrics.memory_breakdown import resident
if os.environ["RANK"] == "1":
    honest = auto_batch.memory_limit
    def tight(device, asked_mib):
        found = honest(device, asked_mib)
        return auto_batch.MemoryLimit(resident() + 80 * 2**20, found.available)
    auto_batch.memory_limit = tight
from trainkit.trainer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_size_that_is_too_large_for_one_rank_is_too_large_for_all(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus)
    program = tmp_path / "tight.py"
    program.write_text(TIGHT_ON_RANK_1)
    case = CASES["ddp"].changed(**HEAVY, batch={"micro": "auto"})
    settings = write_settings(tmp_path / "run", case, corpus)
    content = json.loads(settings.read_text())
    content["batch"] |= {"micro": 1, "accumulation": 8, "search": [1, 2, 4, 8]}
    settings.write_text(json.dumps(content))
    processes = start_ranks(settings, 2, program=(str(program),), XDG_CACHE_HOME=str(tmp_path / "cache"))
    codes = finish(processes)
    assert codes == [0, 0], (tmp_path / "run/rank-0.log").read_text() + (tmp_path / "run/rank-1.log").read_text()
    result = json.loads((tmp_path / "run/result.json").read_text())
    micro, tried = result["micro_batch"], result["micro_search"]["tried"]
    assert micro < 8
    assert {trial["why"].partition(" (")[0] for trial in tried if not trial["fits"]} == {
        "more than the limit on rank 1"
    }
    explicit = write_settings(tmp_path / "explicit", CASES["ddp"].changed(**HEAVY), corpus)
    content = json.loads(explicit.read_text())
    content["batch"] |= {"micro": micro, "accumulation": 8 // micro}
    explicit.write_text(json.dumps(content))
    assert finish(start_ranks(explicit, 2)) == [0, 0]
    assert read_curve(tmp_path / "run") == read_curve(tmp_path / "explicit")
