"""Runs told apart, listed, compared and pruned: short ids, filters, widths, differences, and what pruning frees."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from trainkit.cli.commands import runs as runs_commands
from trainkit.errors import UsageError
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.rundir.listing import disk_use, list_runs

ESCAPE = re.compile("\x1b\\[[0-9;]*m")


def make_run(root: Path, name: str, run_id: str, recipe: str = "version: 1\n", **summary: Any) -> RunLayout:
    """A run that has ended, with as much of a plan as lists read."""
    layout = RunLayout(root / name / run_id)
    layout.root.mkdir(parents=True)
    layout.plan.write_text(json.dumps({"program": {"kind": "builtin"}, "strategy": {"kind": "ddp"}}))
    layout.recipe.write_text(recipe)
    code = summary.pop("exit_code", 0)
    ended = {"state": "ended", "exit_code": code, "failure": "signal" if code == 143 else "program"}
    now = time.time()
    layout.status.write_text(json.dumps({**ended, "started": now - 4000, "ended": now - 400, "host": "tk1"}))
    if summary:
        layout.summary.write_text(json.dumps(summary))
    return layout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three runs in `runs`: one done, one failed, one cancelled."""
    made = tmp_path / "runs"
    known: dict[str, Any] = {"tokens_per_second": 52_300.0, "metrics": {"accuracy": 0.915}}
    make_run(made, "lora", "20260101-000000-aaaa11", steps=1000, total_steps=1000, final_loss=2.5, **known)
    make_run(made, "lora", "20260102-000000-aabb22", exit_code=7, steps=20, total_steps=1000, final_loss=5.0)
    make_run(made, "quickstart", "20260103-000000-cccc33", exit_code=143, steps=500, total_steps=1000, final_loss=3.0)
    return made


def found(trainkit: Trainkit, *words: str) -> list[str]:
    """The short ids of a list."""
    done = trainkit("runs", "list", "--json", *words)
    assert done.returncode == 0, done.stderr
    return [each["short_id"] for each in json.loads(done.stdout)]


@pytest.mark.usefixtures("root")
def test_every_command_takes_a_short_id_or_an_unambiguous_beginning(trainkit: Trainkit) -> None:
    for word in ("aabb22", "aabb", "20260102", "20260102-000000-aabb22"):
        assert json.loads(trainkit("status", word, "--json").stdout)["id"] == "20260102-000000-aabb22"
        assert trainkit("runs", "show", word).stdout.startswith("failed, exit code 7")
    refused = {
        ("logs", "cccc33"): "",
        ("cancel", "cccc"): "is cancelled",
        ("checkpoint", "cccc33"): "is cancelled",
        ("attach", "cccc33"): "20260103-000000-cccc33",
        ("dump", "cccc33"): "20260103-000000-cccc33 is not running",
        ("export", "cccc33", "x"): "20260103-000000-cccc33 has no complete checkpoint",
        ("generate", "cccc", "hello"): "20260103-000000-cccc33 has no complete checkpoint",
    }
    for words, said in refused.items():
        done = trainkit(*words)
        assert said in done.stdout + done.stderr, words
        assert "neither" not in done.stderr, words


def test_a_run_is_planned_again_by_its_short_id(root: Path, trainkit: Trainkit) -> None:
    run = root / "lora" / "20260101-000000-aaaa11"
    (run / "recipe.yaml").write_text("version: 1\nname: lora\ntrain: {steps: 7}\n")
    assert "train.steps: 7" in trainkit("explain", "aaaa11", "train.steps").stdout.replace(" = ", ": ")
    (run / "recipe.yaml").rename(run / "elsewhere")
    (run / "recipe.yaml").symlink_to("elsewhere")
    refused = trainkit("check", "aaaa11")
    assert refused.returncode == 2
    assert "recipe.yaml is a link" in refused.stderr


def test_an_ambiguous_beginning_lists_the_runs_it_may_be_and_names_come_first(root: Path) -> None:
    with pytest.raises(UsageError, match=r"2026 may be any of 3 runs: aaaa11 .*aabb22 .*cccc33"):
        runs_commands.find_run("2026", str(root))
    with pytest.raises(UsageError, match="aa is too short"):
        runs_commands.find_run("aa", str(root))
    with pytest.raises(UsageError, match="beef is neither"):
        runs_commands.find_run("beef", str(root))
    make_run(root, "aaaa11", "20260104-000000-dddd44")
    assert runs_commands.find_run("aaaa11", str(root)).layout.id == "20260104-000000-dddd44"
    assert runs_commands.find_run("aaaa", str(root)).layout.id == "20260101-000000-aaaa11"


def test_the_id_of_an_array_is_all_its_tasks_and_a_tasks_id_one_run(root: Path) -> None:
    for task in (0, 10, 2):
        make_run(root, "sweep", f"20260105-000000-eeee55-{task}")
    for word in ("eeee55", "eeee"):
        tasks, is_array = runs_commands.find_runs(word, str(root))
        assert ([each.layout.short_id for each in tasks], is_array) == (["eeee55-0", "eeee55-2", "eeee55-10"], True)
    assert runs_commands.find_run("eeee55-2", str(root)).layout.id == "20260105-000000-eeee55-2"
    with pytest.raises(UsageError, match="eeee55 is an array job of 3 runs"):
        runs_commands.find_run("eeee55", str(root))


def test_a_run_of_another_folder_is_found_by_its_short_id(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_commands, "known_roots", lambda: [str(root)])
    assert runs_commands.find_run("cccc33", "elsewhere").layout.id == "20260103-000000-cccc33"


def test_runs_are_filtered_sorted_and_limited(root: Path, trainkit: Trainkit) -> None:
    make_run(root, "lora", "20260104-000000-dddd44", exit_code=1)  # which has come to no step
    every = ["aaaa11", "aabb22", "cccc33", "dddd44"]
    assert found(trainkit) == every
    assert found(trainkit, "--filter", "state=failed,cancelled") == every[1:]
    assert found(trainkit, "--filter", "state!=failed", "--filter", "name=lo*") == ["aaaa11"]
    assert found(trainkit, "--filter", "loss<4") == ["aaaa11", "cccc33"]
    assert found(trainkit, "--filter", "evaluation >= 0.9") == ["aaaa11"]
    assert found(trainkit, "--filter", "exit_code=7,1", "--limit", "1") == ["dddd44"]
    assert found(trainkit, "--limit", "2") == every[2:]
    assert found(trainkit, "--sort", "loss") == ["aaaa11", "cccc33", "aabb22", "dddd44"]
    assert found(trainkit, "--sort", "-loss") == ["aabb22", "cccc33", "aaaa11", "dddd44"]  # unknown is last here too
    assert found(trainkit, "--sort", "-steps", "--limit", "1") == ["aaaa11"]
    assert "these conditions hold for none of the runs" in trainkit("runs", "list", "--filter", "loss<1").stdout
    assert trainkit("runs", "list", "nosuch").stdout == "no runs named nosuch in runs\n"


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--filter", "state=fialed"), "did you mean failed?"),
        (("--filter", "lost<2"), "did you mean loss?"),
        (("--filter", "failed"), "write FIELD=VALUE"),
        (("--filter", "name<x"), "write name=VALUE"),
        (("--filter", "loss<x"), "x is no number"),
        (("--filter", "loss=nan"), "nan is no number"),
        (("--filter", "loss"), "write FIELD=VALUE"),
        (("--filter", ""), "--filter '' is no condition"),
        (("--sort", "-lss"), "did you mean loss?"),
    ],
)
def test_a_condition_that_cannot_hold_is_refused(trainkit: Trainkit, words: tuple[str, ...], message: str) -> None:
    done = trainkit("runs", "list", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("command", ["status", "watch", "logs", "report"])
def test_where_there_are_no_runs_yet_the_first_one_is_proposed(trainkit: Trainkit, command: str) -> None:
    done = trainkit(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no runs in runs\n  next: start one (`trainkit run quickstart`)")


def test_a_run_directory_that_lacks_a_file_is_named(tmp_path: Path, trainkit: Trainkit) -> None:
    layout = make_run(tmp_path / "runs", "lora", "20260101-000000-aaaa11")
    layout.plan.unlink()
    for words in (("runs", "show"), ("watch", str(layout.root))):
        done = trainkit(*words)
        assert done.returncode == 2
        assert "runs/lora/20260101-000000-aaaa11 has no plan.json\n" in done.stderr


def test_a_run_with_a_damaged_status_is_not_waited_for(tmp_path: Path, trainkit: Trainkit) -> None:
    make_run(tmp_path / "runs", "lora", "20260101-000000-aaaa11").status.write_text('{"state')
    done = trainkit("watch")
    assert done.returncode == 0
    assert done.stdout.startswith("lora aaaa11  unknown")
    assert "status.json is damaged" in done.stdout


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("width", [40, 80, 100, 120, 160])
def test_a_list_fits_its_terminal_and_paths_keep_their_end(trainkit: Trainkit, width: int) -> None:
    lines = trainkit("runs", "list", environ={"COLUMNS": str(width)}).stdout.splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= width
    heads = lines[0].split()
    if width >= 80:
        assert {"ID", "NAME", "STATE", "STEPS", "LOSS", "EVALUATION", "TIME", "AGE"} <= {*heads}
        assert "aaaa11" in lines[1]
        assert "1000/1000" in lines[1]
        assert "accuracy 0.9150" in lines[1]
    if "RUN" in heads:
        assert lines[1].endswith("20260101-000000-aaaa11")


@pytest.mark.parametrize("width", range(60, 130, 7))
def test_columns_stay_below_their_heads_where_cells_are_shortened(root: Path, trainkit: Trainkit, width: int) -> None:
    measured: dict[str, Any] = {"final_loss": 3.0, "metrics": {"perplexity": 20.7152}}
    make_run(root, "efficiency-table-small", "20260104-000000-dddd44", steps=1000, total_steps=1000, **measured)
    head, *lines = trainkit("runs", "list", environ={"COLUMNS": str(width)}).stdout.splitlines()
    starts = [found.start() for found in re.finditer(r"(?<=  )\S", head)]
    assert starts
    for line in lines:
        assert [line[start - 2 : start] for start in starts] == ["  "] * len(starts), line


def test_a_pipe_gets_every_column_and_whole_paths(root: Path, trainkit: Trainkit) -> None:
    lines = trainkit("runs", "list").stdout.splitlines()
    assert [line.rpartition("  ")[2] for line in lines[1:]] == sorted(str(path) for path in root.glob("*/*"))
    assert "RATE" in lines[0]
    assert "52.3k tokens/s" in lines[1]


@pytest.mark.usefixtures("root")
def test_states_have_colours_where_they_are_wanted_and_never_in_json(trainkit: Trainkit) -> None:
    plain = trainkit("runs", "list", environ={"COLUMNS": "80"}).stdout
    coloured = trainkit("runs", "list", environ={"COLUMNS": "80", "FORCE_COLOR": "1"}).stdout
    assert "\x1b[1;31mfailed" in coloured
    assert "\x1b[32mdone" in coloured
    assert ESCAPE.sub("", coloured) == plain
    assert "\x1b" not in plain + trainkit("runs", "list", "--json", environ={"FORCE_COLOR": "1"}).stdout
    assert trainkit("status", "aaaa11", environ={"FORCE_COLOR": "1"}).stdout.startswith("\x1b[32mdone\x1b[0m, exit")


def test_names_that_a_terminal_would_obey_are_shown_without_it(root: Path, trainkit: Trainkit) -> None:
    layout = make_run(root, "evil", "20260104-000000-dddd44", metrics={"\x1b]0;x\x07acc": 0.5}, steps=1)
    layout.plan.write_text(json.dumps({"program": {"kind": "builtin"}, "strategy": {"kind": "\x1b[2Jddp"}}))
    for words in (
        ("runs", "list"),
        ("status", "dddd44"),
        ("runs", "show", "dddd44"),
        ("runs", "diff", "dddd44", "aaaa11"),
    ):
        done = trainkit(*words)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout, words


def test_many_runs_are_listed_without_reading_the_metrics_of_those_that_have_ended(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        layout = make_run(root, "many", f"20260201-0000{number:02}-ffff00", steps=5, total_steps=5, final_loss=1.0)
        os.mkfifo(layout.metrics)  # reading it would never end
    monkeypatch.chdir(root.parent)
    runs_commands.list_runs("many")
    assert capsys.readouterr().out.count("5/5") == 30


RECIPE = """
version: 1
name: lora
optimizer: {lr: 0.001}
train: {steps: %s}
env: {WANDB_API_KEY: %s, PLAIN: a}
"""


def test_two_runs_differ_by_recipe_plan_environment_and_results(root: Path, trainkit: Trainkit) -> None:
    one = make_run(root, "a", "20260105-000000-111111", RECIPE % (10, "abcdef0123456789"), steps=10, final_loss=2.0)
    two = make_run(root, "a", "20260105-000001-222222", RECIPE % (20, "9876543210abcdef"), steps=20, final_loss=1.5)
    for layout, torch in ((one, "2.6.0"), (two, "2.7.0")):
        code = {"trainkit": "0.1.0", "packages": {"torch": torch, "numpy": "2.0"}, "commit": "c1"}
        layout.code.write_text(json.dumps(code))
        port = "MASTER_PORT=1" if layout is one else "MASTER_PORT=2\nOMP_NUM_THREADS=4"
        layout.environment.write_text(f"unset RANK\nTRAINKIT_RECIPE={layout.recipe}\n{port}\n")
    done = trainkit("runs", "diff", "111111", "222222", environ={"COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in done.stdout.splitlines() if line}
    assert rows["RECIPE"] == ["a 111111", "a 222222"]
    assert rows["train.steps"] == ["10", "20"]
    assert "optimizer.lr" not in rows
    assert "abcdef" not in done.stdout
    assert rows["package torch"] == ["2.6.0", "2.7.0"]
    assert rows["variable OMP_NUM_THREADS"] == ["-", "4"]
    assert not {"package numpy", "commit", "variable MASTER_PORT", "variable TRAINKIT_RECIPE"} & {*rows}
    assert rows["loss"] == ["2", "1.5", "-25.0%"]
    assert rows["steps"] == ["10", "20", "+100.0%"]
    assert "PLAN: nothing differs" in done.stdout
    data = json.loads(trainkit("runs", "diff", "111111", "222222", "--json").stdout)
    assert data["recipe"] == {"train.steps": {"first": 10, "second": 20}}
    assert [each["short_id"] for each in data["runs"]] == ["111111", "222222"]


def test_a_run_is_equal_to_itself_and_one_without_a_summary_is_compared(root: Path, trainkit: Trainkit) -> None:
    same = trainkit("runs", "diff", "aaaa11", "aaaa11")
    assert same.stdout.count("nothing differs") == 4
    bare = make_run(root, "bare", "20260106-000000-333333", exit_code=1)
    bare.recipe.write_bytes(b"\xff\xfe{")
    done = trainkit("runs", "diff", "aaaa11", "bare")
    assert done.returncode == 0, done.stderr
    assert "recipe.yaml" in done.stdout
    assert trainkit("runs", "diff", "aaaa11", "nowhere").returncode == 2


def test_the_size_of_runs_counts_what_is_on_the_disk_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "inside").mkdir(parents=True)
    empty, bare = disk_use([one, two])
    (one / "data").write_bytes(b"x" * 300_000)
    os.link(one / "data", one / "inside" / "again")
    os.link(one / "data", two / "shared")
    with (two / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (one / "link").symlink_to("../two")
    sizes, freed = disk_use([one, two])
    whole = (one / "data").stat().st_blocks * 512
    assert whole >= 300_000
    assert [after - before for after, before in zip(sizes, empty, strict=True)] == [whole, whole]
    assert freed - bare == whole
    assert disk_use([one])[1] == empty[0]  # the other folder still has the file
    assert disk_use([tmp_path / "gone"]) == ([0], 0)


def test_pruning_says_what_it_would_free_before_it_asks(root: Path, trainkit: Trainkit) -> None:
    (root / "lora/20260101-000000-aaaa11/model.pt").write_bytes(b"x" * (3 << 20))
    shown = trainkit("runs", "prune", "--keep", "0", "--dry-run")
    assert shown.returncode == 0
    sizes = [line for line in shown.stdout.splitlines() if "/runs/" in line]
    assert len(sizes) == 3
    assert re.match(r"3\.\d+ MiB +/", next(line for line in sizes if line.endswith("aaaa11")))
    assert re.search(r"^removing these frees 3\.\d+ MiB$", shown.stdout, re.MULTILINE)
    assert len(list_runs(str(root))) == 3
    asked = trainkit("runs", "prune", "--keep", "0", stdin="n\n")
    assert asked.stdout.index("frees 3.") < asked.stdout.index("remove these 3 runs")
