"""Export a checkpoint in a process of its own: ``python -m trainkit.trainer.checkpoint``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import TrainkitError, in_words
from trainkit.hub.push import end_with_input


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint, on the CPU and without a process group. Failures are one line and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.checkpoint", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="<run>/checkpoints/step-<8 digits>")
    parser.add_argument("--destination", type=Path, required=True, help="folder to make; it must not exist")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, as peft reads them")
    parser.add_argument("--for-hub", action="store_true", help="with a model card and the run's tokenizer")
    parser.add_argument("--trust-code", action="store_true", help="import and call what the run names as its model")
    parser.add_argument("--tied", action="store_true", help="end when the standard input does, with who holds it")
    given = parser.parse_args(argv)
    if given.tied:
        threading.Thread(target=end_with_input, daemon=True).start()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would guess aloud
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # to import torch takes seconds, and Ctrl-C would leave its traceback
    from safetensors import SafetensorError

    from trainkit.trainer.checkpoint.export import export, export_adapters

    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on what is half written goes
    try:
        write = export_adapters if given.adapter else export
        write(given.checkpoint, given.destination, trusted=given.trust_code, for_hub=given.for_hub)
    except TrainkitError as error:
        sys.stderr.write(in_words(error))
        return int(error.exit_code)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.stderr.write(f"error: {given.destination} cannot be written: {reason}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
