"""Export a checkpoint in a separate process: ``python -m trainkit.trainer.checkpoint``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trainkit.distribution import install
from trainkit.errors import MachineError, TrainkitError, one_line_each
from trainkit.hub.push import end_with_input
from trainkit.trainer.perf.heap import keep_out_of_heap


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint, on the CPU and without a process group. A failure gives one line and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.trainer.checkpoint", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="<run>/checkpoints/step-<8 digits>")
    parser.add_argument("--destination", type=Path, required=True, help="folder to create; it must not exist")
    parser.add_argument("--adapter", action="store_true", help="export only the adapters, in peft's format")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="", help="default: that of the base model")
    parser.add_argument("--shard-bytes", type=int, help="most of the weights in a file; default: 5 GB")
    parser.add_argument("--for-hub", action="store_true", help="without paths of this machine")
    parser.add_argument("--trust-code", action="store_true", help="import and run the model code that the run names")
    parser.add_argument("--tied", action="store_true", help="end when standard input closes")
    given = parser.parse_args(argv)
    if given.tied:
        threading.Thread(target=end_with_input, daemon=True).start()
    # transformers imports DeepSpeed, which prints guesses about the device
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    keep_out_of_heap(1 << 20)
    # importing torch takes seconds, during which Ctrl-C would print a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from safetensors import SafetensorError

        from trainkit.trainer.checkpoint.export import export, export_adapters
        from trainkit.trainer.checkpoint.shards import SHARD_BYTES
    except ModuleNotFoundError as error:
        what = f"the module {error.name} is not installed, which reads the checkpoint"
        missing = MachineError(what, hint=install(sys.executable, str(error.name).partition(".")[0]))
        sys.stderr.write(one_line_each(missing))
        return int(missing.exit_code)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on an incomplete export is removed
    try:
        options = {"trusted": given.trust_code, "for_hub": given.for_hub, "dtype": given.dtype}
        if given.adapter:
            export_adapters(given.checkpoint, given.destination, **options)
        else:
            size = given.shard_bytes or SHARD_BYTES
            export(given.checkpoint, given.destination, shard_bytes=size, **options)
    except TrainkitError as error:
        sys.stderr.write(one_line_each(error))
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
