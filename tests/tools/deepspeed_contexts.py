"""Plans' decisions out of recipes that exist in memory alone, for what reads no more of them than a file does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.errors import Origin
from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import BatchArithmetic, NodeGroup, Resume, Topology
from trainkit.machine.capability import Dtype
from trainkit.machine.facts import Facts
from trainkit.recipe.resolved import Attachment, Entry, Resolved
from trainkit.recipe.schema import Recipe
from trainkit.recipe.validate import with_kinds

BATCH = BatchArithmetic(32, 4, 4, 2, 4)
HERE = Origin("file run.yaml", 1, "run.yaml", 7, 2)


def context_of(
    tree: Mapping[str, Any], dtype: Dtype = "fp32", base: Attachment | None = None, batch: BatchArithmetic = BATCH
) -> Context:
    """The decisions for a recipe, each of whose keys a layer gives; base: the file that strategy.config names."""
    history = {key: (Entry(value, HERE),) for key, value in leaves(tree)}
    attached = {} if base is None else {"strategy.config": base}
    resolved = Resolved(Recipe.model_validate(with_kinds(dict(tree))), tree, history, attached)
    facts = Facts("linux", "x86_64", "h", "3.11", "/opt/python", 8, 2**36)
    topology = Topology("cpu", (NodeGroup(1, 2, ("cpu", "cpu")),))
    return Context(resolved, facts, topology, "torchrun", (), batch, dtype, "digest", Resume(None, 0, ""))


def base_of(tree: Any, **origins: Origin) -> Attachment:
    """A file of the user's; `__` in a name is a dot."""
    return Attachment("/ds.json", tree, {key.replace("__", "."): origin for key, origin in origins.items()})


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
