"""Ask DeepSpeed itself which of its ops it can build: ``python -m trainkit.doctor.ask_deepspeed OP...``.

Writes one JSON object: op -> {compatible, said}. A process of its own, because importing DeepSpeed takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from trainkit.runner.supervisor.processes import die_with_parent


def main() -> int:
    """Exit code 1, and why, where DeepSpeed cannot even be imported."""
    die_with_parent()
    try:
        builders, _ = overheard(lambda: importlib.import_module("deepspeed.ops.op_builder"))
    except Exception as error:  # noqa: BLE001 - whatever its libraries raise is the answer
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(json.dumps({name: asked(builders, name) for name in sys.argv[1:]}) + "\n")
    return 0


def asked(builders: Any, name: str) -> dict[str, Any]:
    """What the builder of one op says."""
    from trainkit.trainer.perf.build_ops import BUILDERS

    try:
        compatible, output = overheard(lambda: getattr(builders, BUILDERS[name])().is_compatible(verbose=True))
    except Exception as error:  # noqa: BLE001 - builders raise whatever their compiler's driver raises
        return {"compatible": False, "said": f"{type(error).__name__}: {error}"}
    # DeepSpeed colours its remarks, and labels each line of them.
    plain = (re.sub(r"\x1b\[[0-9;]*m", "", line).replace("[WARNING]", "").strip() for line in output.splitlines())
    return {"compatible": bool(compatible), "said": next(filter(None, plain), "")}


def overheard(call: Callable[[], Any]) -> tuple[Any, str]:
    """The call's result and all that it wrote. Builders duplicate the descriptors, so these are what is redirected."""
    # A file and not a pipe: nothing reads while the call writes.
    own = (os.dup(1), os.dup(2))
    with tempfile.TemporaryFile() as file:
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            result = call()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            for number, copy in enumerate(own, start=1):
                os.dup2(copy, number)
                os.close(copy)
        file.seek(0)
        return result, file.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
