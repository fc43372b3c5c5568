"""The machine that a command plans for: this one, one with a file of facts, or a shipped profile."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.cli.file_system import MACHINES, shipped_root
from trainkit.errors import UsageError
from trainkit.files import is_there, parse_json, read_whole
from trainkit.machine.facts import FACTS_VERSION, Facts
from trainkit.text import GIB

LONGEST = 16 * 1024 * 1024  # bytes; the facts of the largest machine take a hundredth
LARGEST = 100_000  # GPUs, or GiB, of one machine
# Versions of a profile's machine where this one lacks the package: the newest that trainkit is tested with.
VERSIONS: Mapping[str, str] = {
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "deepspeed": "0.19.8",
    "ninja": "1.13.2",
    "numpy": "2.4.6",
    "peft": "0.21.2",
    "safetensors": "0.8.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "trl": "1.16.0",
}


def machine_facts(word: str | None) -> Facts:
    """The facts of this machine for None, else of a file of facts (JSON) or a profile (YAML, or a shipped name).

    Raises UsageError for what is none of these.
    """
    if word is None:
        from trainkit.machine.probe import probe

        return probe()
    if word.endswith((".yaml", ".yml")):
        return _own_profile(word)
    if word.endswith(".json") or (is_there(word) and Path(word).is_file()):
        return replace(Facts.from_json(_read_json(word)), origin=word)
    import yaml

    from trainkit.recipe.suggestions import did_you_mean

    found = profiles()
    if word not in found:
        hint = did_you_mean(word, found, f"the profiles are: {', '.join(found)}")
        raise UsageError(f"there is no file and no machine profile {word!r}", hint=hint)
    return profile_facts(word, yaml.safe_load(found[word].read_text(encoding="utf-8")))


def profiles() -> dict[str, Path]:
    """The shipped profiles by name."""
    folder = shipped_root() / "configs" / MACHINES
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read_json(word: str) -> object:
    try:
        return parse_json(_read(word, "trainkit env facts > FACTS.json"))
    except ValueError as error:
        raise UsageError(f"{word} is not JSON: {error}", hint="`trainkit env facts > FACTS.json` makes it") from error


def _own_profile(word: str) -> Facts:
    """A profile that somebody wrote. Raises UsageError for what is none."""
    from trainkit.recipe.yaml_reader import compose_bytes

    hint = "`trainkit cp machines/2x3090 my-machine.yaml` copies one to edit"
    document = compose_bytes(_read(word, hint))
    if document.errors:
        raise UsageError(f"{word}:{document.errors[0].mark.line}: {document.errors[0].what}", hint=hint)
    tree = document.tree
    cards = tree.get("cards", {"count": 0, "memory_gib": 0}) if isinstance(tree, Mapping) else None
    for name, section in (("memory_gib", tree), ("cards.count", cards), ("cards.memory_gib", cards)):
        value = section.get(name.rpartition(".")[2]) if isinstance(section, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise UsageError(f"{word} is not a machine profile: {name} is not a number up to {LARGEST:,}", hint=hint)
    try:
        return profile_facts(word, tree)
    except UsageError as error:
        raise UsageError(f"{word}: {error.diagnostics[0].what}", hint=hint) from error


def _read(word: str, hint: str) -> bytes:
    try:
        return read_whole(word, LONGEST, links=True)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UsageError(f"{word} is too long to be the facts of a machine") from error
        raise UsageError(f"{word} cannot be read: {error.strerror}", hint=hint) from error


def profile_facts(name: str, profile: Mapping[str, Any]) -> Facts:
    """Facts from a profile: its hardware, and software as here, or what VERSIONS says where it is not installed here.

    A profile is {cards: {count, …as a Gpu, memory_gib}, cpu_cores, memory_gib, and any field of Facts}.
    """
    from trainkit.machine import host

    data = dict(profile)
    data["memory_total"] = int(data.pop("memory_gib") * GIB)
    card = dict(data.pop("cards", {"count": 0, "memory_gib": 0}))
    card |= dict.fromkeys(("memory_total", "memory_free"), int(card.pop("memory_gib") * GIB))
    count = int(card.pop("count"))
    # A local version such as +cpu is of this machine's build, not of the profile's.
    here = {key: value.partition("+")[0] for key, value in host.probe_packages()["packages"].items()}
    return Facts.from_json(
        {
            "facts_version": FACTS_VERSION,
            "platform": "linux",
            "machine": "x86_64",
            "hostname": name,
            "python": ".".join(map(str, sys.version_info[:3])),
            "executable": "python",
            "packages": {**VERSIONS, **here},
            "gpus": [{"index": index, "uuid": f"profile-{index}", **card} for index in range(count)],
            "origin": f"profile {name}",
            **data,
        }
    )
