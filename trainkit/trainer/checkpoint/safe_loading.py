"""Load checkpoints without executing their pickles: a pickle may call any function with any arguments.

Checksums prove that a file matches its manifest, not who wrote the two.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

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
# Classes of storages in torch.save's pickles, without "Storage".
_STORED = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
}
STAGED = 16 << 20  # bytes that are read at a time where they cannot go straight to their place
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip archive's part: signature, length of its name, and of what follows


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


def unpickled(content: bytes, kind: type[_Unpickler] = _Unpickler) -> Any:
    """The arrays, tensors and plain values of a pickle. UnpicklingError if it names anything else, or is damaged."""
    try:
        return kind(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a pickle is a program and may raise anything
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error


class _Part(io.RawIOBase):
    """A part of an unbuffered file, as zipfile reads it."""

    def __init__(self, file: io.FileIO, start: int, size: int) -> None:
        super().__init__()
        self._file, self._start, self._size, self._place = file, start, size, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """The new offset, from the part's start."""
        base: int = (0, self._place, self._size)[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        """The number of bytes read: all that the buffer has room for, up to the part's end."""
        wanted = memoryview(buffer)[: max(0, self._size - self._place)]
        _read_all(self._file, self._start + self._place, wanted)
        self._place += len(wanted)
        return len(wanted)


def _read_all(file: io.FileIO, start: int, memory: memoryview) -> None:
    """Fill memory from a place in a file. UnpicklingError where the file ends before."""
    file.seek(start)
    while memory:
        count = file.readinto(memory)
        if not count:
            raise pickle.UnpicklingError("its file is shorter than its tensors")
        memory = memory[count:]


@dataclass(frozen=True, slots=True)
class _Strided:
    """A tensor as torch.save's pickle describes it. first, strides: in elements."""

    dtype: torch.dtype
    storage: str  # the name of its storage in the archive
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_contiguous(self) -> bool:
        expected = _row_major(self.shape)
        return all(
            size == 1 or own == other for size, own, other in zip(self.shape, self.strides, expected, strict=True)
        )


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class _TensorUnpickler(_Unpickler):
    """Reads where a tensor lies, and not the tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (dtype := _STORED.get(name.removesuffix("Storage"))):
            return dtype
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _strided
        return super().find_class(module, name)

    def persistent_load(self, saved: Any) -> Any:
        return saved


def _strided(saved: tuple[Any, ...], first: int, shape: Any, strides: Any, *_: object) -> _Strided:
    kind, dtype, storage = saved[:3]
    sizes: tuple[int, ...] = tuple(map(int, shape))
    steps: tuple[int, ...] = tuple(map(int, strides))
    if (
        kind != "storage"
        or not isinstance(dtype, torch.dtype)
        or len(sizes) != len(steps)
        or min((first, *sizes, *steps)) < 0
    ):
        raise pickle.UnpicklingError("a tensor of no storage")
    return _Strided(dtype, str(storage), int(first), sizes, steps)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A contiguous tensor in a file, of which parts can be read. start: the byte of its first element."""

    file: io.FileIO
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def find(cls, file: io.FileIO, start: int, size: int) -> StoredTensor | None:
        """What torch.save wrote to a part of a file; None for anything but a plain, contiguous tensor.

        UnpicklingError for an archive that is damaged.
        """
        try:
            with zipfile.ZipFile(cast("Any", _Part(file, start, size))) as archive:
                # torch puts all into one folder, whatever its name
                parts = {each.filename.partition("/")[2]: each for each in archive.infolist()}
                if any(each.compress_type for each in parts.values()):
                    raise pickle.UnpicklingError("its archive is compressed, and trainkit never compresses it")
                described = parts["data.pkl"]
                if described.file_size > STAGED or archive.read(parts["byteorder"]) != sys.byteorder.encode():
                    return None
                content = archive.read(described)
                try:
                    found = unpickled(content, _TensorUnpickler)
                except pickle.UnpicklingError:  # another kind of tensor, or none: torch, as safe, says what is wrong
                    return None
                if not isinstance(found, _Strided) or not found.is_contiguous():
                    return None
                stored = parts[f"data/{found.storage}"]
            header = bytearray(_LOCAL_HEADER.size)
            _read_all(file, start + stored.header_offset, memoryview(header))
            signature, *lengths = _LOCAL_HEADER.unpack(header)
            begins = stored.header_offset + _LOCAL_HEADER.size + sum(lengths)
            end = (found.first + math.prod(found.shape)) * found.dtype.itemsize
            if signature != b"PK\x03\x04" or end > stored.file_size or begins + stored.file_size > size:
                raise pickle.UnpicklingError("its archive is damaged (a tensor leads out of it)")
        except KeyError:  # no archive of torch.save's
            return None
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, TypeError) as error:
            raise pickle.UnpicklingError(f"its archive is damaged ({error})") from error
        return cls(file, start + begins + found.first * found.dtype.itemsize, found.dtype, found.shape)

    def read(self, target: Tensor, first: Sequence[int]) -> None:
        """Set a tensor of any format and device to the box of its shape that begins at an index of this one.

        Only the bytes of the box are read, and beside the target at most :data:`STAGED` bytes are held.
        """
        if not target.numel():
            return
        if target.device.type == "cpu" and target.dtype == self.dtype and target.is_contiguous():
            self._read(target, first)
        elif target.numel() * self.dtype.itemsize > STAGED:
            axis = next(axis for axis, size in enumerate(target.shape) if size > 1)
            half = target.shape[axis] // 2
            for begin, size in ((0, half), (half, target.shape[axis] - half)):
                moved = [place + begin * (axis == number) for number, place in enumerate(first)]
                self.read(target.narrow(axis, begin, size), moved)
        else:
            staged = torch.empty(target.shape, dtype=self.dtype)
            self._read(staged, first)
            target.copy_(staged)

    def _read(self, target: Tensor, first: Sequence[int]) -> None:
        """The same for a contiguous tensor of this format in the machine's memory."""
        strides = _row_major(self.shape)
        # Elements follow one another in both within the last axis of which not all is wanted.
        axis = max((axis for axis, size in enumerate(target.shape) if size != self.shape[axis]), default=0)
        run = math.prod(target.shape[axis:]) * self.dtype.itemsize
        memory = memoryview(cast("Any", target.reshape(-1).view(torch.uint8).numpy()))
        begin = sum(place * stride for place, stride in zip(first, strides, strict=True))
        for number, index in enumerate(itertools.product(*map(range, target.shape[:axis]))):
            place = begin + sum(at * stride for at, stride in zip(index, strides, strict=False))
            piece = memory[number * run : (number + 1) * run]
            _read_all(self.file, self.start + place * self.dtype.itemsize, piece)


class StateReader(FileSystemReader):
    """torch's reader of a folder, made safe: torch's own executes the metadata, and opens any file named in it.

    Of a tensor only the wanted bytes are read: torch's own reads all that one rank has saved of it. UnpicklingError for
    metadata that is not plain data, or that names a file outside the folder.
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read a plan's items into the places that the planner names."""
        others: list[Any] = []
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                others.append(item)
            else:
                by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with os.fdopen(open_regular(Path(self.path) / name), "rb", buffering=0) as file:
                by_place = itertools.groupby(sorted(items, key=self._place), self._place)
                for (start, size), same in by_place:
                    stored = StoredTensor.find(file, start, size)
                    for item in same:
                        if stored is None:
                            others.append(item)
                        else:
                            _read_item(stored, item, planner)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _place(self, item: Any) -> tuple[int, int]:
        found = self.storage_data[item.storage_index]
        return found.offset, found.length


def _read_item(stored: StoredTensor, item: Any, planner: LoadPlanner) -> None:
    """UnpicklingError where the metadata is of another tensor than the file holds."""
    target, first = planner.resolve_tensor(item).detach(), tuple(item.storage_offsets)
    ends = [begin + size for begin, size in zip(first, target.shape, strict=False)]
    if (
        len(first) != len(stored.shape)
        or len(target.shape) != len(first)
        or any(end > size for end, size in zip(ends, stored.shape, strict=True))
    ):
        sizes = f"{list(target.shape)} at {list(first)} of {list(stored.shape)}"
        raise pickle.UnpicklingError(f"its metadata does not fit its tensors ({sizes} is wanted)")
    stored.read(target, first)
    planner.commit_tensor(item, target)


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
