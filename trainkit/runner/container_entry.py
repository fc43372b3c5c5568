"""The first command inside a container: check that the image has what the plan needs, or become the launcher.

``container_entry.py --package=torch==2.6.0…``, or
``container_entry.py --home=DIR [--log=FILE] [--unset=NAME,PREFIX*…] -- program args…``. A script of its own, started by
the image's interpreter: standard library only, in syntax that an older Python reads, too.
"""

from __future__ import annotations

import sys

if sys.path and __file__.startswith(sys.path[0] + "/"):
    del sys.path[0]  # our own folder, whose modules must not be taken for the standard library's

import os
import re
import signal

UNFIT = 4  # trainkit's exit code for what a machine lacks
NOT_FOUND = 127
OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main(argv: list[str]) -> int:
    """Returns an exit code, or becomes the program."""
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:3]))
        say(f"the image's {sys.executable} is Python {found}; trainkit requires 3.11 or newer")
        say("set container.python to another interpreter of the image, or use a newer image")
        return UNFIT
    end = argv.index("--") if "--" in argv else len(argv)
    given, program = [word.partition("=")[::2] for word in argv[:end]], argv[end + 1 :]
    packages = [value for name, value in given if name == "--package"]
    if packages:
        return check_packages(packages)
    try:
        for name, value in given:
            if name == "--home":
                os.makedirs(value, exist_ok=True)
                os.environ["HOME"] = value
            elif name == "--log":
                redirect_output(value)
            elif name == "--unset":
                unset_variables(value.split(","))
    except OSError as error:
        say(f"user {os.getuid()} of the container may not write to {error.filename}: {error.strerror}")
        say("next: leave container.user out, or name a user who may write there")
        return UNFIT
    # The user may be only a number in the image, and libraries ask for a name (getpass).
    os.environ.setdefault("USER", f"uid{os.getuid()}")
    # The launcher, the wrapper and the built-in trainer find trainkit's own code before the image's.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH", "")]))
    # As outside a container: ignored here, the signals of a checkpoint request do not kill the launcher; the ranks'
    # wrappers handle them.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        say(f"cannot start {program[0]}: {error.strerror}")
        return NOT_FOUND


def redirect_output(log: str) -> None:
    """Redirect output to an existing log; node 0's log has no number in its name. Raises OSError."""
    folder, name = os.path.split(log)
    path = os.path.join(folder, "launcher.log" if name == "node-0.launcher.log" else name)
    if os.path.isfile(path):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        for own in (1, 2):
            os.dup2(opened, own)
        os.close(opened)


def unset_variables(names: list[str]) -> None:
    """Unset variables by name, or by a prefix that ends in a star."""
    for name in list(os.environ):
        if any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in names):
            del os.environ[name]


def check_packages(packages: list[str]) -> int:
    """Whether the image has these packages (`name>=version`, `name==version`)."""
    from importlib import metadata

    missing: list[str] = []
    other: list[str] = []
    paste: list[str] = []
    install: list[str] = []
    for each in packages:
        name, relation, version = re.split("([>=]=)", each, maxsplit=1)
        try:
            found = metadata.version(name) if name != "python" else ".".join(map(str, sys.version_info[:3]))
        except metadata.PackageNotFoundError:
            missing.append(f"{name} {relation} {version}: it is not installed")
            install.append(f"'{each}'")
            continue
        if relation == ">=" and release(found) < release(version):
            missing.append(f"{name} >= {version}: {found} is installed")
            install.append(f"'{each}'")
        elif relation == "==" and release(found) != release(version):
            other.append(f"the plan is made for {name} {version}; the image has {found}")
            paste.append("{}: {}".format(name, found.partition("+")[0]))
    for line in [*(f"the image lacks {each}" for each in missing), *other]:
        say(line)
    if missing:
        build = f"RUN {sys.executable} -m pip install {' '.join(install)}"
        say(f"next: use an image that has it, or build one: FROM the image, {build}")
    if paste:
        say("next: set the image's versions in the recipe: container.packages: {{{}}}".format(", ".join(paste)))
    return UNFIT if missing or other else 0


def release(version: str) -> list[int]:
    numbers = [int(each) for each in re.split("[^0-9.]", version)[0].split(".") if each]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
