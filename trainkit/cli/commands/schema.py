"""`trainkit schema`: the JSON Schema of recipes, and the reference of every key and flag."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def schema(
    reference: Annotated[
        bool, typer.Option("--reference", help="Print the reference of all keys as text instead.")
    ] = False,
    flags: Annotated[
        bool, typer.Option("--flags", help="Print the reference of all override flags as text instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of recipes, for editors that complete and check YAML.

    Example: trainkit schema > recipe.schema.json
    """
    from trainkit.flags.registry import flag_reference
    from trainkit.recipe.schema.json_schema import json_schema
    from trainkit.recipe.schema.reference import reference_text

    if flags:
        sys.stdout.write(flag_reference())
    elif reference:
        sys.stdout.write(reference_text())
    else:
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
