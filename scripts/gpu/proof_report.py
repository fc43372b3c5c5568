"""What a proof leaves: results.json with everything, and its tables for people in results.md."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import nvml
from proof import Place

from trainkit import __version__

VERSION = 1  # of results.json
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "peft",
    "torch-optimi",
    "numpy",
)
MARKS: Mapping[bool | None, str] = {True: "yes", False: "NO", None: "-"}
HEADS = ("case", "right", "seconds", "found", "expected")


def head(place: Place) -> dict[str, Any]:
    """What results.json says besides its cases."""
    found = {"trainkit": __version__, "python": sys.version.split()[0]}
    found |= {"driver": nvml.driver()} if place.card else {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {
        "results_version": VERSION,
        "card": nvml.name(place.card) if place.card else "cpu",
        "versions": found,
        "device": place.device,
        "tiny": place.tiny,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def read_results(path: Path) -> dict[str, Any]:
    """The results of an earlier call. ValueError for what is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("results_version") != VERSION:
        raise ValueError(f"{path} is no results.json of this kit (version {VERSION})")
    return found


def write_results(folder: Path, found: Mapping[str, Any]) -> None:
    """Write results.json and results.md, each whole or not at all."""
    for name, text in (("results.json", json.dumps(found, indent=1) + "\n"), ("results.md", markdown(found))):
        new = folder / f".{name}.new"
        new.write_text(text)
        os.replace(new, folder / name)  # noqa: PTH105


def markdown(found: Mapping[str, Any]) -> str:
    """A summary, what is wrong, then a table for each group and each measurement."""
    cases: Sequence[Mapping[str, Any]] = found["cases"]
    counts = {mark: sum(each["ok"] is mark for each in cases) for mark in (True, False, None)}
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    counted = f"{counts[True]} right, {counts[False]} wrong, {counts[None]} left out"
    parts = [
        f"# Proof on {found['card']}",
        f"{counted}; {found['date']}, {found['seconds']:.0f} s. {versions}.",
    ]
    if found["tiny"] or found["device"] != "cuda":
        parts.append("The smallest sizes, or no card: this shows that the kit works, and nothing of a card.")
    wrong = [f"- **{each['group']}/{each['name']}**: {each['found']}" for each in cases if each["ok"] is False]
    parts += ["## Wrong\n\n" + "\n".join(wrong)] if wrong else []
    for group in dict.fromkeys(each["group"] for each in cases):
        rows = [each for each in cases if each["group"] == group]
        parts.append(f"## {group}\n\n{table(HEADS, map(row, rows))}")
        parts += [part for each in rows for part in tables(each)]
    return "\n\n".join(parts) + "\n"


def row(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """A case in its group's table."""
    return case["name"], MARKS[case["ok"]], case["seconds"], case["found"], case["expected"]


def tables(case: Mapping[str, Any]) -> Iterator[str]:
    """What a case has measured, where that is a list of rows."""
    for name, content in case["table"].items():
        if isinstance(content, list) and content and isinstance(content[0], Mapping):
            heads = list(dict.fromkeys(head for each in content for head in each))
            cells = ([each.get(head) for head in heads] for each in content)
            yield f"### {case['name']}: {name}\n\n{table(heads, cells)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *([cell(value) for value in each] for each in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """One value, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str("" if value is None else value).replace("|", "/").replace("\n", " ")[:200]
