"""`apptainer`: processes, network and shared memory are the machine's own, and all descend from its command."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text
from trainkit.launch_plan.provenance import Token, token
from trainkit.tools.containers.engine import mounts, of, options, workdir

PREFIX = "APPTAINERENV_"  # variables of this name go in without it, --cleanenv or not (Apptainer user guide)
APART = ",:"
# Flags that the plan sets, or that would undo what it sets.
OWN_FLAGS = """
    --cleanenv -e --contain -c --containall -C --no-home --home -H --bind -B --mount --pwd --cwd --nv --nvccli
    --rocm --env --env-file --pid -p --net -n --ipc -i --uts --userns -u --fakeroot -f
"""
SETS = frozenset(OWN_FLAGS.split())


def argv(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`apptainer exec` and the image. Containers have no names."""
    chosen = ("container.kind",)
    return (
        token("apptainer", keys=chosen),
        token("exec", keys=chosen),
        token("--cleanenv", rule="the machine's libraries and paths stay outside"),
        token("--no-home", rule="packages in ~/.local were made for another interpreter"),
        *_cards(context),
        token("--pwd", rule="where the program starts"),
        workdir(context),
        *(
            token(
                *("--bind=", *each.source.parts, ":", *each.target.parts, ":ro" if each.readonly else ":rw"),
                keys=each.keys,
                rule=each.rule,
            )
            for each in mounts(context)
        ),
        *options(context),
        token(of(context).image, keys=("container.image",)),
    )


def end(names: Sequence[Text]) -> tuple[Text, ...]:
    """Nothing: every process is below the command."""
    return ()


def inspect(image: str) -> tuple[str, ...]:
    """What the image says of itself."""
    return ("apptainer", "inspect", "--environment", image)


def _cards(context: Context) -> tuple[Token, ...]:
    if context.topology.device != "cuda":
        return ()
    amd = any(gpu.vendor == "amd" for gpu in context.cards)
    rule = "inside, CUDA_VISIBLE_DEVICES shows the chosen ones"
    return (token("--rocm" if amd else "--nv", keys=("devices.select",), rule=rule),)
