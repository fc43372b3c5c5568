"""Read commands of container engines (`docker run`, `podman run`, `apptainer exec`) into the container section."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence

from trainkit.tools.base.imported_recipe import ImportContext, ImportedRecipe, argv_origin, card
from trainkit.tools.containers.engines import DOCKER_SETS

# Command -> kind of the engine, and what starts a container with a command.
ENGINES: Mapping[str, tuple[str, str]] = {
    "docker": ("docker", "run"),
    "podman": ("podman", "run"),
    "apptainer": ("apptainer", "exec"),
    "singularity": ("apptainer", "exec"),
}
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")


def start_of_container(words: Sequence[str]) -> int:
    """How many words an engine's command that starts a container begins with (`docker run`); 0 where it is none."""
    known = ENGINES.get(posixpath.basename(words[0])) if words else None
    if known is None:
        return 0
    count = 3 if known[1] == "run" and words[1:2] == ["container"] else 2
    return count if known[1] in words[count - 1 : count] else 0


def read_container(
    draft: ImportedRecipe, context: ImportContext, words: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Import an engine's command; the variables that it gives by value, and the command inside. Errors are noted."""
    name = posixpath.basename(words[0])
    kind, verb = ENGINES[name]
    origin = argv_origin(name, verb)
    draft.set("container.kind", kind, origin)
    if name == "singularity":
        draft.remark("singularity is Apptainer's older name: `apptainer` is called.")
    flags = _Flags(draft, context, f"{name} {verb}", list(words[start_of_container(words) :]))
    flags.read(DOCKER if verb == "run" else APPTAINER)
    if draft.problems:
        return {}, []
    if len(flags.rest) < 2:
        draft.fail(f"{name} {verb} names no command to run in the image", argv_origin(*words[:2]), "add it at the end")
        return {}, []
    image, *inside = flags.rest
    draft.set("container.image", image, argv_origin(image))
    if verb == "run" and flags.entrypoint is None:
        draft.set("container.entrypoint", "image", origin, "as docker run starts it")
    if verb == "run" and draft.get("container.user") is None:
        draft.remark("Files are yours, not the image's user's: container.user: image is as the command had it.")
    for key, value in (("mounts", flags.mounts), ("options", flags.options), ("ulimits", flags.ulimits)):
        if value:
            draft.set(f"container.{key}", value, origin)
    if flags.taken:
        draft.set("env_from", list(dict.fromkeys(flags.taken)), argv_origin("-e", *flags.taken))
    inside = [flags.entrypoint, *inside] if flags.entrypoint else inside
    if _PYTHON.fullmatch(posixpath.basename(inside[0])) and inside[0] != "python3":
        draft.set("container.python", inside[0], argv_origin(inside[0]))
    return flags.variables, inside


class _Flags:
    """An engine's flags. rest: what is not read yet; variables: given by value; taken: given by name."""

    def __init__(self, draft: ImportedRecipe, context: ImportContext, tool: str, rest: list[str]) -> None:
        self.draft, self.context, self.tool, self.rest = draft, context, tool, rest
        self.variables: dict[str, str] = {}
        self.taken: list[str] = []
        self.mounts: list[str] = []
        self.options: list[str] = []
        self.ulimits: dict[str, int] = {}
        self.entrypoint: str | None = None

    def read(self, table: Mapping[str, Take | None]) -> None:
        """Read all flags. A letter's value may follow without a space, and letters without one may be joined."""
        while self.rest and self.rest[0].startswith("-") and not self.draft.problems:
            word = self.rest.pop(0)
            flag, equals, value = word.partition("=")
            if not word.startswith("--"):
                letters = word[1:]
                while len(letters) > 1 and letters[1] != "=" and table.get(f"-{letters[0]}", _Flags.keep) in SWITCHES:
                    if (switch := table[f"-{letters[0]}"]) is not None:
                        switch(self, f"-{letters[0]}", "")
                    letters = letters[1:]
                flag, value, equals = f"-{letters[:1]}", letters[1:].removeprefix("="), letters[1:]
            take = table.get(flag)
            if flag in table and take in SWITCHES:
                if take is not None:
                    take(self, flag, value)
            elif take is None:
                known = flag in DOCKER_SETS
                hint = "leave it out" if known else f"leave it out here, and add {word} to container.options"
                why = "the plan decides it" if known else "it is not known"
                self.draft.fail(f"{self.tool} {flag} cannot be taken over", argv_origin(word), hint, why)
            elif equals or self.rest:
                take(self, flag, value if equals else self.rest.pop(0))
            else:
                self.draft.fail(f"{flag} requires a value", argv_origin(word), "add the value behind it")

    def refuse(self, flag: str, value: str, hint: str, why: str = "") -> None:
        self.draft.fail(f"{flag} {value} cannot be taken over", argv_origin(flag, value), hint, why)

    def mount(self, flag: str, value: str) -> None:
        """`source:target[:options]`, of Apptainer several with commas between."""
        for each in value.split(",") if flag in ("--bind", "-B") else [value]:
            source, _, rest = each.partition(":")
            target, _, mode = rest.partition(":")
            if source.startswith("."):
                source = posixpath.normpath(posixpath.join(self.context.cwd, source))
            target, modes = target or source, mode.split(",")
            if source.startswith("/") and target.startswith("/") and {*modes} <= {"", "ro", "rw", "z", "Z"}:
                self.mounts.append(f"{source}:{target}" + (":ro" if "ro" in modes else ""))
            else:
                self.refuse(flag, each, "write a folder of the machine and one inside, /data:/data or /data:/data:ro")

    def mount_fields(self, flag: str, value: str) -> None:
        """`type=bind,source=…,target=…[,readonly]`."""
        given = dict(each.partition("=")[::2] for each in value.split(","))
        source = given.pop("source", "") or given.pop("src", "")
        target = given.pop("target", "") or given.pop("destination", "") or given.pop("dst", "")
        readonly = any(given.pop(name, "false") in ("", "true", "1") for name in ("readonly", "ro"))
        if given.pop("type", "volume") != "bind" or given or not source or not target:
            self.refuse(flag, value, "write type=bind,source=/data,target=/data")
        else:
            self.mount(flag, f"{source}:{target}" + (":ro" if readonly else ""))

    def variable(self, flag: str, value: str) -> None:
        """`NAME=value`, or `NAME` alone; of Apptainer several with commas between."""
        for each in value.split(",") if self.tool.endswith("exec") else [value]:
            name, equals, given = each.partition("=")
            if equals:
                self.variables[name] = given
            else:
                self.taken.append(name)

    def file(self, flag: str, value: str) -> None:
        hint = "export its variables before the run, and name them under env_from"
        self.refuse(flag, value, hint, "values must not be kept")

    def shared_memory(self, flag: str, value: str) -> None:
        if flag == "--ipc" and value != "host":
            self.refuse(flag, value, "write --ipc=host, or --shm-size for shared memory of the container's own")
            return
        size = re.sub(r"(?<=[a-z])b$", "", value.lower())
        self.draft.set("container.shared_memory", f"{size}b" if size.isdigit() else size, argv_origin(flag, value))

    def ulimit(self, flag: str, value: str) -> None:
        name, _, limits = value.partition("=")
        soft, _, hard = limits.partition(":")
        if re.fullmatch(r"-1|\d+", soft) and hard in ("", soft):
            self.ulimits[name] = int(soft)
        elif value != "host":
            self.refuse(flag, value, "write one number: NAME=NUMBER")

    def user(self, flag: str, value: str) -> None:
        found = "0:0" if value in ("root", "root:root") else value
        if re.fullmatch(r"\d+(:\d+)?", found):
            self.draft.set("container.user", found, argv_origin(flag, value))
        else:
            self.refuse(flag, value, "write numbers, uid:gid, or leave it out: the processes are yours")

    def gpus(self, flag: str, value: str) -> None:
        """`all`, a count, or `device=0,1`; of the Container Device Interface `nvidia.com/gpu=0`."""
        if flag == "--device" and not value.startswith("nvidia.com/gpu="):
            self.keep(flag, value)
            return
        chosen = value.strip("\"'").removeprefix("nvidia.com/gpu=")
        origin = argv_origin(flag, value)
        if chosen.isdecimal() and flag == "--gpus":
            self.draft.set("devices.select", int(chosen), origin)
        elif chosen.startswith("device=") or (flag == "--device" and chosen != "all"):
            named = [card(each) for each in chosen.removeprefix("device=").split(",")]
            before = self.draft.get("devices.select") or []
            self.draft.settings.pop("devices.select", None)
            self.draft.set("devices.select", [*before, *named], origin)
            self.draft.set("devices.order", "pci", origin)  # as NVIDIA's toolkit counts them
        elif chosen != "all":
            self.refuse(flag, value, 'write all, a count, or "device=0,1"')

    def network(self, flag: str, value: str) -> None:
        if value != "host":
            self.draft.remark(f"{flag} {value} is not taken over: the machine's own is used in any case.")

    def command(self, flag: str, value: str) -> None:
        self.entrypoint = value

    def workdir(self, flag: str, value: str) -> None:
        if value != self.context.cwd:
            self.draft.set("container.workdir", value, argv_origin(flag, value))

    def keep(self, flag: str, value: str) -> None:
        """A word that the engine gets as it is."""
        self.options.append(f"{flag}={value}" if value else flag)

    def keep_switch(self, flag: str, value: str) -> None:
        self.keep(flag, value)

    def drop(self, flag: str, value: str) -> None:
        self.draft.remark(f"{flag} {value} is not taken over: trainkit names, starts and ends the container itself.")

    def detach(self, flag: str, value: str) -> None:
        self.draft.remark(
            f"{flag} is not taken over: trainkit run stays until the end; start it with nohup to leave it."
        )


Take = Callable[[_Flags, str, str], None]  # of a flag as written, and its value
# Flags without a value; None: one that is in force anyway.
SWITCHES = (None, _Flags.keep_switch, _Flags.detach)
DOCKER: Mapping[str, Take | None] = {
    **dict.fromkeys(("--rm", "-i", "--interactive", "-t", "--tty"), None),
    **dict.fromkeys(("-v", "--volume"), _Flags.mount),
    "--mount": _Flags.mount_fields,
    **dict.fromkeys(("-e", "--env"), _Flags.variable),
    "--env-file": _Flags.file,
    **dict.fromkeys(("--ipc", "--shm-size"), _Flags.shared_memory),
    "--ulimit": _Flags.ulimit,
    **dict.fromkeys(("-u", "--user"), _Flags.user),
    **dict.fromkeys(("--gpus", "--device"), _Flags.gpus),
    **dict.fromkeys(("--network", "--net", "--pid", "--uts", "-p", "--publish"), _Flags.network),
    "--entrypoint": _Flags.command,
    **dict.fromkeys(("-w", "--workdir"), _Flags.workdir),
    **dict.fromkeys(("--name", "--hostname", "-h", "--restart", "--pull", "--cidfile"), _Flags.drop),
    **dict.fromkeys(("-d", "--detach", "--init"), _Flags.detach),
    **dict.fromkeys(("--privileged", "--read-only"), _Flags.keep_switch),
    **dict.fromkeys(
        (
            *("--cap-add", "--cap-drop", "--cpus", "--cpuset-cpus", "--memory", "-m", "--memory-swap", "--group-add"),
            *("--add-host", "--tmpfs", "--platform", "--label", "-l", "--pids-limit", "--runtime", "--security-opt"),
        ),
        _Flags.keep,
    ),
}
APPTAINER: Mapping[str, Take | None] = {
    **dict.fromkeys(("--nv", "--rocm", "-e", "--cleanenv", "--no-home"), None),
    **dict.fromkeys(("-B", "--bind"), _Flags.mount),
    "--env": _Flags.variable,
    "--env-file": _Flags.file,
    **dict.fromkeys(("--pwd", "--cwd"), _Flags.workdir),
    **dict.fromkeys(("--writable-tmpfs", "--no-mount-tmp"), _Flags.keep_switch),
    "--overlay": _Flags.keep,
}
