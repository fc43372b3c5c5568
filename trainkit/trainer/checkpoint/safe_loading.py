"""Load checkpoints without executing their pickles: a pickle may call any function with any arguments.

Checksums prove that a file matches its manifest, not who wrote the two.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from trainkit.files import open_regular, read_whole
from trainkit.lazy import load

# torch.load reads it at each call, and it overrides an explicit weights_only=False (torch/serialization.py).
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Classes in DeepSpeed's files other than tensors and plain values.
_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler",
    "deepspeed.runtime.zero.config:ZeroStageEnum",
    "deepspeed.utils.tensor_fragment:fragment_address",
)
# Module -> names of data in the metadata of torch.distributed.checkpoint.
_NAMES = {
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath"),
    "pathlib._local": ("Path", "PosixPath"),  # where Python 3.13 has them
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
}
_DATACLASSES = metadata.__name__
_METADATA_BYTES = 1 << 30  # as many as 10,000 tensors on 1,000 ranks have
_NUMBERS = frozenset({"u1", "u4", "i4", "u8", "i8", "f8"})


class _Dtype:
    """Replaces numpy's dtype: a real one, changed by a pickle, can make numpy treat numbers as addresses."""

    def __init__(self, name: str, *_: object) -> None:
        if name not in _NUMBERS:
            raise pickle.UnpicklingError(f"an array of {name!r} is not plain data")
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "|"):
            raise pickle.UnpicklingError(f"an array in byte order {state[1]!r}")


class Array:
    """Replaces numpy's array; holds numbers only."""

    def __init__(self, *_: object) -> None:
        self.values = np.zeros(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, _, content = state
        self.values = np.frombuffer(bytes(content), dtype.name).reshape(shape)

    def tolist(self) -> list[Any]:
        """The numbers."""
        found: list[Any] = self.values.tolist()
        return found


def _from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], *_: object) -> Array:
    """Replaces numpy's function of this name, which pickle protocol 5 uses (the default of Python 3.14)."""
    made = Array()
    made.__setstate__((1, shape, dtype, False, content))
    return made


def _storage(content: bytes) -> Any:
    """Replaces torch's own, which would unpickle the bytes."""
    return _load(torch.load)(io.BytesIO(content))


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not plain data")
    return text.encode("latin1")


# For generators' states of releases that pickled them; NumPy 1 had these names in other modules.
_STAND_INS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encoded,
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): Array,
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy._core.multiarray", "_reconstruct"): Array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("torch.storage", "_load_from_bytes"): _storage,
}


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python, which can check what kind of object gets a state: not a class, not a function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        known = name in _NAMES.get(module, ())
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        # only what the module itself defines; a dotted name could reach its imports
        own = module == _DATACLASSES and getattr(vars(metadata).get(name), "__module__", "") == module
        if not (known or dtype or own):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
        try:
            return super().find_class(module, name)
        except ImportError as error:
            raise pickle.UnpicklingError(
                f"{module}.{name} is missing in this Python, unlike in the one that wrote it"
            ) from error

    def load_build(self) -> None:
        stack: list[Any] = self.stack  # type: ignore[attr-defined]
        state, made = stack.pop(), stack[-1]
        kind = type(made)
        if kind in (_Dtype, Array) or kind is metadata.TensorProperties:
            made.__setstate__(state)
        elif is_dataclass(kind) and isinstance(state, dict) and state.keys() <= {each.name for each in fields(kind)}:
            vars(made).update(state)
        else:
            name = made.__name__ if isinstance(made, type) else kind.__name__
            raise pickle.UnpicklingError(f"a state of {name} is not plain data")

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}  # type: ignore[dict-item]  # noqa: RUF012


def unpickled(content: bytes) -> Any:
    """The arrays, tensors and plain values of a pickle. UnpicklingError if it names anything else, or is damaged."""
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a pickle is a program and may raise anything
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error


class StateReader(FileSystemReader):
    """torch's reader of a folder, made safe: torch's own executes the metadata, and opens any file named in it.

    UnpicklingError for metadata that is not plain data, or that names a file outside the folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Read now: after a later failure torch would try another file, `__0.metadata`, and print a traceback.
        self._metadata = self._read(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata read at the start."""
        return self._metadata

    def _read(self, folder: Path) -> Metadata:
        found = unpickled(read_whole(folder / ".metadata", _METADATA_BYTES))
        places = getattr(found, "storage_data", None)
        if not isinstance(found, Metadata) or not isinstance(places, dict):
            raise pickle.UnpicklingError("its metadata was not written by torch.distributed.checkpoint")
        for name in {str(getattr(place, "relative_path", "")) for place in places.values()}:
            if name in ("", ".", "..") or "/" in name or not (folder / name).is_file():
                raise pickle.UnpicklingError(f"its metadata names {name!r}, which is not a file beside it")
        if any(getattr(place, "transform_descriptors", None) for place in places.values()):
            raise pickle.UnpicklingError("its tensors are compressed, and trainkit never compresses them")
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


@contextmanager
def only_data() -> Iterator[None]:
    """In this context torch.load reads only tensors and plain values, although DeepSpeed and torch ask it for more.

    UnpicklingError for anything that is not plain data, and for an archive that expands beyond its own size.
    """
    known = [load(place) for place in _DEEPSPEED] if "deepspeed" in sys.modules else []
    before, original = os.environ.get(_FORCE), torch.load
    os.environ[_FORCE] = "1"
    vars(torch)["load"] = _load(original)
    try:
        with torch.serialization.safe_globals(known):
            yield
    finally:
        vars(torch)["load"] = original
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load, restricted to tensors and plain values."""

    def checked(file: Any, *args: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike):
            with os.fdopen(open_regular(file), "rb") as archive:
                _refuse_bomb(archive)
        else:
            _refuse_bomb(file)
        return original(file, *args, **{**options, "weights_only": True})

    return checked


class _View:
    """A file as zipfile needs it: torch's own view of a file's part seeks from the end in the wrong direction."""

    def __init__(self, file: Any) -> None:
        file.seek(0, os.SEEK_END)
        self.size: int = file.tell()
        self.read, self.tell, self._file = file.read, file.tell, file

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The new offset from the start."""
        base = (0, self.tell(), self.size)[whence]
        self._file.seek(max(0, base + offset))
        return int(self.tell())


def _refuse_bomb(file: Any) -> None:
    """UnpicklingError for an archive whose parts exceed its own size: torch never compresses archives."""
    start = file.tell()
    try:
        if file.read(4) != b"PK\x03\x04":
            return
        view = _View(file)
        with zipfile.ZipFile(cast("Any", view)) as archive:
            parts = archive.infolist()
        if sum(part.file_size for part in parts) > view.size or any(part.compress_type for part in parts):
            raise pickle.UnpicklingError("its archive is compressed, or its parts overlap")
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise pickle.UnpicklingError(f"its archive is damaged ({error})") from error
    finally:
        file.seek(start)
