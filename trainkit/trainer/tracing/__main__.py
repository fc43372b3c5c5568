"""Trace what is asked for, a line of JSON at a time, until the input ends: ``python -m trainkit.trainer.tracing``."""

from __future__ import annotations

import json
import sys

from trainkit.decode import decode
from trainkit.errors import TrainkitError
from trainkit.foresight.trace import Wanted
from trainkit.trainer.tracing.step import traced


def main() -> int:
    """An answer a line: `{"trace": …}`, or `{"fault": why not, "hint": what to do}`."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what models print is no answer
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {"trace": traced(decode(Wanted, json.loads(line))).to_json()}
        except TrainkitError as error:
            answer = {"fault": error.diagnostics[0].what, "hint": error.diagnostics[0].hint}
        except Exception as error:  # noqa: BLE001 - a model's own code raises anything
            answer = {"fault": f"{type(error).__name__}: {error}".splitlines()[0], "hint": ""}
        answers.write(json.dumps(answer, separators=(",", ":")) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
