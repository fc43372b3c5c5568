"""Hostile content, each from a random generator: pickles of every kind of call, archives, JSON, odd files."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import socket
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cases import changed
from security_judge import PAYLOAD, WROTE

# Names that a reader may know as data, and their like, to be misused.
ALLOWED = (
    "collections OrderedDict", "pathlib Path", "pathlib PosixPath", "torch Size", "torch device", "torch float32",
    "torch._utils _rebuild_tensor_v2", "torch.serialization _get_layout", "_codecs encode", "numpy dtype",
    "numpy ndarray", "numpy._core.multiarray _reconstruct", "numpy.core.multiarray _reconstruct",
    "torch.storage _load_from_bytes", "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata MetadataIndex", "torch.distributed.checkpoint.metadata TensorProperties",
    "torch.distributed.checkpoint.filesystem _StorageInfo", "torch.distributed.checkpoint.filesystem _StoragePrefix",
    "torch FloatStorage", "torch._utils _rebuild_parameter", "builtins bytearray",
    "torch._tensor _rebuild_from_type_v2", "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.utils.tensor_fragment fragment_address",
)  # fmt: skip


def push(value: Any) -> bytes:
    """The operations that push a value of plain data."""
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end


def named(draw: random.Random, module: str, name: str) -> bytes:
    """The operations that push what a name means, in one of their forms."""
    forms = (f"c{module}\n{name}\n".encode(), text(module) + text(name) + b"\x93")
    return draw.choice(forms)


def text(value: str) -> bytes:
    """A short text, without a place in the memo."""
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def payloads(folder: Path) -> tuple[tuple[str, str, tuple[Any, ...]], ...]:
    """Module, name and arguments of calls that leave a trace: a file, a variable, a connection, a process."""
    mark = str(folder / WROTE)
    return (
        ("os", "mkdir", (mark,)),
        ("posix", "system", (f"touch {mark}",)),
        ("os", "system", (f"touch {mark}",)),
        ("builtins", "exec", (f"open({mark!r}, 'w')",)),
        ("__builtin__", "eval", (f"open({mark!r}, 'w')",)),
        ("builtins", "open", (mark, "w")),
        ("io", "open", (mark, "w")),
        ("subprocess", "Popen", (["touch", mark],)),
        ("socket", "create_connection", (("127.0.0.1", 9),)),
        ("os", "putenv", ("CANARY", "1")),
        ("runpy", "run_path", (str(folder / "work" / f"{PAYLOAD}.py"),)),
        ("importlib", "import_module", (PAYLOAD,)),
        ("torch.hub", "load", (str(folder / "work"), "x", "local")),
        ("torch", "load", (mark, None, None)),
        ("torch.serialization", "load", (mark,)),
        ("torch", "save", ([1], mark)),
        ("numpy", "save", (mark, [1])),
        ("numpy", "load", (mark, None, True)),
        ("pathlib", "Path.touch", (mark,)),
        ("shutil", "rmtree", (str(folder / "outside"),)),
        ("torch.distributed.checkpoint.metadata", "os.system", (f"touch {mark}",)),
        ("torch._inductor.codecache", "compile_file", ("x", mark, "y")),
        ("torch.utils._config_module", "load_config", (mark,)),
        ("torch.jit", "load", (mark,)),
        ("torch.utils.cpp_extension", "load", ("x", [mark])),
        ("functools", "partial", (print, "x")),
        ("types", "FunctionType", ({}, {})),
    )


def call(draw: random.Random, folder: Path) -> bytes:
    """Operations that call something harmful, and push one value."""
    module, name, arguments = draw.choice(payloads(folder))
    plain = [each for each in arguments if not callable(each)]
    pushed = b"(" + b"".join(map(push, plain)) + b"t"
    how = draw.randrange(8)
    if how == 0 and "." not in name:
        return b"(" + b"".join(map(push, plain)) + f"i{module}\n{name}\n".encode()
    if how == 1:
        return b"(" + named(draw, module, name) + b"".join(map(push, plain)) + b"o"
    if how == 2:
        return named(draw, module, name) + pushed + b"\x81"
    if how == 3:
        return named(draw, module, name) + pushed + b"}\x92"
    if how == 4:  # a state, given to what a harmful name means
        return named(draw, module, name) + push({"x": 1}) + b"b"
    if how == 5:
        return draw.choice((b"\x82\x01", b"\x83\x01\x01", b"\x84\x01\x00\x00\x00", b"P1\n", push("1") + b"Q"))
    return named(draw, module, name) + pushed + b"R"


def misuse(draw: random.Random, folder: Path) -> bytes:
    """Operations on what a reader allows: with other arguments, and with states that set attributes."""
    module, name = draw.choice(ALLOWED).split(" ")
    other = named(draw, *draw.choice(ALLOWED).split(" "))
    outside = str(folder / "outside" / "secret.txt")
    values: tuple[Any, ...] = (None, -1, 2**62, "x" * 50, b"\xff" * 9, (2**40,), {"__class__": 1}, [[]] * 3, outside)
    values = (*values, ("latin1",))
    odd = draw.choice((*map(push, values), b"(" + other + b"t", other))
    names = ("open", "__reduce__", "__setstate__", "__init__", "__new__", "__class__", "__dict__", "touch", "x")
    attribute = draw.choice(names)
    sets = b"}" + text(attribute) + other + b"s"
    states = (push({attribute: 1}), sets, b"N" + sets + b"\x86", odd)
    made = named(draw, module, name) + b"(" + odd * draw.randrange(4) + b"t" + draw.choice((b"R", b"\x81"))
    given = made if draw.random() < 0.5 else named(draw, module, name)
    return given + draw.choice(states) + b"b" if draw.random() < 0.7 else made


def spliced(draw: random.Random, content: bytes, snippet: bytes) -> bytes:
    """A pickle with other operations somewhere in it, whose value is thrown away or takes the place of another."""
    try:
        operations = [content[start:end] for start, end in _operations(content)]
    except Exception:  # noqa: BLE001 - no pickle any more
        operations = []
    if draw.random() < 0.3 or not operations:
        return b"\x80\x04" + snippet + b"."
    whole = b"".join(operations)
    operations.insert(draw.randrange(1, len(operations)), snippet + (b"0" if draw.random() < 0.8 else b""))
    return b"".join(operations) if draw.random() < 0.95 else whole[: draw.randrange(len(whole))]


def _operations(content: bytes) -> list[tuple[int, int]]:
    """Where each operation begins and ends; frames left out, for their lengths would no longer be true."""
    found = [(operation.name, place or 0) for operation, _, place in pickletools.genops(content)]
    ends = [place for _, place in found[1:]] + [found[-1][1] + 1]
    return [(place, end) for (name, place), end in zip(found, ends, strict=True) if name != "FRAME"]


def pickled(draw: random.Random, content: bytes, folder: Path) -> bytes:
    """A hostile pickle, from a real one."""
    for _ in range(draw.randrange(1, 3)):
        what = draw.random()
        if what < 0.45:
            content = spliced(draw, content, call(draw, folder))
        elif what < 0.85:
            content = spliced(draw, content, misuse(draw, folder))
        else:
            content = flipped(draw, content)
    return content


def flipped(draw: random.Random, content: bytes) -> bytes:
    """A few bytes other, gone or doubled."""
    changed = bytearray(content)
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(changed) + 1)
        what = draw.randrange(4)
        if what == 0:
            changed[place : place + 1] = bytes((draw.randrange(256),))
        elif what == 1:
            del changed[place : place + draw.randrange(1, 30)]
        elif what == 2:
            changed[place:place] = changed[place : place + 20]
        else:
            changed[place : place + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, (2**62).to_bytes(8, "little")))
    return bytes(changed)


def archive(draw: random.Random, content: bytes, folder: Path) -> bytes:
    """torch's archive with another pickle in it, or one that is a bomb, or a TorchScript, or of another form."""
    what = draw.random()
    if what < 0.1:
        return pickled(draw, pickle.dumps({"module": {}}), folder)  # no archive at all
    if what < 0.2:  # the form before archives: number, protocol, system, value, keys
        values: tuple[Any, ...] = (0x1950A86A20F9469CFC6C, 1001, {})
        head = (pickle.dumps(value, 2) for value in values)
        return b"".join((*head, pickled(draw, pickle.dumps({}, 2), folder), pickle.dumps([], 2)))
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as parts, zipfile.ZipFile(out, "w") as written:
        bomb = draw.random() < 0.15
        for part in parts.infolist():
            inside = parts.read(part)
            if part.filename.endswith("/data.pkl"):
                inside = pickled(draw, inside, folder)
            elif bomb and "/data/" in part.filename:
                inside = bytes(draw.choice((2**20, 300_000_000)))
            odd = draw.choice(("../../" + WROTE, "/" + WROTE, "x/code/y.py", "x/constants.pkl"))
            name = part.filename if draw.random() < 0.98 else odd
            written.writestr(name, inside, zipfile.ZIP_DEFLATED if bomb else zipfile.ZIP_STORED)
    return flipped(draw, out.getvalue()) if draw.random() < 0.15 else out.getvalue()


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), "", "..", "../outside/secret.txt", "/etc/passwd", "\0",
    "x" * 10_000, "\x1b]52;c;Y2FuYXJ5\x07", "\x1b[2J\x1b[31mgone", "a\u202eb\u2066c", "line\rover\nline",
    "$(touch PWNED)", "`touch PWNED`", "--output=PWNED", [], {}, [[]], {"": {}}, ["x"] * 1000,
    "${oc.env:AWS_SECRET_ACCESS_KEY}",
)  # fmt: skip


def dumped(draw: random.Random, tree: Any) -> bytes:
    """A JSON file, changed; or one that is too deep, too long, or no JSON."""
    what = draw.random()
    if what < 0.08:
        return b"[" * 1_000_000
    if what < 0.12:
        return b'{"a":' * 100_000
    if what < 0.15:
        return b"[" + b"[]," * 15_000_000 + b"[]]"
    return json.dumps(changed(draw, tree, ODD)).encode("utf-8", "surrogatepass")


def plant(draw: random.Random, path: Path, outside: Path) -> None:
    """Put something that is no file, or leads elsewhere, in the place of a path that is no folder."""
    if path.is_dir() and not path.is_symlink():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    PLANTED[draw.choice(tuple(PLANTED))](path, outside)


def _sparse(path: Path, _outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def _socket(path: Path, _outside: Path) -> None:
    above = os.open(path.parent, os.O_RDONLY)  # a socket's name has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{above}/{path.name}")
    os.close(above)


PLANTED: Mapping[str, Callable[[Path, Path], None]] = {
    "a link to another file": lambda path, outside: path.symlink_to(outside / "secret.txt"),
    "a hard link": lambda path, outside: path.hardlink_to(outside / "linked.txt"),
    "a link to nothing": lambda path, outside: path.symlink_to(outside / "made"),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a link to a device": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to a folder": lambda path, outside: path.symlink_to(outside),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a device": lambda path, _: os.mknod(path, 0o020666, os.makedev(1, 5)),
    "a socket": _socket,
    "10 GB of nothing": _sparse,
    "a folder": lambda path, _: path.mkdir(),
}
