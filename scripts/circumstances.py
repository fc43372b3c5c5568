"""Where and with what figures were measured: the line that stands beside every table of them."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from trainkit.machine.host import probe_cpu

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers")


def circumstances(packages: Sequence[str] = PACKAGES) -> str:
    """`at 1a2b3c4 on 2 cores of AMD EPYC; Linux 6.18, Python 3.11.7, torch 2.13.0`."""
    cpu = probe_cpu()
    versions = [f"{platform.system()} {platform.release()}", f"Python {platform.python_version()}"]
    for name in packages:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"without {name}")
    return (
        f"at {commit()} on {cpu['cpu_cores']} cores of {cpu['cpu_name'] or platform.machine()}; {', '.join(versions)}"
    )


def commit() -> str:
    """The checkout's commit, and whether its files are those of it."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=False).stdout
    return (found.stdout.strip() or "an unknown commit") + (" with changes" if changed else "")
