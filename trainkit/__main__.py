"""Entry point of the `trainkit` command and of `python -m trainkit`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line; the process ends with the documented exit code."""
    if sys.argv[1:] == ["--version"]:  # answered before any import that costs time
        from trainkit import __version__

        sys.stdout.write(f"trainkit {__version__}\n")
        return
    # Imports allocate much and drop little: with the default of 700 the collector searches in vain a hundred times.
    gc.set_threshold(100_000)
    try:
        from trainkit.cli.boundary import run_command_line
    except KeyboardInterrupt:  # on a slow file system even these imports take time
        sys.exit(130)
    code = run_command_line(sys.argv[1:])
    gc.disable()  # the interpreter would search everything once more before it ends
    sys.exit(code)


if __name__ == "__main__":
    main()
