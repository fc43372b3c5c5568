"""The container section: a tagged union on `kind`, one class for each engine that starts an image."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainkit.recipe.schema.base import Section, setting

MOUNT = re.compile(r"/[^:,\n]*:/[^:,\n]*(:(ro|rw))?")
# What NVIDIA's documentation of its PyTorch image gives to `docker run` (docs.nvidia.com/deeplearning/frameworks).
NVIDIA_LIMITS = {"memlock": -1, "stack": 67_108_864}


class NoContainer(Section):
    """The launcher starts on the machine itself."""

    kind: Literal["none"] = setting("none", "No container: the launcher starts on the machine itself.")


class Image(Section):
    """What every engine has."""

    kind: str
    image: str = setting("", "The image, as the engine names it.", pattern=r"^[^\s-]\S*$|^$")
    python: str = setting("python3", "The interpreter in the image, by name or path.", pattern=r"^[^\s-]\S*$")
    mounts: list[str] = setting(
        [],
        "Folders of the machine that are seen inside, as `/data:/data:ro`. The working folder, the run directory, the "
        "cache folder and a checkpoint to go on from are there without being named.",
    )
    workdir: str | None = setting(
        None, "Folder inside in which the program starts; null is the working folder.", pattern=r"^/"
    )
    caches: str | None = setting(
        None,
        "Folder of the machine for HOME and the caches of Hugging Face, torch and Triton inside; null is trainkit's "
        "own in the user's cache folder.",
        pattern=r"^/[^:,\n]*$",
    )
    packages: dict[str, str] = setting(
        {},
        "Versions of libraries in the image, by which the plan is made (`torch: 2.6.0`); one that is left out is taken "
        "to be as on this machine. What the image has is compared before the ranks start.",
    )
    options: list[str] = setting(
        [], "Further words for the engine, in front of the image; not those that trainkit sets."
    )

    def _contradictions(self) -> Iterator[str]:
        if not self.image:
            yield "image must name the image"
        for each in self.mounts:
            if not MOUNT.fullmatch(each):
                yield f"mounts has {each}, which is not /FOLDER/HERE:/FOLDER/INSIDE, with :ro behind it or not"


class _Docker(Image):
    """What docker and podman have in common."""

    shared_memory: Annotated[str, Field(pattern=r"^(host|[1-9]\d*[bkmg])$")] = setting(
        "host", "`host` is the machine's /dev/shm (`--ipc=host`); a size as `16g` is one of the container's own."
    )
    ulimits: dict[str, int] = setting({}, "Limits of the processes inside, by name; -1 is none.")
    user: Annotated[str, Field(pattern=r"^(caller|image|\d+(:\d+)?)$")] = setting(
        "caller",
        "Who the processes inside are: `caller`, so that files in the run directory are yours; `image` as the image "
        "says; or numbers, as `1000:1000`.",
    )
    entrypoint: Literal["none", "image"] = setting(
        "none", "`none`: the plan's command alone is started; `image`: the image's entry point starts it."
    )
    pull: Literal["never", "missing"] = setting(
        "never", "Whether an image that is not on this machine is downloaded at the start."
    )


class Docker(_Docker):
    """A Docker image, by the daemon."""

    kind: Literal["docker"] = setting("docker", "Docker starts the image.")
    ulimits: dict[str, int] = setting(
        NVIDIA_LIMITS,
        "Limits of the processes inside, by name; -1 is none. The defaults are those of NVIDIA's documentation.",
    )


class Podman(_Docker):
    """A Docker or OCI image, without a daemon."""

    kind: Literal["podman"] = setting("podman", "Podman starts the image.")
    ulimits: dict[str, int] = setting(
        {}, "Limits of the processes inside, by name; -1 is none. Without any they are those of this machine."
    )


class Apptainer(Image):
    """A SIF file or another image of Apptainer's."""

    kind: Literal["apptainer"] = setting("apptainer", "Apptainer starts the image: a .sif file or a folder.")


class Pyxis(Image):
    """An image of enroot's, by the Slurm plugin pyxis."""

    kind: Literal["pyxis"] = setting("pyxis", "Slurm's plugin pyxis starts the image, inside of an allocation.")


Container = Annotated[NoContainer | Docker | Podman | Apptainer | Pyxis, Field(discriminator="kind")]
