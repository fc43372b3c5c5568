"""`pyxis`: Slurm's plugin starts an image of enroot's in a step of the job; processes and network are the machine's."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Text, Variable, text
from trainkit.launch_plan.provenance import Token, token
from trainkit.tools.containers.engine import joined, mounts, of, options, workdir

PREFIX = ""
APART = ",:"
# Flags that the plan sets, or that would undo what it sets.
OWN_FLAGS = """
    --container-image --container-mounts --container-workdir --container-env --container-name
    --container-mount-home --no-container-mount-home --container-entrypoint --no-container-entrypoint
    --container-remap-root --no-container-remap-root --overlap --nodes -N --ntasks -n --ntasks-per-node
    --nodelist -w --cpus-per-task -c --cpu-bind --export --container-writable --container-readonly
"""
SETS = frozenset(OWN_FLAGS.split())
STEP = "a step on this node alone, with all that the job has here"


def argv(context: Context, name: Text, names: Sequence[str]) -> tuple[Token, ...]:
    """`srun` with the plugin's words; the image is one of them."""
    folders = [
        text(*each.source.parts, ":", *each.target.parts, ":ro" if each.readonly else ":rw") for each in mounts(context)
    ]
    keys, rule = ("container.kind",), "seen inside"
    return (
        token("srun", keys=keys),
        *(
            token(word, rule=STEP)
            for word in ("--overlap", "--nodes=1", "--ntasks=1", f"--cpus-per-task={context.facts.cpu_cores}")
        ),
        token("--nodelist=", Variable.HOST, rule=STEP),
        token("--cpu-bind=none", rule="the ranks are bound by the plan, where at all"),
        token("--export=ALL", rule="the image's own variables count all the same, but for those that are named"),
        token("--no-container-mount-home", rule="packages in ~/.local were made for another interpreter"),
        token("--no-container-remap-root", rule="files in the run directory are yours"),
        token("--no-container-entrypoint", rule="the plan's command alone is started"),
        token("--container-writable", rule="a folder's place is made where the image has none"),
        token("--container-workdir=", *workdir(context).text.parts, keys=("container.workdir",), rule=rule),
        token("--container-mounts=", *joined(folders, ",").parts, keys=("container.mounts",), rule=rule),
        token(f"--container-env={','.join(names)}", rule="in the place of the image's own"),
        *options(context),
        token("--container-image=", of(context).image, keys=("container.image",)),
    )


def end(names: Sequence[Text]) -> tuple[Text, ...]:
    """Slurm ends the step with the job; the ranks end by themselves when trainkit is gone."""
    return ()


def inspect(image: str) -> tuple[str, ...]:
    """Whether srun knows the plugin's words is asked on the machine."""
    return ()
