"""`scripts/test --fast` answers in an environment that has what trainkit and its tests require, and nothing more."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from tests.installed import brought_by, plain

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys
import pytest

absent = set(sys.argv.pop().split(","))

class Others:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *where):
        return None if name in absent else self.finder.find_spec(name, *where)

class Absent:
    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self):  # other plugins are there, no file of the tests is yet
        sys.meta_path[:] = map(Others, sys.meta_path)

words = ["-q", "--collect-only", "--tier", "unit", "-p", "no:cacheprovider"]
sys.exit(pytest.main(words, plugins=[Absent()]))
"""


def test_the_unit_tier_is_collected_without_a_training_library() -> None:
    kept = brought_by(["test"])
    modules = metadata.packages_distributions().items()
    others = [module for module, of in modules if not kept & {plain(name) for name in of}]
    assert {"torch", "numpy", "huggingface_hub", "pyarrow"} <= set(others)
    words = [sys.executable, "-c", COLLECT, ",".join(others)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
