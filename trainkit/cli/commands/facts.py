"""`trainkit facts`: what is true of this machine, as JSON that `plan --on` reads on another."""

from __future__ import annotations

import json
import sys


def facts() -> None:
    """Print the facts of this machine as JSON: cards, cores, memory, versions, the scheduler's allocation.

    Example: trainkit facts > FACTS.json

    Example: trainkit plan ddp --on FACTS.json
    """
    from trainkit.machine.probe import probe

    sys.stdout.write(json.dumps(probe().to_json(), indent=2) + "\n")
