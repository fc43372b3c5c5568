"""Findings as text for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from trainkit.doctor.check import LEVELS, CheckResult, Finding, worst
from trainkit.text import counted

WIDTH = 80
INDENT = 9
DOCTOR_VERSION = 1
QUIET = frozenset({"ok", "skipped"})  # their evidence is in the JSON only


def render(results: Sequence[CheckResult], subject: str, seconds: float) -> str:
    """A line for each check that is fine, evidence and fix for each that is not; what was skipped, by its reason."""
    lines = [f"Doctor: {subject}", ""]
    skipped: dict[str, list[str]] = {}
    for result in results:
        first, *more = sorted(result.findings, key=lambda finding: -LEVELS.index(finding.level))
        if result.level == "skipped":
            skipped.setdefault(result.findings[0].what, []).append(result.title)
            continue
        lines += _finding(f"{result.level:<{INDENT}}{result.title}: ", first)
        for finding in more:
            if finding.level not in QUIET or result.level == "ok":
                label = "" if finding.level == result.level else f"{finding.level}: "
                lines += _finding(" " * INDENT + label, finding)
    for why, titles in skipped.items():
        lines += _wrapped(f"{'skipped':<{INDENT}}{', '.join(titles)}: {why}", INDENT)
    levels = [result.level for result in results]
    counts = [
        counted(levels.count(level), level, "" if level in QUIET else "s")
        for level in reversed(LEVELS)
        if level in levels
    ]
    lines += ["", f"{counted(len(results), 'check')} in {seconds:.1f} s: {', '.join(counts)}"]
    return "".join(f"{line}\n" for line in lines)


def _finding(label: str, finding: Finding) -> Iterator[str]:
    yield from _wrapped(label + finding.what, INDENT)
    for line in finding.evidence if finding.level not in QUIET else ():
        yield from _wrapped(f"{' ' * INDENT}| {line}", INDENT + 4)
    for number, line in enumerate(finding.fix):
        # never wrapped: it is there to be pasted
        yield f"{' ' * INDENT}{'fix:' if number == 0 else '    '} {line}"


def _wrapped(line: str, indent: int) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def as_data(results: Sequence[CheckResult], recipe: str | None, seconds: float) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "doctor_version": DOCTOR_VERSION,
        "recipe": recipe,
        "level": worst(result.level for result in results),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "name": result.name,
                "title": result.title,
                "level": result.level,
                "seconds": round(result.seconds, 3),
                "verdicts": [
                    {"level": each.level, "what": each.what, "evidence": list(each.evidence), "fix": list(each.fix)}
                    for each in result.findings
                ],
            }
            for result in results
        ],
    }
