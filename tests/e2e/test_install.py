"""Installing as a stranger does: the wheel without torch, and the first command in a fresh clone with an empty home."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def call(*words: str | Path, cwd: Path, home: Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command with an empty home and nothing of this project's environment."""
    home.mkdir(exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "UV_", "SSL_", "http", "no_proxy")) or name in {"LANG", "LC_ALL", "TMPDIR"}
    }
    path = os.pathsep.join([str(Path(sys.executable).resolve().parent), "/usr/local/bin", "/usr/bin", "/bin"])
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**kept, "HOME": str(home), "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def clone(folder: Path) -> Path:
    """A copy of exactly the files that a clone would have."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


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


@pytest.mark.timeout(1200)
def test_the_quickstart_installs_and_learns_in_a_fresh_clone_with_an_empty_home(tmp_path: Path) -> None:
    checkout = clone(tmp_path / "clone")
    # One thread: the tests share two cores, where two threads that wait for each other crawl.
    words = ("train.steps=40", "eval.batches=1", "env.OMP_NUM_THREADS=1")
    done = call(checkout / "scripts/quickstart", *words, cwd=tmp_path, home=tmp_path / "home", timeout=1100)
    assert done.returncode == 0, done.stderr
    (summary,) = (checkout / "runs").glob("quickstart/*/summary.json")
    content = json.loads(summary.read_text())
    assert (content["exit_code"], content["steps"]) == (0, 40)
    assert content["corpus"]["unigram_entropy"] == pytest.approx(3.24, abs=0.1)
    assert content["final_loss"] < content["corpus"]["unigram_entropy"] - 0.2
    assert len(content["sample"]) >= 200
    for stated in (f"{content['final_loss']:.4f}", f"{content['corpus']['unigram_entropy']:.4f}", "Run directory"):
        assert stated in done.stderr
