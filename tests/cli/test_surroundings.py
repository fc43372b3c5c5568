"""What a command line cannot choose: the locale, closed and full streams, folders that are gone or shut, odd names."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
ASCII = (
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
)


@pytest.fixture
def shell(tmp_path: Path, clean_environment: dict[str, str]) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Run a line of shell in which `$T` is trainkit."""

    def call(line: str) -> subprocess.CompletedProcess[str]:
        environ = {**clean_environment, "T": f"{sys.executable} -m trainkit"}
        return subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
        )

    return call


@pytest.mark.torch
@pytest.mark.parametrize("environ", ASCII, ids=["streams", "locale"])
@pytest.mark.parametrize(
    "words", [["plan", "tiny.yaml"], ["--help"], ["run", "--help"], ["ls"], ["check", "odd.yaml"]], ids=" ".join
)
def test_a_locale_without_our_characters_gets_plain_ones(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path, environ: dict[str, str], words: list[str]
) -> None:
    (tmp_path / "odd.yaml").write_text("name: übung\nextends: [./odd.yaml]\n", encoding="utf-8")
    done = trainkit(*words, environ=environ)
    assert done.returncode == (2 if "odd.yaml" in words else 0), done.stderr
    assert (done.stdout + done.stderr).isascii()
    if words[0] == "plan":
        assert "4 = 2 x 2 x 1" in done.stdout


def test_what_programs_read_is_exact_in_every_locale(
    trainkit: Trainkit, tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    program = "import os, sys\nprint(ascii(sys.argv[1:]), os.path.isfile(os.environ['TRAINKIT_RECIPE']))\n"
    (tmp_path / "show.py").write_text(program)
    recipe = "name: odd\noutput: {root: ergebnisse-ü}\nprogram: {kind: torch, script: show.py, args: [üé]}\n"
    (tmp_path / "odd.yaml").write_text(recipe, encoding="utf-8")
    plan = json.loads(trainkit("plan", "odd.yaml", "--json", environ=ASCII[0]).stdout)
    assert plan["output_root"] == "ergebnisse-ü"
    script = trainkit("plan", "odd.yaml", "--shell", environ=ASCII[0]).stdout
    done = subprocess.run(
        ["sh"],
        input=script,
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == f"{['üé']!a} True"


def test_a_full_disk_under_the_output_is_the_machines_fault(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tiny_recipe: Path, tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    for line in ("$T plan tiny.yaml --json > /dev/full", "$T ls zero1 > /dev/full"):
        done = shell(line)
        assert done.returncode == 4
        assert "No space left" in done.stderr
    assert not list(tmp_path.glob("trainkit-bug-*"))


@pytest.mark.parametrize(
    "line",
    [
        "config --defaults --output new.yaml",
        "plan tiny.yaml --export accelerate --output new.yaml",
        "import -o new.yaml torchrun a.py",
    ],
)
def test_a_file_that_the_system_refuses_to_write_is_the_machines_fault(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tiny_recipe: Path, tmp_path: Path, line: str
) -> None:
    (tmp_path / "a.py").touch()
    before = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    done = shell(f"ulimit -f 0; $T {line}")  # no file may have any bytes
    assert done.returncode == 4, done.stderr
    assert "cannot be written: File too large" in " ".join(done.stderr.split())
    assert "next: raise the size of files (ulimit -f)" in done.stderr
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.torch
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$T ls >&-", 0),
        ("$T check nowhere.yaml 2>&-", 2),
        ("$T plan tiny.yaml >&- 2>&-", 0),
        ("echo 'import sys; sys.exit(7)' > seven.py; $T run seven.py <&- >&- 2>&-", 7),
    ],
)
def test_closed_streams_change_no_exit_code(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tiny_recipe: Path, tmp_path: Path, line: str, code: int
) -> None:
    assert shell(line).returncode == code
    assert not list(tmp_path.glob("trainkit-bug-*"))


def test_a_working_folder_that_is_gone_is_said(shell: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    done = shell("mkdir gone && cd gone && rmdir ../gone && $T plan quickstart")
    assert done.returncode == 4
    assert "working folder" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["", "x" * 5000, "a\nb", "nowhere/"], ids=["empty", "long", "lines", "folder"])
def test_odd_names_of_recipes_are_usage_errors(trainkit: Trainkit, tiny_recipe: Path, word: str) -> None:
    done = trainkit("plan", word)
    assert done.returncode == 2
    assert "next:" in done.stderr


@pytest.mark.parametrize(
    "line", ["config --defaults --output $LONG.yaml", "plan quickstart --on $LONG", "cp quickstart $LONG"]
)
def test_a_path_that_the_system_refuses_is_a_usage_error(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, line: str
) -> None:
    done = shell(f"LONG=$(printf '%0300d' 0); $T {line}")
    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert "next: name another path" in done.stderr
    assert not list(tmp_path.glob("trainkit-bug-*"))


@pytest.mark.parametrize("number", [errno.EISDIR, errno.ENOTDIR])
def test_what_is_put_in_the_place_of_a_file_or_a_folder_is_no_bug(
    trainkit: Trainkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def refused(_: object) -> int:
        raise OSError(number, os.strerror(number), "runs/x/status.json")

    monkeypatch.setattr("trainkit.cli.app.invoke", refused)
    done = trainkit("status", "x")
    assert done.returncode == 2
    assert f"the system refuses: {os.strerror(number)}: runs/x/status.json" in done.stderr
    assert not list(tmp_path.glob("trainkit-bug-*"))


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="the superuser may use every folder")
def test_a_run_root_behind_a_shut_folder_is_a_problem_to_the_doctor(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tiny_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    without = "" if os.geteuid() else "setpriv --bounding-set=-dac_override,-dac_read_search"
    done = shell(f"{without} $T doctor tiny.yaml output.root=shut/in")
    (tmp_path / "shut").chmod(0o700)
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"{tmp_path}/shut cannot be written to" in " ".join(done.stdout.split())


@pytest.mark.parametrize("command", ["doctor", "run"])
def test_a_folder_for_offloading_that_cannot_be_used_is_found_before_anything_is_built(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tiny_recipe: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "file").touch()
    offload = "strategy.offload_optimizer=nvme strategy.nvme_path=file/swap"
    done = shell(f"$T {command} tiny.yaml strategy.kind=zero3 {offload} nodes.processes_per_node=2")
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"{tmp_path}/file cannot be written to" in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("line", ["--help", "gpus", "gpus --watch", "plan quickstart"])
def test_a_reader_that_is_gone_ends_every_command_alike(
    shell: Callable[[str], subprocess.CompletedProcess[str]], tmp_path: Path, line: str
) -> None:
    done = shell(f"{{ $T {line}; echo $? > code; }} | true")
    assert (tmp_path / "code").read_text() == f"{128 + signal.SIGPIPE}\n"
    assert done.stderr == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_recipe_that_may_not_be_read_is_a_usage_error(trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0)
    tiny_recipe.chmod(0)
    for word in ("tiny.yaml", "shut", "shut/tiny.yaml"):
        done = trainkit("plan", word)
        assert done.returncode == 2, done.stderr
        assert "next:" in done.stderr


INTERRUPTS = {
    "while planning": (
        "import trainkit.cli.pipeline as pipeline\n"
        "pipeline.build_plan = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
    ),
    "while its first modules are loaded": (
        "class Interrupt:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'trainkit.cli.app': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt)\n"
    ),
}


@pytest.mark.parametrize("when", INTERRUPTS)
def test_an_interrupt_leaves_no_traceback(
    tiny_recipe: Path, tmp_path: Path, clean_environment: dict[str, str], when: str
) -> None:
    script = (
        f"import os, signal, sys\n{INTERRUPTS[when]}"
        "sys.argv = ['trainkit', 'plan', 'tiny.yaml']\n"
        "from trainkit.__main__ import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == ""
