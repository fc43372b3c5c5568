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
    to get, by their keys. techniques: which the plan lists, with the value of each. fetched: repositories of the Hub
    that the ranks wait for. warned: how the plan's warnings end.
    """

    machine: str
    strategy: str
    launcher: str
    batch: tuple[int, int, int, int]
    changes: tuple[str, ...] = ()
    dtype: str = "bf16"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    techniques: Mapping[str, str] = field(default_factory=dict)
    fetched: tuple[str, ...] = ()
    nodes: int = 1
    warned: tuple[str, ...] = ()


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LARGE_LLAMA = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
OLMOE = {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
# Repositories of the Hub that the recipes name -> their config.json, with the real sizes.
REPOSITORIES: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama/Llama-3.3-70B-Instruct": {**LLAMA, **LARGE_LLAMA},
    "allenai/OLMoE-1B-7B-0924-Instruct": {
        **OLMOE,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
    },
    "google-bert/bert-large-uncased": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "google-t5/t5-large": {
        "architectures": ["T5WithLMHeadModel"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": 1024,
        "num_layers": 24,
        "task_specific_params": {"summarization": {"prefix": "summarize: "}},
    },
}
# Data sets of the Hub that they name -> their subsets, with the splits of each.
DATA_SETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "stanfordnlp/imdb": {"plain_text": ("train", "test", "unsupervised")},
    "abisee/cnn_dailymail": dict.fromkeys(("1.0.0", "2.0.0", "3.0.0"), ("train", "validation", "test")),
}
SMALL, LARGE, EXPERTS, *_ = ((name,) for name in REPOSITORIES)
REVIEWS = ("google-bert/bert-large-uncased", "stanfordnlp/imdb")
NEWS = ("google-t5/t5-large", "abisee/cnn_dailymail")
PAIRS = {
    "model.task": "seq2seq_lm",
    "data.columns": {"source": "article", "target": "highlights"},
    "data.subset": "3.0.0",
}
DDP = ("--with", "strategy/ddp", "devices.select=all")
MASK = ("takes an attention mask, and with a mask sdpa does not use its flash kernel",)
EIGHT_BITS = ("efficiency.gradient_checkpointing=true", "optimizer.name=adamw_bnb_8bit")
CHATS: dict[str, Any] = {
    "data.kind": "dataset",
    "efficiency.gradient_checkpointing.every": True,
    "optimizer.weight_decay": 0.0,
}
WHOLE = {**CHATS, "peft.kind": "none", "precision.weights": "fp32", "strategy.sharding": "full_shard"}
QLORA = ("model.quantize=4", "precision.weights=fp32", "optimizer.name=adamw_torch")
AWAY = "efficiency.offload_activations=true"
LARGE_SHAPE = {"model.config.hidden_size": 8192, "model.config.num_hidden_layers": 80, "precision.weights": "fp32",
               "strategy.sharding": "full_shard", "checkpoint.asynchronous": True}  # fmt: skip
OFFLOAD = ("--with", "strategy/fsdp-offload", "devices.select=2")

EXPECTED: Mapping[str, tuple[Expected, ...]] = {
    "gpt-124m": (
        Expected("8xh100", "ddp", "torchrun", (480, 30, 2, 8), techniques={"efficiency.compile.enabled": "true"}),
        Expected("4xa100-40gb", "ddp", "torchrun", (480, 12, 10, 4), ("batch.micro=12",)),
        Expected("1x4090", "single", "python", (480, 30, 16, 1), ("--with", "strategy/single")),
    ),
    "gpt-1.3b": (
        Expected("8xh100", "ddp", "torchrun", (512, 8, 8, 8), trainer={"schedule.warmup_steps": 358}),
        Expected("4xa100-40gb", "ddp", "torchrun", (512, 1, 128, 4), ("batch.micro=1",)),
    ),
    "llama-8b-full": (
        Expected("8xa100-80gb", "fsdp", "torchrun", (128, 2, 8, 8), trainer=WHOLE, fetched=SMALL),
        Expected(
            "4xa100-40gb",
            "fsdp",
            "torchrun",
            (128, 1, 32, 4),
            ("batch.micro=1",),
            trainer=WHOLE,
            fetched=SMALL,
            warned=("and has 39.4 GiB; most of it is optimizer state (15.0 GiB)",),
        ),
        Expected("8xh100", "fsdp", "torchrun", (128, 2, 32, 2), OFFLOAD, fetched=SMALL),
    ),
    "llama-70b-full": (
        Expected("8xh100", "fsdp", "torchrun", (128, 2, 1, 64), trainer=LARGE_SHAPE, nodes=8),
        Expected(
            "8xa100-80gb",
            "fsdp",
            "torchrun",
            (128, 2, 1, 64),
            ("model.path=meta-llama/Llama-3.3-70B-Instruct",),
            fetched=LARGE,
            nodes=8,
        ),
        Expected("8xh100", "fsdp", "torchrun", (128, 2, 2, 32), ("nodes.count=4", AWAY), nodes=4),
        Expected("8xh100", "fsdp", "torchrun", (128, 2, 4, 16), ("nodes.count=2", "strategy.offload=true"), nodes=2),
        Expected("8xh100", "fsdp", "torchrun", (128, 2, 8, 8), ("nodes.count=1", "strategy.offload=true")),
        Expected(
            "4xa100-40gb",
            "fsdp",
            "torchrun",
            (128, 1, 2, 64),
            ("nodes.count=16", "batch.micro=1", "strategy.offload=true", AWAY),
            nodes=16,
        ),
    ),
    "llama-8b-lora": (
        Expected(
            "1x4090",
            "single",
            "python",
            (16, 1, 16, 1),
            trainer={**CHATS, "peft.kind": "lora", "precision.weights": "bf16", "model.quantize.bits": 0},
            techniques={"precision.weights": "bf16", "peft.kind": "lora"},
            fetched=SMALL,
        ),
        Expected(
            "1x4090",
            "single",
            "python",
            (16, 1, 16, 1),
            QLORA,
            trainer={"precision.weights": "fp32"},
            techniques={"model.quantize.bits": "4"},
            fetched=SMALL,
        ),
        Expected("1x4090", "single", "python", (16, 1, 16, 1), (*QLORA, "precision.dtype=fp16"), "fp16", fetched=SMALL),
    ),
    "llama-70b-qlora": tuple(
        Expected(
            "8xa100-80gb",
            strategy,
            "torchrun" if cards > 1 else "python",
            (16, 1, 16 // cards, cards),
            (f"devices.select={cards}", *changes),
            trainer={**CHATS, "model.quantize.bits": 4, "precision.weights": "fp32"},
            techniques={"model.quantize.bits": "4", "peft.kind": "lora"},
            fetched=LARGE,
        )
        for strategy, cards, changes in (("ddp", 2, ()), ("ddp", 1, ()), ("fsdp", 2, ("--with", "strategy/fsdp")))
    ),
    "bert-classifier": (
        Expected(
            "1x4090",
            "single",
            "python",
            (32, 16, 2, 1),
            trainer={"model.task": "sequence_classification"},
            fetched=REVIEWS,
            warned=MASK,
        ),
        Expected(
            "4xa100-40gb", "ddp", "torchrun", (32, 8, 1, 4), (*DDP, "batch.micro=8"), fetched=REVIEWS, warned=MASK
        ),
    ),
    "t5-summarization": (
        Expected("1x4090", "single", "python", (128, 4, 32, 1), trainer=PAIRS, fetched=NEWS),
        Expected("8xh100", "single", "python", (128, 32, 4, 1), ("batch.micro=32",), fetched=NEWS),
        Expected("4xa100-40gb", "ddp", "torchrun", (128, 4, 8, 4), DDP, fetched=NEWS),
        Expected("1x4090", "single", "python", (128, 4, 32, 1), EIGHT_BITS, trainer=PAIRS, fetched=NEWS),
    ),
    "olmoe-full": (
        Expected(
            "8xh100",
            "fsdp",
            "torchrun",
            (128, 2, 8, 8),
            trainer={**WHOLE, "model.config": {"output_router_logits": True}},
            fetched=EXPERTS,
        ),
    ),
}
CASES = [(name, each) for name, several in EXPECTED.items() for each in several]
TITLES = [" ".join((name, each.machine, *each.changes)) for name, each in CASES]


@pytest.mark.parametrize(("name", "expected"), CASES, ids=TITLES)
def test_a_recipe_is_planned_for_the_machine_that_it_names(
    name: str, expected: Expected, trainkit: Trainkit, hub: Hub
) -> None:
    for repository in expected.fetched:
        add(hub, repository)
    done = trainkit("plan", name, "--on", expected.machine, *expected.changes, "--json", environ=hub.environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    plan = json.loads(done.stdout)
    warnings = [each["what"] for each in plan["notices"] if each["severity"] != "note"]
    assert len(warnings) == len(expected.warned), warnings
    assert all(what.endswith(end) for what, end in zip(warnings, expected.warned, strict=True))
    batch = plan["batch"]
    assert (plan["strategy"]["kind"], plan["launcher"]["kind"]) == (expected.strategy, expected.launcher)
    assert (batch["global"], batch["micro"], batch["accumulation"], batch["ranks"]) == expected.batch
    assert plan["topology"]["world_size"] == expected.batch[-1]
    words = [word for word in plan["commands"][0]["argv"] if isinstance(word, str)]
    assert "trainkit.trainer" in words
    processes = expected.batch[-1] // expected.nodes
    assert (f"--nproc-per-node={processes}" in words) == (expected.launcher == "torchrun")
    settings = json.loads(plan["files"]["trainer.json"])
    assert (settings["device"], settings["dtype"]) == ("cuda", expected.dtype)
    assert {key: at(settings["recipe"], key) for key in expected.trainer} == expected.trainer
    titles = [each["title"] for each in plan["preparations"]]  # as `fetch the model owner/name from the Hub`
    fetched = [each for each in titles if each.startswith("fetch ")]
    assert {each.removesuffix(" from the Hub").rpartition(" ")[2] for each in fetched} == set(expected.fetched)
    listed = {each["key"]: each["value"] for each in plan["techniques"]}
    assert {key: listed.get(key) for key in expected.techniques} == expected.techniques


def add(hub: Hub, repository: str) -> None:
    """Files of a repository, as small as may be; of a data set all rows of a split in one file, as the README says."""
    if repository in REPOSITORIES:
        described = {
            "config.json": json.dumps(REPOSITORIES[repository]),
            "tokenizer_config.json": '{"chat_template": "{{ messages }}"}',
        }
        hub.add(repository, {**described, "tokenizer.json": "{}", "model.safetensors": b"weights"})
        return
    subsets = DATA_SETS[repository]
    configs = [
        {"config_name": name, "data_files": [{"split": each, "path": f"{name}/{each}-*"} for each in splits]}
        for name, splits in subsets.items()
    ]
    files = {f"{name}/{each}-00000-of-00001.parquet": b"rows" for name, splits in subsets.items() for each in splits}
    hub.add(repository, {"README.md": f"---\n{yaml.safe_dump({'configs': configs})}---\n", **files}, kind="dataset")


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
    assert "in total" in head
    assert "maller GPUs: " in head
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
