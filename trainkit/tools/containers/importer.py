"""Commands of container engines (`docker run`, `podman run`, `apptainer exec`) read: their words become the section."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trainkit.tools.base.draft import Draft, ImportContext, argv_origin, card
from trainkit.tools.containers.docker import SETS

# Command -> kind of the engine, and what starts a container with a command.
ENGINES: Mapping[str, tuple[str, str]] = {
    "docker": ("docker", "run"),
    "podman": ("podman", "run"),
    "apptainer": ("apptainer", "exec"),
    "singularity": ("apptainer", "exec"),
}
HOST_ALREADY = "the machine's own is used in any case"
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


@dataclass
class Read:
    """What the words of an engine said. variables: given by value; taken: given by name."""

    tool: str
    variables: dict[str, str] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    ulimits: dict[str, int] = field(default_factory=dict)
    entrypoint: str | None = None


Take = Callable[[Draft, ImportContext, Read, str, str], None]  # of a flag as written, and its value


def starts_container(words: Sequence[str]) -> bool:
    """Whether words begin an engine's command that starts a container."""
    return _start(words) > 0


def _start(words: Sequence[str]) -> int:
    """How many words an engine's command that starts a container begins with (`docker run`); 0 where it is none."""
    known = ENGINES.get(posixpath.basename(words[0])) if words else None
    long = known is not None and known[1] == "run" and words[1:2] == ["container"]
    count = 3 if long else 2
    return count if known is not None and known[1] in words[count - 1 : count] else 0


def read_container(draft: Draft, context: ImportContext, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Import an engine's command; the variables that it gives by value, and the command inside. Errors are noted."""
    name = posixpath.basename(words[0])
    kind, verb = ENGINES[name]
    draft.set("container.kind", kind, argv_origin(name, verb))
    if name == "singularity":
        draft.remark("singularity is Apptainer's older name: `apptainer` is called.")
    read, rest = Read(f"{name} {verb}"), list(words[_start(words) :])
    flags = DOCKER if verb == "run" else APPTAINER
    while rest and rest[0].startswith("-") and not draft.problems:
        _take(draft, context, read, flags, rest)
    if draft.problems:
        return {}, []
    if len(rest) < 2:
        draft.fail(f"{name} {verb} names no command to run in the image", argv_origin(*words[:2]), "add it at the end")
        return {}, []
    draft.set("container.image", rest[0], argv_origin(rest[0]))
    inside = [*([read.entrypoint] if read.entrypoint else []), *rest[1:]]
    if verb == "run" and read.entrypoint is None:
        draft.set("container.entrypoint", "image", argv_origin(name, verb), "as docker run starts it")
    if verb == "run" and draft.get("container.user") is None:
        draft.remark("Files are yours, not the image's user's: container.user: image is as the command had it.")
    for key, value in (("mounts", read.mounts), ("options", read.options), ("ulimits", read.ulimits)):
        if value:
            draft.set(f"container.{key}", value, argv_origin(name, verb))
    if read.taken:
        draft.set("env_from", list(dict.fromkeys(read.taken)), argv_origin("-e", *read.taken))
    if _PYTHON.fullmatch(posixpath.basename(inside[0])) and inside[0] != "python3":
        draft.set("container.python", inside[0], argv_origin(inside[0]))
    return read.variables, inside


def _take(draft: Draft, context: ImportContext, read: Read, flags: Mapping[str, Take | None], rest: list[str]) -> None:
    """One flag off the front. A letter's value may follow without a space, and letters without one may be joined."""
    word = rest.pop(0)
    written, equals, value = word.partition("=")
    if not word.startswith("--"):
        letters = word[1:]
        while len(letters) > 1 and letters[1] != "=" and flags.get(f"-{letters[0]}", _kept) in (None, *SWITCHES):
            if (switch := flags[f"-{letters[0]}"]) is not None:
                switch(draft, context, read, f"-{letters[0]}", "")
            letters = letters[1:]
        written, value, equals = f"-{letters[:1]}", letters[1:].removeprefix("="), letters[1:]
    if written not in flags:
        if written in SETS:
            hint, why = "leave it out", "the plan decides it"
        else:
            hint, why = f"leave it out here, and add {word} to container.options of the recipe", "it is not known"
        draft.fail(f"{read.tool} {written} cannot be taken over", argv_origin(word), hint, why)
        return
    take = flags[written]
    if take is None or take in SWITCHES:
        if take is not None:
            take(draft, context, read, written, value)
        return
    if not equals:
        if not rest:
            draft.fail(f"{written} requires a value", argv_origin(word), "add the value behind it")
            return
        value = rest.pop(0)
    take(draft, context, read, written, value)


def _mount(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    """`source:target[:options]`, of Apptainer several with commas between."""
    for each in value.split(",") if flag in ("--bind", "-B") else [value]:
        source, _, rest = each.partition(":")
        target, _, how = rest.partition(":")
        if source.startswith("."):
            source = posixpath.normpath(posixpath.join(context.cwd, source))
        target = target or source
        unknown = set(how.split(",")) - {"", "ro", "rw", "z", "Z"}
        if not (source.startswith("/") and target.startswith("/")) or unknown:
            hint = "write a folder of the machine and one inside, /data:/data or /data:/data:ro"
            draft.fail(f"{flag} {each} cannot be taken over", argv_origin(flag, each), hint)
            continue
        read.mounts.append(f"{source}:{target}" + (":ro" if "ro" in how.split(",") else ""))


def _mount_words(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    """`type=bind,source=…,target=…[,readonly]`."""
    given = dict(each.partition("=")[::2] for each in value.split(","))
    source = given.pop("source", "") or given.pop("src", "")
    target = given.pop("target", "") or given.pop("destination", "") or given.pop("dst", "")
    readonly = any(given.pop(name, "false") in ("", "true", "1") for name in ("readonly", "ro"))
    if given.pop("type", "volume") != "bind" or given or not source or not target:
        hint = "write type=bind,source=/data,target=/data"
        draft.fail(f"{flag} {value} cannot be taken over", argv_origin(flag, value), hint)
        return
    _mount(draft, context, read, flag, f"{source}:{target}" + (":ro" if readonly else ""))


def _variable(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    """`NAME=value`, or `NAME` alone; of Apptainer several with commas between."""
    for each in value.split(",") if read.tool.endswith("exec") else [value]:
        name, equals, given = each.partition("=")
        if equals:
            read.variables[name] = given
        else:
            read.taken.append(name)


def _shared(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    if flag == "--ipc" and value != "host":
        hint = "write --ipc=host, or --shm-size for shared memory of the container's own"
        draft.fail(f"--ipc {value} cannot be taken over", argv_origin(flag, value), hint)
        return
    size = value if flag == "--ipc" else re.sub(r"b$", "", value.lower()) if value[-2:].isalpha() else value.lower()
    draft.set("container.shared_memory", f"{size}b" if size.isdigit() else size, argv_origin(flag, value))


def _limit(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    name, _, limits = value.partition("=")
    soft, _, hard = limits.partition(":")
    if value == "host":
        return
    if not re.fullmatch(r"-1|\d+", soft) or hard not in ("", soft):
        draft.fail(f"{flag} {value} cannot be taken over", argv_origin(flag, value), "write one number: NAME=NUMBER")
        return
    read.ulimits[name] = int(soft)


def _user(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    found = {"root": "0:0", "root:root": "0:0"}.get(value, value)
    if not re.fullmatch(r"\d+(:\d+)?", found):
        hint = "write numbers, uid:gid, or leave it out: the processes are yours"
        draft.fail(f"{flag} {value} cannot be taken over", argv_origin(flag, value), hint)
        return
    draft.set("container.user", found, argv_origin(flag, value))


def _cards(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    """`all`, a count, or `device=0,1`; of the Container Device Interface `nvidia.com/gpu=0`."""
    if flag == "--device" and not value.startswith("nvidia.com/gpu="):
        read.options.append(f"{flag}={value}")
        return
    chosen = value.strip("\"'").removeprefix("nvidia.com/gpu=")
    origin = argv_origin(flag, value)
    if chosen.isdecimal() and flag == "--gpus":
        draft.set("devices.select", int(chosen), origin)
    elif chosen.startswith("device=") or (flag == "--device" and chosen != "all"):
        named = [card(each) for each in chosen.removeprefix("device=").split(",")]
        before = draft.get("devices.select") or []
        draft.settings.pop("devices.select", None)
        draft.set("devices.select", [*before, *named], origin)
        draft.set("devices.order", "pci", origin)  # as NVIDIA's toolkit counts them
    elif chosen != "all":
        draft.fail(f"{flag} {value} cannot be taken over", origin, 'write all, a count, or "device=0,1"')


def _network(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    if value != "host":
        draft.remark(f"{flag} {value} is not taken over: {HOST_ALREADY}.")


def _entry(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    read.entrypoint = value


def _folder(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    if value != context.cwd:
        draft.set("container.workdir", value, argv_origin(flag, value))


def _kept(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    """A word that the engine gets as it is."""
    read.options.append(f"{flag}={value}" if value else flag)


def _left(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    shown = f"{flag} {value}".strip()
    draft.remark(f"{shown} is not taken over: trainkit names, starts and ends the container itself.")


def _switched(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    _kept(draft, context, read, flag, value)


def _detached(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    draft.remark(f"{flag} is not taken over: trainkit run stays until the end; start it with nohup to leave it.")


def _file(draft: Draft, context: ImportContext, read: Read, flag: str, value: str) -> None:
    hint = "export its variables before the run, and name them under env_from"
    draft.fail(f"{flag} {value} cannot be taken over", argv_origin(flag, value), hint, "values must not be kept")


# None: a switch that is in force anyway.
DOCKER: Mapping[str, Take | None] = {
    **dict.fromkeys(("--rm", "-i", "--interactive", "-t", "--tty"), None),
    **dict.fromkeys(("-v", "--volume"), _mount),
    "--mount": _mount_words,
    **dict.fromkeys(("-e", "--env"), _variable),
    "--env-file": _file,
    **dict.fromkeys(("--ipc", "--shm-size"), _shared),
    "--ulimit": _limit,
    **dict.fromkeys(("-u", "--user"), _user),
    **dict.fromkeys(("--gpus", "--device"), _cards),
    **dict.fromkeys(("--network", "--net", "--pid", "--uts", "-p", "--publish"), _network),
    "--entrypoint": _entry,
    **dict.fromkeys(("-w", "--workdir"), _folder),
    **dict.fromkeys(("--name", "--hostname", "-h", "--restart", "--pull", "--cidfile"), _left),
    **dict.fromkeys(("-d", "--detach", "--init"), _detached),
    **dict.fromkeys(("--privileged", "--read-only"), _switched),
    **dict.fromkeys(
        (
            *("--cap-add", "--cap-drop", "--cpus", "--cpuset-cpus", "--memory", "-m", "--memory-swap", "--group-add"),
            *("--add-host", "--tmpfs", "--platform", "--label", "-l", "--pids-limit", "--runtime", "--security-opt"),
        ),
        _kept,
    ),
}
APPTAINER: Mapping[str, Take | None] = {
    **dict.fromkeys(("--nv", "--rocm", "-e", "--cleanenv", "--no-home"), None),
    **dict.fromkeys(("-B", "--bind"), _mount),
    "--env": _variable,
    "--env-file": _file,
    **dict.fromkeys(("--pwd", "--cwd"), _folder),
    **dict.fromkeys(("--writable-tmpfs", "--no-mount-tmp"), _switched),
    "--overlay": _kept,
}
SWITCHES = (_switched, _detached)
