"""Machines that are reached by ssh: what a recipe may say of them, and the words that start a node."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import RecipeError
from trainkit.launch_plan.model import Variable, bind_words, plan_from_json, plan_to_json
from trainkit.launch_plan.render.explain import render
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema import Ssh as Section
from trainkit.schedulers import ssh
from trainkit.schedulers.base import Job, Output, RefusedError

Solve = Callable[..., Resolved]
Trainkit = Callable[..., subprocess.CompletedProcess[str]]


def recipe(nodes: str = "", **cluster: Any) -> str:
    section = {"kind": "ssh", "hosts": ["gpu1", "me@gpu2"], **cluster}
    given = "version: 1\ntrain: {steps: 1}\nbatch: {global: 12}\ndata: {kind: random}\ndevices: {type: cpu}\n"
    return f"{given}strategy: {{kind: ddp}}\n{nodes}\ncluster: {json.dumps(section)}\n"


def test_there_are_as_many_nodes_as_hosts(solve: Solve, here: Facts) -> None:
    planned = build_plan(solve(recipe()), here)
    assert planned.plan.topology.nodes == 2
    assert planned.plan.job is not None
    assert planned.plan.job.hosts == ("gpu1", "me@gpu2")
    assert plan_from_json(plan_to_json(planned.plan)) == planned.plan
    assert "one for each of cluster.hosts" in render("nodes.count", solve(recipe()), planned)
    assert "cluster.hosts" in render("me@gpu2", solve(recipe()), planned)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hosts": []}, "cluster.hosts names no machine"),
        ({"hosts": ["gpu1", "me@gpu1"]}, "cluster.hosts names gpu1 twice"),
        ({"hosts": ["localhost", "gpu1"]}, "the first of cluster.hosts is localhost"),
        ({"hosts": ["::1", "gpu1"]}, "the first of cluster.hosts is ::1"),
        ({"options": ["-tt"]}, "cluster.options has -t"),
        ({"options": ["gpu3"]}, "cluster.options has 'gpu3', which is no option of ssh"),
        ({"options": ["-p"]}, "cluster.options has -p without its value"),
        ({"options": ["-o", "BatchMode=no"]}, "cluster.options sets batchmode"),
        ({"options": ["-oControlPath=/x"]}, "cluster.options sets controlpath"),
        ({"options": ["-o", "  "]}, "behind -o"),
        ({"options": ["-o="]}, "behind -o"),
        ({"options": ['-o"ControlMaster" auto']}, "behind -o"),
        ({"options": ['-oControl"Master"=auto']}, "behind -o"),
        ({"options": ["-o=ControlMaster auto"]}, "behind -o"),
        ({"options": ["-o", " CONTROLMASTER = auto"]}, "cluster.options sets controlmaster"),
        ({"setup": ["a\nb"]}, "cluster.setup.0 holds a line end"),
    ],
)
def test_what_cannot_work_is_refused(solve: Solve, here: Facts, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace("[", r"\[")):
        build_plan(solve(recipe(**changed)), here)


def test_another_number_of_nodes_is_refused(solve: Solve, here: Facts) -> None:
    with pytest.raises(RecipeError, match=r"nodes\.count is 3, and cluster\.hosts names 2"):
        build_plan(solve(recipe("nodes: {count: 3}")), here)


@pytest.mark.parametrize("hosts", [["-oProxyCommand=x"], ["a b"], ["me@-x"], ["a,b"], [""]])
def test_what_is_no_host_is_refused(solve: Solve, hosts: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"cluster\.hosts\.0 must be a machine as ssh knows it"):
        solve(recipe(hosts=hosts))


def test_hosts_may_be_addresses_with_a_port_behind_options(solve: Solve, here: Facts) -> None:
    hosts, options = (
        ["me@2001:db8::1", "fe80::2%eth0", "10.0.0.5"],
        ["-p2222", "-F", "/x", "-4", "-o", "LogLevel=ERROR"],
    )
    job = build_plan(solve(recipe(hosts=hosts, options=options)), here).plan.job
    assert job is not None
    words = bind_words(job.submit, {})
    assert words[:4] == ("ssh", "-T", "-oBatchMode=yes", "-oControlPath=none")
    assert words[4:10] == tuple(options)[:6]
    assert ssh.bare(hosts[0]) == "2001:db8::1"


@pytest.mark.cli
def test_the_script_reaches_bash_as_it_is_with_its_input_held(solve: Solve, here: Facts) -> None:
    setup = ['echo "it\'s $1"; read line || echo "none: $line"']
    job = build_plan(solve(recipe(setup=setup, python="cat")), here).plan.job
    assert job is not None
    script = job.content.bind({Variable.RUN_DIR: "/dir"}).replace("exec cat -P -m trainkit job node /dir --held", "cat")
    script = script.replace('--node "$1" --hosts "$2"', "")
    command = ssh.node_argv(("ssh",), "gpu1", script, ("1", "a,b", "/"))[-1]
    done = subprocess.run(["sh", "-c", command], input="held\n", capture_output=True, text=True, check=False)
    assert done.stdout == "it's 1\nnone: \nheld\n"


def test_where_ssh_goes_is_read_from_its_own_words() -> None:
    query = ssh.address(("ssh", "-T"), "gpu1")
    assert query.argv == ("ssh", "-T", "-G", "--", "gpu1")
    assert query.read(Output(0, "user me\nhostname 10.0.0.5\nport 2222\n", "")) == ssh.Address("10.0.0.5", "2222")
    with pytest.raises(RefusedError, match="Bad owner"):
        query.read(Output(255, "", "Bad owner or permissions on ~/.ssh/config\n"))
    section = Section(hosts=["gpu1"], options=["-p2"])
    given = (Job("1"), "gpu1", ("a b", "c"))
    argv, _ = ssh.Ssh().attach(*given, terminal=True, section=lambda: section, environ={})
    assert (argv[0], "-p2" in argv, "-T" in argv, "-tt" in argv) == ("ssh", True, False, True)
    assert shlex.split(argv[-1]) == ["a b", "c"]


def test_a_signal_to_a_node_is_given_by_the_trainkit_there() -> None:
    words = ("/a b/python", "-P", "-m", "trainkit", "job", "signal", "/runs/r/it's", "15")
    query = ssh.SCHEDULER.signal_node("me@gpu1", words, Section(hosts=["me@gpu1"], options=["-p2"]))
    assert ("-p2" in query.argv, query.argv[-3:-1]) == (True, ("--", "me@gpu1"))
    assert shlex.split(shlex.split(query.argv[-1])[3])[1:9] == [*words]
    assert query.read(Output(0, "", "")) is True
    assert query.read(Output(1, "", "")) is False
    with pytest.raises(RefusedError, match="No route to host"):
        query.read(Output(255, "", "ssh: connect to host gpu1 port 22: No route to host\r\n"))


@pytest.mark.cli
@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ([], ""),
        (["-p2222", "-oPort=22", "-J", "gate"], ""),
        (["-F", "/tmp/config"], "-F"),
        (["-F/tmp/config"], "-F"),
        (["-4", "-I", "lib.so"], "-I"),
        (["-p", "-F", "-oproxycommand touch x"], "-p"),
        (["-p", "22", "-oproxycommand touch x"], "-o proxycommand"),
        (["-o", "KnownHostsCommand=/bin/x"], "-o KnownHostsCommand"),
        (["-oLocalCommand=touch x"], "-o LocalCommand"),
        (["-oSecurityKeyProvider=lib.so"], "-o SecurityKeyProvider"),
        (["-o", "  SmartcardDevice  lib.so"], "-o SmartcardDevice"),
        (["-o HostName = gpu1", "-oUser me", "-Jgate:22,me@[::1]:22"], ""),
        (["-J", "gate -oProxyCommand=x"], "-J"),
        (["-oProxyJump=`x`@gate"], "-o ProxyJump"),
        (["-E", "log"], "-E"),
    ],
)
def test_a_dry_run_runs_no_program_that_the_recipe_names(
    trainkit: Trainkit, tmp_path: Path, options: list[str], refused: str
) -> None:
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho hostname gpu$$\n')
    stand_in.chmod(0o700)
    (tmp_path / "r.yaml").write_text(recipe(options=options))
    path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
    done = trainkit("submit", "r.yaml", "--dry-run", environ={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert "node.sh as node 1" in done.stdout
    assert (tmp_path / "asked").exists() is (refused == "")
    assert (f"no host is contacted: cluster.options has {refused}," in done.stderr) is (refused != "")


@pytest.mark.cli
@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh is installed")
def test_what_a_file_of_ssh_would_run_is_not_run_by_a_dry_run(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f'Match exec "touch {tmp_path}/PWNED"\nHost *\n')
    (tmp_path / "r.yaml").write_text(recipe(options=["-F", str(tmp_path / "config")]))
    assert trainkit("submit", "r.yaml", "--dry-run").returncode == 0
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.cli
@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh is installed")
@pytest.mark.parametrize(
    "option",
    [
        "ProxyCommand touch PWNED",
        '"ProxyCommand" touch PWNED',
        'Proxy"Command"=touch PWNED',
        "=PROXYCOMMAND=touch PWNED",
    ],
)
def test_what_ssh_takes_for_the_name_of_an_option_is_not_run_by_a_dry_run(
    trainkit: Trainkit, tmp_path: Path, option: str
) -> None:
    (tmp_path / "r.yaml").write_text(recipe(hosts=["gpu1"], options=[f"-o{option}"]))
    done = trainkit("submit", "r.yaml", "--dry-run")
    assert "no host is contacted" in done.stderr or f"cluster.options has {option!r} behind -o" in done.stderr
    assert not (tmp_path / "PWNED").exists()
