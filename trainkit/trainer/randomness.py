"""Seeds as pure functions of what they are for, and the generators' states for checkpoints."""

from __future__ import annotations

import hashlib
import pickle
import random
from typing import Any

import numpy as np
import torch

from trainkit.trainer.checkpoint.safe_loading import unpickled


def derived_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for; equal parts give equal seeds on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(derived_seed(seed, "numpy") % 2**32)
    torch.manual_seed(seed)


def be_deterministic() -> None:
    """All of PyTorch's notes on reproducibility apart from seeds; the plan sets CUBLAS_WORKSPACE_CONFIG."""
    # https://docs.pytorch.org/docs/stable/notes/randomness.html From here on an operation without a deterministic
    # implementation raises RuntimeError, and new memory is filled, which is torch's default with it.
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def generator_states() -> bytes:
    """The states of all generators of this process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if _cuda_is_used():
        # Of this rank's card alone: the others may belong to other ranks, or to other runs.
        states["cuda"] = torch.cuda.get_rng_state()
    return pickle.dumps(states)


def restore_generator_states(content: bytes) -> None:
    """The inverse of :func:`generator_states`. UnpicklingError for anything else, of which nothing is executed."""
    states = unpickled(content)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and _cuda_is_used():
        torch.cuda.set_rng_state(states["cuda"])


def _cuda_is_used() -> bool:
    """Whether this run uses a card; one on the CPU must not so much as open those that are there."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
