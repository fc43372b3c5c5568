"""The recipes that people come for: planned for the machine that each names, and their `tiny` variants trained here."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from strategy_runs import finish, read_curve

from tests.conftest import ROOT, Trainkit
from tests.hub_server.server import Hub
from tests.trainer.tiny_tokenizer import save_tokenizer
from tests.warm_ranks import start_ranks
from trainkit.cli.machines import machine_facts
from trainkit.cli.pipeline import build_plan, resolve_request


@dataclass(frozen=True)
class Expected:
    """What a recipe's plan is to say on a machine (`trainkit ls machines`).

    batch: global, micro, accumulation, ranks. changes: words on the command line. trainer: settings that the trainer is
    to get, by their keys. techniques: which the plan lists, with the value of each.
    """

    machine: str
    strategy: str
    launcher: str
    batch: tuple[int, int, int, int]
    changes: tuple[str, ...] = ()
    dtype: str = "bf16"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    techniques: Mapping[str, str] = field(default_factory=dict)


EXPECTED: Mapping[str, tuple[Expected, ...]] = {
    "gpt-124m": (
        Expected("8xh100", "ddp", "torchrun", (480, 30, 2, 8), techniques={"efficiency.compile.enabled": "true"}),
        Expected("4xa100-40gb", "ddp", "torchrun", (480, 12, 10, 4), ("batch.micro=12",)),
        Expected("1x4090", "single", "python", (480, 30, 16, 1), ("--with", "strategy/single")),
    ),
    "gpt-1.3b": (
        Expected("8xh100", "ddp", "torchrun", (512, 8, 8, 8), trainer={"schedule.warmup_steps": 358}),
        Expected("4xa100-40gb", "ddp", "torchrun", (512, 2, 64, 4), ("batch.micro=2",)),
    ),
}
CASES = [
    pytest.param(name, each, id=f"{name}-{each.machine}") for name, several in EXPECTED.items() for each in several
]


@pytest.mark.parametrize(("name", "expected"), CASES)
def test_a_recipe_is_planned_for_the_machine_that_it_names(name: str, expected: Expected, trainkit: Trainkit) -> None:
    done = trainkit("plan", name, "--on", expected.machine, *expected.changes, "--json")
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    plan = json.loads(done.stdout)
    assert [each for each in plan["notices"] if each["severity"] != "note"] == []
    batch = plan["batch"]
    assert (plan["strategy"]["kind"], plan["launcher"]["kind"]) == (expected.strategy, expected.launcher)
    assert (batch["global"], batch["micro"], batch["accumulation"], batch["ranks"]) == expected.batch
    assert plan["topology"]["world_size"] == expected.batch[-1]
    words = [word for word in plan["commands"][0]["argv"] if isinstance(word, str)]
    assert "trainkit.trainer" in words
    assert (f"--nproc-per-node={expected.batch[-1]}" in words) == (expected.launcher == "torchrun")
    settings = json.loads(plan["files"]["trainer.json"])
    assert (settings["device"], settings["dtype"]) == ("cuda", expected.dtype)
    assert {key: at(settings["recipe"], key) for key in expected.trainer} == expected.trainer
    listed = {each["key"]: each["value"] for each in plan["techniques"]}
    assert {key: listed.get(key) for key in expected.techniques} == expected.techniques


def at(tree: Any, key: str) -> Any:
    """What stands at a dotted key."""
    for part in key.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize("name", EXPECTED)
def test_its_tiny_variant_trains_on_a_cpu_with_the_same_techniques(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caches: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = resolve_request(name, variant="tiny", environ={})
    plan = build_plan(resolved, machine_facts("laptop-cpu")).plan
    assert plan.topology.device == "cpu"
    assert [each for each in plan.notices if each.severity == "blocker"] == []
    for file in plan.files:
        Path(file.path).write_text(file.content)
    ranks = plan.topology.world_size
    whole = resolve_request(name, environ={}).recipe
    kept = ("kind", "quantize", "moe")
    assert (ranks > 1) == (whole.strategy.kind != "single")
    assert resolved.recipe.strategy == whole.strategy
    assert resolved.recipe.precision == whole.precision
    assert [getattr(resolved.recipe.model, each, None) for each in kept] == [
        getattr(whole.model, each, None) for each in kept
    ]
    codes = finish(start_ranks(tmp_path / "trainer.json", ranks, XDG_CACHE_HOME=str(caches), HF_HUB_OFFLINE="1"))
    assert codes == [0] * ranks, "\n".join(each.read_text() for each in sorted(tmp_path.glob("rank-*.log")))
    losses = read_curve(tmp_path).losses
    assert len(losses) >= 4
    assert losses[max(losses)] < losses[1]
    assert all(map(math.isfinite, losses.values()))
    assert list((tmp_path / "checkpoints").glob("step-*/manifest.json"))


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tokenised corpora for all of them: several train on Python's own source code."""
    return tmp_path_factory.mktemp("caches")


@pytest.mark.parametrize("name", EXPECTED)
def test_it_says_which_card_it_needs_and_what_takes_the_memory(name: str) -> None:
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    head = text[: text.index("version: 1")]
    assert " GB" in head.splitlines()[1]
    assert "in all" in head
    assert "maller cards: " in head
    parts = [float(line.split()[-1]) for line in head.splitlines() if line.startswith("#   ") and ends_in_number(line)]
    assert parts[-1] == pytest.approx(sum(parts[:-1]), abs=0.06)
    assert yaml.safe_load(text)["variants"].keys() == {"tiny"}


def ends_in_number(line: str) -> bool:
    """Whether a line of a table ends in an amount of GB."""
    return line.split()[-1].replace(".", "", 1).isdecimal()


def test_the_documentation_lists_them() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"^\| `([^`]+)` \|", page.partition("## Recipes to begin with")[2], re.MULTILINE)) == set(
        EXPECTED
    )


def test_a_token_file_is_made_as_documented(hub: Hub, tmp_path: Path, clean_environment: dict[str, str]) -> None:
    page = (ROOT / "docs" / "data-and-models.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    hub.add("openai-community/gpt2", save_tokenizer(tmp_path / "words", template=None))
    texts = ["the cat sat", "on the mat", "what is the sum of two and two"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    hub.add("Skylion007/openwebtext", {"train.jsonl": rows}, kind="dataset")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**clean_environment, **hub.environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ids = np.fromfile(tmp_path / "openwebtext.bin", np.uint16)
    end = 0  # <|end|>
    assert list(np.flatnonzero(ids == end) + 1)[-1] == len(ids)
    assert np.count_nonzero(ids == end) == len(texts)
