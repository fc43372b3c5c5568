"""The machine that a command plans for: this one, one whose facts lie in a file, or a profile that is shipped."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit.errors import UsageError
from trainkit.machine.facts import FACTS_VERSION, Facts

LONGEST = 16 * 1024 * 1024  # bytes; the facts of the largest machine take a hundredth
# What a profile's machine is taken to have where this one lacks it: the newest versions that trainkit is tested with.
VERSIONS: Mapping[str, str] = {
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "deepspeed": "0.19.8",
    "ninja": "1.13.2",
    "numpy": "2.4.6",
    "peft": "0.21.2",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}


def machine_facts(word: str | None) -> Facts:
    """The facts of this machine for None, else of the machine that a file of facts or a profile's name tells of.

    Raises UsageError for what is neither.
    """
    from trainkit.machine.probe import probe

    if word is None:
        return probe()
    if word.endswith(".json") or Path(word).is_file():
        return replace(Facts.from_json(_read(word)), origin=word)
    return _profile(word)


def profiles() -> dict[str, Path]:
    """The shipped profiles by name."""
    from trainkit.cli.disk import shipped_root

    folder = shipped_root() / "configs" / "machines"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(word: str) -> object:
    try:
        with Path(word).open("rb") as file:
            text = file.read(LONGEST + 1)
    except OSError as error:
        raise UsageError(f"{word} cannot be read: {error.strerror}", hint="trainkit facts > FACTS.json") from error
    if len(text) > LONGEST:
        raise UsageError(f"{word} is too long to be the facts of a machine")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{word} is no JSON: {error}", hint="`trainkit facts > FACTS.json` makes it") from error


def _profile(name: str) -> Facts:
    import yaml

    found = profiles()
    if name not in found:
        import difflib

        near = difflib.get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the profiles are: {', '.join(found)}"
        raise UsageError(f"there is no file and no machine profile {name!r}", hint=hint)
    return profile_facts(name, yaml.safe_load(found[name].read_text(encoding="utf-8")))


def profile_facts(name: str, told: Mapping[str, Any]) -> Facts:
    """Facts from a profile: its hardware, and software as here, or what VERSIONS says where it is not installed here.

    A profile is {cards: {count, …as a Gpu, memory_gib}, cpu_cores, memory_gib, and any field of Facts}.
    """
    from trainkit.machine.probes import packages

    data = {key: value for key, value in told.items() if key not in {"cards", "memory_gib"}}
    here = {key: value.partition("+")[0] for key, value in packages.probe()["packages"].items()}
    return Facts.from_json(
        {
            "facts_version": FACTS_VERSION,
            "platform": "linux",
            "machine": "x86_64",
            "hostname": name,
            "python": ".".join(map(str, sys.version_info[:3])),
            "executable": "python",
            "memory_total": int(told["memory_gib"] * 2**30),
            "packages": {**VERSIONS, **here},
            "gpus": [_card(index, told["cards"]) for index in range(told.get("cards", {}).get("count", 0))],
            "origin": f"profile {name}",
            **data,
        }
    )


def _card(index: int, told: Mapping[str, Any]) -> dict[str, Any]:
    memory = int(told["memory_gib"] * 2**30)
    card = {key: value for key, value in told.items() if key not in {"count", "memory_gib"}}
    return {"index": index, "uuid": f"profile-{index}", "memory_total": memory, "memory_free": memory, **card}
