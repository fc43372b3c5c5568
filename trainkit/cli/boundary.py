"""The one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainkit.errors import ExitCode, TrainkitError


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code that the process ends with.

    Every TrainkitError is shown as its diagnostics. Anything else that escapes is a bug: a report file is
    written, its path printed, and the code is 3.
    """
    from trainkit.cli.app import invoke

    try:
        return invoke(arguments)
    except TrainkitError as error:
        from trainkit.cli.diagnostics import show_diagnostics

        show_diagnostics(error.diagnostics)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`trainkit plan … | head`): nothing is wrong, and the interpreter must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # noqa: BLE001 - the boundary: whatever is left is a bug of ours
        from trainkit.cli.report import write_report

        path = write_report(error, arguments)
        sys.stderr.write(
            f"error: this is a bug in trainkit: {type(error).__name__}: {error}\n"
            f"  next: a report was written to {path}; please attach it when you report this\n"
        )
        return int(ExitCode.BUG)
