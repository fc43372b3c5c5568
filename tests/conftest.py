"""What every test has: the real command line, in a working folder and a home of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import hypothesis
import pytest

# The workers of a test run share the cores: torch in each of them with as many threads as there are cores would be
# many times slower. Before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A run of one process has a thread per core all the same (its plan says so). While another worker holds a core, these
# threads would burn the time that it needs by spinning at every barrier: three to four times the work of the run.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# Thousands of processes are started: none is to compile trainkit again, as they would in images that set this.
if sys.dont_write_bytecode:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
# torch takes ninja by PATH. Two versions of it in turn, the system's and the environment's, each begin the log of
# builds anew, and compile all ops again.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

# A shell without job control starts what is in its background with Ctrl-C ignored, and so would be every child here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.made_up_cards import Cards, environments
from tests.warm_commands import fits, run_warm

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("trainkit", deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile("trainkit")
pytest_plugins = [
    "tests.bucket_server",
    "tests.hub_server.server",
    "tests.made_up_plans",
    "tests.made_up_recipes",
    "tests.made_up_runs",
    "tests.tiers",
]
ROOT = Path(__file__).resolve().parents[1]
Trainkit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def extension_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for compiled DeepSpeed ops, so that no test run builds them twice.

    TRAINKIT_TEST_EXTENSIONS names one that outlives the test run: the op for NVMe takes minutes to compile.
    """
    kept = os.environ.get("TRAINKIT_TEST_EXTENSIONS")
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = Path(kept) if kept else shared / "torch-extensions"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# What variables begin with that change a launch, or what the libraries of models and data do.
CHANGING = (
    *(
        "TRAINKIT",
        "PET_",
        "ACCELERATE_",
        "XDG_",
        "CUDA_",
        "OMP_",
        "COV_",
        "NO_COLOR",
        "FORCE_COLOR",
        "COLUMNS",
        "LINES",
    ),
    *("HF_", "TRANSFORMERS_"),
)


@pytest.fixture
def clean_environment(tmp_path: Path, extension_cache: Path) -> dict[str, str]:
    """The caller's environment with an empty home and without anything that would change a launch."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CHANGING)}
    return kept | {
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(extension_cache),
    }


@pytest.fixture
def trainkit(request: pytest.FixtureRequest, tmp_path: Path, clean_environment: dict[str, str]) -> Trainkit:
    """Call `trainkit WORDS…` in an empty folder; the call is bounded in time and never reads a terminal."""
    return call_trainkit(tmp_path, clean_environment, warm=request.node.get_closest_marker("cli") is not None)


def call_trainkit(
    folder: Path, environment: Mapping[str, str], *, warm: bool = False, python: str = sys.executable
) -> Trainkit:
    """The command in a process of its own. warm: it need not start as for users (tests/warm_commands.py)."""

    def call(
        *words: str,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        timeout: float = 240,
        stdin: str = "",
        prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        variables = {**environment, **(environ or {})}
        if warm and not prefix and fits(environ or {}):
            return run_warm(words, cwd or folder, variables, stdin, timeout)
        return subprocess.run(
            [*prefix, python, "-m", "trainkit", *words],
            cwd=cwd or folder,
            env=variables,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return call


@pytest.fixture
def cards(tmp_path: Path, clean_environment: dict[str, str]) -> Cards:
    """`cards(card(0), card(1))` is the environment in which trainkit finds these cards."""
    return environments(tmp_path, clean_environment)


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    """A recipe that trains a very small model for three steps on a text of its own."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        """\
version: 1
name: tiny
devices: {type: cpu}
model: {layers: 1, heads: 2, hidden_size: 16}
data: {path: corpus.txt, sequence_length: 32, cache: cache}
batch: {global: 4, micro: 2}
optimizer: {lr: 1.0e-2}
train: {steps: 3}
logging: {every_steps: 1}
"""
    )
    return recipe
