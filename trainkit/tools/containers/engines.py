"""Container engines: the folders, variables and interpreter of every container, and each engine's command for them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text, Variable, text
from trainkit.launch_plan.provenance import SourcedVariable, Token, token, variable
from trainkit.recipe.schema import Docker, Image, Podman

PACKAGE = "/opt/trainkit/trainkit"  # where trainkit's own code is seen inside
ENTRY = f"{PACKAGE}/runner/container_entry.py"
# What the engine's own command reads on the machine: inside, the image's is used.
ENGINES_OWN = ("PATH", "HOME", "LD_LIBRARY_PATH", "LD_PRELOAD")
_SAME = "the same path inside and outside, so that what the plan names is found"
_STARTS = "looks after the environment inside, and becomes the launcher"
_SHOWS = "inside, CUDA_VISIBLE_DEVICES shows the chosen ones"
_KIND = ("container.kind",)


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of the machine that is seen inside."""

    source: Text
    target: Text
    readonly: bool
    keys: tuple[str, ...] = ()
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """argv: the words up to and with the image, for the container's name and the names of variables that are handed in.

    sets: flags that the plan sets or that would undo it, so that `container.options` must not. apart: characters that
    end a path in its words for folders. prefix: see PlannedContainer. end: the command that ends containers by name;
    empty where their processes descend from the engine's command. inspect: the command that describes an image of this
    machine, and so asks whether the engine works; empty without one.
    """

    argv: Callable[[Context, Text, Sequence[str]], tuple[Token, ...]]
    sets: frozenset[str]
    apart: str
    prefix: str = ""
    end: tuple[str, ...] = ()
    inspect: tuple[str, ...] = ()


def of(context: Context) -> Image:
    """The recipe's container. Only for plans that have one."""
    assert isinstance(context.recipe.container, Image), "the plan has no container"
    return context.recipe.container


def cache_folder(context: Context, *below: str) -> tuple[str | Variable, ...]:
    """The folder of the machine for what outlives a container, and something below it."""
    caches = of(context).caches
    tail = "".join(f"/{each}" for each in below)
    return (caches + tail,) if caches is not None else (Variable.CACHE_DIR, tail)


def environment(context: Context) -> tuple[SourcedVariable, ...]:
    """Where libraries keep what they have downloaded or compiled: for compiled code a folder of its own per image."""
    rule, keys = "outlives the container", ("container.caches",)
    own = f"images/{slug(of(context).image)}"
    folders = {
        "HF_HOME": "huggingface",
        "TORCH_HOME": "torch",
        "TRITON_CACHE_DIR": f"{own}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{own}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{own}/torch_extensions",
    }
    return tuple(variable(name, *cache_folder(context, place), keys=keys, rule=rule) for name, place in folders.items())


def slug(image: str) -> str:
    """An image's name as that of a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", image).strip("-.") or "image"


def mounts(context: Context) -> Iterator[Mount]:
    """Folders that are seen inside, each once: engines refuse a second one at the same place."""
    found: set[tuple[str, str, bool]] = set()
    for each in (*_own_mounts(context), *_named_mounts(context)):
        what = _identity(context, each)
        if what not in found:
            found.add(what)
            yield each


def doubled(context: Context) -> Iterator[tuple[int, str]]:
    """Folders of the recipe that are to be seen where another one is: position, and place inside."""
    taken = {what[1]: what for what in (_identity(context, each) for each in _own_mounts(context))}
    for position, each in enumerate(_named_mounts(context)):
        what = _identity(context, each)
        if taken.setdefault(what[1], what) != what:
            yield position, what[1]


def _own_mounts(context: Context) -> Iterator[Mount]:
    output = context.recipe.output.root
    for folder, keys in ((text(Variable.WORKING_DIR), ()), (text(Variable.RUN_DIR), ("output.root",))):
        yield Mount(folder, folder, False, keys, _SAME)
    if output.startswith("/"):  # checkpoints of earlier runs lie there too
        yield Mount(text(output), text(output), False, ("output.root",), _SAME)
    copies = context.recipe.checkpoint.copy_to or ""
    if copies.startswith("/"):
        yield Mount(text(copies), text(copies), False, ("checkpoint.copy_to",), _SAME)
    caches = text(*cache_folder(context))
    yield Mount(caches, caches, False, ("container.caches",), _SAME)
    rule = "trainkit's own code, for the ranks' wrapper; the image needs none"
    yield Mount(text(Variable.PACKAGE), text(PACKAGE), True, rule=rule)


def _named_mounts(context: Context) -> Iterator[Mount]:
    for word in of(context).mounts:
        source, target, *mode = word.split(":")
        yield Mount(text(source), text(target), mode == ["ro"], ("container.mounts",))


def _identity(context: Context, mount: Mount) -> tuple[str, str, bool]:
    """Folder of the machine, and place inside, as far as they are known."""
    folder = context.resolved.folder or str(mount.source)
    paths = (folder if each.parts == (Variable.WORKING_DIR,) else str(each) for each in (mount.source, mount.target))
    source, target = map(posixpath.normpath, paths)
    return source, target, mount.readonly


def entry(context: Context, unset: Sequence[str], checks: Sequence[str] = ()) -> tuple[Token, ...]:
    """The first command inside, up to the one that it becomes. checks: of packages, which need none behind it."""
    home = cache_folder(context, "home")
    words = [
        token(of(context).python, keys=("container.python",)),
        token(ENTRY, rule=_STARTS),
        token("--home=", *home, keys=("container.caches",), rule="a home that can be written"),
    ]
    if not checks:  # as outside, the launcher writes its own log: the engine would show its output once more
        node = ("node-", Variable.NODE_RANK, ".") if context.topology.nodes > 1 else ()
        place = ("--log=", Variable.ATTEMPT_DIR, "/logs/", *node, "launcher.log")
        words.append(token(*place, rule="the launcher's log, where a run has one"))
    if unset:
        words.append(token(f"--unset={','.join(unset)}", rule="what the image sets must not leak in"))
    words += [token(f"--package={each}", rule="what the plan needs, and was made for") for each in checks]
    return (*words, *(() if checks else (token("--", rule=_STARTS),)))


def _workdir(context: Context) -> Token:
    if (chosen := of(context).workdir) is not None:
        return token(chosen, keys=("container.workdir",))
    return token(Variable.WORKING_DIR, rule="where trainkit was started, from which the recipe's paths start")


def _options(context: Context) -> tuple[Token, ...]:
    return tuple(token(word, keys=("container.options",)) for word in of(context).options)


def _image(context: Context) -> Token:
    return token(of(context).image, keys=("container.image",))


def _docker(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`docker run` and `podman run`: a container for each node, on the machine's network and its process numbers."""
    box = of(context)
    assert isinstance(box, Docker | Podman)
    podman = box.kind == "podman"
    numbers = "the run's processes keep the machine's numbers, by which they are watched and ended"
    network = "ranks meet on the machine's own network, and nodes by its name"
    words = [
        token(box.kind, keys=_KIND),
        token("run", keys=_KIND),
        token("--rm", rule="nothing of it stays behind"),
        token("--name=", *name.parts, rule="by this name it is ended"),
        token(f"--pull={box.pull}", keys=("container.pull",)),
        token("--pid=host", rule=numbers),
        token("--network=host", rule=network),
        token("--uts=host", rule=network),
        token("--security-opt=label=disable", rule="the folders keep their SELinux labels: other programs use them"),
    ]
    size = box.shared_memory
    words.append(token("--ipc=host" if size == "host" else f"--shm-size={size}", keys=("container.shared_memory",)))
    limits = ("container.ulimits",)
    if podman and not box.ulimits:
        words.append(token("--ulimit=host", keys=limits, rule="a user may not raise them"))
    words += [token(f"--ulimit={each}={value}", keys=limits) for each, value in box.ulimits.items()]
    user = ("container.user",)
    if box.user not in ("image", "caller"):
        words.append(token(f"--user={box.user}", keys=user))
    elif box.user == "caller" and podman:
        words.append(token("--user=0:0", keys=user, rule="in podman's container root is you: what it writes is yours"))
    elif box.user == "caller":
        words.append(token("--user=", Variable.USER, keys=user, rule="files in the run directory are yours"))
    words += _docker_gpus(context, podman)
    if box.entrypoint == "none":
        words.append(token("--entrypoint=", keys=("container.entrypoint",)))
    workdir = _workdir(context)
    words.append(Token(text("--workdir=", *workdir.text.parts), workdir.source))
    for each in mounts(context):
        # Not --volume: that would make a folder, root's, of a path that is not there.
        parts = ("--mount=type=bind,source=", *each.source.parts, ",target=", *each.target.parts)
        words.append(token(*parts, *((",readonly",) if each.readonly else ()), keys=each.keys, rule=each.rule))
    rule = "its value comes from the environment, never from the command"
    words += [token(f"--env={each}", rule=rule) for each in names]
    return (*words, *_options(context), _image(context))


def _docker_gpus(context: Context, podman: bool) -> tuple[Token, ...]:
    """GPUs by UUID where the plan names them so; else all, of which CUDA_VISIBLE_DEVICES shows the chosen ones."""
    if context.topology.device != "cuda":
        return ()
    keys = ("devices.select",)
    if any(gpu.vendor == "amd" for gpu in context.cards):
        rule = "ROCm's devices; HIP_VISIBLE_DEVICES shows the chosen ones"  # ROCm documentation, running in Docker
        amd = ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--security-opt=seccomp=unconfined")
        return tuple(token(word, keys=keys, rule=rule) for word in amd)
    if podman:  # by the Container Device Interface (NVIDIA Container Toolkit's documentation)
        return (token("--device=nvidia.com/gpu=all", keys=keys, rule=_SHOWS),)
    if all(each.startswith(("GPU-", "MIG-")) for each in context.devices):
        # Quotes, for the value is a row of comma-separated fields (docker run's documentation).
        rule = "Docker numbers them anew, and a UUID is the same GPU all the same"
        return (token(f'--gpus="device={",".join(context.devices)}"', keys=keys, rule=rule),)
    return (token("--gpus=all", keys=keys, rule=_SHOWS),)


def _apptainer(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`apptainer exec`: processes, network and shared memory are the machine's own; containers have no names."""
    words = [
        token("apptainer", keys=_KIND),
        token("exec", keys=_KIND),
        token("--cleanenv", rule="the machine's libraries and paths stay outside"),
        token("--no-home", rule="packages in ~/.local were made for another interpreter"),
    ]
    if context.topology.device == "cuda":
        amd = any(gpu.vendor == "amd" for gpu in context.cards)
        words.append(token("--rocm" if amd else "--nv", keys=("devices.select",), rule=_SHOWS))
    words += [token("--pwd", rule="where the program starts"), _workdir(context)]
    for each in mounts(context):
        words.append(token("--bind=", *_bound(each), keys=each.keys, rule=each.rule))
    return (*words, *_options(context), _image(context))


def _bound(mount: Mount) -> tuple[str | Variable, ...]:
    return (*mount.source.parts, ":", *mount.target.parts, ":ro" if mount.readonly else ":rw")


def _pyxis(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`srun` with pyxis's words, in a step of the job; the image is one of them."""
    folders = [part for each in mounts(context) for part in (",", *_bound(each))][1:]
    step, rule = "a step on this node alone, with all that the job has here", "seen inside"
    return (
        token("srun", keys=_KIND),
        token("--overlap", rule=step),
        token("--nodes=1", rule=step),
        token("--ntasks=1", rule=step),
        token(f"--cpus-per-task={context.facts.cpu_cores}", rule=step),
        token("--nodelist=", Variable.HOST, rule=step),
        token("--cpu-bind=none", rule="the ranks are bound by the plan, where at all"),
        token("--export=ALL", rule="the image's own variables count all the same, but for those that are named"),
        token("--no-container-mount-home", rule="packages in ~/.local were made for another interpreter"),
        token("--no-container-remap-root", rule="files in the run directory are yours"),
        token("--no-container-entrypoint", rule="the plan's command alone is started"),
        token("--container-writable", rule="a folder's place is made where the image has none"),
        token("--container-workdir=", *_workdir(context).text.parts, keys=("container.workdir",), rule=rule),
        token("--container-mounts=", *folders, keys=("container.mounts",), rule=rule),
        token(f"--container-env={','.join(names)}", rule="in the place of the image's own"),
        *_options(context),
        token("--container-image=", of(context).image, keys=("container.image",)),
    )


# Flags that the plan sets, or that would undo what it sets.
_DOCKER_FLAGS = """
    --rm --name --pull --pid --network --net --uts --ipc --shm-size --ulimit --user -u --userns --gpus
    --entrypoint --workdir -w --mount --volume -v --env -e --env-file --env-host --detach -d --tty -t
    --interactive -i --hostname -h --init --restart --cgroups --cidfile --sig-proxy --detach-keys
    --attach -a --rootfs
"""
_APPTAINER_FLAGS = """
    --cleanenv -e --contain -c --containall -C --no-home --home -H --bind -B --mount --pwd --cwd --nv --nvccli
    --rocm --env --env-file --pid -p --net -n --ipc -i --uts --userns -u --fakeroot -f
"""
_PYXIS_FLAGS = """
    --container-image --container-mounts --container-workdir --container-env --container-name
    --container-mount-home --no-container-mount-home --container-entrypoint --no-container-entrypoint
    --container-remap-root --no-container-remap-root --overlap --nodes -N --ntasks -n --ntasks-per-node
    --nodelist -w --cpus-per-task -c --cpu-bind --export --container-writable --container-readonly
"""
DOCKER_SETS = frozenset(_DOCKER_FLAGS.split())
_VARIABLES_OF_IMAGE = ("image", "inspect", "--format={{json .Config.Env}}")
ENGINES: Mapping[str, Engine] = {
    # Docker's processes are the daemon's children.
    "docker": Engine(
        _docker, DOCKER_SETS, ',"', end=("docker", "rm", "--force"), inspect=("docker", *_VARIABLES_OF_IMAGE)
    ),
    # What killed processes left in podman's own records goes too.
    "podman": Engine(
        _docker, DOCKER_SETS, ',"', end=("podman", "rm", "--force", "--ignore", "--time=0"),
        inspect=("podman", *_VARIABLES_OF_IMAGE),
    ),
    # Variables with this prefix go in without it, --cleanenv or not (Apptainer user guide).
    "apptainer": Engine(
        _apptainer, frozenset(_APPTAINER_FLAGS.split()), ",:", prefix="APPTAINERENV_",
        inspect=("apptainer", "inspect", "--environment"),
    ),
    # Slurm ends the step with the job; the ranks end by themselves when trainkit is gone.
    "pyxis": Engine(_pyxis, frozenset(_PYXIS_FLAGS.split()), ",:"),
}  # fmt: skip
