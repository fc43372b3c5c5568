"""The one place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

from trainkit.cli.streams import prepare
from trainkit.errors import Diagnostic, ExitCode, TrainkitError

# What the system refuses for reasons that lie in the machine, wherever it happens: no bug, and no wrong recipe.
_OF_THE_MACHINE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
)
# What it refuses for the path that it was given.
_OF_THE_PATH = frozenset({errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP})


def run_command_line(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code that the process ends with.

    Every TrainkitError is shown as its diagnostics. Anything else that escapes is a bug: a report file is
    written, its path printed, and the code is 3.
    """
    try:
        prepare()
        from trainkit.cli.app import invoke

        code = invoke(arguments)
        sys.stdout.flush()
    except TrainkitError as error:
        _show(error.diagnostics)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader went away (`trainkit plan … | head`): nothing is wrong, and the interpreter must not complain.
        _forget_output()
        return 141
    except Exception as error:  # noqa: BLE001 - the boundary: whatever is left is the machine's refusal or a bug of ours
        return _refused(error) if _is_refusal(error) else _bug(error, arguments)
    return code


def _show(diagnostics: Sequence[Diagnostic]) -> None:
    from trainkit.cli.diagnostics import show_diagnostics

    with contextlib.suppress(OSError):  # standard error is gone or full: the exit code has to do
        show_diagnostics(diagnostics)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _OF_THE_MACHINE | _OF_THE_PATH


def _refused(error: Exception) -> int:
    assert isinstance(error, OSError)
    _forget_output()
    what = f"the system refuses: {error.strerror}" + (f": {error.filename}" if error.filename else "")
    path = error.errno in _OF_THE_PATH
    hint = "name another path, or a folder that you may use" if path else "make room, or write to another place"
    _show((Diagnostic("error", what, hint=hint),))
    return int(ExitCode.USAGE if path else ExitCode.MACHINE)


def _bug(error: Exception, arguments: Sequence[str]) -> int:
    from trainkit.cli.report import write_report

    path = write_report(error, arguments)
    with contextlib.suppress(OSError):
        sys.stderr.write(
            f"error: this is a bug in trainkit: {type(error).__name__}: {error}\n"
            f"  next: a report was written to {path}; please attach it when you report this\n"
        )
    return int(ExitCode.BUG)


def _forget_output() -> None:
    """What is still in the buffer cannot be written, and shall not be tried again when the interpreter ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
