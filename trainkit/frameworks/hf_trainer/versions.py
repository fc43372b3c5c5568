"""What differs by version of transformers beside the fields' names, as data; tests hold it against the library.

Seen in 4.50.3, 4.53.3, 4.57.6, 5.0.0, 5.5.0, 5.12.0, 5.18.0 and 5.23.0; a change between two of them is taken to have
come with the later one, whose new form the earlier does not know.
"""

from __future__ import annotations

from trainkit.machine.versions import at_least
from trainkit.plan.context import Context

OLDEST, BEYOND = "4.50", "6"  # the versions that the tables know: from the first up to and without the second
NEWEST_SEEN = "5.23.0"

# Feature -> the first version that has it, or the first without it, seen to be so up to the newest.
SINCE = {
    "fsdp is a switch": "5.12",  # before, the words of --fsdp say what is done
    "fsdp_config has a version": "5.0",  # before, accelerate reads it from the environment
    "optim_args reach torch's optimizers": "5.5",  # sgd and adagrad
}
UNTIL = {
    "--optim adamw_hf": "5.0",
    "an optimizer for torch_xla's FSDP": "5.3",  # Trainer makes one only for models that accelerate wraps
}


def version(context: Context) -> str:
    """The installed transformers; the newest that the tables know where it is missing, which blocks the run."""
    return context.facts.packages.get("transformers", NEWEST_SEEN)


def can(feature: str, context: Context) -> bool:
    """Whether the installed version has a feature of the tables."""
    if feature in UNTIL:
        return not at_least(version(context), UNTIL[feature])
    return at_least(version(context), SINCE[feature])
