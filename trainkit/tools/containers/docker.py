"""`docker` and `podman`: a container for each node, named after run and attempt, on the machine's network."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text, Variable, text
from trainkit.launch_plan.provenance import Token, token
from trainkit.recipe.schema import Docker, Podman
from trainkit.tools.containers.engine import HOST_NETWORK, HOST_NUMBERS, Mount, mounts, of, options, words, workdir

PREFIX = ""
APART = ',"'
# Flags that the plan sets, or that would undo what it sets.
OWN_FLAGS = """
    --rm --name --pull --pid --network --net --uts --ipc --shm-size --ulimit --user -u --userns --gpus
    --entrypoint --workdir -w --mount --volume -v --env -e --env-file --env-host --detach -d --tty -t
    --interactive -i --hostname -h --init --restart --cgroups --cidfile --sig-proxy --detach-keys
    --attach -a --rootfs
"""
SETS = frozenset(OWN_FLAGS.split())
GONE = "nothing of it stays behind"
NO_LABELS = "the folders keep their SELinux labels, for other programs use them too"
ROOT_IS_YOU = "in podman's container root is you: what it writes is yours"


def argv(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`docker run` and the image."""
    container = of(context)
    assert isinstance(container, Docker | Podman)
    chosen = ("container.kind",)
    return (
        token(container.kind, keys=chosen),
        token("run", keys=chosen),
        token("--rm", rule=GONE),
        token("--name=", *name.parts, rule="by this name it is ended"),
        token(f"--pull={container.pull}", keys=("container.pull",)),
        *words({"pid": "host"}, HOST_NUMBERS),
        *words({"network": "host", "uts": "host"}, HOST_NETWORK),
        *words({"security-opt": "label=disable"}, NO_LABELS),
        _shared_memory(container),
        *_limits(container),
        *_user(container),
        *_cards(context, container),
        *((token("--entrypoint=", keys=("container.entrypoint",)),) if container.entrypoint == "none" else ()),
        Token(text("--workdir=", *workdir(context).text.parts), workdir(context).source),
        *(_mount(each) for each in mounts(context)),
        *(
            token(f"--env={each}", rule="its value comes from the environment, never from the command")
            for each in names
        ),
        *options(context),
        token(container.image, keys=("container.image",)),
    )


def end(names: Sequence[Text]) -> tuple[Text, ...]:
    """Docker's processes are the daemon's children."""
    return (text("docker"), text("rm"), text("--force"), *names)


def inspect(image: str) -> tuple[str, ...]:
    """The image's variables, as JSON."""
    return ("docker", "image", "inspect", "--format={{json .Config.Env}}", image)


def _shared_memory(container: Docker | Podman) -> Token:
    keys = ("container.shared_memory",)
    if container.shared_memory == "host":
        return token("--ipc=host", keys=keys)
    return token(f"--shm-size={container.shared_memory}", keys=keys)


def _limits(container: Docker | Podman) -> tuple[Token, ...]:
    keys = ("container.ulimits",)
    if container.kind == "podman" and not container.ulimits:
        return (token("--ulimit=host", keys=keys, rule="a user may not raise them"),)
    return tuple(token(f"--ulimit={name}={value}", keys=keys) for name, value in container.ulimits.items())


def _user(container: Docker | Podman) -> tuple[Token, ...]:
    keys = ("container.user",)
    if container.user == "image":
        return ()
    if container.user != "caller":
        return (token(f"--user={container.user}", keys=keys),)
    if container.kind == "podman":
        return (token("--user=0:0", keys=keys, rule=ROOT_IS_YOU),)
    return (token("--user=", Variable.USER, keys=keys, rule="files in the run directory are yours"),)


def _cards(context: Context, container: Docker | Podman) -> tuple[Token, ...]:
    """Cards by UUID where the plan names them so; else all, of which CUDA_VISIBLE_DEVICES shows the chosen ones."""
    if context.topology.device != "cuda":
        return ()
    keys = ("devices.select",)
    if any(gpu.vendor == "amd" for gpu in context.cards):
        rule = "ROCm's devices; HIP_VISIBLE_DEVICES shows the chosen ones"  # ROCm documentation, running in Docker
        amd = ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--security-opt=seccomp=unconfined")
        return tuple(token(word, keys=keys, rule=rule) for word in amd)
    rule = "inside, CUDA_VISIBLE_DEVICES shows the chosen ones"
    if container.kind == "podman":  # by the Container Device Interface (NVIDIA Container Toolkit's documentation)
        return (token("--device=nvidia.com/gpu=all", keys=keys, rule=rule),)
    if all(each.startswith(("GPU-", "MIG-")) for each in context.devices):
        # Quotes, for the value is a row of comma-separated fields (docker run's documentation).
        rule = "Docker numbers them anew, and a UUID is the same card all the same"
        return (token(f'--gpus="device={",".join(context.devices)}"', keys=keys, rule=rule),)
    return (token("--gpus=all", keys=keys, rule=rule),)


def _mount(each: Mount) -> Token:
    # Not --volume: that would make a folder, root's, of a path that is not there.
    parts = ("--mount=type=bind,source=", *each.source.parts, ",target=", *each.target.parts)
    return token(*parts, *((",readonly",) if each.readonly else ()), keys=each.keys, rule=each.rule)
