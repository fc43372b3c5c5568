"""`gpus`, `env`, `facts` and `--on`: what they say of this machine, of made-up ones, and of others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.conftest import Trainkit
from tests.made_up_cards import GIGABYTE, Cards, card
from trainkit.cli.commands.machine import render_cards
from trainkit.cli.machines import machine_facts, profiles
from trainkit.machine.facts import Facts
from trainkit.machine.gpu_locks import GpuLocks as CardLocks


def test_gpus_shows_each_card_with_who_is_on_it_and_which_run_holds_it(trainkit: Trainkit, cards: Cards) -> None:
    busy = [{"pid": os.getpid(), "memory": 30 * GIGABYTE}]
    environ = cards(
        card(0, use=93, temperature=61, power=312.4, power_limit=400, free=50 * GIGABYTE, computing=busy),
        card(1, "V100", throttling=0x24, ecc_errors=3),
        card(2),
    )
    held, far = CardLocks(environ), CardLocks(environ)
    held.take([card(1)["uuid"]])
    held.sign("ada", f"/runs/{'a' * 40}/held")
    far.take([card(2)["uuid"]])
    far.sign("bob", f"/runs/{'a' * 80}/far")
    try:
        done = trainkit("env", "gpus", environ=environ)
    finally:
        held.release()
        far.release()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "3 GPUs, driver 580.82.07 (CUDA 13.0)" in lines[0]
    assert " 0  NVIDIA A100-SXM4-80GB" in lines
    assert any("██████░░░░░░░░░░   30.0 of 80.0 GiB · 93 % busy · 61 °C · 312 of 400 W" in line for line in lines)
    assert any(f"{card(0)['uuid']}  00000000:01:00.0" in line for line in lines)
    assert any(f"{os.getpid()} " in line and "30.0 GiB" in line for line in lines)
    assert f"    held by a trainkit run (pid {os.getpid()}, ada)" in lines
    assert f"      /runs/{'a' * 40}/held" in lines
    assert any(line.startswith("      …") and line.endswith("aaa/far") for line in lines)
    assert "slowed down by: power cap, heat" in done.stdout
    assert "3 uncorrectable memory errors" in done.stdout
    assert all(len(line) <= 80 for line in lines)


def test_a_terminal_that_knows_only_ascii_gets_a_bar_of_it(trainkit: Trainkit, cards: Cards) -> None:
    hot = cards(card(0, use=93, temperature=61, free=50 * GIGABYTE))
    done = trainkit("env", "gpus", environ={**hot, "PYTHONIOENCODING": "ascii"})
    assert "    ######..........   30.0 of 80.0 GiB - 93 % busy - 61 C\n" in done.stdout


def test_gpus_says_idle_and_split(trainkit: Trainkit, cards: Cards) -> None:
    part = {"uuid": "MIG-1", "name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "total": 10 * GIGABYTE, "free": GIGABYTE}
    done = trainkit("env", "gpus", environ=cards(card(0), card(1, instances=[part])))
    assert "    idle" in done.stdout.splitlines()
    assert "MIG 1g.10gb" in done.stdout
    assert "MIG-1" in done.stdout


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (None, "no NVIDIA driver is loaded"),
        ({"fails": "init", "message": "Driver/library version mismatch"}, "Driver/library version mismatch"),
        ({}, "the NVIDIA driver sees no GPU"),
    ],
)
def test_without_a_card_gpus_says_why(
    trainkit: Trainkit, cards: Cards, machine: dict[str, Any] | None, words: str
) -> None:
    if machine is None and Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has cards")
    done = trainkit("env", "gpus", environ=None if machine is None else cards(**machine))
    assert done.returncode == 0
    assert words in done.stdout


def test_gpus_as_json_holds_the_cards_as_facts_do(trainkit: Trainkit, cards: Cards) -> None:
    environ = cards(card(0), card(1))
    told = json.loads(trainkit("env", "gpus", "--json", environ=environ).stdout)
    facts = json.loads(trainkit("env", "facts", environ=environ).stdout)
    assert told["gpus"] == facts["gpus"]
    assert told["driver"] == facts["driver"]


def test_the_names_of_earlier_releases_answer_as_the_parts_of_env(trainkit: Trainkit, cards: Cards) -> None:
    environ = cards(card(0))
    for words in (("gpus", "--on", "8xh100"), ("facts",)):
        old, new = trainkit(*words, environ=environ), trainkit("env", *words, environ=environ)
        assert (old.returncode, old.stderr) == (new.returncode, new.stderr) == (0, "")
        assert re.sub(r'_(available|free)": \d+', "", old.stdout) == re.sub(r'_(available|free)": \d+', "", new.stdout)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--json", "gpus"), "next: trainkit env gpus --json"),
        (("gpus", "--watch", "--on", "8xh100"), "--watch and --on exclude one another"),
        (("--", "x"), "`trainkit env` takes no arguments after --"),
        (("disks",), "no such command 'disks'"),
    ],
    ids=str,
)
def test_a_part_of_env_that_cannot_be_shown_is_refused(trainkit: Trainkit, words: tuple[str, ...], told: str) -> None:
    done = trainkit("env", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_table_fits_a_narrow_terminal(trainkit: Trainkit) -> None:
    done = trainkit("env", "gpus", "--on", "8xh100", environ={"COLUMNS": "60"})
    assert done.stdout.count("NVIDIA H100") == 8
    assert max(map(len, done.stdout.splitlines())) <= 60


def watching(environ: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "trainkit", "env", "gpus", "--watch"]
    return subprocess.Popen(argv, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_watching_works_in_a_pipe_and_ends_well_on_ctrl_c(
    tmp_path: Path, clean_environment: dict[str, str], cards: Cards
) -> None:
    with watching({**clean_environment, **cards(card(0))}, tmp_path) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line.startswith(" 0  NVIDIA")
            if seen == 2:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_watching_draws_over_itself_on_a_terminal(
    tmp_path: Path, clean_environment: dict[str, str], cards: Cards
) -> None:
    environ = {**clean_environment, **cards(card(0)), "TERM": "xterm", "COLUMNS": "100"}
    argv = ["-m", "trainkit", "env", "gpus", "--watch"]
    child = pexpect.spawn(sys.executable, argv, env=environ, cwd=str(tmp_path), timeout=60, encoding="utf-8")
    child.expect("NVIDIA A100")
    child.expect("\x1b\\[1A")  # up a line
    child.expect("NVIDIA A100")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_env_has_what_a_bug_report_needs_and_no_secret(trainkit: Trainkit, cards: Cards) -> None:
    secrets = {"HF_TOKEN": "hf_verysecret", "WANDB_API_KEY": "alsosecret", "NCCL_X": "http://me:mypass@host/"}
    others = {"NCCL_DEBUG": "WARN", "MY_PASSWORD": "unrelated"}
    environ = {**cards(card(0, power_limit=400, clock_limit=1410)), **secrets, **others}
    done = trainkit("env", environ=environ)
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stdout for word in ("hf_verysecret", "alsosecret", "mypass", "unrelated"))
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("HF_TOKEN ***", "NCCL_DEBUG WARN", "NCCL_X http://***@host/", "torch 2.13.0"):
        assert line in lines, done.stdout
    shown = next(line for line in lines if line.startswith("GPU 0 NVIDIA A100-SXM4-80GB, 80.0 GiB, 79.5 free"))
    assert shown.endswith(f", 400 W at most, 1410 MHz at most, {card(0)['uuid']}, 00000000:01:00.0")
    assert any(line.startswith("driver 580.82.07") for line in lines)
    told = json.loads(trainkit("env", "--json", environ=environ).stdout)
    assert told["environment"]["HF_TOKEN"] == "***"


def test_a_plan_made_elsewhere_from_facts_is_the_plan_made_there(
    trainkit: Trainkit, cards: Cards, tmp_path: Path, tiny_recipe: Path
) -> None:
    environ = cards(*(card(number) for number in range(4)))
    (tmp_path / "there.json").write_text(trainkit("env", "facts", environ=environ).stdout)
    words = ("plan", str(tiny_recipe), "--with", "strategy/fsdp", "devices.type=cuda", "devices.select=[3,1]", "--json")
    there = json.loads(trainkit(*words, environ=environ).stdout)
    here = json.loads(trainkit(*words, "--on", "there.json").stdout)
    notices = [each["what"] for each in here.pop("notices")]
    assert any("planned for another machine (there.json)" in what for what in notices)
    there.pop("notices")
    assert here == there
    assert [each["index"] for each in here["cards"]] == [3, 1]


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_profile_can_be_planned_for_and_shown(trainkit: Trainkit, tiny_recipe: Path, name: str) -> None:
    facts = machine_facts(name)
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
    done = trainkit("plan", str(tiny_recipe), "devices.type=auto", "--on", name)
    assert done.returncode == 0, done.stderr
    assert f"planned for another machine (profile {name})" in " ".join(done.stdout.split())
    assert "profile-" not in done.stdout
    assert render_cards(facts, 80)


def test_a_profile_names_its_sources_and_what_it_is(trainkit: Trainkit) -> None:
    listed = trainkit("ls", "machines").stdout
    for name, path in profiles().items():
        assert f"machines/{name} " in listed
        assert "https://" in path.read_text() or "An example" in path.read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no file and no machine profile 'other'"),
        ("{", "other.json is not JSON"),
        ("[" * 100000, "other.json is not JSON"),
        ("[]", "these are not the facts of a machine"),
        ('{"facts_version": 7}', "facts are of version 7"),
        ('{"facts_version": 1}', "`platform` is missing"),
    ],
)
def test_what_is_no_machine_is_a_usage_error(
    trainkit: Trainkit, tmp_path: Path, tiny_recipe: Path, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "other.json").write_text(content)
    done = trainkit("plan", str(tiny_recipe), "--on", "other" if content is None else "other.json")
    assert done.returncode == 2
    assert words in done.stderr


def test_a_profile_is_copied_edited_and_planned_for(trainkit: Trainkit, tmp_path: Path, tiny_recipe: Path) -> None:
    assert trainkit("cp", "machines/2x3090", "mine.yaml").returncode == 0
    profile = (tmp_path / "mine.yaml").read_text()
    assert "yaml-language-server" not in profile  # it is no recipe
    (tmp_path / "mine.yaml").write_text(profile.replace("count: 2", "count: 3"))
    words = ("devices.type=cuda", "devices.select=3", "batch.global=6", "--with", "strategy/ddp")
    done = trainkit("plan", str(tiny_recipe), "--on", "mine.yaml", *words)
    assert done.returncode == 0, done.stderr
    assert "rank 2 on GPU 2: NVIDIA GeForce RTX 3090" in done.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: [", "mine.yaml:2: a value is missing here"),
        ("- a", "mine.yaml is not a machine profile"),
        ("memory_gib: many", "memory_gib is not a number up to 100,000"),
        ("memory_gib: 1.0e+30", "memory_gib is not a number up to 100,000"),
        ("memory_gib: 64\ncards: {count: 2}", "cards.memory_gib is not a number"),
        ("memory_gib: 64", "`cpu_cores` is missing"),
        ("memory_gib: 64\ncpu_cores: 4\nwheels: 4", "unknown key `wheels`"),
        (None, "mine.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_profile_that_cannot_be_read_is_a_usage_error(
    trainkit: Trainkit, tmp_path: Path, tiny_recipe: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "mine.yaml").write_text(text)
    done = trainkit("plan", str(tiny_recipe), "--on", "mine.yaml")
    assert done.returncode == 2
    assert words in done.stderr
    assert "trainkit cp machines/2x3090" in done.stderr


def test_a_run_is_on_this_machine(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("run", str(tiny_recipe), "--on", "8xh100")
    assert done.returncode == 2
    assert "a run is on this machine, not on 8xh100" in done.stderr


def test_a_plan_for_another_machine_does_not_ask_this_one_for_files(trainkit: Trainkit, tmp_path: Path) -> None:
    recipe = tmp_path / "far.yaml"
    recipe.write_text("version: 1\nname: far\ndata: {path: /data/of/the/cluster.txt}\ntrain: {steps: 1}\n")
    assert trainkit("plan", str(recipe)).returncode == 4
    done = trainkit("plan", str(recipe), "--on", "8xh100")
    assert done.returncode == 0, done.stderr
    assert "whether that machine has /data/of/the/cluster.txt is not known" in " ".join(done.stdout.split())
