"""Seeds as pure functions of their purpose."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
