"""Installing as a stranger does: the wheel without torch, and the first command in a fresh clone with an empty home."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_models import save_model
from walk import TASKS, Task, clone, surroundings, walk

from tests.hub_server.server import Hub

ROOT = Path(__file__).resolve().parents[2]


def call(*words: str | Path, cwd: Path, home: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command with an empty home and nothing of this project's environment."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=surroundings(home, Path(sys.executable).resolve().parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.timeout(900)
def test_the_core_installs_without_torch_and_can_validate_plan_and_render(tmp_path: Path) -> None:
    home, checkout = tmp_path / "home", clone(tmp_path / "clone")
    built = call(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, ".", cwd=checkout, home=home
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("training_launcher-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "trainkit/shipped/configs/strategy/fsdp.yaml" in names
    assert "trainkit/shipped/recipes/quickstart.yaml" in names

    venv = tmp_path / "venv"
    assert call(sys.executable, "-m", "venv", venv, cwd=tmp_path, home=home).returncode == 0
    constraints = ROOT / "scripts" / "constraints.txt"
    installed = call(
        venv / "bin/pip", "install", "--quiet", "--constraint", constraints, wheel, cwd=tmp_path, home=home
    )
    assert installed.returncode == 0, installed.stderr
    packages = json.loads(call(venv / "bin/pip", "list", "--format=json", cwd=tmp_path, home=home).stdout)
    assert not {"torch", "numpy", "accelerate", "deepspeed"} & {package["name"] for package in packages}

    trainkit = venv / "bin/trainkit"
    assert "recipes/quickstart" in call(trainkit, "ls", cwd=tmp_path, home=home).stdout
    assert call(trainkit, "check", "quickstart", cwd=tmp_path, home=home).returncode == 0
    planned = call(trainkit, "plan", "quickstart", cwd=tmp_path, home=home)
    assert planned.returncode == 4, planned.stdout + planned.stderr
    install = (
        rf"{re.escape(str(venv))}/bin/python\S* -m pip install '(torch|numpy|safetensors)>=[^']+'( '[^']+'){{2}}\n"
    )
    assert len(re.findall(rf"\n    {install}", planned.stdout)) == 1
    assert "#!/bin/sh" in call(trainkit, "plan", "quickstart", "--shell", cwd=tmp_path, home=home).stdout
    refused = call(trainkit, "run", "quickstart", cwd=tmp_path, home=home)
    assert refused.returncode == 4
    assert len(re.findall(rf"\n  next: {install}", refused.stderr)) == 1
    assert call(trainkit, "cp", "quickstart", cwd=tmp_path, home=home).returncode == 0
    assert call(trainkit, "check", "quickstart.yaml", cwd=tmp_path, home=home).returncode == 0


@pytest.mark.timeout(600)
def test_it_lives_beside_stable_hydra_and_the_omegaconf_that_hydra_needs(tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    words = ("-m", "pip", "install", "--quiet", "--target", beside, "hydra-core==1.3.2", "omegaconf>=2.3,<3")
    installed = call(sys.executable, *words, cwd=tmp_path, home=tmp_path / "home")
    assert installed.returncode == 0, installed.stderr
    assert list(beside.glob("omegaconf-2.3*"))
    (tmp_path / "recipe.yaml").write_text('train: {steps: 7}\nschedule: {warmup_steps: "${train.steps}"}\n')
    script = (
        f"import sys; sys.path[:0] = [{str(beside)!r}, {str(ROOT)!r}]\n"
        "import hydra, omegaconf; assert omegaconf.__version__.startswith('2.3')\n"
        "sys.argv = ['trainkit', 'explain', 'recipe.yaml', 'schedule.warmup_steps']\n"
        "from trainkit.__main__ import main; main()\n"
    )
    done = call(sys.executable, "-c", script, cwd=tmp_path, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert "schedule.warmup_steps = 7" in done.stdout


@pytest.fixture(scope="module")
def after_quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A fresh clone in which a newcomer has called scripts/quickstart, and what that printed."""
    folder = tmp_path_factory.mktemp("newcomer")
    checkout = clone(folder / "clone")
    # One thread: the tests share two cores, where two threads that wait for each other crawl.
    words = ("train.steps=40", "eval.batches=1", "env.OMP_NUM_THREADS=1")
    done = call(checkout / "scripts/quickstart", *words, cwd=folder, home=folder / "home", timeout=1100)
    return checkout, done


@pytest.mark.timeout(1200)
def test_the_quickstart_installs_and_learns_in_a_fresh_clone_with_an_empty_home(
    after_quickstart: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    checkout, done = after_quickstart
    assert done.returncode == 0, done.stderr
    (summary,) = (checkout / "runs").glob("quickstart/*/summary.json")
    content = json.loads(summary.read_text())
    assert (content["exit_code"], content["steps"]) == (0, 40)
    assert content["corpus"]["unigram_entropy"] == pytest.approx(3.24, abs=0.1)
    assert content["final_loss"] < content["corpus"]["unigram_entropy"] - 0.2
    assert len(content["sample"]) >= 200
    for stated in (f"{content['final_loss']:.4f}", f"{content['corpus']['unigram_entropy']:.4f}", "Run directory"):
        assert stated in done.stderr


# The tests' Hub has tiny models of these names.
SMALL_MODELS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llama", "distilbert/distilbert-base-uncased": "bert"}
# What the pages train is the quickstart's recipe; here it takes seconds.
SMALL = {
    "layers: 4, heads: 4, hidden_size: 128": "layers: 1, heads: 1, hidden_size: 16",
    "sequence_length: 128": "sequence_length: 16",
    "batches: 10": "batches: 1",
}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_newcomer_is_led_through_a_task_by_the_pages_alone(
    after_quickstart: tuple[Path, subprocess.CompletedProcess[str]], task: Task, tmp_path: Path, hub: Hub
) -> None:
    checkout, done = after_quickstart
    assert done.returncode == 0, done.stderr
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    recipe = (ROOT / "recipes" / "quickstart.yaml").read_text()
    for printed, small in SMALL.items():
        assert printed in recipe
        recipe = recipe.replace(printed, small)
    (checkout / "recipes" / "quickstart.yaml").write_text(f"{recipe}env: {{OMP_NUM_THREADS: 1}}\n")
    for name, kind in SMALL_MODELS.items():
        if any(name in (ROOT / "docs" / page.partition("#")[0]).read_text() for page in task.pages):
            hub.add(name, save_model(tmp_path / "hub" / kind, kind))
    home = {**surroundings(tmp_path / "home", checkout / ".venv" / "bin"), **hub.environment}
    # Threads that wait for one another must not take the other tests' cores meanwhile.
    assert walk(task, checkout, {**home, "GOMP_SPINCOUNT": "0"}) >= 2
