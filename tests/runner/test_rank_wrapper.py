"""The wrapper of a rank, with real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from handmade_plans import REPOSITORY, environment, python

from trainkit.runner.rundir.records import ROOM, last_of

BEAT = "import time, sys\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)\n"


def start(attempt: Path, *program: str, rank: int = 0, grace: float = 5.0, **options: Any) -> subprocess.Popen[bytes]:
    environ = environment(**{"RANK": str(rank), "LOCAL_RANK": str(rank), **options.pop("environment", {})})
    more = options.pop("words", ())
    words = [sys.executable, "-m", "trainkit.runner.rank", "--attempt", str(attempt), "--grace", str(grace), *more]
    words += ["--", *program]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(words, env=environ, **options)


def record(attempt: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((attempt / "ranks" / f"rank-{rank}.json").read_text()))


def log(attempt: Path, stream: str, rank: int = 0) -> str:
    return (attempt / "logs" / f"rank-{rank}.{stream}").read_text()


def wait_for_program(attempt: Path, text: str = "ready") -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        path = attempt / "logs" / "rank-0.out"
        if path.exists() and text in path.read_text() and record(attempt)["pid"]:
            return record(attempt)
        time.sleep(0.02)
    raise AssertionError(f"the program has not said {text!r}")


def expecting(attempt: Path, account: str = "") -> tuple[Path, tuple[str, ...]]:
    """Where the rank shows what it runs, with an account of an earlier start, and the options that have it compared."""
    (attempt / "expected.json").write_text("{}")
    shown = attempt / "shown" / "rank-0.json"
    shown.parent.mkdir()
    if account:
        shown.write_text(account)
    return shown, ("--expect", str(attempt / "expected.json"))


def test_the_exit_code_is_passed_on_and_recorded(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"))
    out, err = wrapper.communicate(timeout=20)
    assert (wrapper.returncode, out, err) == (7, b"out\n", b"err\n")
    assert (log(tmp_path, "out"), log(tmp_path, "err")) == ("out\n", "err\n")
    found = record(tmp_path)
    assert (found["exit_code"], found["signal"], found["told_to_stop"]) == (7, None, False)
    assert found["started"] <= found["ended"]


def test_a_segmentation_fault_is_recorded_as_its_signal(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert wrapper.wait(20) == 128 + signal.SIGSEGV
    assert (record(tmp_path)["exit_code"], record(tmp_path)["signal"]) == (None, signal.SIGSEGV)


def test_a_program_that_is_not_there_is_127_and_one_that_cannot_run_126(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"\0\1")
    assert start(tmp_path / "a", "no-such-program").wait(20) == 127
    assert "cannot start no-such-program" in log(tmp_path / "a", "err")
    assert start(tmp_path / "b", str(tmp_path / "data.bin")).wait(20) == 126
    assert "Permission denied" in record(tmp_path / "b")["message"]


def test_a_rank_that_cannot_register_starts_nothing_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "attempt").write_text("a file where the folder should be")
    wrapper = start(tmp_path / "attempt", *python("print('ran')"))
    out, err = wrapper.communicate(timeout=20)
    assert (wrapper.returncode, out) == (1, b"")
    assert err.decode() == f"trainkit.runner.rank: {tmp_path}/attempt cannot be written: Not a directory\n"


def test_a_rank_whose_log_cannot_be_opened_is_recorded_as_one_that_could_not_start(tmp_path: Path) -> None:
    (tmp_path / "logs/rank-0.out").mkdir(parents=True)
    wrapper = start(tmp_path, *python("print('ran')"))
    out, err = wrapper.communicate(timeout=20)
    assert (wrapper.returncode, out) == (1, b"")
    assert err.decode() == f"trainkit.runner.rank: {tmp_path}/logs/rank-0.out cannot be written: Is a directory\n"
    recorded = record(tmp_path)
    assert (recorded["pid"], recorded["exit_code"]) == (0, 1) and recorded["ended"]
    assert recorded["message"] == f"{tmp_path}/logs/rank-0.out cannot be written: Is a directory"


def test_only_rank_0_speaks_on_the_console(tmp_path: Path) -> None:
    out, _ = start(tmp_path, *python("print('hello')"), rank=3).communicate(timeout=20)
    assert out == b""
    assert log(tmp_path, "out", rank=3) == "hello\n"


def test_term_reaches_the_program_once_when_a_launcher_signals_the_whole_group(tmp_path: Path) -> None:
    code = """
import signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append(1))
print('ready', flush=True)
while not got: time.sleep(0.01)
time.sleep(0.5)
print('times', len(got))
sys.exit(143)
"""
    wrapper = start(tmp_path, *python(code), start_new_session=True)
    wait_for_program(tmp_path)
    os.killpg(wrapper.pid, signal.SIGTERM)
    os.kill(wrapper.pid, signal.SIGTERM)
    assert wrapper.wait(20) == 143
    assert "times 1" in log(tmp_path, "out")
    assert record(tmp_path)["told_to_stop"]


def test_usr1_is_forwarded_and_is_no_order_to_stop(tmp_path: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
print('ready', flush=True)
while True: time.sleep(0.05)
"""
    wrapper = start(tmp_path, *python(code))
    wait_for_program(tmp_path)
    wrapper.send_signal(signal.SIGUSR1)
    assert wrapper.wait(20) == 0
    assert not record(tmp_path)["told_to_stop"]


def test_a_program_that_ignores_term_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + BEAT), grace=0.5)
    wait_for_program(tmp_path)
    began = time.monotonic()
    wrapper.send_signal(signal.SIGTERM)
    assert wrapper.wait(20) == 137
    assert 0.5 <= time.monotonic() - began < 5
    assert record(tmp_path)["told_to_stop"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal")
def test_the_program_dies_with_its_wrapper(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python(BEAT))
    program = psutil.Process(wait_for_program(tmp_path)["pid"])
    wrapper.kill()
    wrapper.wait(20)
    psutil.wait_procs([program], timeout=5)
    assert not program.is_running() or program.status() == psutil.STATUS_ZOMBIE
    assert record(tmp_path)["ended"] is None


def test_a_background_child_that_holds_the_output_does_not_hold_the_wrapper(tmp_path: Path) -> None:
    began = time.monotonic()
    wrapper = start(tmp_path, "sh", "-c", "sleep 60 & echo done")
    assert wrapper.wait(20) == 0
    assert time.monotonic() - began < 10
    assert log(tmp_path, "out") == "done\n"


def test_a_console_that_goes_away_stops_neither_program_nor_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    wrapper = start(tmp_path, *python("for i in range(2000): print('line', i)"), stdout=writer)
    os.close(writer)
    os.close(reader)
    assert wrapper.wait(30) == 0
    assert log(tmp_path, "out").endswith("line 1999\n")


def test_large_output_without_a_line_break_arrives_whole(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python("import sys; sys.stdout.buffer.write(bytes(range(256)) * 100_000)"))
    out, _ = wrapper.communicate(timeout=60)
    assert out == bytes(range(256)) * 100_000
    assert (tmp_path / "logs" / "rank-0.out").read_bytes() == out


def test_a_restarted_rank_appends_to_its_log(tmp_path: Path) -> None:
    for restart in ("0", "1"):
        start(tmp_path, *python("print('hello')"), environment={"TORCHELASTIC_RESTART_COUNT": restart}).wait(20)
    assert log(tmp_path, "out") == "hello\nhello\n"
    assert record(tmp_path)["restart"] == 1


def test_the_program_sees_the_environment_and_input_of_the_wrapper(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['RANK'], sys.stdin.read())"
    wrapper = start(tmp_path, *python(code), stdin=subprocess.PIPE)
    out, _ = wrapper.communicate(b"typed", timeout=20)
    assert out == b"0 typed\n"


def test_a_wrong_command_line_says_how_it_should_be() -> None:
    words = [sys.executable, "-m", "trainkit.runner.rank", "program"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("module", ["trainkit.runner.rank.__main__", "trainkit.runner.supervisor.guardian"])
def test_wrapper_and_guardian_need_the_standard_library_only(module: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    roots = {name.split(".")[0] for name in done.stdout.split()}
    assert roots - set(sys.stdlib_module_names) <= {"trainkit", "__main__"}
    assert not roots & {"subprocess", "dataclasses", "pathlib", "argparse", "tempfile", "logging"}  # start-up counts


@pytest.mark.parametrize(
    ("main", "rank", "local_rank", "level"),
    [
        ("each-node", 0, 0, "info"),
        ("each-node", 1, 1, "error"),
        ("each-node", 2, 0, "info"),
        ("one", 0, 0, "info"),
        ("one", 2, 0, "error"),
    ],
)
def test_a_replica_gets_variables_of_its_own(tmp_path: Path, main: str, rank: int, local_rank: int, level: str) -> None:
    program = python("import os; print(os.environ['LEVEL'], os.environ['OTHER'])")
    words = ("--main", main, "--replica-env", "LEVEL=error", "--replica-env", "OTHER=a=b")
    environ = {"LOCAL_RANK": str(local_rank), "LEVEL": "info", "OTHER": "none"}
    assert start(tmp_path, *program, rank=rank, words=words, environment=environ).wait(20) == 0
    assert log(tmp_path, "out", rank).split() == [level, "none" if level == "info" else "a=b"]


def test_a_rank_stays_on_the_cores_of_its_place(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    program = python("import os; print(sorted(os.sched_getaffinity(0)))")
    wrapper = start(tmp_path, *program, rank=1, words=("--cores", f"0-{core}:{core}"))
    wrapper.communicate(timeout=20)
    assert wrapper.returncode == 0
    assert log(tmp_path, "out", 1) == f"[{core}]\n"


def test_cores_that_are_not_there_start_nothing(tmp_path: Path) -> None:
    wrapper = start(tmp_path, *python("print('started')"), words=("--cores", "4090"))
    wrapper.communicate(timeout=20)
    assert wrapper.returncode != 0
    assert "started" not in log(tmp_path, "out")


@pytest.mark.parametrize(
    ("differences", "code", "ended", "why"),
    [
        ('["it is another"]', 0, 1, "it is another"),  # a script that goes on after it
        ("5", 7, 7, ""),  # forged
        ("[1]", 7, 7, ""),
        ('{"a": 1}', 7, 7, ""),
    ],
)
def test_a_part_that_was_not_as_planned_fails_a_script_and_a_forged_account_changes_nothing(
    tmp_path: Path, differences: str, code: int, ended: int, why: str
) -> None:
    shown, words = expecting(tmp_path)
    leave = f"echo '{{\"differences\": {differences}}}' > {shown}; exit {code}"
    assert start(tmp_path, "sh", "-c", leave, words=words).wait(20) == ended
    assert (record(tmp_path)["exit_code"], record(tmp_path)["not_as_planned"]) == (ended, why)


def test_what_a_rank_showed_before_it_was_restarted_is_forgotten(tmp_path: Path) -> None:
    shown, words = expecting(tmp_path, '{"strategy": "of another start", "differences": []}')
    assert start(tmp_path, *python("raise SystemExit(5)"), words=words).wait(20) == 5
    assert record(tmp_path)["not_as_planned"] == ""
    assert not shown.exists()


def test_a_rank_that_was_not_as_planned_is_not_started_again_when_the_launcher_restarts_it(tmp_path: Path) -> None:
    _, words = expecting(tmp_path, '{"differences": ["it is another"]}')
    wrapper = start(tmp_path, *python("print('started')"), words=words)
    assert (wrapper.communicate(timeout=20), wrapper.returncode) == ((b"", b""), 1)
    found = record(tmp_path)
    assert (found["pid"], found["exit_code"], found["not_as_planned"]) == (0, 1, "it is another")


@pytest.mark.parametrize(
    ("account", "code", "proven", "ended", "why"),
    [
        ("", 0, "yes", 1, "not shown: no torch optimizer took a step"),
        ('{"error": "KeyError: 1"}', 0, "yes", 1, "not shown: KeyError: 1"),
        ('{"strategy": null}', 0, "yes", 0, ""),
        ("", 7, "yes", 7, ""),
        ("", 0, "no", 0, ""),
    ],
)
def test_a_rank_that_has_to_show_what_it_runs_fails_where_nothing_is_seen_and_is_not_started_again(
    tmp_path: Path, account: str, code: int, proven: str, ended: int, why: str
) -> None:
    shown, words = expecting(tmp_path)
    words = (*words, "--prove", proven)
    leave = f"[ -z '{account}' ] || echo '{account}' > {shown}; exit {code}"
    assert start(tmp_path, "sh", "-c", leave, words=words).wait(20) == ended
    assert (record(tmp_path)["exit_code"], record(tmp_path)["not_as_planned"]) == (ended, why)
    assert why in log(tmp_path, "err")
    if why:
        assert start(tmp_path, *python("print('started')"), words=words).wait(20) == 1
        assert (record(tmp_path)["pid"], record(tmp_path)["not_as_planned"]) == (0, why)


LEFT_BEHIND = """
import os, signal, socket, sys, time
folder = sys.argv[1]
os.mkdir(folder)
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{folder}/listener-x")
listener.listen()
if os.fork() == 0:
    time.sleep(100)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_socket_folders_of_a_killed_programs_workers_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "pymp-abc123"
    wrapper = start(tmp_path / "run", *python(LEFT_BEHIND), str(folder))
    wrapper.communicate(timeout=20)
    assert record(tmp_path / "run")["signal"] == signal.SIGKILL
    assert not folder.exists()


def test_a_record_that_cannot_be_written_is_said_and_changes_no_exit_code(tmp_path: Path) -> None:
    ranks = tmp_path / "run" / "ranks"
    code = f"import os, sys; os.rename({str(ranks)!r}, {str(tmp_path / 'gone')!r}); sys.exit(5)"
    _, stderr = (wrapper := start(tmp_path / "run", *python(code))).communicate(timeout=20)
    assert wrapper.returncode == 5
    assert f"trainkit.runner.rank: {tmp_path}/run cannot be written: No such file or directory" in stderr.decode()


def test_the_end_of_an_output_fits_into_the_block_of_a_record() -> None:
    for output in (b"short", b"x" * 10_000, "é\N{SNOWMAN}".encode() * 3000, bytes(range(256)) * 40):
        found = last_of(output)
        assert len(json.dumps(found)) <= ROOM
        assert output.decode("utf-8", "replace").endswith(found) and found
