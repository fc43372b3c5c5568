"""Shell text around a command: its words are those that the shell makes, and the rest is named or refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.convert.reading import comments, imported, read, settings
from trainkit.convert.shell import read_shell
from trainkit.errors import UsageError
from trainkit.recipe.schema.launching import program_argv

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
# Each with the words that a POSIX shell hands to the program.
TEXTS: dict[str, list[str]] = {
    "python train.py --a 1": ["python", "train.py", "--a", "1"],
    "\n# a comment\npython train.py \\\n  --a 'x  y' \\\n  --b=\"$HERE\"/z\n": [
        "python", "train.py", "--a", "x  y", "--b=value of here/z",
    ],
    "python train.py \"\" '' a\\ b \"a\\\"b\" '$HERE' \\$HERE": [
        "python", "train.py", "", "", "a b", 'a"b', "$HERE", "$HERE",
    ],
    "python train.py $WORDS \"$WORDS\" x$WORDS": ["python", "train.py", "--a", "1", "--a 1", "x--a", "1"],
    "python train.py ${MISSING:-7} ${HERE:-7} cost=5$": ["python", "train.py", "7", "value", "of", "here", "cost=5$"],
    "CUDA_VISIBLE_DEVICES=0 python train.py --x '{\"a\": [1, 2]}'": [
        "CUDA_VISIBLE_DEVICES=0", "python", "train.py", "--x", '{"a": [1, 2]}',
    ],
}  # fmt: skip
BEFORE = "HERE='value of here'\nWORDS='--a 1'\n"


@pytest.mark.cli
@pytest.mark.parametrize("text", TEXTS)
def test_words_are_those_that_the_shell_makes(text: str) -> None:
    words, remarks = read_shell(BEFORE + text)
    assert words == TEXTS[text]
    assert remarks == []
    shell = f"unset MISSING\n{BEFORE}python() {{ printf '%s\\n' python \"$@\"; }}\n{text}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines() == [word for word in TEXTS[text] if not word.startswith("CUDA_")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nohup python train.py > log.txt 2>&1 &", "`>log.txt` is not taken over"),
        ("python train.py 2>&1 | tee log", "`| tee log` is not taken over"),
        ("python train.py &", "`&` is not taken over"),
        ("#SBATCH --nodes=2\nsrun torchrun --nproc_per_node 2 train.py", "#SBATCH lines are not read"),
        ("source venv/bin/activate && python train.py", "`source venv/bin/activate` before the command"),
        ("python train.py && echo done", "`echo done` after the command"),
        ("torchrun --nnodes 2 --node_rank $SLURM_NODEID --master_addr h train.py", "$SLURM_NODEID is not taken over"),
        ("srun -N 2 torchrun --nproc_per_node 2 train.py", "`srun -N 2` in front is not taken over"),
        ("time nice -n 5 python train.py", "`nice -n 5` in front is not taken over"),
    ],
)  # fmt: skip
def test_what_stands_around_the_command_is_named(text: str, said: str) -> None:
    made = imported("go.sh", {"go.sh": text})
    assert said in comments(made)
    assert read(made).recipe.program.script == "train.py"


def test_a_script_hands_its_exported_variables_to_the_recipe() -> None:
    words = "run_glue.py --do_train --task_name $TASK --learning_rate $LR"
    text = f"export TASK=mrpc NCCL_DEBUG=INFO\nLR=1e-4\npython {words}\n"
    found = settings(imported("go.sh", {"go.sh": text}))
    assert (found["env.TASK"], found["env.NCCL_DEBUG"], found["optimizer.lr"]) == ("mrpc", "INFO", 1e-4)
    assert found["program.args.task_name"] == "mrpc"
    assert "env.LR" not in found


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("python train.py $OUT", "$OUT has a value only where the shell runs"),
        ("python train.py $(date)", "$( is known only where the shell runs"),
        ("python train.py `date`", "runs another command"),
        ("python train.py *.json", "names of files that only the shell knows"),
        ("python train.py --out ~/x", "stands for your home folder"),
        ("cd x && python train.py", "changes the folder that paths start from"),
        ("for x in 1 2; do python train.py; done", "more than a plain command"),
        ("python a.py; python b.py", "it holds 2 commands (python, python), not one"),
        ("# nothing", "it holds 0 commands, not one"),
        ("python train.py 'open", "a quote has no end"),
    ],
)
def test_what_only_the_shell_knows_is_an_error_with_a_next_step(text: str, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        imported("go.sh", {"go.sh": text})
    (found,) = caught.value.diagnostics
    assert what in found.what
    assert "go.sh: " in found.what
    assert found.hint


@pytest.mark.cli
def test_a_line_in_one_word_and_a_script_that_sh_runs_are_read_alike(trainkit: Trainkit) -> None:
    done = trainkit("import", "python train.py --config a.json > log")
    assert done.returncode == 0, done.stderr
    assert "config: a.json" in done.stdout
    assert "`>log` is not taken over" in done.stdout
    missing = trainkit("import", "sh", "gone.sh")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "there is no file gone.sh" in missing.stderr


def test_a_script_gets_its_arguments() -> None:
    files = {"go.sh": 'torchrun --nproc_per_node=$1 train.py --a "$@" b$@\n'}
    found = read(imported("go.sh", files, program=("2", "x y"))).recipe
    assert found.nodes.processes_per_node == 2
    assert program_argv(found.program.args) == ["--a", "2", "x y", "b2", "x y"]
    with pytest.raises(UsageError, match=r"\$1 is argument 1 of the script, and it has 0"):
        imported("go.sh", files)
    bare = imported("go.sh", {"go.sh": 'python train.py "$@"'})
    assert program_argv(read(bare).recipe.program.args) == []
    assert "$@ is empty here" in comments(bare)


def test_words_that_the_callers_shell_has_made_are_left_alone() -> None:
    text = imported("torchrun train.py '$HOME' '*' '~' '>' '&'")
    assert program_argv(read(text).recipe.program.args) == ["$HOME", "*", "~", ">", "&"]
