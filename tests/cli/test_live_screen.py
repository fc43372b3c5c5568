"""The screen of `trainkit watch`: what it reads of a run, what it shows at each size, which keys it obeys."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Trainkit
from trainkit.cli.live import drawing
from trainkit.cli.live.drawing import Look
from trainkit.cli.live.reading import LiveRun, Memory, Rank
from trainkit.cli.live.screen import Part, WatchScreen
from trainkit.files import hold_lock
from trainkit.heartbeat import FORWARD, HeartbeatState
from trainkit.launch_plan.model import (
    PLAN_VERSION,
    BatchArithmetic,
    Choice,
    Command,
    EnvironmentDiff,
    Foresight,
    NodeGroup,
    Plan,
    PlannedGpu,
    Resume,
    Topology,
    plan_to_json,
    text,
)
from trainkit.runner.report.history import Curve
from trainkit.runner.rundir.layout import RunLayout
from trainkit.runner.watch.heartbeats import Heartbeats, RankBeat

HERE = os.uname().nodename
GIB = 2**30
FORESIGHT = Foresight("formula", 0.1, (), 2 * GIB, 8 * GIB, "fits", "", host_limit=16 * GIB, host=4 * GIB)
PLAN = Plan(
    plan_version=PLAN_VERSION,
    name="small",
    recipe_digest="",
    training_digest="",
    strategy=Choice("ddp", ""),
    launcher=Choice("torchrun", ""),
    program=Choice("builtin", ""),
    device=Choice("cpu", ""),
    topology=Topology("cpu", (NodeGroup(1, 2, ("cpu", "cpu")),)),
    batch=BatchArithmetic(8, 4, 1, 2, 4),
    commands=(Command((text("torchrun"),), (text("python"),), (text("train.py"),)),),
    preparations=(),
    environment=EnvironmentDiff(),
    files=(),
    resume=Resume(None, 0, ""),
    output_root="runs",
    max_restarts=0,
    grace_seconds=1.0,
    foresight=FORESIGHT,
    notices=(),
)
SIZES = ((80, 24), (120, 40), (200, 60), (40, 12))
Steps = Callable[["Shown"], Awaitable[None]]


def made_run(folder: Path, name: str = "small", *, steps: int = 30, attempts: int = 1, **status: Any) -> RunLayout:
    """The directory of a run that has logged so many of 40 steps. status: more of status.json."""
    layout = RunLayout(folder / f"runs/{name}/20260101-000000-1ceb19")
    for number in range(1, attempts + 1):
        (layout.attempt(number).logs).mkdir(parents=True)
        layout.attempt(number).log(0, "out").write_text(f"output of attempt {number}\n")
    layout.root.mkdir(parents=True, exist_ok=True)
    layout.recipe.write_text("version: 1\n")
    layout.plan.write_text(json.dumps(plan_to_json(PLAN)))
    known = {"state": "ended", "exit_code": 0, "started": 100.0, "ended": 160.0, "host": HERE, "attempt": attempts}
    layout.status.write_text(json.dumps({**known, **status}))
    start = {"event": "start", "steps": 40, "first_step": 0, "evaluates_every": 10}
    records = [start, *(record(step) for step in range(1, steps + 1))]
    records += [{"step": step, "eval_loss": 2.5, "eval_seconds": 1.0} for step in range(10, steps + 1, 10)]
    layout.metrics.write_text("".join(f"{json.dumps(each)}\n" for each in records if steps))
    return layout


def record(step: int) -> dict[str, Any]:
    more = {"learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 4321.0, "memory_bytes": GIB}
    return {"step": step, "loss": 2.0 + 1 / step, "seconds": 0.1, **more, "phases": {"forward": 0.06, "backward": 0.03}}


def running(layout: RunLayout) -> RunLayout:
    """The same while it goes on: trainkit holds its lock."""
    layout.status.write_text(json.dumps({"state": "running", "host": HERE, "attempt": 1}))
    hold_lock(layout.lock)
    return layout


class Shown:
    """A screen under test."""

    def __init__(self, screen: WatchScreen, pilot: Any) -> None:
        self.screen, self.press, self.pause = screen, pilot.press, pilot.pause
        self.resize = pilot.resize_terminal

    @property
    def parts(self) -> list[Part]:
        """Those that are seen, in order."""
        return [part for part in self.screen.query(Part) if part.size.area and part.region.height]

    @property
    def text(self) -> str:
        return "\n".join(part.render().plain for part in self.parts)


def show(*runs: RunLayout, size: tuple[int, int] = (80, 24), steps: Steps) -> None:
    """Show runs on a screen in this process, and go through some steps."""

    async def all_of_it() -> None:
        screen = WatchScreen([LiveRun(layout) for layout in runs], Look())
        async with screen.run_test(size=size) as pilot:
            shown = Shown(screen, pilot)
            while not all(run.looks for run in screen.runs):
                await pilot.pause(0.02)
            await pilot.pause()
            await steps(shown)
        if screen.failure:
            raise screen.failure

    asyncio.run(all_of_it())


@pytest.mark.parametrize("size", SIZES)
def test_every_part_fits_into_every_size_and_large_ones_show_four_charts(tmp_path: Path, size: tuple[int, int]) -> None:
    layout = running(made_run(tmp_path))

    async def steps(shown: Shown) -> None:
        for part in shown.parts:
            lines = part.render().split("\n")
            assert len(lines) <= part.size.height
            assert all(line.cell_len <= part.size.width for line in lines), part.render().plain
        assert shown.parts[-1].region.bottom == size[1]
        titles = ("1 loss", "2 learning rate", "3 tokens/s", "4 gradient norm")
        assert [title in shown.text for title in titles] == [True, *[size[0] >= 110] * 3]
        if size[0] >= 80:
            assert "small 1ceb19  running" in shown.text
            assert "step 30/40" in shown.text
            assert "next: evaluation at step 40" in shown.text
            assert "memory of rank 0, peak 1024 MiB" in shown.text
            assert "of 8192 MiB, predicted 2048 MiB" in shown.text
            assert "output of attempt 1" in shown.text
            assert " q  leave" in shown.text

    show(layout, size=size, steps=steps)


def test_keys_choose_the_curve_its_scale_the_rank_and_the_help(tmp_path: Path) -> None:
    layout = made_run(tmp_path)
    layout.attempt(1).log(1, "err").write_text("warning of rank 1\n")

    async def steps(shown: Shown) -> None:
        await shown.press("tab")
        assert "2 learning rate" in shown.text
        await shown.press("shift+tab", "l")
        assert "1 loss (log)" in shown.text
        await shown.press("6")
        assert "6 seconds by phase" in shown.text
        assert "forward 0.06" in shown.text
        await shown.press("9")  # there is none
        assert "6 seconds by phase" in shown.text
        await shown.press("r")
        assert "log of rank 1  attempts/1/logs/rank-1.err\nwarning of rank 1" in shown.text
        await shown.press("r")
        assert "log of rank 0" in shown.text
        await shown.press("question_mark")
        await shown.pause()
        assert "the run is not touched" in shown.text
        assert "this list, or the log again" in shown.text
        await shown.press("q")
        assert not shown.screen.is_running

    show(layout, steps=steps)


def test_several_runs_share_the_charts_and_stand_side_by_side_where_there_is_room(tmp_path: Path) -> None:
    runs = (made_run(tmp_path, "one"), made_run(tmp_path, "two", steps=20))

    async def steps(shown: Shown) -> None:
        assert "1 loss  ⣿ 1ceb19 2.033  o evaluation 2.5  ⣿ 1ceb19 2.05  o evaluation 2.5" in shown.text
        assert shown.text.count("log of rank") == 1
        await shown.press("right")
        await shown.resize(200, 60)
        await shown.pause()
        assert shown.text.count("log of rank") == 2

    show(*runs, size=(90, 30), steps=steps)


def test_a_spike_is_seen_however_many_steps_a_column_has() -> None:
    values: list[float | None] = [1.0] * 100_000
    values[54_321] = 9.0
    values[7] = None
    curve = Curve([*range(1, 100_001)], values)
    line = drawing.Line("", curve, "cyan")
    rows = drawing.chart("loss", [line], 80, 12, Look(), log=False).plain.split("\n")
    assert rows[0] == "loss  ⣿ 1 (1 not finite)"
    assert rows[1].startswith("         9┤")
    assert len(rows[1].split("┤")[1].strip()) == 1
    assert rows[-1].split() == ["1", "50000", "100000"]


@pytest.mark.parametrize("values", [[], [None], [0.0], [-1.0, -1.0], [1e299, -1e299], [5e-324, 1.0]], ids=str)
@pytest.mark.parametrize("log", [False, True])
def test_any_values_can_be_drawn(values: list[float | None], log: bool) -> None:
    line = drawing.Line("", Curve([*range(len(values))], values), "cyan")
    for width, height in ((80, 12), (30, 5), (5, 2), (0, 0)):
        text = drawing.chart("loss", [line], width, height, Look(), log=log)
        assert all(row.cell_len <= width for row in text.split("\n"))


def test_without_colours_the_curves_of_two_runs_are_of_different_characters() -> None:
    lines = [drawing.Line(name, Curve([1, 2], [value, value]), "") for name, value in (("a", 1.0), ("b", 2.0))]
    text = drawing.chart("loss", lines, 60, 8, Look(colours=False), log=False).plain
    assert "++++" in text
    assert "⣀" in text or "⣿" in text or "⠤" in text
    plain = drawing.chart("loss", lines, 60, 8, Look(colours=False, braille=False), log=False).plain
    assert "****" in plain
    assert not any("\u2800" <= char <= "\u28ff" for char in plain)


def test_text_of_others_is_shown_as_it_is_and_never_obeyed(tmp_path: Path) -> None:
    name = "[red]x\x1b]0;t\x07"
    layout = made_run(tmp_path, name, failure="program", why="[@click=app.bell]y\x1b[2J", exit_code=1, rank=0)
    layout.attempt(1).log(0, "out").write_bytes(
        "\x1b[31m[bold]z[/bold]\r\n\u202eä\u4e2d\xff".encode("utf-8", "replace")
    )
    with layout.metrics.open("a") as file:
        file.write('{"step": 31, "loss": NaN, "[red]\\u001b[0m": 1.0}\n{"step": 1e999}\n')
        file.write(
            f'{{"step": {10**30}, "loss": {10**400}}}\n{{"step": 32, "loss": "x", "phases": {{"data": {10**400}}}}}\n'
        )

    async def steps(shown: Shown) -> None:
        for word in ("[red]x", "[@click=app.bell]y", "[bold]z[/bold]", "(1 not finite)"):
            assert word in shown.text
        await shown.press("tab", "tab", "tab", "tab", "tab", "tab")
        assert "[red]" in shown.text
        assert "\x1b" not in shown.text
        assert "\u202e" not in shown.text

    show(layout, size=(120, 40), steps=steps)


def test_a_state_that_somebody_has_made_up_is_not_obeyed_either(tmp_path: Path) -> None:
    run = LiveRun(made_run(tmp_path, outcome="\x1b]0;t\x07queer_state"))
    run.read()
    shown = drawing.header(run, "", 100).plain
    assert "queer state" in shown
    assert shown.isprintable()


def test_a_failed_run_shows_the_log_of_the_rank_that_failed(tmp_path: Path) -> None:
    layout = made_run(tmp_path, failure="rank", why="rank 1 ran out of memory", exit_code=1, rank=1)
    layout.attempt(1).log(1, "err").write_text("Traceback\nOutOfMemoryError: " + "x" * 100 + " the end\n")
    layout.attempt(1).log(1, "out").write_text("written later than the error\n")
    later = layout.attempt(1).log(1, "err").stat().st_mtime + 1
    os.utime(layout.attempt(1).log(1, "out"), (later, later))

    async def steps(shown: Shown) -> None:
        assert "small 1ceb19  failed" in shown.text
        assert "exit code 1, after 1:00, rank 1 ran out of memory" in shown.text.replace("\n", " ")
        assert "log of rank 1" in shown.text
        assert "the end" in shown.text

    show(layout, size=(100, 30), steps=steps)


def test_a_resumed_run_shows_its_latest_attempt(tmp_path: Path) -> None:
    layout = made_run(tmp_path, attempts=2)

    async def steps(shown: Shown) -> None:
        assert "attempt 2" in shown.text
        assert "output of attempt 2" in shown.text
        layout.attempt(3).logs.mkdir(parents=True)
        layout.attempt(3).log(0, "out").write_text("output of attempt 3\n")
        shown.screen.current.read()
        await shown.press("l")
        assert "output of attempt 3" in shown.text

    show(layout, steps=steps)


def test_a_run_without_a_step_says_what_it_waits_for(tmp_path: Path) -> None:
    layout = running(made_run(tmp_path, steps=0))

    async def steps(shown: Shown) -> None:
        assert "no step yet: the ranks are being started" in shown.text
        assert "no values yet" in shown.text
        assert "none of 2 ranks is recorded" in shown.text

    show(layout, steps=steps)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("builtin", "no values"),
        ("hf", "no values"),
        ("torch", "no curves: only the built-in trainer and Trainer log metrics"),
    ],
)
def test_an_ended_run_without_curves_promises_none(tmp_path: Path, program: str, text: str) -> None:
    layout = made_run(tmp_path, steps=0)
    layout.plan.write_text(json.dumps(plan_to_json(replace(PLAN, program=Choice(program, "")))))

    async def steps(shown: Shown) -> None:
        assert f"  {text}\n" in f"{shown.text}\n"
        assert "yet" not in shown.text

    show(layout, steps=steps)


def test_a_script_on_trainer_has_the_curves_and_the_step_of_trainers_log(tmp_path: Path) -> None:
    layout = running(made_run(tmp_path, steps=0))
    layout.plan.write_text(json.dumps(plan_to_json(replace(PLAN, program=Choice("hf", "")))))

    async def steps(shown: Shown) -> None:
        assert "no values yet: Trainer writes its log with a checkpoint, and at the end" in shown.text
        log = [{"step": 2, "loss": 3.5}, {"step": 4, "loss": 2.5}, {"step": 4, "eval_loss": 2.25}]
        (layout.root / "output").mkdir()
        state = {"global_step": 4, "max_steps": 9, "log_history": log}
        (layout.root / "output" / "trainer_state.json").write_text(json.dumps(state))
        run = shown.screen.current
        run._next_results = run._next_state = 0.0
        run.read()
        await shown.press("l")
        assert "step 4/9" in shown.text
        assert "loss 2.5000  evaluation loss 2.2500" in shown.text
        assert run.history.curves["loss"].values == [3.5, 2.5]

    show(layout, steps=steps)


def test_of_ranks_whose_heartbeat_cannot_be_read_no_step_is_denied(tmp_path: Path) -> None:
    layout = running(made_run(tmp_path, steps=0))
    record = {"rank": 0, "local_rank": 0, "host": "elsewhere", "wrapper_pid": 1}
    (layout.attempt(1).root / "ranks").mkdir()
    (layout.attempt(1).root / "ranks" / "rank-0.json").write_text(json.dumps(record))

    async def steps(shown: Shown) -> None:
        assert "its step is not known here; rank 0: on another host" in shown.text
        assert "no step yet" not in shown.text

    show(layout, steps=steps)


def test_a_directory_that_disappears_is_reported(tmp_path: Path) -> None:
    layout = made_run(tmp_path)
    run = LiveRun(layout)
    run.read()
    assert run.state.word == "done"
    shutil.rmtree(layout.root)
    again = LiveRun(layout)
    again.read()
    assert (again.state.word, "gone" in again.outlook) == ("lost", True)


def test_keys_are_obeyed_while_a_scheduler_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, answer, asked = made_run(tmp_path), threading.Event(), threading.Event()

    def hung(self: LiveRun) -> None:
        asked.set()
        answer.wait(60)

    async def steps(shown: Shown) -> None:
        monkeypatch.setattr(LiveRun, "read_state", hung)
        while not asked.is_set():
            await asyncio.sleep(0.01)
        await shown.press("tab")
        assert "2 learning rate" in shown.text
        await shown.press("q")
        assert not shown.screen.is_running

    show(layout, steps=steps)
    assert not answer.is_set()
    answer.set()


def test_an_error_of_ours_ends_the_screen_and_reaches_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LiveRun) -> None:
        raise ZeroDivisionError("planted")

    layout = made_run(tmp_path)

    async def steps(shown: Shown) -> None:
        monkeypatch.setattr(LiveRun, "read_log", broken)
        shown.screen.simulate_key("r")
        while shown.screen.is_running:
            await asyncio.sleep(0.01)

    with pytest.raises(ZeroDivisionError, match="planted"):
        show(layout, steps=steps)


def test_a_rank_has_its_phase_times_and_memory_and_a_slow_one_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = HeartbeatState(os.getpid(), 30, FORWARD, 0.0, ())
    beats = {rank: RankBeat(rank, HERE, state, [(0.2, own)] * 20) for rank, own in ((0, 0.05), (1, 0.15))}
    monkeypatch.setattr(Heartbeats, "read", lambda self: beats)
    layout = running(made_run(tmp_path))
    (layout.attempt(1).root / "paces.json").write_text(json.dumps({"7": ["elsewhere", 0.2, 0.05]}))
    run = LiveRun(layout)
    run.read()
    assert [(each.number, each.host, each.step, each.own, each.is_straggler) for each in run.ranks] == [
        (0, HERE, 0.2, 0.05, False),
        (1, HERE, 0.2, 0.15, True),
        (7, "elsewhere", 0.2, 0.05, False),
    ]
    assert [each.doing.partition(" ")[0] for each in run.ranks] == ["forward", "forward", "on"]
    assert run.ranks[0].memory > 2**20
    assert [each._replace(used=0) for each in run.memory] == [Memory("of 2 ranks", 0, 16 * GIB, 4 * GIB)]
    rows = drawing.ranks(run, 100, 3).plain.split("\n")
    assert rows[1].endswith("straggler")
    assert rows[2].strip() == "and 2 more"


def test_memory_of_each_gpu_stands_against_its_limit_and_the_prediction(tmp_path: Path) -> None:
    layout = running(made_run(tmp_path))
    cards = tuple(PlannedGpu(number, f"GPU-{number}", "card") for number in (2, 3))
    layout.plan.write_text(json.dumps(plan_to_json(replace(PLAN, cards=cards))))
    samples = [{"uuid": f"GPU-{number}", "memory_bytes": number * GIB, "utilization": 90} for number in (2, 3, 9)]
    layout.cards.write_text(f'{json.dumps({"time": 1, "cards": samples})}\n{{"time": 2, "car')
    run = LiveRun(layout)
    run.read()
    limits = (8 * GIB, 2 * GIB, 90)
    assert run.memory == [Memory("GPU 2", 2 * GIB, *limits), Memory("GPU 3", 3 * GIB, *limits)]
    first, second = drawing.memory(run, 100, 2).plain.split("\n")
    assert re.match(r"memory GPU 2 2048 MiB █+│░+ of", first)
    assert second.endswith("of 8192 MiB, predicted 2048 MiB, 90% busy")


@pytest.mark.parametrize("damaged", ["", "[]", '{"cards": "x", "topology": []}'])
def test_a_run_whose_plan_is_damaged_is_shown_by_its_other_files(tmp_path: Path, damaged: str) -> None:
    layout = made_run(tmp_path)
    layout.plan.write_text(damaged)
    run = LiveRun(layout)
    run.read()
    assert (run.world_size, run.history.progress.step, run.log) == (1, 30, ["output of attempt 1"])
    assert run.memory == [Memory("of rank 0, peak", GIB)]


def test_of_many_ranks_the_slowest_are_shown_first(tmp_path: Path) -> None:
    run = LiveRun(made_run(tmp_path))
    run.ranks = [Rank(number, "host", "forward", 0.2, 0.1 + number / 1000) for number in range(64)]
    rows = drawing.ranks(run, 100, 5).plain.split("\n")
    assert [row.split()[0] for row in rows[1:4]] == ["63", "62", "61"]
    assert rows[4].strip() == "and 61 more"


@pytest.fixture(scope="session")
def touched() -> Iterator[list[tuple[str, Any]]]:
    """What this process opens for writing, removes, renames, or sends signals to, while `touched` is not closed."""
    found: list[tuple[str, Any]] = []
    changing = ("os.kill", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            found.append((event, arguments[0]))
        elif event in changing:
            found.append((event, arguments))

    sys.addaudithook(hook)
    yield found


def test_nothing_of_a_run_is_written_and_no_process_gets_a_signal(
    tmp_path: Path, touched: list[tuple[str, Any]], trainkit: Trainkit
) -> None:
    layout = running(made_run(tmp_path, attempts=2))

    def state() -> dict[str, tuple[int, int, int]]:
        files = {path: path.stat() for path in [layout.root, *layout.root.rglob("*")]}
        return {str(path): (each.st_mtime_ns, each.st_size, each.st_mode) for path, each in files.items()}

    async def steps(shown: Shown) -> None:
        await shown.press("r", "tab", "l", "question_mark")
        shown.screen.current.read()
        await shown.press("q")

    before = state()
    touched.clear()
    show(layout, steps=steps)
    assert [each for each in touched if str(tmp_path) in str(each) or each[0] == "os.kill"] == []
    assert state() == before
    (layout.root / ".lock").unlink()
    assert trainkit("watch", str(layout.root)).returncode == 0
    assert state().keys() == before.keys() - {str(layout.lock)}


def test_without_a_terminal_a_run_that_is_over_is_told_once(tmp_path: Path, trainkit: Trainkit) -> None:
    made_run(tmp_path, "one")
    made_run(tmp_path, "two", steps=20)
    told = trainkit("watch", "one", "two")
    assert (told.returncode, told.stderr) == (0, "")
    lines = told.stdout.splitlines()
    assert (
        lines[0]
        == "one 1ceb19  done  step 30/40  loss 2.0333  evaluation loss 2.5000  4321 tokens/s  exit code 0, after 1:00"
    )
    assert "memory of rank 0, peak 1024 MiB" in lines[1]
    assert sum(line.startswith("log of rank 0") for line in lines) == 2
    assert "\x1b" not in told.stdout


def test_a_run_that_is_not_there_is_refused(trainkit: Trainkit) -> None:
    told = trainkit("watch", "nowhere")
    assert (told.returncode, "next: " in told.stderr) == (2, True)
