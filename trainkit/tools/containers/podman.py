"""`podman`: as docker, but for how containers are ended and images described."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.launch_plan.model import Text, text
from trainkit.tools.containers.docker import APART, PREFIX, SETS, argv

__all__ = ["APART", "PREFIX", "SETS", "argv", "end", "inspect"]


def end(names: Sequence[Text]) -> tuple[Text, ...]:
    """What killed processes left in podman's own records goes too."""
    return (*(text(word) for word in ("podman", "rm", "--force", "--ignore", "--time=0")), *names)


def inspect(image: str) -> tuple[str, ...]:
    """The image's variables, as JSON."""
    return ("podman", "image", "inspect", "--format={{json .Config.Env}}", image)
