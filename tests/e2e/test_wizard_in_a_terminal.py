"""The wizard on a terminal: reasons, the way back, typing, leaving, and no colour where none is wanted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pexpect
import pytest
import yaml
from wizard_terminal import DOWN, ENTER, QUESTIONS, UP, spawn

from tests.wizard.conftest import machine_of


@pytest.fixture
def two_old_cards(tmp_path: Path) -> list[str]:
    """The option that stands for a machine with two cards before Ampere."""
    (tmp_path / "facts.json").write_text(json.dumps(machine_of(2, "V100").to_json()))
    return ["--on", "facts.json"]


def test_reasons_the_way_back_refusals_and_leaving_without_loss(
    tmp_path: Path, clean_environment: dict[str, str], two_old_cards: list[str]
) -> None:
    child = spawn(tmp_path, clean_environment, two_old_cards)
    child.expect(QUESTIONS["program"])
    child.send("?")
    child.expect("program.kind: ")
    child.expect(QUESTIONS["program"])
    child.send("<")
    child.expect("this is the first question")
    child.expect(QUESTIONS["program"])
    child.send("pretrain" + ENTER)
    child.expect(QUESTIONS["where"])
    child.send(DOWN + DOWN + UP + UP + ENTER)
    child.expect(r"2\. Where does it run\? all")
    child.expect(QUESTIONS["strategy"])
    child.send("<")
    child.expect("your last answer")
    child.send("one" + ENTER)
    child.expect(QUESTIONS["data"])
    child.send(ENTER)
    child.expect(QUESTIONS["precision"])
    child.send("bf16" + ENTER)
    child.expect(r"no: bf16 cannot be chosen here: bf16\s+requires\s+compute\s+capability\s+8.0")
    child.expect(QUESTIONS["precision"])
    child.send(ENTER)
    child.expect(QUESTIONS["batch"])
    child.send("?")
    child.expect("batch.micro: ")
    child.expect(QUESTIONS["batch"])
    child.send("64/x" + ENTER)
    child.expect("'64/x' is not a batch")
    child.expect(QUESTIONS["batch"])
    child.send("6\x03")
    child.expect("continue with:\r\n  trainkit config --on facts.json --answers")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    kept = yaml.safe_load((tmp_path / "recipe.answers.yaml").read_text())
    assert kept["devices"] == {"type": "cuda", "select": 1}
    assert kept["precision"] == {"dtype": "fp16"}
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize("key", ["\x03", "\x04"])
@pytest.mark.parametrize("typed", [(), ("torch",)])
def test_ctrl_c_and_ctrl_d_leave_a_list_and_a_line_alike(
    tmp_path: Path, clean_environment: dict[str, str], key: str, typed: tuple[str, ...]
) -> None:
    child = spawn(tmp_path, clean_environment)
    child.expect(QUESTIONS["program"])
    for word in typed:
        child.send(word + ENTER)
        child.expect(QUESTIONS["command"])
    child.send(key)
    child.expect("answers are saved" if typed else "nothing is written")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert "Traceback" not in child.before
    assert len(list(tmp_path.glob("*.yaml"))) == len(typed)


def test_an_existing_file_is_asked_about_and_another_name_can_be_typed(
    tmp_path: Path, clean_environment: dict[str, str]
) -> None:
    (tmp_path / "recipe.yaml").write_text("mine\n")
    child = spawn(tmp_path, clean_environment, ["--set", "devices.type=cpu", "--set", "train.steps=3"])
    for topic in ("program", "data", "precision", "batch", "checkpointing"):
        child.expect(QUESTIONS[topic])
        child.send(("pretrain" if topic == "program" else "") + ENTER)
    child.expect(r"recipe.yaml exists. Replace it\?")
    child.send("other.yaml" + ENTER)
    child.expect(r"Write other.yaml\?")
    child.send(ENTER)
    child.expect("other.yaml is written")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert (tmp_path / "recipe.yaml").read_text() == "mine\n"
    assert yaml.safe_load((tmp_path / "other.yaml").read_text())["train"] == {"steps": 3}


def test_no_colour_is_used_where_none_is_wanted(
    tmp_path: Path, clean_environment: dict[str, str], two_old_cards: list[str]
) -> None:
    child = spawn(tmp_path, clean_environment, two_old_cards, NO_COLOR="1")
    log = tmp_path / "screen"
    with log.open("w") as child.logfile_read:
        child.expect(QUESTIONS["program"])
        child.send(ENTER)
        child.expect(QUESTIONS["where"])
        child.send("?")
        child.expect(QUESTIONS["where"])
        child.send(ENTER)
        child.expect(QUESTIONS["strategy"])
        child.sendintr()
        child.expect(pexpect.EOF)
    screen = log.read_text()
    assert not re.search(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7])\b[0-9;]*m", screen)
