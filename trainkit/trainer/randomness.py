"""Seeds as pure functions of their purpose, and the generators' states for checkpoints."""

from __future__ import annotations

import json
import random
from pickle import UnpicklingError

import numpy as np
import torch

from trainkit.files import parse_json
from trainkit.seeds import derived_seed
from trainkit.trainer.checkpoint.safe_loading import Array, unpickled


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
    """The states of all generators of this process, as JSON: nothing in it can be executed."""
    kind, words, *rest = np.random.get_state(legacy=True)
    states = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(words).tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
    }
    if _cuda_is_used():
        # Of this rank's GPU alone: the others may belong to other ranks, or to other runs.
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    if torch.backends.mps.is_available():  # there is one of these, and seeding torch has opened it already
        states["mps"] = torch.mps.get_rng_state().tolist()
    return json.dumps(states).encode()


def restore_generator_states(content: bytes) -> None:
    """The inverse of :func:`generator_states`; also of pickles, which older checkpoints hold: nothing is executed.

    UnpicklingError for anything else.
    """
    try:
        states = parse_json(content) if content.startswith(b"{") else unpickled(content)
        version, words, gauss = states["python"]
        kind, keys, place, *rest = states["numpy"]
        keys = keys.tolist() if isinstance(keys, Array) else keys
        if not 0 <= place <= len(keys):  # NumPy would read behind them
            raise ValueError(f"place {place} of {len(keys)}")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), place, *rest))
        torch.set_rng_state(torch.as_tensor(states["torch"], dtype=torch.uint8))
        if "cuda" in states and _cuda_is_used():
            torch.cuda.set_rng_state(torch.as_tensor(states["cuda"], dtype=torch.uint8))
        if "mps" in states and torch.backends.mps.is_available():
            torch.mps.set_rng_state(torch.as_tensor(states["mps"], dtype=torch.uint8))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise UnpicklingError(f"the states of the generators are damaged ({error})") from error


def _cuda_is_used() -> bool:
    """Whether this run uses a GPU; one on the CPU must not so much as open those that are there."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
