"""An sshd on every machine of `machines`, with keys of its own: port 22 of each, root lets itself in.

Needs root and Debian's openssh-server and openssh-client.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from machines import LOGIN, Machines, missing

SSHD = "/usr/sbin/sshd"
SERVER = """\
Port 22
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
PidFile none
"""
CLIENT = """\
Host tk*
  User root
  IdentityFile {folder}/id
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


def lacking() -> str:
    """Why there can be no sshd here; empty where there can."""
    return missing("ssh", "ssh-keygen") or ("" if shutil.which(SSHD) else "needs sshd")


@dataclass(frozen=True)
class Ssh:
    """The sshd of some machines. folder: of keys and configuration."""

    machines: Machines
    folder: Path

    @property
    def config(self) -> Path:
        """For the client: `ssh -F`."""
        return self.folder / "config"

    def up(self) -> None:
        """Start one on every machine but the login machine, whose root then knows them all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in
        for name in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        (self.folder / "sshd_config").write_text(SERVER.format(folder=self.folder))
        self.config.write_text(CLIENT.format(folder=self.folder))
        key = " ".join((self.folder / "hostkey.pub").read_text().split()[:2])
        nodes = [name for name in self.machines.names if name != LOGIN]
        (self.folder / "known_hosts").write_text("".join(f"{name} {key}\n" for name in nodes))
        for name in nodes:
            argv = self.machines.argv(name, [SSHD, "-f", str(self.folder / "sshd_config")])
            subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)
