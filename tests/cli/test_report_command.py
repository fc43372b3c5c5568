"""`trainkit report`: which runs, where the page is written, and what is never overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Trainkit
from tests.made_up_runs import MakeRun, records
from trainkit.html_report.page import MARK, MOST


def test_one_run_has_its_page_in_its_directory_and_several_have_one_here(
    trainkit: Trainkit,
    make_run: MakeRun,
    tmp_path: Path,
) -> None:
    one, two = make_run("one", records(3, float)), make_run("two", records(3, float), number=2)
    done = trainkit("report", "one")
    assert done.returncode == 0, done.stderr
    assert (done.stdout.split(" (")[0], done.stderr) == (f"written to {one.root / 'report.html'}", "")
    assert (one.root / "report.html").read_text().startswith(MARK)
    assert trainkit("report").stdout.startswith(f"written to {two.root / 'report.html'}")  # the newest
    assert trainkit("report", "one", two.id, str(one.root)).stdout.startswith("written to report.html")
    assert (tmp_path / "report.html").read_text().count('class="key"') == 2


def test_a_file_that_is_no_report_stays_unless_forced(
    trainkit: Trainkit,
    make_run: MakeRun,
    tmp_path: Path,
) -> None:
    make_run("one", records(3, float))
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    done = trainkit("report", "one", "-o", "mine.html")
    assert done.returncode == 2
    assert "mine.html exists, and is no report" in done.stderr
    assert "--force" in done.stderr
    assert mine.read_text() == "mine"
    assert trainkit("report", "one", "-o", "mine.html", "--force").returncode == 0
    assert trainkit("report", "one", "-o", "mine.html").returncode == 0  # now it is ours
    assert mine.read_text().startswith(MARK)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nobody",), "nobody is neither a run directory nor a run in runs"),
        (("one", "-o", "runs"), "runs is a folder"),
        (("one", "-o", "mine/deeper/report.html"), "mine/deeper/report.html cannot be written"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_with_what_to_do(
    trainkit: Trainkit,
    make_run: MakeRun,
    tmp_path: Path,
    words: tuple[str, ...],
    said: str,
) -> None:
    make_run("one", records(3, float))
    (tmp_path / "mine").write_text("a file")
    done = trainkit("report", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_more_runs_than_can_be_told_apart_are_refused(
    trainkit: Trainkit,
    make_run: MakeRun,
) -> None:
    for number in range(MOST + 1):
        make_run(f"run-{number}")
    done = trainkit("report", *(f"run-{number}" for number in range(MOST + 1)))
    assert done.returncode == 2
    assert f"name at most {MOST}" in done.stderr


def test_a_browser_is_opened_with_the_page_or_the_way_without_one_is_said(
    trainkit: Trainkit,
    make_run: MakeRun,
    tmp_path: Path,
) -> None:
    layout = make_run("one", records(3, float))
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\n')
    browser.chmod(0o755)
    display = {"DISPLAY": ":9", "BROWSER": f"{browser} %s", "PATH": os.environ["PATH"]}
    done = trainkit("report", "one", "--open", environ=display)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened").read_text().strip() == (layout.root / "report.html").as_uri()
    done = trainkit("report", "one", "--open", environ={"DISPLAY": "", "WAYLAND_DISPLAY": ""})
    assert done.returncode == 4
    assert "this session has no display" in done.stderr
    assert str(layout.root / "report.html") in done.stderr
    assert done.stdout.startswith("written to ")
