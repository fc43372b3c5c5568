"""Shell completion: what is offered, that real shells take it as one word, and that no name in it is ever executed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import Trainkit
from tests.loaded_scripts import script
from trainkit.cli.completion import INDEX, complete, quoted, split
from trainkit.runner.rundir.listing import list_runs

LIST = "trainkit run quickstart "


def offered(line: str) -> list[str]:
    words, *_ = split(line)
    return list(complete(words[1:-1], words[-1])[0])


def make_run(root: Path, name: str, run: str) -> None:
    (root / name / run).mkdir(parents=True)
    (root / name / run / "plan.json").write_text("{}")
    (root / name / run / "recipe.yaml").write_text("version: 1\n")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with runs, some of them of people who mean harm, and files that are hard to quote."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs", "gpt", "20260101-000000-abcdef")
    make_run(tmp_path / "runs", "gpt", "20260102-000000-123456")
    for number, name in enumerate(
        ("$(touch owned)", "`touch owned`", "; touch owned", "x\x1b[31my", "a\nb", "q\"uo'te")
    ):
        make_run(tmp_path / "runs", name, f"2026020{number}-000000-aaaaaa")
    make_run(tmp_path / "elsewhere", "other", "20260103-000000-bbbbbb")
    (tmp_path / "runs" / "unfinished" / "20260104-000000-cccccc").mkdir(parents=True)
    (tmp_path / "runs" / ".hidden" / "x").mkdir(parents=True)
    (tmp_path / "my file.yaml").touch()
    (tmp_path / 'it\'s $x "here".yaml').touch()
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "inner.yaml").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0)
    yield tmp_path
    (tmp_path / "closed").chmod(0o755)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("trainkit ", {"run", "plan", "status", "completion"}, {"job", "gpus", "--help", "--fsdp"}),
        ("trainkit -", {"--version", "--help"}, {"run"}),
        ("trainkit runs list --filter ", {"state=failed", "name="}, {"state="}),
        ("trainkit runs list --sort -l", {"-loss", "-left"}, {"loss"}),
        ("trainkit runs ", {"list", "show", "prune"}, {"run"}),
        ("trainkit env ", {"gpus", "facts"}, {"run"}),
        ("trainkit no-such ", set(), {"run"}),
        ("trainkit run --with ", {"strategy/fsdp", "devices/cpu"}, {"quickstart"}),
        ("trainkit run --with strategy/fsdp ", {"quickstart", "zero2"}, {"strategy/fsdp"}),
        ("trainkit plan ddp --on ", {"8xh100", "2x3090"}, {"ddp"}),
        ("trainkit plan ddp --on=8xh", {"--on=8xh100"}, set()),
        ("trainkit plan ddp --export ", {"accelerate", "deepspeed", "hf"}, {"quickstart"}),
        ("trainkit export gpt --dtype ", {"fp32", "bf16"}, {"gpt"}),
        ("trainkit cp ", {"quickstart", "strategy/fsdp", "machines/8xh100"}, set()),
        ("trainkit check quickstart ", {"ddp", "train."}, set()),
        ("trainkit explain quickstart train.", {"train.steps", "train.steps="}, set()),
        ("trainkit completion ", {"bash", "zsh", "fish"}, set()),
        ("trainkit import --kind ", {"hf", "torch"}, set()),
        (LIST, {"optimizer.", "train.", "name="}, {"optimizer.lr=", "quickstart", "--fsdp", "fsdp"}),
        (f"{LIST}optimizer.", {"optimizer.lr=", "optimizer.name="}, {"optimizer."}),
        (f"{LIST}efficiency.", {"efficiency.compile.", "efficiency.attention="}, {"efficiency.compile.mode="}),
        (f"{LIST}optimizer.name=", {"optimizer.name=adamw_torch", "optimizer.name=muon"}, set()),
        (f"{LIST}train.deterministic=", {"train.deterministic=true", "train.deterministic=false"}, set()),
        (f"{LIST}logging.report_to+=", {"logging.report_to+=wandb"}, set()),
        (f"{LIST}env", {"env.", "env=", "env_from="}, set()),
        (f"{LIST}-", {"--with", "--help-all"}, {"--fsdp"}),
        (f"{LIST}--", {"--with", "--help-all", "--fsdp", "--learning_rate"}, {"--learning-rate"}),
        (f"{LIST}--learning-", {"--learning-rate"}, {"--learning_rate"}),
        (f"{LIST}--lr_scheduler_type ", {"cosine", "linear"}, {"train."}),
        (f"{LIST}--lr-scheduler-type=c", {"--lr-scheduler-type=cosine"}, set()),
        (f"{LIST}--bf16 ", {"train."}, set()),
        (f"{LIST}-- ", set(), {"train."}),
        ("trainkit run tor", {"torchrun"}, set()),
        ("trainkit run train.py ", set(), {"quickstart", "train."}),
        ("trainkit run --nproc_per_node 2 torchrun ", set(), {"quickstart", "train."}),
        ("trainkit config --set optimizer.na", {"optimizer.name="}, set()),
        ("trainkit config --set optimizer.name=sg", {"optimizer.name=sgd"}, set()),
        ("trainkit run efficiency-table-small --variant ", {"bf16", "all"}, {"quickstart"}),
        ("trainkit bench efficiency-table-small --only bf16,che", {"bf16,checkpointing"}, set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_goes_on_with_what_its_command_takes(line: str, some: set[str], none: set[str]) -> None:
    found = set(offered(line))
    assert some <= found, found
    assert not none & found


@pytest.mark.unit
@pytest.mark.parametrize(
    ("line", "files"),
    [
        (f"{LIST}data.path=", "files"),
        (f"{LIST}output.root=", "folders"),
        (f"{LIST}--deepspeed ", "files"),
        (f"{LIST}optimizer.lr=", ""),
        ("trainkit run train.py ", "files"),
        (f"{LIST}-- ", "files"),
        ("trainkit logs --root ", "folders"),
        ("trainkit logs --rank ", ""),
    ],
)
def test_the_shell_itself_completes_paths_where_they_are_meant(line: str, files: str) -> None:
    words, *_ = split(line)
    assert complete(words[1:-1], words[-1])[1] == files


@pytest.mark.unit
def test_runs_are_offered_by_name_and_by_id_newest_first_and_none_that_a_terminal_would_obey(runs: Path) -> None:
    found = offered("trainkit status ")
    assert found.index("gpt") < found.index("123456") < found.index("abcdef")
    assert {"gpt", "$(touch owned)", "q\"uo'te"} <= {*found}
    assert not {"x\x1b[31my", "a\nb", "unfinished", ".hidden", "other"} & {*found}
    known = {run.layout.id for run in list_runs(str(runs / "runs"))}
    assert known == {*offered("trainkit status 2026")}
    assert offered("trainkit status abc") == ["abcdef"]
    assert offered("trainkit logs --root elsewhere 2026") == ["20260103-000000-bbbbbb"]
    assert offered("trainkit logs --root=elsewhere o") == ["other"]
    assert offered("trainkit logs --root closed ") == offered("trainkit logs --root nowhere ") == []
    assert "gpt" in offered("trainkit runs list ") and "20260101-000000-abcdef" not in offered("trainkit runs list ")


@pytest.mark.unit
def test_a_recipe_is_a_shipped_name_a_file_a_script_or_a_run_directory(runs: Path) -> None:
    found = {*offered("trainkit run ")}
    assert {"quickstart", "my file.yaml", "sub dir/", "train.py", "closed/", "runs/"} <= found
    assert "notes.txt" not in found
    assert "train.py" not in offered("trainkit submit ")
    assert offered("trainkit run closed/") == []
    assert offered("trainkit run runs/gpt/20260101") == ["runs/gpt/20260101-000000-abcdef"]
    assert offered("trainkit status runs/gpt/20260101") == ["runs/gpt/20260101-000000-abcdef"]


@pytest.mark.unit
def test_variants_of_the_files_that_a_recipe_extends_are_offered_and_no_description_moves_the_cursor(
    runs: Path,
) -> None:
    (runs / "base.yaml").write_text('version: 1\nvariants: {small: {description: "a\\e[31mb"}, "l\\e[1m": {}}\n')
    (runs / "own.yaml").write_text("extends: [base.yaml, own.yaml, strategy/ddp]\nvariants:\n  large: {train: {}}\n")
    found, _ = complete(["run", "own.yaml", "--variant"], "")
    assert found == {"large": "", "small": ""}
    (runs / "own.yaml").write_text("extends: {\n")
    assert offered("trainkit run own.yaml --variant ") == offered("trainkit run missing.yaml --variant ") == []


@pytest.mark.unit
@given(word=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_a_quoted_word_is_split_into_itself(word: str, quote: str) -> None:
    assert split(f"a {quote}{quoted(word, quote)}{quote}")[0] == ["a", word]


def test_bash_reads_quoted_words_as_they_were(runs: Path) -> None:
    words = [each.name for each in (*runs.iterdir(), *(runs / "runs").iterdir()) if each.name.isprintable()]
    line = " ".join(f"{quote}{quoted(word, quote)}{quote}" for word in words for quote in ("", "'", '"'))
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [word for word in words for _ in range(3)]
    assert not (runs / "owned").exists()


def test_the_index_is_that_of_the_commands_and_the_schema() -> None:
    assert Path(INDEX).read_text(encoding="utf-8") == script("renew").completion(), "renew it: scripts/renew"


def test_an_answer_loads_nothing_of_the_commands(runs: Path, clean_environment: dict[str, str]) -> None:
    code = (
        "import sys\nfrom trainkit.__main__ import main\n"
        "sys.argv = ['trainkit', '__complete', 'zsh', 'run', 'quickstart', 'optimizer.name=']\nmain()\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment,
        cwd=runs,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "optimizer.name=adamw_torch\t" in done.stdout
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"typer", "rich", "click", "pydantic", "yaml", "omegaconf"}
    assert {each for each in done.stderr.split() if each.startswith("trainkit.")} == {
        "trainkit.__main__",
        "trainkit.cli",
        "trainkit.cli.completion",
    }


def test_the_script_of_the_own_shell_is_printed_and_of_another_one_refused(trainkit: Trainkit) -> None:
    assert trainkit("completion", environ={"SHELL": "/usr/bin/zsh"}).stdout == trainkit("completion", "zsh").stdout
    done = trainkit("completion", "tcsh")
    assert (done.returncode, done.stdout) == (2, "")
    assert "next: name one of bash, zsh, fish" in done.stderr


ARGS = "args() { printf '[%s]' \"$@\"; echo END; }; PS1='REA''DY> '"
# How each shell starts without a user's files; what makes `args` print its words; and its prompt.
SHELLS: Mapping[str, tuple[str, str]] = {
    "bash": ("--norc", f"bind 'set enable-bracketed-paste off'; source script.bash; {ARGS}"),
    "zsh": (
        "-f",
        f"autoload -U compinit; compinit -u -D; bindkey -e; unset zle_bracketed_paste; . ./script.zsh; {ARGS}",
    ),
    "fish": (
        "--no-config",
        """source script.fish; function args; printf '[%s]' $argv; echo END; end; function fish_prompt
        echo -n 'REA''DY> '; end""".replace("\n        ", ";"),
    ),
}
# A line with TAB behind it -> its last word then.
TYPED: dict[str, str] = {
    "trainkit ru": "run",
    "~/bin/trainkit plan quickstart --on 1xt": "1xt4",
    f"{LIST}optimizer.n": "optimizer.name=",
    f"{LIST}optimizer.name=adaf": "optimizer.name=adafactor",
    f"{LIST}data.path=tra": "data.path=train.py",
    "trainkit run 'my": "my file.yaml",
    "trainkit run sub\\ dir/": "sub dir/inner.yaml",
    "trainkit run it": 'it\'s $x "here".yaml',
    "trainkit status 20260101": "20260101-000000-abcdef",
    "trainkit status '$(": "$(touch owned)",
    'trainkit status q\\"': "q\"uo'te",
}
# Where the script quotes itself: bash inserts what it is given as it is.
OF_BASH: dict[str, str] = {
    f"{LIST}--lr_scheduler_type=li": "--lr_scheduler_type=linear",
    f"{LIST}-- tra": "train.py",
    f"{LIST}data.path='my": "data.path=my file.yaml",
    'trainkit run "my': "my file.yaml",
    "trainkit run my\\ f": "my file.yaml",
    'trainkit run "it': 'it\'s $x "here".yaml',
    "trainkit run closed/": "closed/",
    "trainkit status \\;": "; touch owned",
}


@pytest.fixture
def shell(request: pytest.FixtureRequest, runs: Path, clean_environment: dict[str, str]) -> Iterator[Any]:
    """A shell in a terminal of its own, with the completion loaded."""
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed; scripts/cluster/packages installs it")
    (runs / "bin").mkdir()
    (runs / "bin" / "trainkit").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m trainkit "$@"\n')
    (runs / "bin" / "trainkit").chmod(0o755)
    environ = {**clean_environment, "HOME": str(runs), "TERM": "xterm", "LC_ALL": "C.UTF-8", "HISTFILE": "/dev/null"}
    environ["PATH"] = f"{runs / 'bin'}{os.pathsep}{environ['PATH']}"
    told = subprocess.run(
        [runs / "bin" / "trainkit", "completion", name], env=environ, capture_output=True, timeout=60, check=True
    )
    (runs / f"script.{name}").write_bytes(told.stdout)
    argument, start = SHELLS[name]
    child = pexpect.spawn(
        name, [argument, "-i"], env=environ, cwd=str(runs), encoding="utf-8", dimensions=(50, 200), timeout=60
    )
    child.sendline(start)
    child.expect_exact("READY> ")
    yield child
    child.close(force=True)


@pytest.mark.parametrize("shell", SHELLS, indirect=True)
def test_a_tab_completes_what_is_typed_into_one_word_and_executes_none(shell: Any, runs: Path) -> None:
    for line, word in (TYPED | OF_BASH if shell.command.endswith("bash") else TYPED).items():
        shell.send(f"{line}\t\x01args \x05\r")  # Ctrl-A, Ctrl-E: to the begin, to the end
        shell.expect_exact("END\r\n")
        told = shell.before.rpartition("\n")[2]
        assert f"[{word}]" in told, (line, told)
        shell.expect_exact("READY> ")
    assert not (runs / "owned").exists()
