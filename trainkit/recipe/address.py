"""Addresses of folders elsewhere, as fsspec takes them: `s3://bucket/path`, or a path."""

from __future__ import annotations

from collections.abc import Mapping

# By scheme, the package by which fsspec reads it (fsspec.registry.known_implementations).
PACKAGES: Mapping[str, str] = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
}
# By package, the variables in which it looks for credentials first.
CREDENTIALS: Mapping[str, tuple[str, ...]] = {
    "s3fs": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gcsfs": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "adlfs": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
# By scheme, why nothing can be kept there.
UNFIT: Mapping[str, str] = {
    "memory": "it ends with its process",
    "http": "fsspec only reads from it",
    "https": "fsspec only reads from it",
    "data": "fsspec only reads from it",
}


def scheme(address: str) -> str:
    """`s3` of `s3://bucket/path`; empty for a path."""
    before, separator, _ = address.partition("://")
    return before.lower() if separator else ""


def has_credentials(address: str) -> bool:
    """Whether it names a user or a password: `s3://key:secret@bucket`, `sftp://user@host`.

    Azure's containers are none: `abfs://container@account.dfs.core.windows.net/path`.
    """
    user, at, _ = address.partition("://")[2].partition("/")[0].rpartition("@")
    return bool(at) and (":" in user or PACKAGES.get(scheme(address)) != "adlfs")
