"""Commands of container engines as recipes: their words become the section, and none of them is dropped."""

from __future__ import annotations

from typing import Any

import pytest

from tests.convert.reading import comments, imported, refusal, script, settings

DOCKER = "docker run --rm -it --gpus all --ipc=host"
LINES: dict[str, dict[str, Any]] = {
    f"{DOCKER} --ulimit memlock=-1 --ulimit stack=67108864 -v /data:/data:ro -v /here:/workspace -w /workspace "
    "-e NCCL_DEBUG=INFO -e HF_TOKEN -u 1000:1000 team/pytorch:2 torchrun --nproc_per_node 2 train.py --lr 0.1": {
        "program.kind": "torch", "program.script": "train.py", "program.args.lr": "0.1",
        "strategy.kind": "ddp", "launcher.kind": "torchrun", "nodes.processes_per_node": 2,
        "container.kind": "docker", "container.image": "team/pytorch:2", "container.shared_memory": "host",
        "container.ulimits.memlock": -1, "container.ulimits.stack": 67_108_864, "container.entrypoint": "image",
        "container.mounts": ["/data:/data:ro", "/here:/workspace"], "container.workdir": "/workspace",
        "container.user": "1000:1000", "env.NCCL_DEBUG": "INFO", "env_from": ["HF_TOKEN"],
    },
    "sudo podman run --device nvidia.com/gpu=1 --shm-size 16G --entrypoint '' --cpus=8 i:1 deepspeed train.py": {
        "program.kind": "torch", "program.script": "train.py", "launcher.kind": "deepspeed",
        "program.local_rank": True, "strategy.kind": "ddp",
        "container.kind": "podman", "container.image": "i:1", "container.shared_memory": "16g",
        "container.options": ["--cpus=8"], "devices.select": [1], "devices.order": "pci",
    },
    "docker run --gpus '\"device=0,GPU-1\"' --mount type=bind,src=/d,dst=/d,readonly --entrypoint python i train.py": {
        "program.kind": "torch", "program.script": "train.py", "container.kind": "docker", "container.image": "i",
        "container.mounts": ["/d:/d:ro"], "container.python": "python",
        "devices.select": [0, "GPU-1"], "devices.order": "pci",
    },
    "singularity exec --nv -B /data,/big:/b:ro --pwd /b --env A=1,B=2 x.sif accelerate launch train.py": {
        "program.kind": "accelerate", "program.script": "train.py", "launcher.kind": "accelerate",
        "strategy.kind": "ddp", "devices.select": "all", "container.kind": "apptainer", "container.image": "x.sif",
        "container.mounts": ["/data:/data", "/big:/b:ro"], "container.workdir": "/b", "env.A": "1", "env.B": "2",
    },
    "apptainer exec x.sif python -m torch.distributed.run --nproc-per-node 2 train.py": {
        "program.kind": "torch", "program.script": "train.py", "strategy.kind": "ddp", "launcher.kind": "torchrun",
        "nodes.processes_per_node": 2, "container.kind": "apptainer", "container.image": "x.sif",
        "container.python": "python",
    },
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_container_s_command_becomes_the_section_and_the_rest_is_read_as_ever(line: str) -> None:
    assert settings(imported(line)) == LINES[line]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--foo=bar", "docker run --foo cannot be taken over"),
        ("--userns=host", "docker run --userns cannot be taken over"),
        ("-itx", "docker run -x cannot be taken over"),
        ("-", "docker run - cannot be taken over"),
        ("--env-file secrets.env", "--env-file secrets.env cannot be taken over"),
        ("-v named:/data", "-v named:/data cannot be taken over"),
        ("--mount type=tmpfs,target=/x", "--mount type=tmpfs,target=/x cannot be taken over"),
        ("--ipc=container:x", "--ipc container:x cannot be taken over"),
        ("-u nobody", "-u nobody cannot be taken over"),
        ("--ulimit nofile=1:2", "--ulimit nofile=1:2 cannot be taken over"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(words: str, said: str) -> None:
    assert refusal(f"docker run {words} team/pytorch:2 python train.py").what == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("docker run --rm team/pytorch:2", "docker run names no command to run in the image"),
        ("docker exec box python train.py", "docker exec does not start a program in an image as `docker run` does"),
        ("apptainer run x.sif python x.py", "apptainer run does not start a program in an image as `apptainer exec`"),
        ("docker", "docker does not start a program"),
        ("docker run i bash -c 'python train.py'", "the container starts bash, and trainkit the program itself"),
    ],
)
def test_what_starts_no_program_in_an_image_is_named(line: str, said: str) -> None:
    assert said in refusal(line).what


def test_letters_without_a_value_may_be_joined_with_one_that_has_one() -> None:
    text = imported("docker container run --rm -itdv /data:/data team/pytorch:2 python train.py")
    found = settings(text)
    assert (found["container.image"], found["container.mounts"]) == ("team/pytorch:2", ["/data:/data"])
    assert "-d is not taken over" in comments(text)


def test_what_trainkit_does_itself_is_said() -> None:
    said = comments(imported("A=1 docker run -d --name mine --network bridge team/pytorch:2 python train.py"))
    for each in ("-d is not taken", "--name mine is not taken", "--network bridge is not", "A in front is not"):
        assert each in said


def test_a_secret_given_by_value_is_taken_by_name() -> None:
    text = imported("docker run -e HF_TOKEN=hf_abcdefghijk team/pytorch:2 python train.py")
    assert "hf_abcdefghijk" not in text
    assert settings(text)["env_from"] == ["HF_TOKEN"]


@pytest.mark.cli
def test_a_script_with_a_container_is_read_like_the_command() -> None:
    line = "docker run --rm --gpus all \\\n  -v $PWD:/w -w /w $IMAGE torchrun --nproc_per_node=2 train.py"
    found = settings(script(f"IMAGE=team/pytorch:2\n{line}\n"))
    assert found["container.image"] == "team/pytorch:2"
    assert found["container.mounts"] == ["/here:/w"]
