"""The plan's container: whether its engine works, the image and the folders are here, and the driver runs its CUDA."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from trainkit.doctor.check import Done, Finding, Host, Target, ok
from trainkit.doctor.checks.gpus import OLDEST, SOURCE, driver_version
from trainkit.machine.facts import at_least, release
from trainkit.recipe.schema import Apptainer, Docker, Image, Podman, Pyxis
from trainkit.tools.containers.engines import ENGINES

SECONDS = 10.0
# What docker, podman and their daemons say.
NO_DAEMON = re.compile(r"cannot connect to|is the docker daemon running|permission denied while trying", re.IGNORECASE)
NO_IMAGE = re.compile(
    r"no such (image|object)|image not known|unable to find image|failed to find image", re.IGNORECASE
)
# Variables of NVIDIA's images, as their Dockerfiles set them.
_VERSION = re.compile(r"^CUDA_VERSION=(\d+\.\d+)", re.MULTILINE)
_REQUIRED = re.compile(r"^NVIDIA_REQUIRE_CUDA=.*?cuda>=(\d+\.\d+)", re.MULTILINE)


def container(host: Host, target: Target) -> Finding | list[Finding]:
    """The first thing that is missing of engine and image; each folder that is; a driver that is too old."""
    assert target.recipe is not None
    box = target.recipe.container
    assert isinstance(box, Image)
    sources = [each.split(":")[0] for each in box.mounts]
    found = [
        Finding("problem", f"container.mounts names {source}, which does not exist on this machine")
        for source in sources if not host.under(source).exists()
    ]  # fmt: skip
    if host.which("srun" if isinstance(box, Pyxis) else box.kind) is None:
        fix = f"{box.kind} --version      # install it, or choose another container.kind"
        if isinstance(box, Pyxis):
            fix = "srun --version      # inside of a Slurm cluster whose Slurm has the plugin pyxis"
        return [*found, Finding("problem", f"{box.kind} is not on PATH here", (), (fix,))]
    if isinstance(box, Pyxis):
        if "--container-image" in host.run(("srun", "--help"), SECONDS, environ=host.environ).output:
            return found or ok("srun takes pyxis's arguments")
        fix = "srun --help | grep container      # pyxis, a plugin of Slurm, adds these; ask who runs the cluster"
        return [*found, Finding("problem", "srun has no --container-image here: pyxis is not installed", (), (fix,))]
    if isinstance(box, Apptainer) and "://" not in box.image and not Path(box.image).exists():
        fix = f"apptainer pull {shlex.quote(box.image)} docker://IMAGE"
        return [*found, Finding("problem", f"there is no image {box.image}", (), (fix,))]
    done = host.run((*ENGINES[box.kind].inspect, box.image), SECONDS, environ=host.environ)
    if not done.fine:
        return [*found, _failed(box, done)]
    found += [*_driver(host, target, variables(done.output))]
    return found or [ok(f"{box.kind} has the image {box.image}")]


def _failed(box: Image, done: Done) -> Finding:
    said = done.said
    if NO_DAEMON.search(done.errors):
        fix = "sudo systemctl start docker      # then: docker info; you may have to be in the group docker"
        return Finding("problem", "the Docker daemon does not answer", (said,), (fix,))
    if isinstance(box, Docker | Podman) and NO_IMAGE.search(done.errors):
        pull = f"{box.kind} pull {shlex.quote(box.image)}"
        if box.pull == "missing":
            return Finding("note", f"{box.kind} will download the image {box.image} at the start", (), (pull,))
        hint = f"{pull}      # or set container.pull: missing"
        return Finding("problem", f"the image {box.image} is not on this machine", (said,), (hint,))
    return Finding("problem", f"{box.kind} cannot describe the image {box.image}", (said,))


def variables(output: str) -> str:
    """The image's variables, one `NAME=value` in a line, from what the engine prints (JSON of docker and podman)."""
    try:
        found = json.loads(output)
    except ValueError:
        return output.replace("export ", "").replace('"', "")
    return "\n".join(map(str, found)) if isinstance(found, list) else ""


def image_cuda(variables: str) -> str:
    """The CUDA of an image by its variables; empty where it says none."""
    match = _VERSION.search(variables) or _REQUIRED.search(variables)
    return match[1] if match else ""


def _driver(host: Host, target: Target, said: str) -> Iterator[Finding]:
    """What the image's CUDA wants of the driver, by NVIDIA's table."""
    cuda, driver = image_cuda(said), driver_version(host)
    if not target.cuda or not cuda or not driver:
        return
    oldest, newest = OLDEST.get(release(cuda)[0]), host.facts.cuda_driver
    evidence = (f"driver {driver}", f"the image has CUDA {cuda}", SOURCE)
    if oldest and not at_least(driver, oldest):
        what = f"driver {driver} is too old for the image's CUDA {cuda}, which requires {oldest} or newer"
        yield Finding("problem", what, evidence, ("install a newer driver, or take an image of an older CUDA",))
    elif newest and release(newest)[:2] < release(cuda)[:2]:
        what = f"the image's CUDA {cuda} is newer than the driver's {newest}: code compiled at run time may not load"
        libraries = "an image with NVIDIA's compatibility libraries (container.entrypoint: image uses them)"
        yield Finding("warning", what, evidence, (f"a driver for it, or {libraries}",))
