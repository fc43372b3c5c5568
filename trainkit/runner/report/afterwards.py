"""``python -m trainkit.runner.report.afterwards RUN_DIR``: summary.json of a run whose trainkit was killed.

Its guardian starts this when all is ended, from what lies in the run directory.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from trainkit.files import read_json, read_json_lines, write_json
from trainkit.launch_plan.model import plan_from_json
from trainkit.runner.report.card_watch import CardWatch
from trainkit.runner.report.exit_status import Verdict
from trainkit.runner.report.progress import Progress
from trainkit.runner.report.summary import build_summary
from trainkit.runner.rundir.layout import RunLayout


def write_summary(layout: RunLayout) -> None:
    """Write the summary of a run that has ended. Raises OSError, and ValueError, KeyError or TypeError for no run."""
    plan, status = plan_from_json(read_json(layout.plan)), read_json(layout.status)
    progress, watch = Progress(), CardWatch(plan.cards, layout.cards)
    for record in read_json_lines(layout.metrics):
        progress = progress.take(record, 0.0)
    watch.recall()
    verdict = Verdict(**{name: status[name] for name in Verdict._fields})
    seconds = (status["ended"] or time.time()) - status["started"]
    write_json(layout.summary, build_summary(plan, layout, verdict, seconds, progress, watch))


if __name__ == "__main__":
    write_summary(RunLayout(Path(sys.argv[1])))
