"""Whole runs with the python launcher, as `trainkit run` executes them; also on a disk that fills up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from handmade_plans import command, environment, python


def run(folder: Path, *program: str, environ: dict[str, str] | None = None, **plan: Any) -> Any:
    return subprocess.run(
        command(folder, *program, **plan),
        env=environment(**(environ or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run_dir(folder: Path) -> Path:
    return next((folder / "runs" / "handmade").iterdir())


def test_standard_output_is_the_programs_alone_and_its_code_is_ours(tmp_path: Path) -> None:
    done = run(tmp_path, *python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert "err\n" in done.stderr
    assert "exit code 3 is the program's own" in done.stderr
    status = json.loads((run_dir(tmp_path) / "status.json").read_text())
    assert (status["state"], status["failure"], status["exit_code"]) == ("ended", "program", 3)


def test_the_run_directory_is_complete(tmp_path: Path) -> None:
    assert run(tmp_path, "true").returncode == 0
    names = {str(path.relative_to(run_dir(tmp_path))) for path in run_dir(tmp_path).rglob("*") if path.is_file()}
    own = {"recipe.yaml", "plan.json", "code.json", "command.sh", "env.txt", "summary.json", "status.json", ".lock"}
    attempt = {"logs/rank-0.out", "logs/rank-0.err", "logs/launcher.log", "ranks/rank-0.json"}
    # The working folder is this checkout: whether there is a diff depends on it.
    assert names - {"code.diff"} == own | {f"attempts/1/{name}" for name in attempt}


def test_a_summary_of_a_foreign_program_says_why_it_has_no_loss(tmp_path: Path) -> None:
    run(tmp_path, "true")
    summary = json.loads((run_dir(tmp_path) / "summary.json").read_text())
    assert (summary["exit_code"], summary["world_size"], summary["launcher"]) == (0, 1, "python")
    assert summary["final_loss"] is None
    assert "built-in trainer" in summary["reasons"]["final_loss"]


def test_secrets_reach_the_program_and_no_file(tmp_path: Path) -> None:
    code = "import os; assert [len(os.environ[name]) for name in ('HF_TOKEN', 'MY_API_KEY')] == [7, 9]"
    done = run(
        tmp_path,
        *python(code),
        environ={"HF_TOKEN": "hunter2"},
        take=["HF_TOKEN"],
        variables={"MY_API_KEY": "swordfish"},
    )
    assert done.returncode == 0, done.stderr
    listing = (run_dir(tmp_path) / "env.txt").read_text()
    assert "HF_TOKEN=***\n" in listing
    assert "MY_API_KEY=***\n" in listing
    assert "OMP_NUM_THREADS=1\n" in listing
    written = [path for path in run_dir(tmp_path).rglob("*") if path.is_file()]
    assert not [path for path in written if b"hunter2" in path.read_bytes()]


def test_a_missing_variable_ends_with_code_4_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "true", take=["TRAINKIT_TEST_NOWHERE"])
    assert done.returncode == 4
    assert "TRAINKIT_TEST_NOWHERE" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_cannot_be_written_ends_with_code_4(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    done = run(tmp_path, "true")
    assert done.returncode == 4
    assert "cannot be created" in done.stderr


def test_runs_that_start_at_the_same_time_have_directories_of_their_own(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            command(tmp_path, "true"), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(4)
    ]
    assert [process.wait(60) for process in started] == [0] * 4
    assert len(list((tmp_path / "runs" / "handmade").iterdir())) == 4


def test_standard_input_reaches_a_single_rank(tmp_path: Path) -> None:
    words = command(tmp_path, *python("print(input()[::-1])"))
    done = subprocess.run(
        words, env=environment(), input="abc\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "cba\n"


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    words = command(tmp_path, *python("for i in range(20000): print('line', i)"))
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 0
    assert (run_dir(tmp_path) / "attempts/1/logs/rank-0.out").read_text().endswith("line 19999\n")


def test_a_reader_that_stalls_does_not_keep_a_stopped_run_alive(tmp_path: Path) -> None:
    code = "import time\nfor _ in range(5000): print('x' * 4000)\ntime.sleep(60)"
    words = command(tmp_path, *python(code), grace=1.0)
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)  # the pipe is full by now, and nobody reads it
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(20) == 143
    finally:
        process.kill()
        process.stdout.close()


def test_metrics_become_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    code = f"""
import json, pathlib
folder = next(pathlib.Path(r"{tmp_path}/runs/handmade").iterdir())
with (folder / "metrics.jsonl").open("a") as file:
    for record in ({{"event": "start", "steps": 2}}, {{"step": 2, "loss": 1.5, "seconds": 1.0}}):
        file.write(json.dumps(record) + "\\n")
"""
    done = run(tmp_path, *python(code))
    assert done.returncode == 0, done.stderr
    assert "step 2/2  loss 1.5000\n" in done.stderr
    assert "\x1b" not in done.stderr
    assert json.loads((run_dir(tmp_path) / "summary.json").read_text())["final_loss"] == 1.5


@pytest.mark.parametrize(("exit_code", "runs_the_program"), [(0, True), (6, False)])
def test_the_program_runs_only_after_a_preparation_that_went_well(
    tmp_path: Path, exit_code: int, runs_the_program: bool
) -> None:
    code = f"import sys; print('building', file=sys.stderr); sys.exit({exit_code})"
    preparations = [{"title": "build ops", "argv": python(code), "lock": "ops"}]
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run(tmp_path, *python("print('ran')"), preparations=preparations, environ=environ)
    assert done.returncode == exit_code
    assert ("ran" in done.stdout) == runs_the_program
    assert (run_dir(tmp_path) / "attempts/1/logs/prepare.err").read_text() == "building\n"
    if exit_code:
        assert "the preparation 'build ops' exited with code 6" in done.stderr
        assert "  | building" in done.stderr


def test_two_runs_never_prepare_the_same_thing_at_once(tmp_path: Path) -> None:
    code = f"""
import os, time
os.mkdir(r"{tmp_path}/busy")
time.sleep(0.7)
os.rmdir(r"{tmp_path}/busy")
"""
    preparations = [{"title": "build ops", "argv": python(code), "lock": "ops"}]
    words = command(tmp_path, "true", preparations=preparations)
    environ = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    started = [subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], said
    assert max(text.count("waiting") for text in said) == 1


def test_a_stop_while_preparing_ends_the_preparation(tmp_path: Path) -> None:
    code = f"import time; open(r'{tmp_path}/begun', 'w').close(); time.sleep(60)"
    preparations = [{"title": "build ops", "argv": python(code), "lock": "ops"}]
    words = command(tmp_path, "true", preparations=preparations, grace=2.0)
    environ = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    process = subprocess.Popen(words, env=environ, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143


def test_a_launcher_that_fails_is_quoted(tmp_path: Path) -> None:
    done = run(tmp_path, "true", launcher="broken", ranks=2)
    assert done.returncode == 9
    assert "broken exited with code 9 and no rank failed" in done.stderr
    assert "  | no rendezvous today" in done.stderr


IMPATIENT = """
import os, runpy, sys
from trainkit.runner.supervisor import parent
parent.LOST_SECONDS, parent.BEAT_SECONDS = 1.0, 0.2
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_whose_guardian_is_stopped_can_be_ended(tmp_path: Path) -> None:
    program = "import pathlib, time; pathlib.Path('here').touch(); time.sleep(600)"
    interpreter, *words = command(tmp_path, *python(program))
    argv = [interpreter, "-c", IMPATIENT, *words]
    with subprocess.Popen(argv, env=environment(), stdin=subprocess.DEVNULL, cwd=tmp_path) as running:
        until = time.monotonic() + 30
        while not (tmp_path / "here").exists() and time.monotonic() < until:
            time.sleep(0.05)
        pids = json.loads((run_dir(tmp_path) / "status.json").read_text())["pids"]
        os.kill(pids["guardian"], signal.SIGSTOP)
        running.send_signal(signal.SIGTERM)
        try:
            assert running.wait(20) == 137
        finally:
            if running.poll() is None:
                os.kill(pids["guardian"], signal.SIGCONT)
    status = json.loads((run_dir(tmp_path) / "status.json").read_text())
    assert status["why"] == "trainkit's guardian process was stopped for 1 s from outside"


WITH_A_WORKER = """
import os, signal, socket, sys, time
folder = sys.argv[1]
os.mkdir(folder)
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{folder}/listener-x")
listener.listen()
wrapper = os.getppid()
if os.fork() == 0:
    time.sleep(100)
listener.close()
os.kill(wrapper, signal.SIGKILL)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_socket_folders_of_workers_that_are_told_to_end_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "pymp-abc123"
    assert run(tmp_path, *python(WITH_A_WORKER), str(folder)).returncode == 137
    assert not folder.exists()


# A disk that fills up under a run: a small file system in memory, in a mount namespace of its own.
FILL = """
import os, sys
for block in (1 << 16, 1):
    with open({path!r}, "ab", buffering=0) as file:
        try:
            while file.write(b"x" * block) == block: pass
        except OSError:
            pass
print("y" * 100_000, flush=True)
print("the reason is here", file=sys.stderr, flush=True)
sys.exit({code})
"""
MOUNT = """
mount -t tmpfs -o size=2m tmpfs "$1" && cd "$1" || exit 77
shift
"$@"
code=$?
cat runs/*/*/status.json
exit $code
"""
NO_NAMESPACE = 77


def in_a_small_file_system(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder that holds 2 MiB, and show the status of its run at the end."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh", str(folder), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == NO_NAMESPACE or done.stderr.startswith("unshare: "):
        pytest.skip(f"this machine grants no mount namespaces: {done.stderr}")
    return done


@pytest.mark.parametrize("code", [0, 7])
def test_a_disk_that_fills_up_changes_no_exit_code_and_what_is_lost_is_said(tmp_path: Path, code: int) -> None:
    program = python(FILL.format(path=str(tmp_path / "fill"), code=code))
    done = in_a_small_file_system(tmp_path, *command(tmp_path, *program))
    assert done.returncode == code, done.stderr
    status = json.loads(done.stdout[done.stdout.index("{") :])
    assert (status["state"], status["exit_code"]) == ("ended", code)
    assert "rank 0: 100020 bytes of output could not be written to the log: No space left on device" in done.stderr
    assert ("  | the reason is here" in done.stderr) == bool(code)  # of one that failed, from its record
    assert "summary.json could not be written: No space left on device" in done.stderr
