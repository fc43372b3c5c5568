"""`trainkit estimate`, `strategy.kind: auto` and what is said when memory runs out, through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit

SMALL = ("model.layers=2", "model.hidden_size=64", "model.heads=2", "data.sequence_length=32")


def quick(trainkit: Trainkit, *words: str) -> dict[str, Any]:
    done = trainkit("estimate", "quickstart", "--quick", "--json", *SMALL, *words)
    assert done.returncode in (0, 4), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_estimate_has_parts_limit_time_and_changes(trainkit: Trainkit) -> None:
    found = quick(trainkit, "--on", "1x4090")
    assert found["basis"] == "formula"
    assert found["total"] == sum(found["parts"].values())
    assert {"parameters", "optimizer state", "activations", "context"} <= found["parts"].keys()
    assert found["headroom"] == found["limit"] - found["total"] > 0
    assert found["step"] > 0
    assert {"batch.micro=1"} <= {f"batch.micro={each['settings'].get('batch.micro')}" for each in found["changes"]}


def test_the_model_itself_is_traced_and_the_trace_is_kept(trainkit: Trainkit, tmp_path: Path) -> None:
    words = ("estimate", "quickstart", *SMALL, "--json")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    traced, again = (json.loads(trainkit(*words, environ=environ).stdout) for _ in range(2))
    assert traced["basis"] == "traced"
    assert again == traced
    assert list((tmp_path / "cache" / "trainkit" / "traces").iterdir())
    by_formula = quick(trainkit)
    assert by_formula["allocated"] == pytest.approx(traced["allocated"], rel=0.01)


def test_what_does_not_fit_exits_with_4(trainkit: Trainkit) -> None:
    done = trainkit("estimate", "gpt-1.3b", "--on", "1x4090", "--quick")
    assert done.returncode == 4
    assert "does not fit" in done.stdout
    assert "batch.micro=1" in done.stdout


def test_the_nearest_settings_that_fit_are_printed_to_be_typed(trainkit: Trainkit) -> None:
    where = ("--on", "1x4090", "--quick")
    done = trainkit("estimate", "gpt-1.3b", *where, "--fit")
    assert done.returncode == 0, done.stderr
    again = trainkit("estimate", "gpt-1.3b", *done.stdout.split(), *where)
    assert again.returncode == 0, again.stdout
    assert trainkit("estimate", "quickstart", *SMALL, "--quick", "--fit").stdout == ""


@pytest.mark.e2e
def test_all_machines_are_ranked(trainkit: Trainkit) -> None:
    done = trainkit("estimate", "gpt-1.3b", "--on", "all", "--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]
    fitting = [line.split()[0] for line in lines if " fits " in line]
    assert fitting
    assert lines[0].split()[0] in fitting
    assert any(line.startswith("1xt4") and "bf16" in line for line in lines)  # which it does not have


@pytest.mark.e2e
def test_what_takes_several_machines_says_how_many_and_how_large_a_checkpoint_is(trainkit: Trainkit) -> None:
    words = ("estimate", "llama-70b-full", "--quick", "--json", "nodes.count=1", "--on")
    done = trainkit(*words, "8xh100")
    assert done.returncode == 4, done.stderr
    found = json.loads(done.stdout)
    assert found["checkpoint"] == pytest.approx(12 * 70_553_706_496, rel=1e-6)  # 4 bytes of weights, 8 of AdamW's state
    assert found["disk"] == 3 * found["checkpoint"]
    fitting = {
        key: value for each in found["changes"] if each["verdict"] == "fits" for key, value in each["settings"].items()
    }
    assert fitting == {"strategy.offload": True, "nodes.count": 8}
    small = trainkit(*words, "1x4090")
    assert small.returncode == 4
    assert {each["verdict"] for each in json.loads(small.stdout)["changes"]} == {"too large"}


def test_variants_stand_beside_published_figures(trainkit: Trainkit) -> None:
    done = trainkit("estimate", "efficiency-table", "--on", "1xv100-16gb", "--variant", "all", "--quick")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert {"base", "accumulation", "all-8bit"} <= rows.keys()
    assert rows["all-8bit"].rstrip().endswith("5,363 MiB, 10.35/s")


def test_the_picture_is_svg_and_nothing_else_is_written(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("estimate", "quickstart", *SMALL, "--quick", "--plot", "memory.svg")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "memory.svg").read_text().startswith("<svg ")
    wrong = trainkit("estimate", "quickstart", *SMALL, "--quick", "--plot", "memory.png")
    assert wrong.returncode == 2
    assert "does not end in .svg" in wrong.stderr


def test_a_program_of_ones_own_cannot_be_told(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = trainkit("estimate", "train.py")
    assert done.returncode == 4
    assert "what a program of your own takes is in its code" in done.stderr


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip


def test_a_script_on_trainer_is_told_as_far_as_its_arguments_say(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "run_clm.py").write_text("from transformers import Trainer\n")
    recipe = {"version": 1, "devices": {"type": "cpu"}, "batch": {"micro": 8, "global": 8},
              "program": {"kind": "hf", "script": "run_clm.py", "args": {"model_name_or_path": "base"}}}  # fmt: skip
    (tmp_path / "own.yaml").write_text(json.dumps(recipe))
    unknown = trainkit("estimate", "own.yaml", "--quick")
    assert unknown.returncode == 4
    assert "do not say how many tokens a sample has (--block_size" in unknown.stderr
    known = trainkit("estimate", "own.yaml", "--quick", "--json", "program.args.block_size=64")
    found = json.loads(known.stdout)
    built_in = {"version": 1, "devices": {"type": "cpu"}, "batch": recipe["batch"], "precision": {"dtype": "fp32"},
                "model": {"kind": "hf", "path": "base"}, "optimizer": {"name": "adamw_torch_fused"},
                "data": {"kind": "random", "sequence_length": 64}, "strategy": {"kind": "single"},
                "train": {"steps": 1}}  # fmt: skip
    (tmp_path / "like.yaml").write_text(json.dumps(built_in))
    like = json.loads(trainkit("estimate", "like.yaml", "--quick", "--json").stdout)
    assert found["allocated"] == like["allocated"]
    assert "counted as trainkit's trainer on the same model (causal lm)" in found["notes"][0]
    keys = {key for each in found["changes"] for key in each["settings"]}
    assert "efficiency.gradient_checkpointing.every" in keys
    assert not {key for key in keys if key.startswith(("peft", "data", "model"))}
    again = trainkit("estimate", "own.yaml", "--quick", "--json", "program.args.block_size=64",
                     "program.args.gradient_checkpointing=true")  # fmt: skip
    recomputing = json.loads(again.stdout)
    assert recomputing["allocated"] < found["allocated"]
    told = {key for each in recomputing["changes"] for key in each["settings"]}
    assert "efficiency.gradient_checkpointing.every" not in told
    absent = trainkit("estimate", "own.yaml", "--quick", "program.args.model_name_or_path=gone")
    assert "gone is no folder here" in absent.stderr


def test_nothing_was_measured_at_first(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("estimate", "--calibration", environ={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "nothing was measured yet" in done.stdout


def test_auto_says_what_it_took_and_why(trainkit: Trainkit) -> None:
    done = trainkit("explain", "quickstart", "strategy.kind", "strategy.kind=auto", "batch.global=32", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "chosen by its estimate" in done.stdout


@pytest.mark.e2e
def test_a_run_shows_what_was_foreseen_and_is_remembered(trainkit: Trainkit, tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = trainkit("run", "quickstart", "train.steps=5", "eval.every_steps=0", *SMALL, environ=environ)
    assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/*/*/summary.json")
    found = json.loads(summary.read_text())["foresight"]
    assert found["measured"].keys() == found["error"].keys() >= {"total", "step"}
    assert "Foreseen, in all" in done.stdout + done.stderr
    shown = trainkit("estimate", "--calibration", environ=environ).stdout
    assert " 1 " in shown


@pytest.mark.e2e
def test_a_run_without_memory_is_told_what_to_change_and_then_runs(trainkit: Trainkit) -> None:
    """Address space is limited (ulimit -v), so that an allocation of torch's fails as on a full machine."""
    large = ("model.layers=2", "model.hidden_size=256", "model.heads=4", "data.sequence_length=1024", "train.steps=1",
             "batch.global=64", "batch.micro=64", "eval.every_steps=0", "sample.prompt=")  # fmt: skip
    limit = ("prlimit", "--as=2900000000")
    failed = trainkit("run", "quickstart", *large, prefix=limit)
    assert failed.returncode != 0
    said = failed.stdout + failed.stderr
    assert "memory ran out (the machine's) on rank 0" in said
    first = next(line for line in said.splitlines() if line.startswith("next: ") and "in all" in line)
    settings = first.removeprefix("next: ").partition(" (")[0].split()
    again = trainkit("run", "quickstart", *large, *settings, prefix=limit)
    assert again.returncode == 0, again.stderr
