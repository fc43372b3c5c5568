"""Repositories of the tests' Hub: commits of files, branches, tags, and who may read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

# What a new repository's .gitattributes keeps in LFS, and the size from which the Hub keeps everything there.
LFS_NAMES = ("*.safetensors", "*.bin", "*.pt", "*.parquet", "*.arrow", "*.gz", "*.zip", "*.tar", "*.msgpack")
LFS_SIZE = 10 * 1024**2


@dataclass(frozen=True)
class Blob:
    """One content, and the names that git and LFS give it."""

    content: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git holds of a file in LFS."""
        size = len(self.content)
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {size}\n".encode()

    @cached_property
    def oid(self) -> str:
        """Git's hash of what it holds."""
        held = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(held) + held, usedforsecurity=False).hexdigest()

    @property
    def lfs_sizes(self) -> dict[str, int]:
        """As listings have them beside the checksum."""
        return {"size": len(self.content), "pointerSize": len(self.pointer)}

    @property
    def etag(self) -> str:
        """What names the content in a cache of huggingface_hub."""
        return self.sha256 if self.lfs else self.oid


def in_lfs(name: str, size: int) -> bool:
    """Whether the Hub keeps a file of `size` bytes in LFS: by its name or size, never when empty."""
    by_name = any(fnmatch(name.rsplit("/", 1)[-1], pattern) for pattern in LFS_NAMES)
    return size > 0 and (by_name or size >= LFS_SIZE)


def blob(name: str, content: bytes) -> Blob:
    """A file as the Hub would keep it."""
    return Blob(content, lfs=in_lfs(name, len(content)))


@dataclass(frozen=True)
class Commit:
    """A state of all files, newest in `message`."""

    oid: str
    files: Mapping[str, Blob]
    message: str
    parent: Commit | None = None

    def history(self) -> Iterator[Commit]:
        """This commit and all before it."""
        here: Commit | None = self
        while here is not None:
            yield here
            here = here.parent


@dataclass
class Repository:
    """A repository of the Hub: `kind` is model or dataset; `readers` are the users whom a gated one admits."""

    name: str
    kind: str = "model"
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)

    def commit(self, files: Mapping[str, Blob], message: str = "commit", branch: str = "main") -> str:
        """Make `files` the branch's state; its hash, of 40 digits."""
        parent = self.branches.get(branch)
        told = [parent.oid if parent else self.name, message, *(f"{name} {files[name].oid}" for name in sorted(files))]
        oid = hashlib.sha1("\n".join(told).encode(), usedforsecurity=False).hexdigest()
        self.branches[branch] = self.commits[oid] = Commit(oid, dict(files), message, parent)
        return oid

    def change(self, files: Mapping[str, bytes | None], message: str = "change", branch: str = "main") -> str:
        """Write or (None) remove files of a branch; the new commit's hash."""
        before = dict(self.branches[branch].files)
        for name, content in files.items():
            before.pop(name, None)
            if content is not None:
                before[name] = blob(name, content)
        return self.commit(before, message, branch)

    def at(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag, or a hash names."""
        return self.branches.get(revision) or self.tags.get(revision) or self.commits.get(revision)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The contents at a revision, by name."""
        commit = self.at(revision)
        assert commit is not None, f"{self.name} has no {revision}"
        return {name: blob.content for name, blob in commit.files.items()}


def files_of(source: Path | Mapping[str, bytes | str]) -> dict[str, Blob]:
    """The files of a folder, or contents by name, as a repository keeps them."""
    if isinstance(source, Path):
        found = sorted(path for path in source.rglob("*") if path.is_file())
        contents = {path.relative_to(source).as_posix(): path.read_bytes() for path in found}
    else:
        contents = {name: text.encode() if isinstance(text, str) else text for name, text in source.items()}
    return {name: blob(name, content) for name, content in contents.items()}


def entries(commit: Commit, under: str = "", *, recursive: bool = True) -> list[dict[str, object]]:
    """The tree below a folder, as the Hub lists it."""
    prefix = f"{under}/" if under else ""
    listed: dict[str, dict[str, object]] = {}
    for name, held in sorted(commit.files.items()):
        if not name.startswith(prefix):
            continue
        parts = name.removeprefix(prefix).split("/")
        folders = [prefix + "/".join(parts[: depth + 1]) for depth in range(len(parts) - 1)]
        for folder in folders if recursive else folders[:1]:
            oid = hashlib.sha1(folder.encode(), usedforsecurity=False).hexdigest()
            listed.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
        if recursive or not folders:
            listed[name] = {"type": "file", "oid": held.oid, "size": len(held.content), "path": name}
            listed[name] |= {"lfs": {"oid": held.sha256, **held.lfs_sizes}} if held.lfs else {}
    return list(listed.values())


def info(repository: Repository, commit: Commit, *, blobs: bool) -> dict[str, object]:
    """What the Hub tells of a repository at a commit; with `blobs`, of its files' sizes too."""
    siblings: list[dict[str, object]] = []
    for name, held in sorted(commit.files.items()):
        sizes: dict[str, object] = {"blobId": held.oid, "size": len(held.content)} if blobs else {}
        sizes |= {"lfs": {"sha256": held.sha256, **held.lfs_sizes}} if blobs and held.lfs else {}
        siblings.append({"rfilename": name, **sizes})
    return {
        "_id": "0" * 24,
        "id": repository.name,
        "author": repository.name.split("/")[0],
        "sha": commit.oid,
        "lastModified": "2026-01-01T00:00:00.000Z",
        "private": repository.private,
        "gated": "manual" if repository.gated else False,
        "tags": [],
        "siblings": siblings,
    }
