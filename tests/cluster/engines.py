"""Real container engines for tests, on storage of their own, with an image of empty folders and links alone.

What runs inside is this machine's own interpreter, which the recipes mount: no registry is asked.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

IMAGE = "localhost/trainkit-test:1"
STARTS_WITHIN = 20.0


def lacking(kind: str) -> str:
    """Why the engine cannot be had here; empty where it can."""
    needed = ("podman",) if kind == "podman" else ("docker", "dockerd")
    absent = [name for name in needed if shutil.which(name) is None]
    if absent:
        return f"needs {kind}: {' and '.join(absent)} not found (apt-get install podman runc, or docker.io)"
    return "" if os.getuid() == 0 else f"needs root for {kind}'s own storage"


def skeleton() -> bytes:
    """A root file system of empty folders, and the links that this one has."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in ("etc", "tmp", "proc", "sys", "dev", "run", "root", "var", "usr", "opt", "home", "work"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        for name in ("bin", "lib", "lib64", "sbin"):
            if Path("/", name).is_symlink():
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, str(Path("/", name).readlink())
                archive.addfile(entry)
        if Path("/etc/ld.so.cache").exists():
            archive.add("/etc/ld.so.cache", "etc/ld.so.cache")
    return content.getvalue()


@dataclass
class Engine:
    """An engine that runs. environ: by which its command finds it; limits: what this machine lets it set."""

    kind: str
    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    daemon: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        """Start it, and give it the image."""
        if self.kind == "podman":
            self.configure()
        else:
            self.limits = {"nofile": _files()}
            self._start_daemon()
        subprocess.run(
            self._argv("import", "-", IMAGE), input=skeleton(), check=True, capture_output=True, env=self._all()
        )

    def configure(self) -> None:
        """Tell podman of its storage, in folders of this one: graph and run."""
        runtime = 'runtime = "runc"\n' if shutil.which("runc") else ""
        limits = f'default_ulimits = ["nofile={_files()}:{_files()}", "nproc=4096:4096"]'
        # Locks in a file of its storage: those in shared memory stay for good, and nodes count what is left there.
        (self.folder / "containers.conf").write_text(f'[containers]\n{limits}\n[engine]\nlock_type = "file"\n{runtime}')
        (self.folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{self.folder}/graph"\nrunroot = "{self.folder}/run"\n'
        )
        self.environ = {
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
        }

    def down(self) -> None:
        """End it, with every container."""
        for name in self.containers():
            self.call("rm", "--force", name)
        if self.daemon is not None:
            self.daemon.terminate()
            self.daemon.wait(timeout=STARTS_WITHIN)
            # The network of containers without one of their own stays mounted, as the daemon leaves it.
            for left in (self.folder / "exec" / "netns").glob("*"):
                subprocess.run(["umount", str(left)], check=False, capture_output=True)
        else:
            self.call("image", "rm", "--force", IMAGE)

    def containers(self) -> list[str]:
        """The names of all, whatever their state."""
        return self.call("ps", "--all", "--format={{.Names}}").split()

    def call(self, *words: str) -> str:
        """What the engine prints."""
        return subprocess.run(self._argv(*words), check=True, capture_output=True, text=True, env=self._all()).stdout

    def _argv(self, *words: str) -> list[str]:
        return [self.kind, *words]

    def _all(self) -> dict[str, str]:
        return {**os.environ, **self.environ}

    def _start_daemon(self) -> None:
        address = f"unix://{self.folder}/d.sock"
        places = (f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec", f"--pidfile={self.folder}/pid")
        apart = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--storage-driver=vfs")
        with (self.folder / "dockerd.log").open("wb") as log:
            self.daemon = subprocess.Popen(
                ["dockerd", f"--host={address}", *places, *apart], stdout=log, stderr=log, start_new_session=True
            )
        self.environ = {"DOCKER_HOST": address}
        until = time.monotonic() + STARTS_WITHIN
        while subprocess.run(["docker", "version"], check=False, capture_output=True, env=self._all()).returncode:
            assert time.monotonic() < until and self.daemon.poll() is None, (self.folder / "dockerd.log").read_text()
            time.sleep(0.1)


def _files() -> int:
    """Engines raise limits, which root without CAP_SYS_RESOURCE may not."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def recipe(engine: Engine, program: dict[str, object], **more: object) -> str:
    """A recipe of a program in the engine's image, which sees this machine's interpreter."""
    own = dict.fromkeys((sys.prefix, sys.base_prefix, "/usr"))
    inside = [each for each in own if not any(each != other and each.startswith(f"{other}/") for other in own)]
    limits = {"ulimits": engine.limits} if engine.limits else {}
    container = {
        "kind": engine.kind,
        "image": IMAGE,
        "python": sys.executable,
        "mounts": [f"{each}:{each}:ro" for each in inside],
        **limits,
    }
    tree = {"version": 1, "name": "box", "devices": {"type": "cpu"}, "program": program, "container": container, **more}
    return json.dumps(tree)  # JSON is YAML
