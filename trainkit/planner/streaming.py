"""What a plan says of data that is read while it is trained on: its sources, their shares, and who reads what."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.launch_plan.context import Context
from trainkit.launch_plan.model import Notice
from trainkit.recipe.schema import DatasetData, JsonlData, Recipe
from trainkit.recipe.schema.model import is_packed
from trainkit.text import listed


def is_packed_stream(recipe: Recipe) -> bool:
    """Whether every process that reads has to turn all rows into tokens, to know where its samples begin."""
    data = recipe.data
    return isinstance(data, JsonlData | DatasetData) and data.streaming and is_packed(recipe)


def streaming_notices(context: Context) -> Iterator[Notice]:
    """The sources of a stream with their shares; and that packing has every process read all of it."""
    data = context.recipe.data
    if context.recipe.program.kind != "builtin" or not isinstance(data, JsonlData | DatasetData) or not data.streaming:
        return
    if data.mix:
        mix = [each for each in data.mix if each.weight]
        total = sum(each.weight for each in mix)
        names = ((each.weight / total, each.path if isinstance(each.path, str) else each.path[0]) for each in mix)
        yield Notice("note", f"samples are drawn from {listed([f'{path} ({share:.1%})' for share, path in names])}")
    processes = context.processes * max(1, data.workers)
    if processes > 1 and is_packed_stream(context.recipe):
        what = (
            "where a packed sample begins depends on all texts before, so that each of the "
            f"{processes} processes that read turns the whole stream into tokens"
        )
        hint = "set data.workers to 1 at most; data.packing: false, or data.kind: tokens, spares the others' share"
        yield Notice("note", what, hint)
