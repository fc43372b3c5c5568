"""The numbers that a script on Trainer is told, for its TrainingArguments to be seen to hold them."""

from __future__ import annotations

from collections.abc import Iterator

from trainkit.frameworks.hf_trainer.argv_reader import spoken_fields
from trainkit.frameworks.hf_trainer.fields import ROWS, spoken
from trainkit.frameworks.hf_trainer.row import set_below, version
from trainkit.frameworks.hf_trainer.versions import name_of
from trainkit.plan.context import Context
from trainkit.plan.provenance import Source


def numbers(context: Context) -> Iterator[tuple[str, int | float, Source]]:
    """Field, value and what made it. Words and switches are left out: TrainingArguments rewrite some of them."""
    own = spoken_fields(context.recipe.program.args)
    for row in ROWS:
        value = row.value(context) if row.field not in own and spoken(context, row) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            keys = tuple(each for key in row.keys for each in set_below(context, key))
            yield name_of(row.field, version(context)), value, Source(keys or row.keys[:1])
