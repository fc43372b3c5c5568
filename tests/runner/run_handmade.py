"""Runs a hand-made plan as `trainkit run` would: `python run_handmade.py '{"program": […], "output_root": …, …}'`."""

from __future__ import annotations

import json
import os
import sys

from handmade_plans import make_plan, of_nodes, words

from trainkit.errors import TrainkitError
from trainkit.launch_plan.model import Planned, Preparation, Provenance
from trainkit.runner.execute import execute
from trainkit.runner.request import RunRequest


def main() -> int:
    """Exit code of the run."""
    wanted = json.loads(sys.argv[1])
    wanted["preparations"] = [
        Preparation(item["title"], words(*item["argv"]), item["lock"]) for item in wanted.get("preparations", ())
    ]
    nodes, rendezvous = wanted.pop("nodes", 1), wanted.pop("rendezvous", "")
    plan = make_plan(**wanted)
    plan = of_nodes(plan, nodes, rendezvous) if nodes > 1 else plan
    number = 0 if nodes > 1 else None
    request = RunRequest(Planned(plan, Provenance({}, {})), "version: 1\n", "#!/bin/sh\n", dict(os.environ), number)
    try:
        return execute(request)
    except TrainkitError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
