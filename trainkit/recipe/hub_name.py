"""The names of repositories of the Hugging Face Hub."""

from __future__ import annotations

import re

# huggingface_hub, utils/_validators.py: validate_repo_id
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_FORM = re.compile(rf"(?:{_PART}/)?{_PART}")
_LONGEST = 96  # characters
# Endings of files whose rows have columns, which are no repositories; other files are text.
ROWS = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)


def is_repository(name: str) -> bool:
    """Whether a text has the form of a repository's name: `name`, or `owner/name`."""
    odd = "--" in name or ".." in name or name.endswith(".git") or ROWS.search(name)
    return len(name) <= _LONGEST and not odd and bool(_FORM.fullmatch(name))


def is_on(switch: str) -> bool:
    """Whether huggingface_hub takes a variable's value (HF_HUB_OFFLINE) for true (huggingface_hub.constants)."""
    return switch.upper() in ("1", "ON", "YES", "TRUE")


def has_owner(name: str) -> bool:
    """Whether it is one with its owner, as an upload needs it."""
    return is_repository(name) and "/" in name


_ADDRESS = re.compile(rf"(?:https?://[^/]+/|hf://)(?:(?:datasets|models)/)?({_PART}/{_PART})(?:[/@?#].*)?")
_AT = re.compile(rf"({_PART}/{_PART})(?:/|@[^/]+)")


def meant(path: str) -> str:
    """The repository that an address of the Hub is of, or `owner/name/`, or `owner/name@revision`; empty for none."""
    found = _ADDRESS.fullmatch(path) or _AT.fullmatch(path)
    return found[1] if found and is_repository(found[1]) else ""
