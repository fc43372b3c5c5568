"""A DeepSpeed file that a program of the user's own is given: it stays as it is, and its stage is the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import Origin, RecipeError, UsageError
from trainkit.frameworks.base.draft import Draft, ImportContext
from trainkit.frameworks.base.foreign_file import ForeignFile, read_mapping
from trainkit.frameworks.deepspeed.fields import KINDS, STAGE
from trainkit.frameworks.deepspeed.offloading import ZERO
from trainkit.recipe.layers.interpolation import interpolated
from trainkit.recipe.layers.merge import value_at
from trainkit.recipe.layers.paths import absolute

STAGES = "write 0, 1, 2 or 3"


def stage_of(tree: Mapping[str, Any]) -> Any:
    """The stage of ZeRO that DeepSpeed reads in a file: 0 where there is none; any other value is an error of its own.

    deepspeed/runtime/zero/config.py: get_zero_config, which takes the switch of the first versions too.
    """
    if isinstance(tree.get(ZERO), bool):
        return int(tree[ZERO])
    found = value_at(tree, STAGE)
    return 0 if found is None else found


def use_as_base(draft: Draft, context: ImportContext, path: str, origin: Origin) -> ForeignFile | None:
    """Set strategy and base file; the file that was read, or None and a problem in the draft."""
    if interpolated(path):
        hint = "give its value with --set NAME=VALUE: the stage of ZeRO stands in the file"
        draft.fail(f"the DeepSpeed file is named by a variable: {path}", origin, hint)
        return None
    try:
        file = read_mapping(context, path, f"file {path}", 1)
    except UsageError as error:
        for each in error.diagnostics:
            draft.fail(each.what, origin, each.hint)
        return None
    except RecipeError as error:
        draft.problems += error.diagnostics
        return None
    stage, zero = stage_of(file.tree), file.tree.get(ZERO)
    if not (zero is None or isinstance(zero, Mapping | bool)):
        draft.fail(f"{ZERO} is {zero!r}", file.at(ZERO), 'write {"stage": 1}, or the stage that is meant')
    elif type(stage) is not int or stage not in KINDS:
        draft.fail(f"{STAGE} is {stage!r}", file.at(STAGE), STAGES)
    else:
        says = stage or value_at(file.tree, STAGE) == 0
        reason = "" if says else f"{path} says no ZeRO stage: nothing is partitioned"
        draft.set("strategy.kind", KINDS[stage], origin, reason)
        draft.set("strategy.config", absolute(path, context.cwd), origin)
        return file
    return None
