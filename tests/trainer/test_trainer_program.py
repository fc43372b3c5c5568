"""The trainer as a program: exit codes and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from strategy_runs import Case, write_settings

ROOT = Path(__file__).parents[2]


def trainer(settings: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **extra}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None) if name not in extra else None
    command = [sys.executable, "-m", "trainkit.trainer", "--settings", str(settings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_missing_corpus_is_one_line_with_exit_code_1(tmp_path: Path) -> None:
    done = trainer(write_settings(tmp_path / "run", Case({"kind": "single"}, ranks=1), tmp_path / "nowhere"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: data.path: {tmp_path}/nowhere does not exist\n"


def test_torch_is_not_waited_for_before_the_settings_are_read() -> None:
    code = "import sys, trainkit.trainer.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True)


@pytest.mark.parametrize(
    "content", [None, "a link", "{", "[]", '{"batch": 7}', '{"recipe": {}}', '{"recipe": {"nmae": 1}, "batch": {}}']
)
def test_settings_that_planning_did_not_write_are_refused_without_a_traceback(
    content: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "trainer.json"
    if content == "a link":
        path.symlink_to(path.name)  # to itself
    elif content is not None:
        path.write_text(content)
    done = trainer(path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: the settings file {path}")
    assert ("cannot be read: " in done.stderr) == (content in (None, "a link"))
    assert "Traceback" not in done.stderr


def test_another_number_of_ranks_than_planned_is_refused(corpus_folder: Path, tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "run", Case({"kind": "single"}, ranks=1), corpus_folder)
    done = trainer(settings, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 1
    assert "the plan is for 1 rank, and the launcher started 2" in done.stderr


def test_a_card_that_is_not_there_is_one_line(corpus_folder: Path, tmp_path: Path) -> None:
    settings = write_settings(tmp_path / "run", Case({"kind": "single"}, ranks=1), corpus_folder)
    settings.write_text(settings.read_text().replace('"device": "cpu"', '"device": "cuda"'))
    done = trainer(settings, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.startswith("error: local rank 0 needs a GPU of its own, and torch ")
    assert "sees 0 here (CUDA_VISIBLE_DEVICES=)" in done.stderr


def test_log_levels_follow_the_rank(corpus_folder: Path, tmp_path: Path) -> None:
    short = {"train": {"steps": 1}}
    said = []
    for number, level in enumerate(("info", "warning")):
        case = Case({"kind": "single"}, ranks=1).changed(**short, logging={"level": level})
        done = trainer(write_settings(tmp_path / str(number), case, corpus_folder))
        assert (done.returncode, done.stderr) == (0, "")
        said.append(done.stdout)
    assert said[0].startswith("gpt with ")
    assert said[0].count("\n") == 1
    assert said[1] == ""


def test_a_rank_leaves_nothing_in_its_temporary_folder(corpus_folder: Path, tmp_path: Path) -> None:
    case = Case({"kind": "single"}, ranks=1).changed(train={"steps": 1})
    (tmp_path / "tmp").mkdir()
    done = trainer(write_settings(tmp_path / "run", case, corpus_folder), TMPDIR=str(tmp_path / "tmp"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not list((tmp_path / "tmp").iterdir())


SPEAK = """
import sys
from trainkit.recipe.schema import Logging
from trainkit.trainer.__main__ import configure_logging, log
from trainkit.trainer.settings import World

rank, local_rank, level, replica_level, each_node = sys.argv[1:]
asked = Logging(level=level, replica_level=replica_level, each_node=each_node == "true")
configure_logging(asked, World(rank=int(rank), size=4, local_rank=int(local_rank)))
for name in ("debug", "info", "warning", "error"):
    getattr(log, name)(name)
"""


@pytest.mark.parametrize(
    ("rank", "local_rank", "level", "replica_level", "each_node", "news", "trouble"),
    [
        (0, 0, "debug", "error", "true", ["debug", "info"], ["warning", "error"]),
        (1, 1, "debug", "error", "true", [], ["error"]),
        (1, 1, "error", "info", "true", ["info"], ["warning", "error"]),
        (2, 0, "info", "error", "true", ["info"], ["warning", "error"]),  # the first rank of a second node
        (2, 0, "info", "error", "false", [], ["error"]),
        (0, 0, "warning", "info", "false", [], ["warning", "error"]),
    ],
)
def test_main_ranks_speak_at_one_level_and_replicas_at_another(
    rank: int, local_rank: int, level: str, replica_level: str, each_node: str, news: list[str], trouble: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPEAK, str(rank), str(local_rank), level, replica_level, each_node],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.stderr.split()) == (news, trouble)


def test_tensorboard_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    corpus_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "tensorboard.py").write_text("raise ImportError('hidden by a test')\n")
    case = Case({"kind": "single"}, ranks=1).changed(logging={"report_to": ["tensorboard"]})
    done = trainer(write_settings(tmp_path / "run", case, corpus_folder), PYTHONPATH=f"{tmp_path / 'hidden'}:{ROOT}")
    assert done.returncode == 1
    assert f"{sys.executable} -m pip install 'tensorboard>=2.18,<3'" in done.stderr
