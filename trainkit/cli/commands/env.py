"""`trainkit env`: everything that a bug report needs, ready to paste."""

from __future__ import annotations

import json
import os
import sys

from trainkit.cli.options import Json


def env(as_json: Json = False) -> None:
    """Show versions, cards, cores, memory, scheduler and the variables that change a launch. Secrets are masked.

    Example: trainkit env
    """
    from trainkit.cli.environment_report import render, report
    from trainkit.machine.probe import probe

    told = report(probe(), dict(os.environ))
    sys.stdout.write(json.dumps(told, indent=2) + "\n" if as_json else render(told))
