"""The size of /dev/shm, through which ranks and loader processes of one machine hand each other data."""

from __future__ import annotations

from trainkit.doctor.surroundings import Aim, Surroundings
from trainkit.doctor.units import GIB, MIB, in_words
from trainkit.doctor.verdict import Verdict, ok, skipped

TITLE = "shared memory"
LIMIT = 2.0
FAST = True

# What a container gets when nobody asks for more (https://docs.docker.com/reference/cli/docker/container/run/):
# NCCL and torch's loader processes fail there with "Bus error" or "No space left on device".
CONTAINER_DEFAULT = 64 * MIB
NOTHING = 8 * MIB  # not even one segment of NCCL's or of a loader process
LOW = GIB
FIX = (
    "docker run --ipc=host …      # or --shm-size=8g; Kubernetes: an emptyDir with medium: Memory",
    "sudo mount -o remount,size=8G /dev/shm      # outside a container",
)


def needs(aim: Aim) -> str:
    """Loader processes, NCCL and DeepSpeed share memory; gloo does not."""
    if aim.recipe is None:
        return ""
    workers = aim.recipe.data.workers if aim.recipe.program.kind == "builtin" else 1  # of a script nothing is known
    shared = aim.ranks > 1 and (aim.cuda or aim.deepspeed)
    return "" if workers or shared else "neither loader processes nor ranks of this plan share memory"


def run(surroundings: Surroundings, aim: Aim) -> list[Verdict]:
    """Too small, nearly full, or fine."""
    path = surroundings.under("/dev/shm")  # noqa: S108 - only its size is read
    if not path.is_dir():
        return [skipped(f"there is no {path} on this system")]
    space = surroundings.space(path)
    evidence = (f"{path}: {in_words(space.total)}, {in_words(space.free)} free",)
    listing = f"ls -lS {path} | head      # what fills it; remove what no process uses any more"
    if space.free < NOTHING:
        return [Verdict("problem", "no room left", evidence, (listing, *FIX))]
    if space.total <= CONTAINER_DEFAULT:
        # whether it is enough depends on the batch and on the number of cards
        what = "too small for many cards or for loader processes"
        return [Verdict("problem" if aim.anything else "warning", what, evidence, FIX)]
    if space.free < LOW:
        return [Verdict("warning", "little room for loader processes with large batches", evidence, (listing, *FIX))]
    return [ok(f"{in_words(space.free)} free in {path}")]
