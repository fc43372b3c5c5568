"""Scripts of jobs and nodes, run by Bash: lines of cluster.setup that fail, and paths that a shell would split."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from trainkit.launch_plan.model import Plan, Variable, bind_words
from trainkit.launch_plan.provenance import setup_lines, token
from trainkit.launch_plan.render import shell
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved

pytestmark = pytest.mark.cli

PYTHON = 'my $HOME env\'s "bin"/python'


def done(script: str, *, login: bool, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script as sbatch starts one from a file, or as ssh starts one in a login shell."""
    (folder / "job.sh").write_text(script)
    argv = ("-lc", script, "node.sh") if login else ("job.sh",)
    return subprocess.run(("bash", *argv), cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("login", [False, True], ids=["file", "login shell"])
@pytest.mark.parametrize(
    ("setup", "failed"),
    [
        (["true", "false"], "line 2 failed with exit code 1: false"),
        (["nosuchcommand", "touch after"], "line 1 failed with exit code 127: nosuchcommand"),
        (["if true; then", "  (exit 5)", "fi"], "line 2 failed with exit code 5:   (exit 5)"),
        (["cat >text <<END", "false", "END", "cd /nosuch"], "line 4 failed with exit code 1: cd /nosuch"),
        (["module() { return 3; }", "module load cuda"], "line 2 failed with exit code 3: module load cuda"),
        (["printf 'true\\nfalse\\n' >sourced", ". ./sourced"], "line 2 failed with exit code 1: . ./sourced"),
        (["set -E", "module() { false; return 4; }", "module x"], "line 3 failed with exit code 4: module x"),
        (["A=$(false)"], "line 1 failed with exit code 1: A=$(false)"),
        (["true", "exit 3"], "line 2 or one after it ended the shell with exit code 3: exit 3"),
        (["exit"], "line 1 or one after it ended the shell with exit code 0: exit"),
        (["f() {", "  exit 5", "}", "f"], "line 4 or one after it ended the shell with exit code 5: f"),
        (
            ["echo 'exit 6' >sourced", ". ./sourced"],
            "line 2 or one after it ended the shell with exit code 6: . ./sourced",
        ),
        (["set -eu", "f() { false; }", "f"], "line 3 or one after it ended the shell with exit code 1: f"),
        (
            ["true", "exec nosuchcommand"],
            "line 2 or one after it ended the shell with exit code 127: exec nosuchcommand",
        ),
        (["true", 'echo "x'], "line 1 or one after it ended the shell with exit code 2: true"),
        (["true", "cat >text <<END"], "line 2 or one after it ended the shell with exit code 0: cat >text <<END"),
        (["trap 'exit 7' ERR", "false"], "line 2 or one after it ended the shell with exit code 7: false"),
        # What goes on in a shell goes on here.
        (["if false; then", "  exit 1", "fi", "cat >text <<END", "false", "END"], ""),
        (["module() { false; true; }", "module load cuda", "export A=$(false)"], ""),
        (["printf 'false\\ntrue\\n' >sourced", "source ./sourced", "false || true", "[ -f nosuch ] && . nosuch"], ""),
        (["mkdir made", "cd $_", "[ ${PWD##*/} = made ]", "cd ..", "(exit 3) || A=$(exit 3) || true"], ""),
        (["true \\"], ""),
        (["false | true", "for each in 1 2; do", "  test $each = 1 || continue", "done", "! true"], ""),
    ],
)
def test_a_line_of_setup_that_fails_is_named_and_ends_the_job(
    tmp_path: Path, setup: Sequence[str], failed: str, *, login: bool
) -> None:
    lines = setup_lines(setup, token('echo "$1" >failed; exit 4'))
    found = done(
        "\n".join(["#!/bin/bash", *(str(each.text) for each in lines), "echo begun"]), login=login, folder=tmp_path
    )
    assert (found.returncode, found.stdout) == ((4, "") if failed else (0, "begun\n")), found.stderr
    if failed:
        assert found.stderr.splitlines()[-1] == f"cluster.setup {failed}"
        assert (tmp_path / "failed").read_text() == f"cluster.setup {failed}\n"
    assert not (tmp_path / "after").exists()


def test_a_variable_that_is_not_set_ends_the_job_by_name(tmp_path: Path) -> None:
    lines = setup_lines(["set -euo pipefail; echo $UNSET"], token("exit 4"))
    for login in (False, True):
        found = done("\n".join(str(each.text) for each in lines), login=login, folder=tmp_path)
        said = (
            r"cluster.setup line 1 or one after it ended the shell with exit code \d+: set -euo pipefail; echo \$UNSET"
        )
        assert (found.returncode, bool(re.fullmatch(said, found.stderr.splitlines()[-1]))) == (4, True), found.stderr


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_ends_setup_at_once_and_is_no_fault_of_a_line(tmp_path: Path, name: str) -> None:
    line = f"(sleep 0.5; kill -{name} $$) & (sleep 2; ! [ -e /proc/$$/exe ] || touch waited)"
    lines = setup_lines([line], token('echo "$1" >failed; exit 4'))
    found = done("\n".join(str(each.text) for each in lines), login=False, folder=tmp_path)
    assert found.returncode == -signal.Signals[f"SIG{name}"]
    assert [each.name for each in tmp_path.iterdir()] == ["job.sh"]
    assert "cluster.setup" not in found.stderr


def test_a_trap_of_setup_that_takes_the_place_of_the_check_is_named(tmp_path: Path) -> None:
    def run(*setup: str) -> subprocess.CompletedProcess[str]:
        lines = setup_lines(setup, token("exit 4"))
        return done(
            "\n".join([*(str(each.text) for each in lines), "trap -p ERR EXIT DEBUG"]), login=False, folder=tmp_path
        )

    assert "sets a trap on ERR itself" in run("trap 'echo own' ERR", "false").stderr
    for setup in ("true", "trap - ERR"):
        found = run(setup)
        assert (found.returncode, found.stdout, found.stderr) == (0, "", ""), "no trap stays, and nothing is said"


@pytest.fixture
def planned(solve: Callable[..., Resolved], here: Facts, tmp_path: Path) -> Callable[[str], Plan]:
    """Plans for a cluster whose interpreter is a stand-in that prints its words, by a path that a shell would split."""
    python = tmp_path / PYTHON
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    python.chmod(0o755)

    def plan(cluster: str) -> Plan:
        recipe = (
            "version: 1\nname: r\ndevices: {type: cpu}\ndata: {kind: random}\ntrain: {steps: 1}\noutput: {root: /o}\n"
        )
        quoted = '"' + str(python).replace('"', '\\"') + '"'
        return build_plan(solve(f"{recipe}cluster: {{{cluster}, python: {quoted}}}\n"), here).plan

    return plan


@pytest.mark.parametrize("setup", ["", 'setup: ["true"], '])
def test_the_interpreter_of_a_job_may_be_anywhere(tmp_path: Path, planned: Callable[[str], Plan], setup: str) -> None:
    job = planned(f"kind: slurm, {setup}requeue: {{}}").job
    assert job is not None
    script = job.content.bind({Variable.RUN_DIR: shlex.quote("/o/a b")})
    assert done(script, login=False, folder=tmp_path).stdout == "-P|-m|trainkit|job|batch|/o/a b|"
    if setup:
        script = script.replace("\ntrue\n", "\nfalse\n")
        said = "cluster.setup line 1 failed with exit code 1: false"
        assert done(script, login=False, folder=tmp_path).stdout == f"-P|-m|trainkit|job|batch|/o/a b|--failed|{said}|"


def test_so_may_that_of_a_node_of_pods_and_of_a_script(tmp_path: Path, planned: Callable[[str], Plan]) -> None:
    job = planned('kind: ssh, setup: ["true"], hosts: [gpu1]').job
    assert job is not None
    script = f"set -- 0 gpu1 .\n{job.content.bind({Variable.RUN_DIR: shlex.quote('/o/a b')})}"
    shown = done(script, login=False, folder=tmp_path).stdout
    assert shown.startswith("-P|-m|trainkit|job|node|/o/a b|--held|--node|0|--hosts|gpu1|")
    pods = planned('kind: kubernetes, image: i, volumes: ["c:/o"]').job
    assert pods is not None
    (workload,) = yaml.safe_load_all(pods.content.bind({Variable.RUN_ID: "1"}))
    pod = workload["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"][0] == str(tmp_path / PYTHON)
    plan = planned("kind: slurm")
    (tmp_path / "plan.sh").write_text(shell.render(plan).replace("/o/r", "o/r"))
    shown = subprocess.run(
        ("sh", "plan.sh"), cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60, check=False
    ).stdout
    assert shown.startswith("-P|-m|trainkit.trainer|"), shown
    assert bind_words(plan.commands[0].wrapper[:1], {}) == (str(tmp_path / PYTHON),)
