"""What a run meets that it cannot train with: one clear error, exit code 1, and what was saved stays whole."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Trainkit


def saved_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_empty_data_set_is_named(trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("")
    done = trainkit("run", str(tiny_recipe))
    assert done.returncode == 1
    assert "corpus.txt" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_loss_that_is_no_number_names_its_step_and_leaves_the_last_checkpoint(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    done = trainkit(
        "run", str(tiny_recipe), "optimizer.lr=1e12", "checkpoint.every_steps=1", "optimizer.weight_decay=1e12"
    )
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert "is nan at step 2" in told
    assert "lower optimizer.lr" in told
    assert "Traceback" not in told
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_checkpoint_with_a_flipped_bit_is_refused_by_the_name_of_its_file_and_its_neighbour_is_taken(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    assert trainkit("run", str(tiny_recipe), "checkpoint.every_steps=1", "train.steps=2").returncode == 0
    (run_dir,) = (tmp_path / "runs/tiny").iterdir()
    older, newer = (run_dir / f"checkpoints/step-0000000{step}" for step in (1, 2))
    damaged = next((newer / "state").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    before = saved_files(older)
    done = trainkit("run", str(tiny_recipe), f"checkpoint.resume={newer}")
    assert done.returncode == 1
    told = done.stdout + done.stderr
    assert f"is damaged: state/{damaged.name}" in told
    assert "use an older checkpoint" in told
    assert saved_files(older) == before
    assert trainkit("run", str(tiny_recipe), f"checkpoint.resume={older}").returncode == 0
