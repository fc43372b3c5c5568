"""Every answer that is given in a real terminal is found again in the process: its arguments, environment and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wizard_terminal import DOWN, contents, converse, environment, planned, spawn, words

from tests.conftest import Trainkit
from tests.wizard.conftest import machine_of
from tests.wizard.test_wizard_fine_tuning import save_model
from trainkit.launch_plan.model import Plan
from trainkit.machine.facts import Facts

WITNESS = Path(__file__).resolve().parent / "programs" / "witness.py"
Drive = Callable[..., Plan]


@pytest.fixture
def drive(tmp_path: Path, clean_environment: dict[str, str]) -> Drive:
    """Answer the wizard for a machine; the plan there of the recipe that it writes."""

    def answer(facts: Facts, **typed: str) -> Plan:
        (tmp_path / "facts.json").write_text(json.dumps(facts.to_json()))
        asked = converse(spawn(tmp_path, clean_environment, ["--on", "facts.json"]), **{"program": "pretrain", **typed})
        plan = planned(tmp_path, facts)
        assert len(asked) + 1 <= (8 if plan.topology.world_size == 1 else 12)
        return plan

    return answer


@pytest.fixture
def started(tmp_path: Path, clean_environment: dict[str, str], trainkit: Trainkit) -> Callable[..., Any]:
    """Answer the wizard here and run its recipe; what each process saw of itself."""

    def answer(**typed: str) -> list[dict[str, Any]]:
        converse(spawn(tmp_path, clean_environment, ["--set", f"env.WITNESS={tmp_path}"]), program="torch", **typed)
        done = trainkit("run", "recipe.yaml", timeout=200)
        assert done.returncode == 0, done.stderr
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]

    return answer


def test_cpu(started: Callable[..., Any]) -> None:
    (rank,) = started(command=f"{WITNESS} --lr 0.1 'two words'", where="cpu")
    assert rank["argv"] == ["--lr", "0.1", "two words"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & rank["environment"].keys()  # as python starts it
    assert not any("torch.distributed.run" in line for line in rank["processes"])


def test_ddp_on_a_cpu_under_the_launcher_that_was_chosen(started: Callable[..., Any]) -> None:
    ranks = started(command=str(WITNESS), where="cpu-2", strategy="ddp", launcher="accelerate")
    assert [rank["environment"]["RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["environment"]["WORLD_SIZE"] for rank in ranks} == {"2"}
    assert all(any("accelerate.commands.launch" in line for line in rank["processes"]) for rank in ranks)


def test_the_built_in_trainer_on_a_cpu(tmp_path: Path, clean_environment: dict[str, str], trainkit: Trainkit) -> None:
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    small = {"model.layers": 1, "model.hidden_size": 16, "data.sequence_length": 32, "data.cache": "cache"}
    words = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    child = spawn(tmp_path, clean_environment, words)
    converse(child, program="pretrain", where="cpu", data="corpus.txt", batch="4/2", checkpointing="yes", length="3/2")
    done = trainkit("run", "recipe.yaml", timeout=200)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "recipe").iterdir()
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert len(list((run / "checkpoints").glob("*2*"))) == 1
    settings = json.loads((run / "trainer.json").read_text())
    assert settings["recipe"]["data"]["path"] == "corpus.txt"
    assert settings["batch"].items() >= {"global_": 4, "micro": 2, "accumulation": 2, "ranks": 1}.items()
    assert settings["recipe"]["efficiency"]["gradient_checkpointing"]["every"] is True


def test_one_gpu_by_enter_alone(drive: Drive) -> None:
    facts = machine_of(1)
    plan = drive(facts)
    assert environment(plan)["CUDA_VISIBLE_DEVICES"] == facts.gpus[0].uuid
    assert (plan.launcher.kind, plan.topology.world_size) == ("python", 1)
    trainer = contents(plan, "trainer.json")
    assert (trainer["device"], trainer["dtype"]) == ("cuda", "bf16")
    assert trainer["batch"]["global_"] == 32
    assert trainer["recipe"]["train"]["steps"] == 500


def test_one_gpu_with_everything_typed(drive: Drive, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    typed = {"precision": "fp32", "batch": "64/8", "checkpointing": "yes", "length": "70/35"}
    plan = drive(machine_of(2), where="1", data="corpus/**/*.txt", **typed)
    trainer = contents(plan, "trainer.json")
    recipe = trainer["recipe"]
    assert plan.topology.world_size == 1
    assert (recipe["data"]["path"], recipe["data"]["include"]) == ("corpus", "**/*.txt")
    assert trainer["dtype"] == "fp32"
    assert (trainer["batch"]["micro"], trainer["batch"]["accumulation"]) == (8, 8)
    assert recipe["efficiency"]["gradient_checkpointing"]["every"] is True
    assert (recipe["train"]["steps"], recipe["checkpoint"]["every_steps"]) == (70, 35)


def test_fine_tuning_on_two_gpus(drive: Drive, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    save_model(tmp_path / "base", template=False)
    typed = {"rows": "chats.jsonl", "model": "base", "method": "lora", "strategy": "ddp", "output": "out"}
    plan = drive(machine_of(2), program="finetune", **typed)
    recipe = contents(plan, "trainer.json")["recipe"]
    assert (recipe["model"]["path"], recipe["peft"]["kind"]) == ("base", "lora")
    assert (recipe["data"]["path"], recipe["data"]["chat_template"]) == ("chats.jsonl", "chatml")
    assert (recipe["train"]["epochs"], plan.output_root) == (3.0, "out")


def test_mps(drive: Drive) -> None:
    plan = drive(machine_of(mps=True))
    trainer = contents(plan, "trainer.json")
    assert (trainer["device"], plan.topology.world_size, plan.launcher.kind) == ("mps", 1, "python")
    assert trainer["recipe"]["data"]["pin_memory"] is False


def test_ddp_on_cards_in_the_order_that_was_typed(drive: Drive) -> None:
    facts = machine_of(4)
    plan = drive(facts, where="2,0", strategy="ddp", launcher="torchrun", batch="64/8")
    assert environment(plan)["CUDA_VISIBLE_DEVICES"] == f"{facts.gpus[2].uuid},{facts.gpus[0].uuid}"
    assert "--nproc-per-node=2" in words(plan)
    trainer = contents(plan, "trainer.json")
    assert trainer["recipe"]["strategy"]["kind"] == "ddp"
    assert trainer["batch"].items() >= {"global_": 64, "micro": 8, "accumulation": 4, "ranks": 2}.items()


def test_fsdp_chosen_with_arrow_keys(drive: Drive) -> None:
    # ddp, fsdp | full_shard, shard_grad_op | class names are typed | auto, torchrun, accelerate
    plan = drive(machine_of(2), strategy=DOWN, sharding=DOWN, wrapping="BertLayer,T5Block", launcher=DOWN * 2)
    strategy = contents(plan, "trainer.json")["recipe"]["strategy"]
    assert (strategy["kind"], strategy["sharding"], strategy["offload"]) == ("fsdp", "shard_grad_op", False)
    assert (strategy["auto_wrap"], strategy["wrap_classes"]) == ("transformer", ["BertLayer", "T5Block"])
    assert "accelerate.commands.launch" in words(plan)


def test_zero2_with_offload_under_deepspeed(drive: Drive) -> None:
    plan = drive(machine_of(2), strategy="zero2", offload="cpu", launcher="deepspeed", precision="bf16")
    config = contents(plan, "deepspeed.json")
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert config["bf16"]["enabled"] is True
    assert "deepspeed.launcher.runner" in words(plan)


def test_zero3_with_nvme(drive: Drive) -> None:
    plan = drive(machine_of(2), strategy="zero3", offload="nvme-all", nvme="/local_nvme")
    config = contents(plan, "deepspeed.json")["zero_optimization"]
    assert config["stage"] == 3
    for part in ("offload_optimizer", "offload_param"):
        assert config[part]["device"] == "nvme"
        assert "/local_nvme" in config[part]["nvme_path"]


def test_zero3_with_everything_in_cpu_memory(drive: Drive) -> None:
    config = contents(drive(machine_of(2), strategy="zero3", offload="cpu-all"), "deepspeed.json")["zero_optimization"]
    assert config["stage"] == 3
    assert {config[part]["device"] for part in ("offload_optimizer", "offload_param")} == {"cpu"}


def test_two_nodes(drive: Drive) -> None:
    plan = drive(machine_of(2), where="nodes", machines="2 first:29511", strategy="fsdp")
    assert (plan.topology.nodes, plan.topology.world_size) == (2, 4)
    assert plan.rendezvous == "first:29511"
    assert "--nnodes=2" in words(plan)
    assert any("29511" in word or "<port>" in word for word in words(plan))
