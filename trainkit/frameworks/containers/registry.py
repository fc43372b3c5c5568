"""Every engine by the kind that a recipe names it by."""

from __future__ import annotations

from trainkit.frameworks.containers.inside import Engine
from trainkit.lazy import Registry

_HERE = "trainkit.frameworks.containers"
ENGINES: Registry[Engine] = Registry({name: f"{_HERE}.{name}" for name in ("docker", "podman", "apptainer", "pyxis")})
