"""scripts/gpu/prove on a CPU: its cases run, a case that should fail does, it goes on, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure
import pytest
from measure import Asked
from proof import Case, Place, markdown
from proof_cases import CASES, REFUSED, rows
from proof_checks import command, distance, measured, program_command, shown_card

from tests.made_up_cards import Cards, card
from trainkit.cli.machines import machine_facts
from trainkit.cli.pipeline import plan_recipe, resolve_request
from trainkit.errors import RecipeError
from trainkit.machine.facts import GpuProcess

pytestmark = pytest.mark.e2e  # what the kit measures with imports torch, accelerate and transformers
GPU = Path(__file__).resolve().parents[2] / "scripts" / "gpu"
PROVE = GPU / "prove"
HERE = [case for case in CASES if case.on_cpu]
# The kit with two more cases: one that must fail, and one that leaves a process behind.
PLANTED = """\
import dataclasses, runpy, subprocess, sys
sys.path.insert(0, sys.argv[1])
import proof_cases
from proof import Case
def leave(case, place, limit):
    subprocess.Popen(["sleep", "600"], env=place.environment(place.folder("left")), start_new_session=True)
    return case.outcome(True, "left")
words = (*proof_cases.FP32, "train.seed=4")
(wrong,) = proof_cases.rows("planted", {"other data": (words, proof_cases.SINGLE, proof_cases.EXACT)}, turn=2)
proof_cases.CASES += (dataclasses.replace(wrong, on_cpu=True), Case(2, "planted", "left", leave, on_cpu=True))
sys.argv = [sys.argv[1] + "/prove", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets lie in the kit's temporary folder."""
    made = Path(tempfile.mkdtemp(prefix="gpu-"))
    (made / "tmp").mkdir()
    yield made
    shutil.rmtree(made)


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    extensions = os.environ.get("TRAINKIT_TEST_EXTENSIONS", str(folder / "extensions"))
    return {**kept, "TMPDIR": str(folder / "tmp"), "TORCH_EXTENSIONS_DIR": extensions}


def prove(folder: Path, *words: str, program: Sequence[str] = (str(PROVE),)) -> subprocess.CompletedProcess[str]:
    """The kit's outcome on a CPU with the smallest sizes."""
    argv = [sys.executable, *program, "--device", "cpu", "--tiny", "--jobs", "2", *words]
    environ = environment(folder)
    return subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=500, check=False)


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def marks(results: dict[str, Any]) -> dict[str, bool | None]:
    return {f"{case['group']}/{case['name']}": case["ok"] for case in results["cases"]}


def left_in(folder: Path) -> list[str]:
    """Files and processes of a call that is over."""
    found = [path.name for path in (folder / "tmp").iterdir()]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{folder}/tmp/".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def whole(folder: Path) -> subprocess.CompletedProcess[str]:
    """All that a CPU can run, and what was planted."""
    return prove(folder, "--minutes", "8", "--output", "out", program=("-c", PLANTED, str(GPU)))


def test_every_case_of_a_cpu_is_right_and_what_is_planted_is_wrong(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    assert whole.returncode == 1, whole.stdout + whole.stderr
    found = marks(found_in(folder / "out"))
    wrong = {"planted/other data", "kit/nothing left"}
    assert {title for title, ok in found.items() if ok is not True} == wrong, whole.stdout
    assert found.keys() == {case.title for case in HERE} | wrong | {"planted/left"}
    assert left_in(folder) == []


def test_a_wrong_case_says_what_is_wrong_and_keeps_its_log(
    folder: Path, whole: subprocess.CompletedProcess[str]
) -> None:
    cases = {f"{case['group']}/{case['name']}": case for case in found_in(folder / "out")["cases"]}
    assert "losses differ by" in cases["planted/other data"]["found"]
    assert "12 steps of 4 samples" in cases["planted/other data"]["log"]
    assert "sleep 600" in cases["kit/nothing left"]["found"]
    page, log = ((folder / "out" / name).read_text() for name in ("results.md", "log.txt"))
    assert "# Proof on cpu" in page and "2 wrong, 0 left out" in page and "- **planted/other data**: losses" in page
    assert "### loop: loops" in page and "nothing of a card" in page
    assert "FAILED   planted/other data" in log and "12 steps of 4 samples" in log


def test_a_second_call_goes_on_with_what_was_not_right(folder: Path, whole: subprocess.CompletedProcess[str]) -> None:
    earlier = found_in(folder / "out")
    for case in earlier["cases"]:
        case["ok"] = None if case["name"] == "fsdp" else case["ok"]
    (folder / "earlier.json").write_text(json.dumps(earlier))
    done = prove(folder, "--after", "earlier.json", "--output", "again")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = [
        line.split("]")[1].split()[1].rstrip(":") for line in (folder / "again" / "log.txt").read_text().splitlines()
    ]
    assert ran == ["strategy/single", "strategy/fsdp", "kit/nothing"]
    found = marks(found_in(folder / "again"))
    assert found.keys() >= {case.title for case in HERE} and set(found.values()) == {True}


def test_results_of_another_card_are_not_gone_on_with(folder: Path, whole: subprocess.CompletedProcess[str]) -> None:
    (folder / "other.json").write_text(json.dumps({**found_in(folder / "out"), "card": "NVIDIA H200"}))
    done = prove(folder, "--after", "other.json", "--output", "other")
    assert done.returncode == 2
    assert done.stderr == "error: the earlier results have card: NVIDIA H200, and this call cpu\n"
    assert not (folder / "other").exists()


def test_a_call_that_is_ended_leaves_its_results_and_nothing_else(folder: Path) -> None:
    argv = [sys.executable, str(PROVE), "--device", "cpu", "--tiny", "--only", "strategy,facts", "--output", "ended"]
    process = subprocess.Popen(argv, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "facts/machine" in process.stdout.readline()
    until = time.monotonic() + 60
    while not [*(folder / "tmp").glob("trainkit-gpu-*/runs/strategy-single/*/*/trainer.json")]:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    found = marks(found_in(folder / "ended"))
    assert (found["facts/machine"], found["kit/nothing left"]) == (True, True)
    assert left_in(folder) == []


def test_what_would_not_end_in_time_is_left_out(folder: Path) -> None:
    done = prove(folder, "--minutes", "0.2", "--output", "late")
    assert done.returncode == 0
    found = found_in(folder / "late")["cases"]
    assert [case["ok"] for case in found] == [None] * len(HERE) + [True]
    assert all(case["found"].startswith("no time: 0 s were left, it takes") for case in found[:-1])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--case", "nobody"), 2, "no group or case here is called nobody"),
        (("--device", "cuda"), 4, "NVML tells of no NVIDIA card here"),
        (("--after", "nothing.json"), 2, "nothing.json cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(folder: Path, words: Sequence[str], code: int, said: str) -> None:
    if "cuda" in words and Path("/dev/nvidiactl").exists():
        pytest.skip("there is a card here")
    done = prove(folder, *words, "--output", "refused")
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not (folder / "refused").exists()


def test_what_needs_no_cuda_is_right_on_made_up_cards(folder: Path, cards: Cards) -> None:
    there = cards(card(0, "T4", reserved=0), card(1, "T4", reserved=0))
    there["PYTHONPATH"] = os.pathsep.join([there["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, str(PROVE), "--case", "no such card,card sampling,speed/1300M", "--output", "made-up"]
    environ = {**environment(folder), **there}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {case["name"]: case for case in found_in(folder / "made-up")["cases"]}
    assert [found[name]["ok"] for name in ("no such card", "card sampling", "1300M")] == [True, True, None]
    assert found["no such card"]["found"].endswith("there is no GPU `77` here")
    assert found_in(folder / "made-up")["card"] == "Tesla T4"
    assert found["1300M"]["found"] == "it needs a GPU of 64 GiB, this one has 15"


def test_cases_come_with_those_that_they_are_compared_with(folder: Path) -> None:
    done = prove(folder, "--list", "--case", "zero2")
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["strategy/single", "strategy/zero2"]


TRAINED = [case for case in CASES if case.words and case.check is not shown_card]
NAMING = [case for case in CASES if case.check is shown_card]
CARD = "GPU-12345678-1111-2222-3333-444444444444"


@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.title)
def test_the_words_of_every_case_plan_on_a_card(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, recipe, *words = command(case, Place(tmp_path, "cuda", tiny=False), tmp_path / "runs")
    if case.name in REFUSED:
        with pytest.raises(RecipeError, match="unsupported combination"):
            planned(recipe, words, busy=True)
    else:
        assert not planned(recipe, words, busy=case.phase == 2).blockers


@pytest.mark.parametrize("case", NAMING, ids=lambda case: case.title)
def test_every_way_to_name_a_card_plans(case: Case, tmp_path: Path) -> None:
    (_, recipe, *words), environ = program_command(case, Place(tmp_path, "cuda", tiny=False, card=CARD), tmp_path)
    plan = planned(recipe, words, busy=case.phase == 2, visible_devices=environ.get("CUDA_VISIBLE_DEVICES"))
    assert bool(plan.blockers) == bool(case.exit_code)
    assert case.exit_code or [card.uuid for card in plan.cards] == [CARD]


def planned(recipe: str, words: Sequence[str], *, busy: bool = False, **facts: Any) -> Any:
    """The plan of a command line's words for a machine with one H100. busy: others are on it; facts: more of it."""
    presets = [word for flag, word in pairwise(words) if flag == "--with"]
    variant = next((word for flag, word in pairwise(words) if flag == "--variant"), None)
    overrides = [word for word in words if word.partition("=")[1]]
    resolved = resolve_request(recipe, overrides, presets, variant=variant, environ={})
    machine = machine_facts("8xh100")
    card = replace(machine.gpus[0], uuid=CARD)
    if busy:
        card = replace(card, memory_free=card.memory_total // 2, processes=(GpuProcess(1, "ada", "python", 2**33),))
    return plan_recipe(resolved, replace(machine, gpus=(card,), **facts)).plan


def measurements(scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """The words of every recipe that is measured."""
    for size in (*measure.MICRO, measure.BERT):
        yield size, measure.speed_words(Asked(size, "cuda", False, scratch), 30)
    for part, found in measure.ROWS.items():
        for name, words in found.items():
            yield f"{part} {name}", ["efficiency-table", *words]
    for name in measure.CONFIGURATIONS:
        yield name, measure.memory_words(Asked("", "cuda", False, scratch), name)
    for name in measure.LOOPED:
        yield f"loop {name}", measure.loop_words(Asked("", "cuda", False, scratch), name, 20)


def test_the_words_of_every_measurement_plan_on_a_card(tmp_path: Path) -> None:
    refused = []
    for name, (recipe, *words) in measurements(tmp_path):
        try:
            if blockers := planned(recipe, words).blockers:
                refused.append((name, blockers))
        except RecipeError as error:
            refused.append((name, error.diagnostics))
    assert not refused


ROW = {"samples/s, metrics": 100.0, "samples/s, clock": 101.0, "MFU, metrics": 0.39}


@pytest.mark.parametrize(
    ("size", "card", "more", "missed"),
    [
        ("350M", "NVIDIA H200", {}, ["less than 40% MFU"]),
        ("350M", "NVIDIA H100 80GB HBM3", {"MFU, metrics": 0.41}, []),
        ("124M", "NVIDIA H200", {}, []),
        ("350M", "NVIDIA A100-SXM4-80GB", {}, []),
        ("350M", "NVIDIA H100 PCIe", {}, []),
        ("bert-large", "NVIDIA H200", {}, ["less than 357 samples/s"]),
        ("350M", "NVIDIA A10", {"samples/s, clock": 80.0}, ["the metrics say 100.0 samples/s, the clock 80.0"]),
    ],
)
def test_speed_is_judged_on_the_cards_of_the_gates(
    size: str, card: str, more: dict[str, float], missed: list[str], tmp_path: Path
) -> None:
    assert measure.missed(Asked(size, "cuda", False, tmp_path), card, {**ROW, **more}) == missed


def test_curves_with_other_steps_are_infinitely_far() -> None:
    one: dict[str, list[float | None]] = {"loss": [2.0, 1.0], "norm": [1.0, 1.0], "eval": []}
    assert distance(one, one) == 0.0
    assert distance(one, {**one, "norm": [1.0, 1.1]}) == pytest.approx(0.1)
    assert distance(one, {**one, "loss": [2.0]}) == distance(one, {**one, "loss": [2.0, None]}) == float("inf")


def test_a_measurement_that_writes_no_answer_is_wrong(tmp_path: Path) -> None:
    case = Case(1, "facts", "nothing", measured("nothing"))
    found = case.check(case, Place(tmp_path, "cpu", tiny=True), 60.0)
    assert (found.ok, found.found) == (False, "exit code 2") and "invalid choice: 'nothing'" in found.log


def test_every_case_has_a_name_of_its_own_and_its_reference_before_it() -> None:
    places = {case.title: (case.phase, case.turn) for case in CASES}
    assert len(places) == len(CASES) > 95
    assert all(places[case.like] < places[case.title] for case in CASES if case.like)


def test_packages_that_words_use_are_needed() -> None:
    (case,) = rows("strategy", {"zero2": (("--with", "strategy/zero2", "optimizer.name=adamw_bnb_8bit"), "", 0.0)})
    assert case.needs == ("deepspeed", "bitsandbytes")


def test_a_page_of_results_cannot_be_broken_by_what_was_found() -> None:
    case = Case(1, "facts", "machine", shown_card).outcome(False, "a | b\nc").to_json()
    found: dict[str, Any] = {
        "card": "cpu",
        "versions": {},
        "date": "",
        "seconds": 1.0,
        "tiny": False,
        "device": "cuda",
        "cases": [case],
    }
    assert "| machine | NO | 0 | a / b c |" in markdown(found)
