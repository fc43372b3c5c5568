"""Commands of training tools that start a launcher: read as the command that they would start."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.convert.reading import argv, comments, imported, refusal, settings
from trainkit.convert.command import starts_program
from trainkit.recipe.schema.launching import program_argv

FULL = {"full.yaml": "stage: sft\ndeepspeed: ds_z3.json\nlearning_rate: 1.0e-5\n", "lora.yaml": "stage: sft\n"}
TORCHRUN = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def test_llamafactory_is_started_on_every_gpu_with_its_file_and_overrides_untouched() -> None:
    text = imported("llamafactory-cli train lora.yaml learning_rate=1e-5", FULL)
    found = settings(text)
    assert (found["program.module"], found["launcher.kind"]) == ("llamafactory.launcher", "torchrun")
    assert (found["devices.select"], found["strategy.kind"]) == ("all", "ddp")
    assert argv(text) == ["lora.yaml", "learning_rate=1e-5"]
    assert {key.removeprefix("env."): value for key, value in found.items() if key.startswith("env.")} == TORCHRUN


def test_llamafactory_reads_its_variables_for_nodes_and_processes() -> None:
    line = "FORCE_TORCHRUN=1 NNODES=2 NODE_RANK=1 NPROC_PER_NODE=4 MASTER_ADDR=h MASTER_PORT=7 OPTIM_TORCH=0 "
    found = settings(imported(f"{line} llamafactory-cli train full.yaml", FULL))
    assert (found["nodes.count"], found["nodes.processes_per_node"], found["nodes.rendezvous"]) == (2, 4, "h:7")
    assert not {key for key in found if key.startswith("env.")}


def test_llamafactory_on_one_gpu_is_one_process_unless_it_is_forced() -> None:
    one = settings(imported("CUDA_VISIBLE_DEVICES=2 llamafactory-cli train lora.yaml", FULL))
    assert (one.get("launcher.kind"), one["devices.select"]) == (None, [2])  # one process is started by python
    forced = settings(imported("CUDA_VISIBLE_DEVICES=2 FORCE_TORCHRUN=1 llamafactory-cli train lora.yaml", FULL))
    assert forced["launcher.kind"] == "torchrun"


def test_what_the_tools_own_file_says_of_the_ranks_is_named() -> None:
    text = comments(imported("FORCE_TORCHRUN=1 llamafactory-cli train full.yaml", FULL))
    assert "full.yaml says deepspeed ds_z3.json: the program sets that up itself" in text
    assert "llamafactory-cli starts `torchrun --nproc_per_node=gpu -m llamafactory.launcher` itself" in text


@pytest.mark.parametrize(
    ("line", "files", "strategy"),
    [
        ("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", {"x.yaml": "deepspeed: ds.json"}, "zero3"),
        ("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml", {"x.yaml": "deepspeed: gone.json"}, "ddp"),
        ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train x.yaml", {"x.yaml": "deepspeed: ds.json"}, None),
        ("axolotl train x.yaml", {"x.yaml": "deepspeed: ds.json"}, "zero3"),
        ("axolotl train x.yaml", {"x.yaml": "fsdp_config: {offload_params: true}"}, "fsdp"),
        ("axolotl train x.yaml --launcher torchrun -- --nproc_per_node=2", {"x.yaml": "fsdp: [full_shard]"}, "fsdp"),
        ("fabric run --devices 2 --strategy deepspeed_stage_3_offload train.py", {}, "zero3"),
        ("fabric run --devices 2 --strategy deepspeed train.py", {}, "zero2"),
        ("fabric run --devices 2 --strategy ddp_spawn train.py", {}, "ddp"),
    ],
)
def test_the_plan_has_the_strategy_that_the_tool_is_told_in_its_own_way(
    line: str, files: dict[str, str], strategy: str | None
) -> None:
    files = {**files, "ds.json": '{"zero_optimization": {"stage": 3}}'}
    found = settings(imported(line, files), files)
    assert found.get("strategy.kind") == strategy
    assert found["program.kind"] == "torch"  # the proof warns, for the program's own file decides
    assert not [key for key in found if key.startswith("strategy.") and key != "strategy.kind"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("axolotl train x.yml", {"launcher.kind": "accelerate"}),
        ("axolotl train x.yml --num-processes 4", {"launcher.kind": "accelerate", "nodes.processes_per_node": 4}),
        ("axolotl train x.yml --launcher torchrun -- --nproc_per_node=2", {"nodes.processes_per_node": 2}),
        ("axolotl train x.yml --launcher python", {}),
    ],
)
def test_axolotl_is_started_by_the_launcher_that_it_is_given(line: str, expected: dict[str, Any]) -> None:
    text = imported(line, {"x.yml": "base_model: m\n"})
    found = settings(text)
    assert found["program.module"] == "axolotl.cli.train"
    assert {key: found[key] for key in expected} == expected
    assert ("launcher.kind" in found) is bool(expected)  # one process is started by python
    assert argv(text) == ["x.yml"]


def test_trl_parts_the_launchers_flags_from_the_scripts_as_its_parser_does() -> None:
    text = imported("trl sft --model_name_or_path m --num_processes 4 --bf16 True --output_dir out")
    found = settings(text)
    assert (found["program.kind"], found["program.module"]) == ("hf", "trl.scripts.sft")
    assert (found["nodes.processes_per_node"], found["precision.dtype"]) == (4, "bf16")
    file = "model_name_or_path: m\nnum_processes: 3\naccelerate_config: mine.yaml\nlearning_rate: 1.0e-5\n"
    mine = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n"
    text = imported("trl sft --config sft.yaml", {"sft.yaml": file, "mine.yaml": mine})
    assert settings(text)["nodes.processes_per_node"] == 3  # a flag of accelerate's wins over its file
    assert "--config" in argv(text)


def test_fabric_run_sets_the_variables_that_fabric_reads() -> None:
    found = settings(imported("fabric run --strategy=ddp --devices=4 --precision 16-mixed train.py --lr 1"))
    assert (found["nodes.processes_per_node"], found["program.script"]) == (4, "train.py")
    assert found["env.LT_STRATEGY"] == "ddp"
    assert found["env.LT_PRECISION"] == "16-mixed"
    assert found["env.LT_CLI_USED"] == "1"


@pytest.mark.parametrize(
    ("line", "name", "started", "launcher"),
    [
        ("tune run --nproc_per_node 2 lora '--a b'", "tune", ["/usr/bin/env", "tune", "run"], None),
        ("nohup fairseq-train data-bin", "fairseq-train", ["/usr/bin/env", "fairseq-train", "data-bin"], None),
        ("composer -n 2 train.py", "composer", ["/usr/bin/env", "composer", "-n", "2", "train.py"], None),
        (".venv/bin/composer -n 2 train.py", "composer", [".venv/bin/composer"], None),
        ("torchrun --no_python fairseq-train d", "fairseq-train", ["/usr/bin/env", "fairseq-train", "d"], "torchrun"),
        ("torchrun --no_python /usr/bin/env x", "x", ["/usr/bin/env", "x"], "torchrun"),
    ],
)
def test_a_console_script_is_a_program_that_is_found_where_a_shell_finds_it(
    line: str, name: str, started: list[str], launcher: str | None
) -> None:
    found = yaml.safe_load(imported(line))
    program = found["program"]
    words = [program["script"], *program_argv(program.get("args", []))]
    assert (found["name"], program["kind"], found.get("launcher", {}).get("kind")) == (name, "torch", launcher)
    assert words[: len(started)] == started


def test_a_console_script_that_is_asked_for_something_else_is_no_program() -> None:
    assert starts_program(["tune", "run", "lora"])
    assert not starts_program(["tune", "download", "org/model"])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("trl vllm-serve m", "trl vllm-serve starts no training"),
        ("llamafactory-cli chat x.yaml", "llamafactory-cli chat starts no training"),
        ("USE_RAY=1 llamafactory-cli train lora.yaml", "USE_RAY is set: Ray starts its processes"),
        ("MIN_NNODES=1 llamafactory-cli train lora.yaml", "MIN_NNODES is set: the number of nodes may change"),
        ("axolotl train x.yml --launcher mpi", "axolotl has no launcher mpi"),
        ("fabric run --gpus=2 train.py", "fabric run has no flag --gpus"),
        ("trl sft --accelerate_config zero3", "--accelerate_config zero3 is a file in the package trl"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_in_the_tools_place_is_refused_with_its_reason(line: str, what: str) -> None:
    assert what in refusal(line, FULL).what
