"""The plan as a page, as a comparison, and as an explanation."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import UsageError
from trainkit.launch_plan.model import Planned
from trainkit.launch_plan.render import explain, shell, table
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

Layered = Callable[..., Resolved]
Machine = Callable[..., Facts]
GOLDEN = Path(__file__).parents[1] / "golden" / "rendered"
RENEW = "TRAINKIT_RENEW_GOLDEN=1 python -m pytest tests/launch_plan"

RECIPE: dict[str, Any] = {
    "name": "demo",
    "program": {"kind": "torch", "script": "train.py", "args": ["--text", "it's $5"], "reads_recipe": True},
    "strategy": {"kind": "fsdp"},
    "devices": {"select": [3, 1]},
    "batch": {"global": 64, "micro": 4},
    "env": {"NCCL_DEBUG": "WARN"},
    "env_from": ["HF_TOKEN"],
}


TECHNIQUES: dict[str, Any] = {
    "name": "techniques",
    "strategy": {"kind": "ddp"},
    "batch": {"global": 64, "micro": 4},
    "precision": {"dtype": "bf16", "tf32": True},
    "efficiency": {"gradient_checkpointing": {"every": 2}, "compile": {"enabled": True}},
    "optimizer": {"name": "adafactor", "lr": 1e-2},
    "data": {"workers": 2},
}


SLURM: dict[str, Any] = {
    "name": "queued",
    "strategy": {"kind": "fsdp"},
    "nodes": {"count": 4, "processes_per_node": 4},
    "batch": {"global": 64, "micro": 4},
    "env_from": ["HF_TOKEN"],
    "cluster": {
        "kind": "slurm",
        "partition": "long",
        "account": "lab",
        "qos": "high",
        "constraint": "nvlink",
        "reservation": "class",
        "nodelist": "n[1-8]",
        "exclude": "n3",
        "time": "1-12:00:00",
        "cpus_per_node": 32,
        "memory_per_node": "480G",
        "exclusive": True,
        "gpu_kind": "h100",
        "setup": ["module load cuda/12.8"],
        "requeue": {"warn_seconds": 300, "without_progress": 2},
        "sbatch": ["--mail-type=END"],
        "srun": ["--mpi=none"],
    },
}


SSH: dict[str, Any] = {
    "name": "reached",
    "strategy": {"kind": "ddp"},
    "nodes": {"count": 2, "processes_per_node": 4},
    "cluster": {"kind": "ssh", "hosts": ["a1", "me@a2"], "workdir": "/data", "options": ["-p2222"]},
}


@pytest.mark.parametrize(
    ("name", "render", "recipe"),
    [
        ("table-slurm.txt", table.render, SLURM),
        ("table-ssh.txt", table.render, SSH),
        ("table.txt", table.render, RECIPE),
        ("plan.sh", shell.render, RECIPE),
        ("table-techniques.txt", table.render, TECHNIQUES),
    ],
)
def test_a_rendered_plan_is_as_written_down(
    layered: Layered, machine: Machine, name: str, render: Callable[..., str], recipe: dict[str, Any]
) -> None:
    text, path = render(build_plan(layered(recipe), machine(4)).plan), GOLDEN / name
    text = text.replace(sys.executable, "<python>")
    text = re.sub(r"\(\d+ bytes\)", "(N bytes)", text)  # the trainer's settings grow with every key of the schema
    if os.environ.get("TRAINKIT_RENEW_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path} is missing; make it with: {RENEW}"
    assert path.read_text() == text, f"{name} differs; if the change is meant, renew it with: {RENEW}"


def test_the_page_fits_100_columns(layered: Layered, machine: Machine) -> None:
    for recipe in ({}, {"strategy": {"kind": "zero3"}}, {"strategy": {"kind": "ddp"}, "nodes": {"count": 64}}):
        page = table.render(build_plan(layered(recipe), machine(2)).plan)
        assert max(map(len, page.splitlines())) <= 100


def test_the_page_shows_batch_topology_reasons_and_remarks(layered: Layered, machine: Machine) -> None:
    recipe = {"strategy": {"kind": "zero2"}, "batch": {"global": 64, "micro": 4}}
    page = table.render(build_plan(layered(recipe), machine(2, packages={"torch": "2.13.0"})).plan)
    wanted = "'numpy>=1.26,<3' 'safetensors>=0.4.3,<0.9' 'deepspeed>=0.19.4,<0.19.9' 'ninja>=1.11.1,<2'"
    for words in (
        "Batch: 64 = 4 \N{MULTIPLICATION SIGN} 8 \N{MULTIPLICATION SIGN} 2",
        "rank 1 on GPU 1",
        "DeepSpeed partitions optimizer state and gradients",
        "deepspeed.json",
        "blocker: program builtin under zero2 requires deepspeed >= 0.19.4; it is not installed",
        f"\n    /opt/python -m pip install {wanted}\n",
    ):
        assert page.count(words) == 1


def test_the_page_for_thousands_of_nodes_is_short(layered: Layered, machine: Machine) -> None:
    where = {"count": 4096, "rendezvous": "node0:29400"}
    model = {"layers": 48, "hidden_size": 8192, "heads": 64}  # which needs no remark that it fits on one card
    recipe = {"strategy": {"kind": "fsdp"}, "precision": {"dtype": "fp32"}, "model": model, "nodes": where}
    page = table.render(build_plan(layered(recipe), machine(8)).plan)
    assert "4096 nodes, 32768 ranks on cuda" in page
    assert "local rank 7 on GPU 7" in page
    assert len(page.splitlines()) < 80


def test_equal_plans_do_not_differ(layered: Layered, machine: Machine) -> None:
    one, two = (build_plan(layered(RECIPE), machine(4)).plan for _ in range(2))
    assert explain.render_diff(one, two) == "The plans are the same.\n"


def test_a_comparison_names_what_changes(layered: Layered, machine: Machine) -> None:
    before = build_plan(layered({"strategy": {"kind": "ddp"}, "env": {"A": "1"}}), machine()).plan
    after = build_plan(
        layered({"strategy": {"kind": "zero1"}, "optimizer": {"lr": 0.5}, "env": {"A": "2"}}), machine()
    ).plan
    lines = [line.strip() for line in explain.render_diff(before, after).splitlines()]
    for line in (
        "~ strategy.kind: ddp -> zero1",
        "~ A: 1 -> 2",
        "+ DS_ACCELERATOR: cpu",
        "+ the whole file",
        "~ recipe.optimizer.lr: 0.0003 -> 0.5",
        "The settings that decide training differ: neither resumes from the other's checkpoints on its own.",
    ):
        assert line in lines


def test_a_comparison_of_commands_shows_the_words_that_change(layered: Layered, machine: Machine) -> None:
    def plan(ranks: int) -> Planned:
        return build_plan(layered({"strategy": {"kind": "ddp"}, "nodes": {"processes_per_node": ranks}}), machine())

    changed = explain.render_diff(plan(2).plan, plan(4).plan)
    assert "- --nproc-per-node=2" in changed
    assert "+ --nproc-per-node=4" in changed
    assert "--rdzv-backend" not in changed


def test_a_value_of_several_lines_stays_on_its_line_of_a_page(layered: Layered, machine: Machine) -> None:
    program = {"kind": "torch", "script": "train.py", "args": ["--text", "one\n  fake\x1b[31m 'x' \\"]}
    resolved = layered({"env": {"A": "1"}}, {"program": program, "env": {"A": "one\n  FAKE=1"}})
    planned, other = build_plan(resolved, machine()), build_plan(layered({"env": {"A": "2"}}), machine())
    page, changes = table.render(planned.plan), explain.render_diff(other.plan, planned.plan)
    assert "  A=$'one\\n  FAKE=1'\n" in page
    assert r"--text $'one\n  fake\x1b[31m \'x\' \\'" in page
    assert '~ A: 2 -> "one\\n  FAKE=1"' in changes
    assert r"A=$'one\n  FAKE=1'   in the ranks' environment" in explain.render("A", resolved, planned)
    assert "\x1b" not in page + changes


@pytest.fixture
def two_layers(layered: Layered) -> Resolved:
    return layered(
        {"strategy": {"kind": "ddp"}, "optimizer": {"lr": 0.1}}, {"optimizer": {"lr": 0.2}, "env": {"A": "1"}}
    )


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            "optimizer.lr",
            ["optimizer.lr = 0.2", "given by file layer1.yaml:1:3", "beaten: 0.1 of file layer0.yaml:2:3"],
        ),
        ("optimizer.beta1", ["optimizer.beta1 = 0.9", "the default"]),
        ("optimizer", ["optimizer.lr = 0.2", "optimizer.beta2 = 0.95"]),
        ("--nproc-per-node=2", ["nodes.processes_per_node", 'strategy.kind = "ddp"   layer0.yaml:1:3']),
        ("--nproc-per-node", ["word 5 of the command"]),
        ("nproc-per-node", ["word 5 of the command"]),
        ("--no-python", ["because: the program brings its own interpreter"]),
        ("OMP_NUM_THREADS", ["OMP_NUM_THREADS=8", "because: 16 cores / 2 ranks"]),
        ("A", ["A=1", "from env.A", "layer1.yaml:2:3"]),
        ("MASTER_ADDR", ["yours is not handed on: it describes an outer launcher"]),
        ("trainer.json.dtype", ["from precision.dtype", "default"]),
    ],
)
def test_a_key_or_a_word_of_the_plan_is_traced_to_its_origin(
    two_layers: Resolved, machine: Machine, query: str, words: list[str]
) -> None:
    text = explain.render(query, two_layers, build_plan(two_layers, machine()))
    for expected in words:
        assert expected in text


def test_an_unknown_word_is_answered_with_what_it_may_have_meant(two_layers: Resolved, machine: Machine) -> None:
    with pytest.raises(UsageError) as caught:
        explain.render("optimiser.lr", two_layers, build_plan(two_layers, machine()))
    assert "optimizer.lr" in caught.value.diagnostics[0].hint


def test_without_a_key_every_value_that_a_layer_gives_is_listed(two_layers: Resolved) -> None:
    lines = explain.render_all(two_layers).splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["strategy.kind", "optimizer.lr", "env.A"]
    assert "layer1.yaml:1:3" in lines[1]


def test_sizes_that_nobody_gave_are_said_to_be_the_scripts_own(layered: Layered, machine: Machine) -> None:
    resolved = layered({"program": {"kind": "hf", "script": "train.py"}, "strategy": {"kind": "ddp"}})
    planned = build_plan(resolved, machine())
    assert "Batch: the script's own\n" in table.render(planned.plan)
    for key in ("batch.global", "batch.accumulation", "batch.eval_micro"):
        assert "the plan leaves it to the script" in explain.render(key, resolved, planned)
    partly = build_plan(layered(resolved.tree, {"batch": {"micro": 4}}), machine())
    assert "Batch: the script's own = 4 \N{MULTIPLICATION SIGN} the script's own" in table.render(partly.plan)
