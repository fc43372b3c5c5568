"""The documentation is true: every command in it runs, its derived parts are what the code says, its links lead on."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny_models import save_model

from tests.conftest import call_trainkit
from tests.foresight.hub_configs import CONFIGS
from tests.hub_server.server import TOKEN, Hub
from tests.installed import python_with

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / ".github").glob("*.md"))]
# Run by other means: the quickstart, and extras that a page adds, by test_install in a fresh clone; the proof on a card
# (but for the card) by bench/test_gpu_proof; the others by whoever runs this very test.
ELSEWHERE = {
    "git",
    "cd",
    "scripts/quickstart",
    "scripts/environment",
    "scripts/gpu/prove",
    "scripts/test",
    "scripts/check",
    "scripts/renew",
    ".venv/bin/python",
}
TRAINING = ("run", "bench", "sweep")
OTHERS = {"lora", "tiny", "train.py", "from-torchrun.yaml", "pip.yaml", "reviews.yaml"}
# A file that a page shows; its reader has written it.
FILE = re.compile(r"^<!-- file (\S+) -->\n```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# The tests' Hub has tiny models of these names.
SMALL_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llama", "distilbert/distilbert-base-uncased": "bert"}
# Smaller than printed, through a layer that any user may use.
SMALL = {
    "TRAINKIT__MODEL__HIDDEN_SIZE": "16",
    "TRAINKIT__MODEL__LAYERS": "1",
    "TRAINKIT__DATA__SEQUENCE_LENGTH": "16",
    "TRAINKIT__EVAL__BATCHES": "1",
}


def blocks(page: Path, language: str) -> list[str]:
    """A page's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands of a page, in the order in which they are printed."""
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line and not line.startswith("#")]


def test_the_derived_parts_are_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/renew"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_every_page_is_reached_from_it() -> None:
    readme = PAGES[0].read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    linked = {(ROOT / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", readme)}
    assert not {page for page in PAGES[1:] if page.parent.name == "docs"} - linked


def test_the_readme_begins_with_a_clone_and_the_two_commands() -> None:
    first, second, *_ = blocks(PAGES[0], "sh")
    assert [line.partition("  ")[0] for line in first.splitlines()] == [
        "git clone ADDRESS trainkit", "cd trainkit", "scripts/quickstart"
    ]  # fmt: skip
    assert second == "scripts/test\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_the_recipe_that_is_explained_is_valid(trainkit: Trainkit, tmp_path: Path) -> None:
    (recipe,) = blocks(ROOT / "docs" / "recipes.md", "yaml")
    (tmp_path / "team.yaml").write_text("version: 1\noutput: {root: runs}\n")
    (tmp_path / "explained.yaml").write_text(recipe)
    assert yaml.safe_load(recipe)["name"] == "my-run"
    done = trainkit("check", "explained.yaml")
    assert done.returncode == 0, done.stderr
    planned = trainkit("plan", "explained.yaml", "devices.type=cpu", environ={"HF_TOKEN": "x"})
    assert planned.returncode == 0, planned.stderr
    assert "64 = 4" in planned.stdout


def test_the_wizards_recipe_is_what_it_writes_today(trainkit: Trainkit, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "wizard.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- wizard -->")[2].partition("<!-- end of wizard -->")[0]
    done = trainkit(
        "config", "--defaults", "--on", "2x3090", "--set", "strategy.kind=fsdp", "--set", "data.path=python-stdlib"
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "recipe.yaml").read_text().partition("\n")[2]
    assert written.partition("# As it would")[0] in shown


def test_the_pages_have_commands_for_all_that_trainkit_does() -> None:
    shown = {shlex.split(line, comments=True)[1] for page in PAGES for line in commands(page) if "trainkit " in line}
    assert shown >= {
        *("run", "plan", "check", "explain", "export", "import", "config", "bench", "runs", "ls", "cp", "schema"),
        *("env", "doctor", "data", "generate", "completion", "sweep"),
    }


@pytest.fixture
def after_quickstart(tmp_path: Path, clean_environment: dict[str, str]) -> Trainkit:
    """Call `trainkit` in an environment with what scripts/quickstart installs."""
    (extras,) = re.findall(r"^scripts/environment (.*)$", (ROOT / "scripts/quickstart").read_text(), re.MULTILINE)
    python = python_with(extras.split(), tmp_path / "environment")
    others = clean_environment["PATH"].split(os.pathsep)
    path = os.pathsep.join(
        [str(python.parent), *(each for each in others if Path(sys.executable).parent != Path(each))]
    )
    return call_trainkit(tmp_path, {**clean_environment, "PATH": path}, python=str(python))


def test_a_strategy_that_the_quickstart_installs_nothing_for_names_what_it_needs(
    after_quickstart: Trainkit, tmp_path: Path
) -> None:
    planned = after_quickstart("plan", "quickstart", "--with", "strategy/zero2")
    assert planned.returncode == 4, planned.stdout + planned.stderr
    install = f"{tmp_path}/environment/bin/python -m pip install 'deepspeed>=0.19.4,<0.19.9' 'ninja>=1.11.1,<2'"
    assert f"\n    {install}\n" in planned.stdout
    refused = after_quickstart("run", "quickstart", "--with", "strategy/zero2")
    assert refused.returncode == 4
    assert f"\n  next: {install}\n" in refused.stderr
    elsewhere = after_quickstart("plan", "quickstart", "--with", "strategy/zero2", "--on", "8xh100")
    assert elsewhere.returncode == 0, elsewhere.stdout + elsewhere.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
@pytest.mark.timeout(900)
def test_every_command_runs_as_printed_and_in_this_order(
    request: pytest.FixtureRequest, tmp_path: Path, page: Path, hub: Hub
) -> None:
    # Those of README work right after the two commands with which it begins.
    trainkit = request.getfixturevalue("after_quickstart" if page.stem == "README" else "trainkit")
    reader = {**hub.environment, "HF_TOKEN": TOKEN}  # who is logged in to a Hub
    for name, content in FILE.findall(page.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(content)
    for name, kind in SMALL_MODELS.items():
        if name in page.read_text(encoding="utf-8"):
            hub.add(name, save_model(tmp_path / "hub" / kind, kind))
    for name, config in CONFIGS.items():  # which pages only estimate
        if name in page.read_text(encoding="utf-8"):
            hub.add(name, {"config.json": json.dumps(config), "model.safetensors": b"weights"})
    if not (tmp_path / "train.py").exists():
        (tmp_path / "train.py").write_text(
            "import sys; assert sys.argv[1:] == ['--lr', '0.1', 'two words'], sys.argv\n"
        )
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[0] in ELSEWHERE:
            continue
        if words[0] == "python":
            continue  # test_install does
        assert words[0] == "trainkit", f"no test runs {line!r}"
        # the built-in trainer's own models; others are of another kind, and small
        is_big = words[1] in TRAINING and not OTHERS & {*words}
        done = trainkit(*words[1:], environ={**reader, **(SMALL if is_big else {})}, timeout=400)
        fine = (0, 4) if words[1] == "doctor" else (0,)  # the machine of the test may have a problem
        if said := re.search(r"# exit code (\d+)", line):
            fine = (int(said[1]),)
        assert done.returncode in fine, f"{line}\n{done.stdout}\n{done.stderr}"
