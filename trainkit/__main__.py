"""Entry point of the `trainkit` command and of `python -m trainkit`."""

from __future__ import annotations

import gc
import sys

OLDEST = (3, 11)  # Python


def main() -> None:
    """Run the command line; the process ends with the documented exit code."""
    if sys.version_info[:2] < OLDEST:  # before any import that an older one cannot read
        oldest, found = (".".join(map(str, each)) for each in (OLDEST, sys.version_info[:3]))
        sys.stderr.write(
            f"error: trainkit needs Python {oldest} or newer, and this is {found}: {sys.executable}\n"
            f"  next: call it with a newer one, as in python{oldest} -m trainkit\n"
        )
        sys.exit(4)
    if sys.argv[1:] == ["--version"]:  # answered before any import that costs time
        from trainkit import __version__

        sys.stdout.write(f"trainkit {__version__}\n")
        return
    if sys.argv[1:2] == ["__complete"]:  # a shell waits for it at every TAB
        from trainkit.cli.completion import main as complete

        complete(sys.argv[2:])
        return
    # Imports allocate much and drop little: with the default of 700 the collector searches in vain a hundred times.
    gc.set_threshold(100_000)
    try:
        from trainkit.cli.boundary import leave, run_command_line
    except KeyboardInterrupt:  # on a slow file system even these imports take time
        sys.exit(130)
    leave(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
