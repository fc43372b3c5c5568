"""Shell text around a command, in scripts and notebooks: words are those that the shell makes, the rest is named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.convert.reading import HERE, argv, checked, comments, context, imported, read, refusal, script, settings
from trainkit.convert.command import starts_program
from trainkit.convert.importing import ShellOptions
from trainkit.convert.shell import read_shell
from trainkit.convert.shell.evaluating import Script
from trainkit.errors import RecipeError
from trainkit.recipe.schema.launching import program_argv

pytestmark = pytest.mark.cli  # Bash reads the scripts
Trainkit = Callable[..., subprocess.CompletedProcess[str]]
PIECES = [
    "a", "--x", "b=", "/", ".", ",", "1", "%", "^", "+", "@", ":", "é", "\\$", '\\"', "\\'", "$A", "${B}", "$UNSET",
    "$@", "$#", "$1", "${UNSET:-z}", "${A:-z}", "${UNSET-}", "${B%.*}", "${B#*.}", "${B##*/}", "${#A}", "${E[@]}",
    "${E[1]}", "${#E[@]}", "$((N+1))", "$((N*2-1))", "$(echo hi $A)", "$(basename $B)",
]  # fmt: skip
QUOTED = st.lists(st.sampled_from(["a", "  ", "$A", "${B}", "$UNSET", "'", '\\"', "\\$", "$((N+1))", "*", "é", "$1"]))
MADE = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        QUOTED.map(lambda pieces: f'"{"".join(pieces)}"'),
        st.text('a $`"\\*#é{}()=~;|&<>!\t-', max_size=4).map(lambda text: f"'{text}'"),
    ),
    min_size=1,
    max_size=4,
).map("".join)


@given(st.lists(MADE, max_size=4))
def test_words_of_any_pieces_are_those_that_bash_makes(words: list[str]) -> None:
    text = f"A='a b'; B=x/y.tar.gz; N=3; E=(one 'two three' four)\npython train.py {' '.join(words)}"
    found = read_shell(Script(text, starts_program, "go.sh", ("p1", "p 2")))
    assert not found.opened.parts
    read = [re.sub(r"\$\{oc\.env:\w+(?:,([^}]*))?\}", lambda match: match[1] or "", word) for word in found.words]
    body = f"set -- p1 'p 2'\npython() {{ printf '%s\\0' python \"$@\"; }}\n{text}"
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
    done = subprocess.run(["bash", "-c", body], capture_output=True, timeout=20, check=True, env=environ)
    # a variable that is not set is no word to Bash, and an empty one here
    assert [word for word in read if word] == [word for word in done.stdout.decode().split("\0") if word]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nohup python train.py > log.txt 2>&1 &", "`> log.txt` is not taken over"),
        ("python train.py 2>&1 | tee log", "`| tee log` is not taken over"),
        ("python train.py &", "`&` is not taken over"),
        ("set -e\n#SBATCH --nodes=2\ntorchrun --nproc_per_node 2 train.py", "#SBATCH lines below the first command"),
        ("source venv/bin/activate && python train.py", "`source venv/bin/activate` before the command"),
        ("python train.py && rm x", "`rm x` after the command"),
        ("torchrun --nnodes 2 --node_rank $SLURM_NODEID --master_addr h train.py", "$SLURM_NODEID is not taken over"),
        ("srun -N 2 torchrun --nproc_per_node 2 train.py", "`srun -N 2` in front is not taken over"),
        ("time nice -n 5 python train.py", "`nice -n 5` in front is not taken over"),
        ("python prepare.py\ntorchrun --nproc_per_node 2 train.py\npython evaluate.py", "`python prepare.py` (line 1)"),
        ("if grep -q x log; then rm log; fi\ntorchrun train.py", "`rm log` before the command"),
        ("STAMP=$(date +%s)\npython train.py --name x-$STAMP", "STAMP is what `$(date +%s)` comes to"),
    ],
)  # fmt: skip
def test_what_is_around_the_command_is_named(text: str, said: str) -> None:
    made = script(text)
    assert said in comments(made)
    assert read(made, environ={"STAMP": "7"}).recipe.program.script == "train.py"


def test_a_script_hands_its_exported_variables_to_the_recipe() -> None:
    words = "run_glue.py --do_train --task_name $TASK --learning_rate $LR"
    found = settings(script(f"export TASK=mrpc NCCL_DEBUG=INFO\nLR=1e-4\npython {words}\n"))
    assert (found["env.TASK"], found["env.NCCL_DEBUG"], found["optimizer.lr"]) == ("mrpc", "INFO", 1e-4)
    assert found["program.args.task_name"] == "mrpc"
    assert "env.LR" not in found


def test_a_variable_that_nothing_sets_is_read_from_the_environment_when_the_recipe_is() -> None:
    made = script(
        "torchrun --nproc_per_node=${GPUS:-8} --nnodes $NODES --master_addr $HOST train.py "
        "--lr ${LR:-1e-4} --data $DATA/x ~/y"
    )
    environ = {"NODES": "2", "HOST": "h", "HOME": "/home/u"}
    nodes = read(made, environ={**environ, "GPUS": "4"}).recipe.nodes
    assert (nodes.processes_per_node, nodes.count, nodes.rendezvous) == (4, 2, "h:29500")
    assert argv(made, {**environ, "DATA": "/d"}) == ["--lr", "1e-4", "--data", "/d/x", "/home/u/y"]
    assert argv(made, environ) == ["--lr", "1e-4", "--data", "/x", "/home/u/y"]  # empty, as in every shell
    with pytest.raises(RecipeError, match="reads the environment variable NODES, which is not set"):
        read(made, environ={"HOST": "h", "HOME": "/"})


def test_what_the_caller_sets_counts_and_an_argument_without_a_value_is_asked_for_by_name() -> None:
    text = 'MODEL=$1\nif [ -z "$OUT" ]; then OUT=runs; fi\npython train.py --model $MODEL --out $OUT ${2:-4}\n'
    assert argv(script(text), {"MODEL": "m"}) == ["--model", "m", "--out", "runs", "4"]
    given_ = script(text, program=("big",), lines=ShellOptions({"OUT": "here"}))
    assert argv(given_) == ["--model", "big", "--out", "here", "4"]


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("G=${GPUS:-8}\npython train.py --acc $((64 / G)) --x $((G * 2))", ["--acc", "8", "--x", "16"],
         "GPUS is taken as it is here: not set, and so empty"),
        ("python train.py --split train[:100] --of [name]", ["--split", "train[:100]", "--of", "[name]"],
         "train[:100] is taken as it is written"),
        ('python train.py "$@"', [], "$@ is empty here"),
    ],
)  # fmt: skip
def test_what_is_taken_as_it_is_here_is_said(text: str, words: list[str], said: str) -> None:
    made = script(text)
    assert argv(made) == words
    assert said in comments(made)


def test_a_settings_file_that_the_environment_may_replace_is_read_as_it_is_by_default() -> None:
    files = {"a.yaml": "distributed_type: MULTI_GPU\nnum_processes: 4\n"}
    made = script("accelerate launch --config_file ${CONFIG:-a.yaml} train.py", files)
    assert settings(made)["nodes.processes_per_node"] == 4
    assert "a.yaml is read here; import again where $CONFIG names another file." in comments(made)


def test_gpus_that_a_command_counts_are_all_gpus_and_no_word_elsewhere() -> None:
    for counted in ("$(nvidia-smi -L | wc -l)", "$(nvidia-smi --list-gpus | wc -l)"):
        assert settings(script(f"torchrun --nproc_per_node={counted} train.py"))["devices.select"] == "all"
    text = "N=$(nvidia-smi -L | wc -l)\ntorchrun --nproc_per_node $N train.py --name run_$N"
    assert read(script(text, lines=ShellOptions({"N": "4"}))).recipe.program.args == {"name": "run_4"}
    assert "program.args is made of $(nvidia-smi -L | wc -l)" in refusal("go.sh", {"go.sh": text}).what
    found = refusal("go.sh", {"go.sh": f"{text} --acc $((8 / N))"})
    assert "which only a running shell knows" in found.what
    assert found.hint == "give it: --set N=VALUE"


def test_a_folder_that_the_script_goes_to_is_where_its_paths_start() -> None:
    files = {"sub/dir/run_glue.py": "import torch"}
    made = script("cd sub/$(echo dir)\ntorchrun --nproc_per_node 2 run_glue.py", files)
    program = read(made, files).recipe.program
    assert (program.folder, program.script) == ("sub/dir", "run_glue.py")
    assert "folder: /data/p\n" in script("cd /data/p\npython train.py")


def test_paths_of_settings_are_seen_from_where_trainkit_is_called() -> None:
    files = {
        "ds.json": {"zero_optimization": {"stage": 2}},
        "sub/tr.py": "from transformers import HfArgumentParser, TrainingArguments, Trainer\nTrainer()",
    }
    text = "cd sub\ntorchrun --nproc_per_node 2 tr.py --output_dir out --deepspeed ../ds.json"
    found = read(script(text, files, kind="hf"), files).recipe
    assert (found.output.root, found.program.folder) == ("sub/out", "sub")
    assert getattr(found.strategy, "config", "") == "/here/ds.json"


def test_launches_that_differ_in_arguments_alone_become_variants() -> None:
    launch = "NAME=x_$lr torchrun --nproc_per_node 2 train.py --lr $lr --s $s"
    made = script(f"for lr in 1e-4 3e-4; do for s in 1 2; do {launch}; done; done")
    found = read(made, variant="lr-3e-4_s-1").recipe
    assert (found.program.args, found.env) == ({"lr": "3e-4", "s": "1"}, {"NAME": "x_3e-4"})
    assert read(made).recipe.program.args == {"lr": "1e-4", "s": "1"}
    assert "It starts the program 4 times" in comments(made)
    positional = script("python train.py a --x\npython train.py b\npython train.py a --x")
    assert read(positional, variant="args-b").recipe.program.args == ["b"]
    with_flag = script("python train.py --n 1 --x\npython train.py --n 2")
    assert program_argv(read(with_flag, variant="n-2").recipe.program.args) == ["--n", "2"]


ENDLESS = "it does not end, or comes to more than is read"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("python train.py $(cat x)", "program.args is made of $(cat x), which only a running shell knows (line 1)"),
        ("X=`cat x`1\npython train.py a`cat y`", "program.args is made of $(cat y)"),
        ("python a.py; python b.py", "it starts 2 programs (line 1: python a.py; line 1: python b.py)"),
        ("torchrun --nproc_per_node 1 train.py\ntorchrun --nproc_per_node 2 train.py", "it starts 2 programs (line 1"),
        ("cd sub && python train.py; cd .. && python train.py", "it starts 2 programs (line 1"),
        ("for g in 0 1; do CUDA_VISIBLE_DEVICES=$g python train.py --n $g; done", "it starts 2 programs (line 1"),
        ("for n in {1..101}; do python train.py --n $n; done", "it starts 101 programs (line 1"),
        ("python $SCRIPT --x", "it starts no program that can be imported"),
        ("for x in $LIST; do python train.py $x; done", "it starts no program that can be imported"),
        ("cd other\npython train.py", "there is no folder /here/other here"),
        ("f() { f | f & }; f; python train.py", "it calls itself, or is nested too deeply"),
        ("if grep -q A100 <(nvidia-smi); then B=8; else B=4; fi\npython train.py $B", "depends on"),
        ("python train.py & wait $!\n[ $? = 0 ] && python b.py", "it starts 2 programs"),
        ("torchrun a.py || python b.py", "what it starts depends on how `torchrun a.py` ends"),
        ("accelerate launch --config_file $FILE train.py", "the file is ${oc.env:FILE}, and nothing sets FILE"),
        ("python -c 'print(1)'", "it starts no program"),
        ("# nothing", "it starts no program that can be imported"),
        ("if x; then\n python train.py", "line 1: cannot be read: `if` statement must end with `fi`"),
        ("python train.py " + "\0" * 10**6, "it has a NUL byte"),
        ("python train.py " + "${" * 10**6, "it has more than 262,144 characters"),
        ("# " + "x" * 2**22, "go.sh has more than 4,194,304 bytes"),
        ("python train.py 'open", "line 1: cannot be read: reached EOF without closing quote"),
        ("torchrun --master_port=<your port> train.py", "<your port> is to be replaced"),
        ("torchrun train.py --a <path of x>  --b <path of y>", "<path of x> is to be replaced"),
        ("python train.py --model <模型>", "<模型> is to be replaced"),
        ("torchrun --nproc_per_node={num_gpus} train.py", "{num_gpus} is to be replaced"),
        ("python tools\\train.py --a 1", "tools\\train.py is a path as Windows writes it"),
        ("python train.py --dir out/$API_TOKEN", "it is a secret by its name"),
        ("python train.py \\\n --a 1\n --b 2", "line 3: it begins with --b: is a backslash missing at the end"),
        # a few characters that stand for more than any command
        ("python train.py {1..999999999}", ENDLESS),
        ("python train.py $(seq 1 999999999)", ENDLESS),
        ("python train.py $(awk 'BEGIN { while (1) {} }')", ENDLESS),
        ("f0() { :; }\n" + "".join(f"f{n}() {{ f{n - 1}; f{n - 1}; }}\n" for n in range(1, 40)) + "f39; python x.py",
         ENDLESS),
        ("X=0123456789\n" + "X=$X$X\n" * 40 + "python train.py $X", ENDLESS),
    ],
)  # fmt: skip
def test_what_only_the_shell_knows_is_an_error_with_a_next_step(text: str, what: str) -> None:
    assert what in refusal("go.sh", {"go.sh": text, "sub/train.py": ""}).what


def test_a_kind_of_device_as_default_of_the_number_of_processes_is_one_for_each_gpu() -> None:
    text = script("torchrun --nproc_per_node=${PROCESSES:-gpu} train.py")
    assert (read(text).recipe.nodes.processes_per_node, read(text).recipe.devices.type) == ("auto", "cuda")
    assert read(text, environ={"PROCESSES": "3"}).recipe.nodes.processes_per_node == 3


def test_what_sounds_like_a_secret_and_is_none_may_be_read_from_the_environment() -> None:
    files = {"go.sh": "python train.py --dir out/$API_TOKEN --class $CLASS_TOKEN"}
    here = replace(context(files), public=frozenset({"API_TOKEN"}))
    text = checked(["go.sh"], here, f"{HERE}/recipe.yaml")
    environ = {"API_TOKEN": "3", "CLASS_TOKEN": "dog"}
    assert read(text, environ=environ).recipe.program.public == ["API_TOKEN"]
    assert argv(text, environ) == ["--dir", "out/3", "--class", "dog"]


def test_one_of_several_commands_is_chosen_by_its_line_or_turn() -> None:
    text = "torchrun a.py\nfor x in 1 2; do torchrun b.py $x; done"
    assert "script: a.py" in script(text, lines=ShellOptions(number=1))
    assert read(script(text, lines=ShellOptions({"x": "2"}, 2)), {"b.py": ""}).recipe.program.args == ["2"]


def test_a_line_in_one_word_and_a_script_that_sh_runs_are_read_alike(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("import", "python train.py --config a.json > log")
    assert done.returncode == 0, done.stderr
    assert "config: a.json" in done.stdout
    assert "`> log` is not taken over" in done.stdout
    behind = trainkit("import", "torchrun train.py", "--output", "made.yaml", "--", "--lr", "3")
    assert behind.returncode == 0, behind.stderr
    assert "lr: 3" in (tmp_path / "made.yaml").read_text()
    assert "unexpected argument 'more'" in trainkit("import", "torchrun train.py", "more").stderr
    (tmp_path / "sub").mkdir()
    assert "folder: sub" in trainkit("import", "cd sub\ntorchrun train.py --config a.yaml").stdout
    missing = trainkit("import", "sh", "gone.sh")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "there is no file gone.sh" in missing.stderr
    (tmp_path / "go.sh").write_text("python train.py --n $N\npython other.py\n")
    chosen = trainkit("import", "--set", "N=5", "--line", "1", "go.sh")
    assert "n: 5" in chosen.stdout
    assert trainkit("import", "--set", "N", "go.sh").returncode == 2


def test_bytes_that_are_no_text_are_an_error_in_the_command_and_none_beside_it(
    trainkit: Trainkit, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "beside.sh").write_bytes(b"# caf\xe9\npython train.py --kind torch\n")
    (tmp_path / "within.sh").write_bytes(b"python train.py --place caf\xe9\n")
    assert trainkit("import", "beside.sh", "-o", "r.yaml").returncode == 0
    for words in (["within.sh"], [os.fsdecode(b"python train.py --place caf\xe9")]):
        done = trainkit("import", *words)
        assert done.returncode == 2, done.stderr
        assert "is not UTF-8 text" in done.stderr and "next: write it in UTF-8" in done.stderr


def test_a_script_gets_its_arguments() -> None:
    made = script('torchrun --nproc_per_node=$1 train.py --a "$@" b$@\n', program=("2", "x y"))
    assert settings(made)["nodes.processes_per_node"] == 2
    assert argv(made) == ["--a", "2", "x y", "b2", "x", "y"]


def test_words_that_the_callers_shell_has_made_are_left_alone() -> None:
    assert argv(imported("torchrun train.py '$HOME' '*' '~' '>' '&'")) == ["$HOME", "*", "~", ">", "&"]


@pytest.mark.parametrize("missing", ["shfmt", "bash"])
def test_a_machine_without_what_reads_scripts_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == missing else real(name, **more))
    found = refusal("go.sh", {"go.sh": "python train.py $X"})
    assert {"shfmt": "shfmt parses scripts", "bash": "Bash reads scripts, and there is none"}[missing] in found.what
    assert "install" in found.hint


def test_a_variable_that_a_script_takes_away_is_named() -> None:
    here = replace(context({"go.sh": "unset NCCL_DEBUG GONE\npython train.py"}), environ={"NCCL_DEBUG": "INFO"})
    text = checked(["go.sh"], here, f"{HERE}/recipe.yaml")
    assert "`unset NCCL_DEBUG` is not taken over: unset it before the run." in comments(text)
    assert "GONE" not in comments(text)


def notebook(*cells: str) -> dict[str, str]:
    """A notebook with these cells of code, and one of prose that is no code."""
    prose = {"cell_type": "markdown", "source": ["!torchrun not_this.py\n"]}
    code: list[Any] = [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in cells]
    return {"nb.ipynb": json.dumps({"cells": [prose, *code], "nbformat": 4})}


@pytest.mark.parametrize(
    "cells",
    [
        ("!pip install x\n", "import os\n!torchrun --nproc_per_node 2 train.py \\\n    --lr 1e-3\nprint(1)"),
        ("%env LR=1e-3\n%cd .", "%%bash\ntorchrun --nproc_per_node 2 train.py --lr $LR\n"),
    ],
)
def test_the_command_of_a_shell_line_or_cell_is_imported(cells: tuple[str, ...]) -> None:
    text = imported("nb.ipynb", notebook(*cells))
    assert settings(text)["nodes.processes_per_node"] == 2
    assert argv(text) == ["--lr", "1e-3"]


def test_variables_and_folders_of_python_carry_over_and_those_of_a_shell_line_do_not() -> None:
    files = {"sub/train.py": ""} | notebook(
        "import os\nos.environ['LR'] = '1e-3'\nos.environ[\"NAME\"] = f'{x}-1'\nos.chdir('sub')",
        "!export SEED=7\n!cd ..\n%set_env OUT=a b",
        "!torchrun --nproc_per_node 2 train.py --lr $LR --seed x$SEED --out $OUT --name $NAME",
    )
    text = imported("nb.ipynb", files)
    found = read(text, files, environ={"NAME": "n"}).recipe
    assert program_argv(found.program.args) == ["--lr", "1e-3", "--seed", "x", "--out", "a", "b", "--name", "n"]
    assert (found.program.folder, found.env["OUT"]) == ("sub", "a b")
    assert "NAME is what" in comments(text)


TO_SCRIPT = "nbconvert --to script nb.ipynb"


@pytest.mark.parametrize(
    ("content", "what", "hint"),
    [
        (notebook("notebook_launcher(train, num_processes=2)"), "processes inside the notebook", TO_SCRIPT),
        (notebook("trainer = Trainer(model=m)\ntrainer.train()"), "in the notebook's own cells", TO_SCRIPT),
        (notebook("print(1)"), "no cell starts a training", "name the script"),
        ({"nb.ipynb": "{"}, "nb.ipynb is not a Jupyter notebook", ""),
        ({"nb.ipynb": "[]"}, "nb.ipynb is not a Jupyter notebook", ""),
        ({"nb.ipynb": '{"cells": 3}'}, "nb.ipynb is not a Jupyter notebook", ""),
    ],
)
def test_a_notebook_without_a_command_is_refused_with_what_to_do(content: dict[str, str], what: str, hint: str) -> None:
    found = refusal("nb.ipynb", content)
    assert what in found.what
    assert hint in found.hint


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (
            "notebook_launcher(train, (3, lr), num_processes=2)",
            'trainkit.run_function(train, "program.kind=accelerate", args=(3, lr), ranks=2).wait()',
        ),
        (
            "accelerate.notebook_launcher(train, num_processes=N, mixed_precision='bf16')",
            'trainkit.run_function(train, "program.kind=accelerate", "precision.dtype=bf16", ranks=N).wait()',
        ),
        ("notebook_launcher(train, ())", "leaves num_processes to the machine"),
        ("notebook_launcher(train, (), num_nodes=2)", "`num_nodes` is not read"),
        ("notebook_launcher(train)\nnotebook_launcher(test)", "it calls notebook_launcher 2 times"),
        ("notebook_launcher(train, (), 2", "no Python that can be read"),
    ],
)
def test_a_launch_inside_a_notebook_is_answered_with_the_call_that_takes_its_place(call: str, answer: str) -> None:
    found = refusal("nb.ipynb", notebook("%matplotlib inline\ndef train(*args): ...", call))
    assert answer in (found.hint if answer.startswith("trainkit") else found.why)
