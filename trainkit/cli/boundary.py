"""Turn errors into messages and exit codes, and make the standard streams safe."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from trainkit import __version__
from trainkit.distribution import NAME, install, pip
from trainkit.errors import Diagnostic, ExitCode, MachineError, TrainkitError, UsageError, refusal

# System errors that are caused by a given path, not by a bug or a wrong recipe.
_OF_THE_PATH = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}
)
# What a terminal that knows only ASCII shows for the characters that trainkit itself writes.
_PLAIN = {
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "·": "-",
    "\N{FULL BLOCK}": "#",
    "\N{LIGHT SHADE}": ".",
    "\N{DEGREE SIGN}": "",
}
_HANDLER = "trainkit"
# A requirement of this package, and the bounds in it.
_REQUIREMENT = re.compile(r"([\w.-]+)\s*\(?([^;)]*)\)?\s*(;.*)?")
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


def run_command_line(arguments: Sequence[str], invoke: Callable[[list[str]], int] | None = None) -> int:
    """Run one command; returns the exit code that the process ends with. invoke: in place of `app.invoke`.

    Every TrainkitError is shown as its diagnostics. Anything else that escapes is a bug: a report file is
    written, its path printed, and the code is 3.
    """
    try:
        prepare_streams()
        from trainkit.cli import app

        code = (invoke or app.invoke)(list(arguments))
        sys.stdout.flush()
    except TrainkitError as error:
        return _show(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader is gone (`trainkit plan … | head`): this is not an error.
        _forget_output()
        return 141
    except Exception as error:  # noqa: BLE001 - the boundary: what is left is an error of the system or a bug of ours
        return _explain(error, arguments)
    return code


def leave(code: int) -> NoReturn:
    """End the process. Freeing every object would take the interpreter a third as long as a plan."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no reader, a full disk, closed: only the exit code is left
            stream.flush()
    os._exit(code)


def _explain(error: Exception, arguments: Sequence[str]) -> int:
    """What the system refuses, a package that does not fit, or a bug of ours, with its report."""
    if refused := refusal(error):
        _forget_output()
        return _show(MachineError(refused[0], hint=refused[1]))
    if isinstance(error, OSError) and error.errno in _OF_THE_PATH:
        _forget_output()
        what = f"the system refuses: {error.strerror}" + (f": {error.filename}" if error.filename else "")
        return _show(UsageError(what, hint="name another path, or a folder that you may write to"))
    with contextlib.suppress(Exception):  # nothing that happens here may hide the code
        if found := unmet(error):
            return _show(MachineError(found))
    with contextlib.suppress(Exception):  # nothing that happens here may hide the code
        from trainkit.text import strip_control

        path = write_report(error, arguments)
        sys.stderr.write(
            f"error: this is a bug in trainkit: {type(error).__name__}: {strip_control(str(error))}\n"
            f"  next: a report was written to {path}; please attach it when you report this\n"
        )
    return int(ExitCode.BUG)


def _show(error: TrainkitError) -> int:
    from trainkit.cli.diagnostics import show_diagnostics

    with contextlib.suppress(OSError):  # standard error is gone or full: only the exit code is left
        show_diagnostics(error.diagnostics)
    return int(error.exit_code)


def _forget_output() -> None:
    """Send what is still in the buffer to /dev/null: the interpreter would try to write it again when it ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_report(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the report into the working folder, or the temporary one where that can't be written. Returns its path."""
    import platform
    import shlex
    import tempfile
    import traceback

    from trainkit.recipe.secrets import mask_values, mask_words

    text = (
        f"trainkit {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"command: trainkit {shlex.join(mask_words(arguments))}\n"
        f"interpreter: {sys.executable}\n\n"
        f"{mask_values(''.join(traceback.format_exception(error)))}"
    )
    for place in (os.getcwd, tempfile.gettempdir):
        with (
            contextlib.suppress(OSError),
            tempfile.NamedTemporaryFile(
                "w",
                encoding="utf-8",
                errors="backslashreplace",
                dir=place(),
                prefix="trainkit-bug-",
                suffix=".txt",
                delete=False,
            ) as file,
        ):
            file.write(text)
            return Path(file.name)
    sys.stderr.write(text)
    return Path("-")


def prepare_streams() -> None:
    """Make both streams safe to write to, whatever the locale and the caller's redirections."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:  # closed by the caller: what is opened next would get its number, and all that is printed
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    codecs.register_error(_HANDLER, _encodable)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller (`>&-`)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - lives as long as we do
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _encodable(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    if "\udc80" <= char <= "\udcff":  # a byte of a file's name that is not UTF-8, as Python keeps it
        return bytes((ord(char) - 0xDC00,)), error.start + 1
    return _PLAIN.get(char, char.encode("ascii", "backslashreplace").decode("ascii")), error.start + 1


def unmet(error: Exception) -> tuple[Diagnostic, ...]:
    """Which of trainkit's own requirements is not met, if that explains an error; else empty."""
    found = tuple(_unmet())
    if not found and isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("trainkit"):
        what = f"the module {error.name} is not installed, and trainkit needs it"
        if (checkout := Path(__file__).parents[2]).joinpath("pyproject.toml").is_file():
            hint = f"install trainkit with its requirements: {install(sys.executable, '-e', str(checkout))}"
        else:
            hint = f"`{pip(sys.executable)} check` says what installed packages lack"
        return (Diagnostic("error", what, hint=hint),)
    return found


def _unmet() -> Iterator[Diagnostic]:
    from importlib import metadata

    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # it runs from a checkout that nobody installed
        return
    for each in requirements:
        match = _REQUIREMENT.match(each)
        if match is None or match[3]:  # a marker: of an extra
            continue
        name, bounds = match[1], match[2].strip()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = ""
        if not installed or not all(_fits(installed, *bound) for bound in _BOUND.findall(bounds)):
            state = f"{installed} is installed" if installed else "it is not installed"
            what = f"trainkit requires {name}{bounds}; {state}"
            yield Diagnostic("error", what, hint=install(sys.executable, f"{name}{bounds}"))


def _fits(installed: str, operator: str, bound: str) -> bool:
    from trainkit.machine.facts import at_least, release

    return at_least(installed, bound) if operator == ">=" else release(installed) < release(bound)
