"""How checks are run and shown: side by side, within limits, as text and as JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from prepared_machine import Machine

from trainkit.cli.commands.doctor import as_data, render
from trainkit.doctor.check import Check, CheckResult, Commands, Finding, Host, Level, Target, ok, skipped, worst
from trainkit.doctor.examine import CHECKS, examine


def made_up(
    *findings: Finding, seconds: float = 0, error: BaseException | None = None, name: str = "one", limit: float = 5.0
) -> Check:
    """A check that finds these, or fails, after a while."""

    def run(host: Host, target: Target) -> Sequence[Finding]:
        time.sleep(seconds)
        if error:
            raise error
        return findings or [ok("fine")]

    return Check(name, "made up", limit, run)


def test_a_check_that_hangs_is_given_up_and_the_others_answer(machine: Machine) -> None:
    begin = time.monotonic()
    found = examine([made_up(seconds=60, limit=0.3), made_up()], machine.host(), Target(), 18.0)
    assert time.monotonic() - begin < 30
    assert [result.level for result in found] == ["warning", "ok"]
    assert "no answer" in found[0].findings[0].what


def test_all_checks_together_have_a_limit_below_any_of_their_own(machine: Machine) -> None:
    found = examine([made_up(seconds=60)], machine.host(), Target(), longest=0.2)
    assert found[0].level == "warning" and found[0].seconds < 30


def test_checks_run_side_by_side(machine: Machine) -> None:
    three = [made_up(seconds=2, name=name) for name in ("one", "two", "three")]
    found = examine(three, machine.host(), Target(), longest=5.5)
    assert [result.level for result in found] == ["ok", "ok", "ok"]


def test_a_mistake_in_a_check_is_not_swallowed(machine: Machine) -> None:
    with pytest.raises(ZeroDivisionError):
        examine([made_up(error=ZeroDivisionError())], machine.host(), Target(), 18.0)


def test_every_check_says_what_it_is_and_has_a_limit() -> None:
    for name, check in CHECKS.items():
        assert name == name.lower() and check.title and 0 < check.limit < 20, name


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ((), "ok"),
        (("skipped", "skipped"), "skipped"),
        (("skipped", "ok"), "ok"),
        (("note", "ok"), "note"),
        (("warning", "problem", "ok"), "problem"),
    ],
)
def test_the_worst_verdict_counts(levels: tuple[Level, ...], expected: Level) -> None:
    assert worst(levels) == expected


def test_text_fits_80_columns_but_for_what_is_there_to_be_pasted() -> None:
    long = "a finding of many words that goes on and on beyond the width of a terminal and is wrapped for that reason"
    findings = (Finding("problem", long, (long,), ("export " + "X" * 100,)), Finding("warning", long), skipped("no"))
    text = render([CheckResult("a", "made up", findings, 0.1)], "this machine", 1.25)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80] == ["         fix: export " + "X" * 100]
    assert lines[2].startswith("problem  made up: a finding")
    assert lines[-1] == "1 check in 1.2 s: 1 problem"
    assert sum("| a finding" in line for line in lines) == 1


def test_what_was_skipped_stands_at_the_end_by_its_reason() -> None:
    no_card, alone = (skipped("there is no GPU here"),), (skipped("one process meets nobody"),)
    checks = {"driver": no_card, "ports": alone, "health": no_card, "disk": (ok("fine"),)}
    text = render([CheckResult(name, name, findings, 0.1) for name, findings in checks.items()], "this machine", 1.0)
    assert text.splitlines()[2:5] == [
        "ok       disk: fine",
        "skipped  driver, health: there is no GPU here",
        "skipped  ports: one process meets nobody",
    ]


def test_json_holds_every_verdict() -> None:
    result = CheckResult("a", "made up", (Finding("warning", "w", ("e",), ("f",)), ok("fine", "x")), 0.12345)
    data = json.loads(json.dumps(as_data([result], "quickstart", 1.0)))
    assert data["level"] == "warning" and data["recipe"] == "quickstart"
    assert data["checks"][0]["verdicts"] == [
        {"level": "warning", "what": "w", "evidence": ["e"], "fix": ["f"]},
        {"level": "ok", "what": "fine", "evidence": ["x"], "fix": []},
    ]


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid_file}; echo before; wait"
    done = Commands(dict(os.environ))(("sh", "-c", script), 1.0)
    assert done.code is None and done.output == "before\n" and "did not end within 1 s" in done.said
    deadline = time.monotonic() + 20
    while is_running(int(pid_file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_command_that_does_not_exist_is_told(tmp_path: Path) -> None:
    done = Commands({})((str(tmp_path / "nothing"),), 1.0)
    assert not done.fine and "cannot be started: No such file or directory" in done.said
