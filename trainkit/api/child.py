"""``python -m trainkit.api.child FD WORDS…``: the command line of a Python caller, which learns its errors by FD."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

from trainkit.api.running import message_of, told
from trainkit.cli.app import invoke
from trainkit.cli.boundary import leave, run_command_line
from trainkit.errors import TrainkitError


def main(fd: int, words: list[str]) -> NoReturn:
    """Run the command; the process ends with its exit code."""
    os.set_inheritable(fd, False)  # for this process alone: it closes as soon as this one has ended
    threading.Thread(target=end_with_caller, args=(fd,), daemon=True).start()

    def told_errors(arguments: list[str]) -> int:
        try:
            return invoke(arguments)
        except TrainkitError as error:
            os.write(fd, told(message_of(error)))
            return int(error.exit_code)

    leave(run_command_line(words, told_errors))


def end_with_caller(fd: int) -> None:
    """Wait for the end of the caller, which never sends anything; then end in order."""
    if not os.read(fd, 1):
        os.kill(os.getpid(), signal.SIGTERM)  # under nohup, SIGHUP is ignored


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
