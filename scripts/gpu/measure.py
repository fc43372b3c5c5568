"""One measurement in a process of its own; the answer is a JSON file.

`problems` in it are what is wrong, `said` is one line for people, the rest are tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "bench")]

from measure_parts import Asked  # noqa: E402

from trainkit.lazy import call  # noqa: E402

# Imported at first use: torch takes seconds, and the loops bring transformers too.
MEASUREMENTS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "facts": call("measure_facts:facts"),
    "speed": call("measure_speed:speed"),
    "warm": call("measure_speed:warm"),
    "loop": call("measure_loop:loop"),
    "table": call("measure_table:table"),
    "memory": call("measure_memory:memory"),
    "sampling": call("measure_facts:sampling"),
}


def main() -> int:
    """Measure, and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("which", nargs="?", default="", help="a size, or a part of the table")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--answer", type=Path, required=True)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainkit-measured-") as scratch:
        answer = MEASUREMENTS[asked.what](Asked(asked.which, asked.device, asked.tiny, Path(scratch)))
    asked.answer.write_text(json.dumps({"problems": [], **answer}, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
