"""No pickle of a checkpoint is executed: a pickle may name any function, to be called with any arguments.

Checksums prove that a file is the one of its manifest, not who wrote both.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from trainkit.lazy import load

# torch.load reads it at each call, and it counts over an explicit weights_only=False (torch/serialization.py).
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# What DeepSpeed's files hold other than tensors and plain values.
_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# Module -> names of data: states of generators, and the metadata of torch.distributed.checkpoint.
_NAMES = {
    "_codecs": ("encode",),
    "collections": ("OrderedDict",),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct",),  # as numpy 1 writes it
    "numpy._core.multiarray": ("_reconstruct",),
    "numpy.core.numeric": ("_frombuffer",),  # in place of the above in protocol 5, which is the default of Python 3.14
    "numpy._core.numeric": ("_frombuffer",),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),  # where Python 3.13 has them
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
}
_DATACLASSES = metadata.__name__


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):  # torch's own would unpickle whatever is in them
            return lambda content: torch.load(io.BytesIO(content), weights_only=True)
        known = name in _NAMES.get(module, ())
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # only what the module defines itself, by no dotted name: that would reach what it imports
        own = module == _DATACLASSES and getattr(vars(metadata).get(name), "__module__", "") == module
        if not (known or dtype or own):
            raise pickle.UnpicklingError(f"{module}.{name} is no data")
        try:
            return super().find_class(module, name)
        except ImportError as error:
            raise pickle.UnpicklingError(
                f"{module}.{name} is not in this Python, but in the one that wrote it"
            ) from error


def unpickled(content: bytes) -> Any:
    """The arrays, tensors and plain values of a pickle. UnpicklingError if it names anything else."""
    return _Unpickler(io.BytesIO(content)).load()


@contextmanager
def only_data(state: Path | None = None) -> Iterator[None]:
    """Inside, torch.load reads tensors and plain values alone, though DeepSpeed and torch ask it for all.

    state: a folder of torch.distributed.checkpoint. UnpicklingError for what is no data.
    """
    if state is not None:  # its metadata is a pickle of its own, which no option of torch's restricts
        unpickled((state / ".metadata").read_bytes())
    known = [load(place) for place in _DEEPSPEED] if "deepspeed" in sys.modules else []
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(known):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before
