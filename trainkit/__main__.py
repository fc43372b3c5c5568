"""Entry point of the `trainkit` command and of `python -m trainkit`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the process ends with the documented exit code."""
    if sys.argv[1:] == ["--version"]:  # answered before any import that costs time
        from trainkit import __version__

        sys.stdout.write(f"trainkit {__version__}\n")
        return
    try:
        from trainkit.cli.boundary import run_command_line
    except KeyboardInterrupt:  # on a slow file system even these imports take time
        sys.exit(130)
    sys.exit(run_command_line(sys.argv[1:]))


if __name__ == "__main__":
    main()
