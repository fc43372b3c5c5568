"""The study of a sweep in its file: trials are tried once, kept when it is opened again, and stopped by the median."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.errors import MachineError, UsageError
from trainkit.sweeps.results import Definition, SweepResult, as_data, ranked, table
from trainkit.sweeps.space import Space, read_space
from trainkit.sweeps.study import Sampler, Study, Trial, draw_points, locked, read_trials

pytestmark = pytest.mark.torch  # Optuna imports numpy
pytest.importorskip("optuna")
GRID = read_space(["optimizer.lr=1e-4,3e-4", "train.seed=range(2)"])
DRAWN = read_space(["optimizer.lr=log(1e-5,1e-3)", "model.layers=int(1,4)"])


def opened(
    folder: Path, space: Space = GRID, sampler: Sampler = "grid", *, early: bool = False, most: int = 4
) -> Study:
    study = Study(folder, space, sampler, 0, lower=True, early_stop=early, trials=most)
    if sampler == "grid":
        study.plan([*space.grid()])
    return study


def test_a_grid_is_tried_in_order_and_what_has_ended_is_kept_when_it_is_opened_again(tmp_path: Path) -> None:
    study = opened(tmp_path)
    first = study.next(4)
    second = study.next(4)
    assert first is not None and second is not None
    assert [first.point, second.point] == [*GRID.grid()][:2]
    study.keep(0, run="/runs/a", step=3)
    study.finish(0, 2.5)
    study.keep(1, run="/runs/b")
    again = opened(tmp_path)
    assert [each.state for each in again.trials()] == ["done", "running", "waiting", "waiting"]
    assert (again.trials()[0].value, again.trials()[1].run) == (2.5, "/runs/b")
    again.finish(1, 1.5)  # of a trial that another process began
    assert again.next(4) is not None and again.next(4) is not None and again.next(4) is None
    assert read_trials(tmp_path) == again.trials()


def test_a_failed_trial_is_tried_once_more_when_the_study_is_opened_again(tmp_path: Path) -> None:
    study = opened(tmp_path)
    while trial := study.next(4):
        study.fail(trial.number, "out of memory") if trial.number == 2 else study.finish(trial.number, 1.0)
    assert [each.why for each in study.trials() if each.state == "failed"] == ["out of memory"]
    again = opened(tmp_path)
    retried = again.next(4)
    assert retried is not None and retried.point == [*GRID.grid()][2]
    again.finish(retried.number, 0.5)
    assert [each.state for each in again.trials()] == ["done"] * 4
    assert opened(tmp_path).next(4) is None


def test_a_trial_worse_than_the_median_is_stopped_and_none_before_two_have_ended(tmp_path: Path) -> None:
    study = opened(tmp_path, early=True)
    for number, value in enumerate((1.0, 2.0)):
        assert study.next(4) is not None
        assert not study.report(number, 10, value)
        study.finish(number, value)
    assert study.next(4) is not None
    assert not study.report(2, 10, 1.2)
    assert study.report(2, 20, float("nan"))
    assert study.next(4) is not None
    assert study.report(3, 10, 5.0)
    study.stop(3)
    last = study.trials()[3]
    assert (last.state, last.value, last.step) == ("stopped early", 5.0, 10)


def test_an_evaluation_is_reported_once_though_a_run_goes_back_to_it(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.next(4)
    study.report(0, 10, 1.0)
    study.report(0, 10, 2.0)
    assert study.trials()[0].value == 1.0


def test_tpe_draws_as_many_as_asked_and_goes_on_after_those_before(tmp_path: Path) -> None:
    study = opened(tmp_path, DRAWN, "tpe", most=3)
    for number in range(3):
        trial = study.next(3)
        assert trial is not None
        study.finish(number, float(number))
    assert study.next(3) is None
    more = opened(tmp_path, DRAWN, "tpe", most=5)
    drawn = [more.next(5), more.next(5)]
    points = [each.point for each in more.trials()]
    assert all(drawn) and more.next(5) is None
    assert all(point not in points[:number] for number, point in enumerate(points))


def test_a_point_that_is_drawn_again_takes_the_value_of_the_first(tmp_path: Path) -> None:
    study = opened(tmp_path, read_space(["train.seed=0,1"]), "tpe", most=8)
    tried = 0
    while trial := study.next(8):
        study.finish(trial.number, float(str(trial.point["train.seed"])))
        tried += 1
    assert tried == 2
    trials = study.trials()
    assert len(trials) == 8
    assert all(each.value == float(str(each.point["train.seed"])) for each in trials)
    assert sum("not trained twice" in each.why for each in trials) == 6


def test_points_at_random_are_the_same_for_a_seed_and_no_two_alike() -> None:
    assert draw_points(DRAWN, 5, 0)[:3] == draw_points(DRAWN, 3, 0)
    assert draw_points(DRAWN, 3, 0) != draw_points(DRAWN, 3, 1)
    points = draw_points(GRID, 4, 0)
    assert sorted(map(str, points)) == sorted(map(str, GRID.grid()))
    with pytest.raises(UsageError, match="4 points in all"):
        draw_points(GRID, 5, 0)


def test_only_one_process_runs_a_sweep(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(MachineError, match="is running"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_a_folder_without_a_study_is_named(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no study"):
        read_trials(tmp_path)
    assert [*tmp_path.iterdir()] == []


TRIALS = [
    Trial(0, {"optimizer.lr": "1e-4"}, "done", 2.0, 6, "/runs/tiny/20260101-000000-aaaaaa"),
    Trial(1, {"optimizer.lr": 0.00031234567}, "done", 1.0, 6),
    Trial(2, {"optimizer.lr": "1e-2"}, "stopped early", 9.0, 2),
    Trial(3, {"optimizer.lr": "1"}, "failed", why="out of memory: no room"),
    Trial(4, {"optimizer.lr": "2"}, "running", float("nan"), 3),
    Trial(5, {"optimizer.lr": "3"}, "waiting"),
]


def result(*, lower: bool = True) -> SweepResult:
    definition = Definition("tiny", ("tiny.yaml",), "/", ("optimizer.lr=1,2",), "grid", 0, False, "loss", lower, 6, "d")
    return SweepResult(Path("/sweep"), definition, TRIALS)


def test_the_table_is_in_the_order_of_the_metric_and_what_has_none_follows() -> None:
    found = result()
    lines = table(found.definition, found.trials, {4: 10}).splitlines()
    assert lines[0].split() == ["TRIAL", "loss", "optimizer.lr", "STATE", "STEP", "RUN"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "0", "2", "4", "3", "5"]
    assert lines[1].split() == ["1", "1.0000", "0.0003123", "done", "6", "-"]
    assert "3/10" in lines[4] and "failed: out of memory: no room" in lines[5]
    assert found.best is not None and found.best.number == 1
    highest = result(lower=False).best
    assert highest is not None and highest.number == 0
    assert [each.number for each in ranked(TRIALS, lower=False)][:2] == [0, 1]


def test_json_holds_no_value_that_is_not_a_number() -> None:
    data = as_data(result())
    assert (data["best"], data["best_recipe"]) == (1, "/sweep/best.yaml")
    assert [each["value"] for each in data["trials_made"]] == [1.0, 2.0, 9.0, None, None, None]
    assert not result().complete
