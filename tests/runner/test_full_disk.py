"""A disk that fills up under a run: real ones, small file systems in memory in a mount namespace of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_HANDMADE = Path(__file__).with_name("run_handmade.py")
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
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
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
    program = [sys.executable, "-c", FILL.format(path=str(tmp_path / "fill"), code=code)]
    request = json.dumps({"program": program, "output_root": str(tmp_path / "runs")})
    done = in_a_small_file_system(tmp_path, sys.executable, str(RUN_HANDMADE), request)
    assert done.returncode == code, done.stderr
    status = json.loads(done.stdout[done.stdout.index("{") :])
    assert (status["state"], status["exit_code"]) == ("ended", code)
    assert "rank 0: 100020 bytes of output could not be written to the log: No space left on device" in done.stderr
    assert ("  | the reason is here" in done.stderr) == bool(code)  # of one that failed, from its record
    assert "summary.json could not be written: No space left on device" in done.stderr
