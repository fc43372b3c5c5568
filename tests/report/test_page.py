"""What a report shows: of whole runs all of it, of damaged ones what can be read, and nothing as HTML of others."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from tests.made_up_runs import ENDED, MakeRun, records
from trainkit.files import hold_lock
from trainkit.html_report.collect import collect, labels_of
from trainkit.html_report.page import MARK, facts, page
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import RunInfo
from trainkit.runner.rundir.records import RankRecord

Info = Callable[[RunLayout], RunInfo]
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\x1b[31m&amp;"
VOID = {"meta", "img", "input", "br", "line", "rect"}


class Reader(HTMLParser):
    """The elements of a page: those that are open where they may not be, texts, and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.headings: list[int] = []
        self.data = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)
        if ("id", "data") in attrs:
            self.data = "wanted"

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.data == "wanted":
            self.data = data
        elif self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def shown(*runs: RunInfo) -> Reader:
    labels = labels_of(runs)
    return Reader(page([collect(*each, {}) for each in zip(runs, labels, strict=True)], ", ".join(labels)))


def test_the_page_has_what_a_run_has(make_run: MakeRun, info: Info) -> None:
    summary = {
        "final_loss": 1.25, "eval_loss": 1.5, "best_metric": "accuracy", "best_value": 0.875, "best_step": 8,
        "metrics": {"accuracy": 0.75}, "samples_per_second": 61.5, "memory": [{"rank": 0, "rss": 3 << 30}],
        "sample": "def say(word):", "training": {"model": "gpt of 4 blocks"},
    }  # fmt: skip
    layout = make_run("one", records(8, lambda step: 4 / step, every=4), summary=summary)
    lines = (
        {"sample": 7, "source": "a joy", "reference": "good", "prediction": "bad", "label": 0, "target": 1,
         "probabilities": [0.75, 0.25]},
        {"sample": 8, "source": "a bore", "reference": "bad", "prediction": "bad", "label": 0, "target": 0,
         "probabilities": [0.5, 0.5]},
    )  # fmt: skip
    (layout.root / "predictions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = shown(info(layout))
    words = " ".join(found.texts)
    for each in (
        "done",
        "1.2500",
        "0.8750 at step 8",
        "61.50",
        "3072 MiB",
        "single \N{MULTIPLICATION SIGN} 1 rank",
        "def say(word):",
    ):
        assert each in words
    for each in ("gpt of 4 blocks", "a joy", "0.7500", "1 right (50.0%)", "Plan of made-up", "RANK=0", "lr: "):
        assert each in words
    assert found.texts.count("wrong") == 1
    assert not found.open
    assert found.headings[0] == 1
    assert all(after <= before + 1 for before, after in zip(found.headings, found.headings[1:], strict=False))
    data = json.loads(found.data)
    assert data["charts"][0]["series"][0]["y"][:2] == [4, 2]


def test_a_page_loads_nothing_and_runs_only_its_own_programs(make_run: MakeRun, info: Info) -> None:
    text = page([collect(info(make_run("one")), "one", {})], "one")
    (policy,) = re.findall('Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert len(re.findall("sha256-", policy)) == 3
    assert "unsafe" not in policy
    assert text.startswith(MARK)
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_texts_of_others_never_become_elements(make_run: MakeRun, info: Info) -> None:
    clean, summary = make_run("clean", records(3, float)), {"sample": HOSTILE, "training": {HOSTILE: HOSTILE}}
    layout = make_run(
        f"a{HOSTILE[1:8]}".replace("/", "") + "<b>",
        [*records(3, float), {"step": 4, HOSTILE: 1.0}],
        summary={**summary, "metrics": {HOSTILE: 1.0}, "best_metric": HOSTILE},
        verdict={"exit_code": 1, "failure": "program", "why": HOSTILE, "rank": 0},
        recipe={"sample": {"prompt": HOSTILE.replace("\x1b", "")}},
    )
    (layout.attempt(1).log(0, "err")).write_text(HOSTILE)
    line = {"sample": HOSTILE, "source": HOSTILE, "prediction": HOSTILE, "reference": HOSTILE, "loss": HOSTILE}
    (layout.root / "predictions.jsonl").write_text(json.dumps(line))
    layout.environment.write_text(HOSTILE)
    found, plain = shown(info(layout)), shown(info(clean))
    assert "img" not in found.tags
    assert "b" not in found.tags
    assert found.tags.count("script") == plain.tags.count("script") == 3
    assert sum("<img src=x onerror=alert(1)>" in text for text in found.texts) >= 9
    assert not [text for text in found.texts if "\u202e" in text or "\x1b" in text]
    assert HOSTILE in found.data or json.loads(found.data)["charts"][-1]["title"] == HOSTILE


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe\0", b'{"step": 1e999}', b"9" * 400]
)
def test_damaged_files_take_nothing_else_away(make_run: MakeRun, info: Info, content: bytes) -> None:
    layout = make_run("one", records(3, float), summary={"final_loss": 1.0})
    files_of_run = [each for each in layout.root.iterdir() if each.is_file()]
    run = info(layout)
    for path in (
        *files_of_run,
        layout.cards,
        layout.code,
        layout.root / "trainer.json",
        layout.root / "predictions.jsonl",
    ):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        found = shown(info(layout))
        assert not found.open
        assert found.headings[:2] == [1, 2]
        path.unlink()
        assert not shown(info(layout)).open
        if before is not None:
            path.write_bytes(before)
    assert shown(run).data == shown(info(layout)).data


def test_numbers_that_no_float_holds_are_left_out(make_run: MakeRun, info: Info) -> None:
    huge = 10**400
    metrics = [
        *records(3, float),
        {"step": 4, "loss": huge, "elapsed": huge, "phases": {"forward": huge}},
        {"step": huge, "loss": 1.0},
    ]
    names = ("final_loss", "best_value", "best_step", "samples_per_second", "eval_loss")
    summary = {**dict.fromkeys(names, huge), "gpu_memory_occupied": {"GPU-1": huge}}
    layout = make_run("one", metrics, summary=summary)
    (layout.root / "predictions.jsonl").write_text(
        json.dumps({"sample": huge, "loss": huge}) + "\n" + '{"loss": NaN}\n'
    )
    card = {"memory_bytes": huge, "utilization": huge}
    layout.cards.write_text("".join(f"{json.dumps({'time': at, 'cards': [card]})}\n" for at in (ENDED - 59.9, huge)))
    assert json.loads(shown(info(layout)).data)["charts"][0]["series"][0]["y"] == [1, 2, 3, None]


def test_a_gone_run_directory_is_a_page_without_content(make_run: MakeRun, info: Info) -> None:
    layout = make_run("one", records(3, float))
    run = info(layout)
    shutil.rmtree(layout.root)
    assert "No curves" in " ".join(shown(run).texts)


def test_secrets_of_recipes_logs_and_variables_are_masked(make_run: MakeRun, info: Info) -> None:
    token = "hf_" + "a1B2" * 8 + "cd"
    layout = make_run("one", recipe={"env": {"MY_API_KEY": token, "OTHER": "plain"}})
    layout.environment.write_text(f"MY_API_KEY={token}\n")
    other = make_run("two", recipe={"env": {"MY_API_KEY": "another1secret2value"}})
    status = json.loads(layout.status.read_text())
    layout.status.write_text(
        json.dumps({**status, "exit_code": 1, "failure": "program", "rank": 0, "why": "it failed"})
    )
    layout.attempt(1).log(0, "err").write_text(f"login with {token}\nMY_API_KEY=another1secret2value\n")
    text = page([collect(info(each), each.name, {}) for each in (layout, other)], "two")
    assert token not in text
    assert "another1secret2value" not in text
    assert "login with ***" in text


def test_a_failed_run_shows_the_last_lines_of_who_failed_and_not_of_who_was_told_to_stop(
    make_run: MakeRun, info: Info
) -> None:
    layout = make_run(
        "one", verdict={"exit_code": 7, "failure": "program", "why": "rank 1 exited with code 7", "rank": 1}
    )
    second = layout.attempt(2)
    second.logs.mkdir(parents=True)
    second.ranks.mkdir()
    for attempt in (layout.attempt(1), second):
        for rank, stopped in ((0, True), (1, False)):
            record = RankRecord(rank, rank, "here", 1, 2, started=ENDED, ended=ENDED, exit_code=7, told_to_stop=stopped)
            (attempt.ranks / f"rank-{rank}.json").write_text(json.dumps(record._asdict()))
            attempt.log(rank, "err").write_text(f"rank {rank} says why in attempt {attempt.root.name}\n")
    words = "\n".join(shown(info(layout)).texts)
    assert words.count("rank 1 says why in attempt 2") == 1
    assert words.count("rank 1 says why in attempt 1") == 1
    assert "Attempt 1: rank 1 on here, exit code 7" in words
    assert "rank 0 says" not in words


def test_runs_beside_each_other_show_the_keys_that_differ(make_run: MakeRun, info: Info) -> None:
    rates = (0.001, 0.002, 0.001)
    layouts = [
        make_run("same", records(3, float), recipe={"optimizer": {"lr": rate}}, number=number)
        for number, rate in enumerate(rates)
    ]
    runs = [info(each) for each in layouts]
    assert labels_of(runs)[0] == f"same {layouts[0].short_id}"
    text = page([collect(run, f"run {number}", {}) for number, run in enumerate(runs)], "three")
    assert "1 key with different values" in text
    row = "<td><code>optimizer.lr</code></td><td>0.001</td><td><mark>0.002</mark></td><td>0.001</td>"
    assert row in text


def test_a_run_without_phases_beside_one_with_them_has_no_time_of_a_step(make_run: MakeRun, info: Info) -> None:
    silent = [{name: value for name, value in each.items() if name != "phases"} for each in records(3, float)]
    layouts = [make_run("timed", records(3, float)), make_run("silent", silent, number=1)]
    text = page([collect(info(each), each.name, {}) for each in layouts], "two")
    bars = re.findall(r'<p class="bar">.*?</svg>(.*?)</p>', text)
    assert bars == ["timed: 61 ms a step", "silent: no phases recorded"]
    assert text.count('<svg class="phases"') == 1


def test_a_run_that_goes_on_says_so_and_how_far_it_is(make_run: MakeRun, info: Info) -> None:
    layout = make_run("one", [*records(8, float)][:5])
    layout.status.write_text(json.dumps({"state": "running", "attempt": 1, "started": ENDED}))
    held = hold_lock(layout.lock)
    try:
        found = dict(facts(collect(info(layout), "one", {})))
    finally:
        os.close(held)
    assert found["State"] == "running"
    assert found["Steps"] == "4 of 8"
    assert found["Loss"] == "4.0000"
    assert "Final loss" not in found


def test_samples_of_cards_are_at_the_steps_in_which_they_were_taken(make_run: MakeRun, info: Info) -> None:
    layout = make_run("one", records(4, float))
    start = ENDED - 60
    taken = [(start - 5, 1, 0), (start + 0.07, 5, 20), (start + 0.08, 7, 40), (start + 0.2, 6, 90), (start + 99, 9, 9)]
    lines = (
        {"time": at, "cards": [{"memory_bytes": size, "utilization": busy}, {"memory_bytes": 2, "utilization": None}]}
        for at, size, busy in taken
    )
    layout.cards.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curves = collect(info(layout), "one", {}).curves
    assert (curves["gpu_memory"].steps, curves["gpu_memory"].values) == ([2, 4], [7, 6])
    assert curves["gpu_utilization"].values == [30, 90]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def schemes() -> Iterator[dict[str, str]]:
    css = files("trainkit.html_report").joinpath("page.css").read_text()
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)
    yield {name: light for name, light, _ in found}
    yield {name: dark for name, _, dark in found}


def test_text_and_lines_stand_out_in_both_colour_schemes() -> None:
    for colours in schemes():
        for text, behind in (("text", "page"), ("text", "panel"), ("text", "mark"), ("dim", "page"), ("dim", "panel")):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
        for text in ("link", "wrong"):
            assert contrast(colours[text], colours["page"]) >= 4.5, text
        for number in range(6):
            assert contrast(colours[f"c{number}"], colours["page"]) >= 3, number


def test_the_library_lies_beside_its_licence() -> None:
    folder = Path(str(files("trainkit.html_report").joinpath("uplot")))
    assert {each.name for each in folder.iterdir()} == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    assert "MIT License" in (folder / "LICENSE").read_text()


def test_of_many_predictions_those_that_are_furthest_off_are_shown(make_run: MakeRun, info: Info) -> None:
    layout = make_run("one")
    losses = [*range(40), 7.5, None, float("nan"), "3"]
    lines = ({"sample": number, "source": f"text {number}", "loss": loss} for number, loss in enumerate(losses))
    (layout.root / "predictions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = collect(info(layout), "one", {}).predictions
    assert [line["sample"] for line in found.first] == [*range(10)]
    assert [line["sample"] for line in found.worst] == [39, 38, 37, 36, 35, 34, 33, 32, 31, 30]
    assert (found.count, found.right, found.more) == (44, None, False)
