"""The run's token: a node that can read it may join the run, and node 0 proves that it has it, too.

Node 0 writes it before it answers anybody, readable for its user alone, into a folder that all nodes share: the run
directory, or output.root where there is none yet. It is removed when all nodes have met. The token itself is never
sent: each side shows an HMAC (RFC 2104) over two random numbers, one of each side.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from trainkit.errors import MachineError
from trainkit.files import open_regular, publish
from trainkit.runner.nodes.agreement import Say

BYTES = 32
HEX = re.compile(f"[0-9a-f]{{{2 * BYTES}}}")  # as nonces and proofs are sent, and the token is written
FIRST_BYTES = 512  # of a message of somebody who has proved nothing yet
NODE_0, OTHER = "node 0", "other node"  # who proves: node 0's own proof, sent back, proves nothing


def token_path(folder: str, start: str, place: tuple[str, int]) -> str:
    """Where the token of a start lies. place: node 0's address and port, as the nodes are told them."""
    digest = hashlib.sha256(f"{start}\n{place[0]}\n{place[1]}".encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(os.path.abspath(folder), f".token-{digest[:16]}")


@contextlib.contextmanager
def made_token(path: str, say: Say) -> Iterator[bytes]:
    """A new token at the path, as long as the nodes meet. Raises MachineError where it cannot be written.

    A start that is refused or ended leaves no folder that was made for it.
    """
    folder = os.path.dirname(path)
    token = secrets.token_bytes(BYTES)
    above = [folder, *map(str, Path(folder).parents)]
    made = list(itertools.takewhile(lambda each: not os.path.lexists(each), above))
    try:
        os.makedirs(folder, exist_ok=True)
        publish(path, token.hex(), mode=0o600)
        seen = os.lstat(path).st_mode
    except OSError as error:
        what = f"the run's token, which lets other nodes in, cannot be written to {folder}: {error.strerror}"
        hint = "set output.root to a folder that you may write to, and that all nodes share"
        raise MachineError(what, hint=hint) from error
    if stat.S_IMODE(seen) & 0o077:
        say(f"warning: {folder} keeps no file private: whoever reads the run's token in it can join the nodes")
    try:
        yield token
    except BaseException:
        _remove(path)
        with contextlib.suppress(OSError):  # another run is in it
            for each in made:
                os.rmdir(each)
        raise
    _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):  # the folder has been removed
        os.unlink(path)


def read_token(path: str) -> bytes:
    """The token at a path. Raises OSError, also for a file that another user may have put there."""
    with os.fdopen(open_regular(path), "rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        # A server may call every user by another number (squashing): then the folder has the same owner.
        if owner not in (os.geteuid(), os.stat(os.path.dirname(path)).st_uid):
            raise PermissionError(1, f"it belongs to another user ({owner})", path)
        text = file.read(2 * BYTES + 1).decode("ascii", "replace")
    if not HEX.fullmatch(text):
        raise OSError(22, "it is no token", path)
    return bytes.fromhex(text)


def new_nonce() -> str:
    """A random number that proves a proof to be fresh."""
    return secrets.token_hex(BYTES)


def is_hex(value: object) -> bool:
    """Whether a value has the form of a nonce or a proof."""
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def proof(token: bytes, side: str, nonces: tuple[str, str]) -> str:
    """What shows that a side has the token. nonces: node 0's, and the other node's."""
    return hmac.new(token, "\n".join((side, *nonces)).encode(), hashlib.sha256).hexdigest()


def is_proof(value: object, token: bytes, side: str, nonces: tuple[str, str]) -> bool:
    """Whether a value is that proof; compared in constant time."""
    return isinstance(value, str) and is_hex(value) and hmac.compare_digest(value, proof(token, side, nonces))
