"""What a program is seen to run, and how it is told from what was planned."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.files import publish
from trainkit.files import read_json as read
from trainkit.runner.rank.wrapper import HOOK, differences, observed
from trainkit.verify import observe

STEP = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("went on")
"""


def run(
    folder: Path,
    program: str,
    expected: dict[str, Any] | str,
    *words: str,
    plant: Callable[[Path], object] = str,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    (folder / "expected.json").write_text(expected if isinstance(expected, str) else json.dumps(expected))
    plant(folder / "expected.json")
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environ
    inside = observed(outside, str(folder / "expected.json"), str(folder / "shown" / "rank-0.json"))
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        check=False,
        env=inside,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def shown(folder: Path, name: str = "rank-0.json") -> dict[str, Any]:
    return read(str(folder / "shown" / name))


def promise(**changed: Any) -> dict[str, Any]:
    return {"strategy": "single", "world_size": 1, "device": "cpu", "dtype": None, **changed}


def test_a_program_that_runs_as_planned_goes_on_and_leaves_an_account(tmp_path: Path) -> None:
    done = run(tmp_path, STEP, promise())

    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
    assert shown(tmp_path) == {**promise(), "differences": []}


def test_a_program_that_runs_otherwise_is_ended_at_its_first_step_and_says_why(tmp_path: Path) -> None:
    done = run(tmp_path, STEP, promise(device="cuda", world_size=2))

    assert (done.returncode, done.stdout) == (observe.NOT_AS_PLANNED, "")
    assert "world size 2 was planned, and it is 1; device cuda was planned, and it is cpu" in done.stderr
    assert differences(str(tmp_path / "shown" / "rank-0.json")) in done.stderr


ARGUMENTS = """
import sys, types
places = types.ModuleType("transformers.training_args")
sys.modules |= {"transformers": types.ModuleType("transformers"), places.__name__: places}
class TrainingArguments:
    def __init__(self, steps):
        self.max_steps = steps
class Derived(TrainingArguments):
    pass
places.TrainingArguments = TrainingArguments
"""


KIND = "import enum\nclass Kind(enum.Enum):\n    LINE = 'linear'\nmade = TrainingArguments(Kind.LINE)"


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("made", "planned", "says"),
    [
        ("made = Derived(4)", 3, "max_steps 3 was planned, and the script's TrainingArguments hold 4"),
        ("beside, made = TrainingArguments(4), Derived(3)", 3, ""),
        (KIND, "linear", ""),
        ("made = Derived(True)", False, "max_steps False was planned, and the script's TrainingArguments hold True"),
        ("", 3, "max_steps cannot have reached the script, which has no TrainingArguments"),
    ],
    ids=["another number", "as planned beside another", "an enumeration", "a switch", "none"],
)
def test_settings_that_do_not_reach_the_scripts_arguments_end_it(
    tmp_path: Path, made: str, planned: object, says: str
) -> None:
    done = run(tmp_path, f"{ARGUMENTS}{made}\n{STEP}", promise(arguments={"max_steps": planned}))

    assert (done.returncode, done.stdout) == ((observe.NOT_AS_PLANNED, "") if says else (0, "went on\n")), done.stderr
    assert says in done.stderr


STATE = """
import sys, types
callbacks = types.ModuleType("transformers.trainer_callback")
sys.modules |= {"transformers": types.ModuleType("transformers"), callbacks.__name__: callbacks}
class TrainerState:
    def __init__(self, global_step):
        self.global_step = global_step
callbacks.TrainerState = TrainerState
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("planned", "step", "says"),
    [
        (40, 40, ""),
        (40, 0, "resuming at step 40 was planned, and Trainer starts at step 0"),
        (40, 20, "Trainer starts at step 20"),
        (None, 20, ""),
        (None, 0, "resuming was planned, and Trainer starts at step 0: hand resume_from_checkpoint to trainer.train()"),
    ],
)
def test_a_resume_that_does_not_happen_ends_the_run(tmp_path: Path, planned: int | None, step: int, says: str) -> None:
    resume, folder = "--resume_from_checkpoint", "checkpoint-40/" if planned else "best"
    promised = promise(resume={"argument": resume})
    done = run(tmp_path, f"{STATE}state = TrainerState({step})\n{STEP}", promised, f"{resume}=runs/{folder}")

    assert done.returncode == (observe.NOT_AS_PLANNED if says else 0), done.stderr
    assert says in done.stderr
    assert shown(tmp_path)["step"] == step


def test_an_exception_handler_of_the_program_does_not_keep_it_alive(tmp_path: Path) -> None:
    program = STEP.replace("optimizer.step()", "try: optimizer.step()\nexcept BaseException: pass")

    done = run(tmp_path, program, promise(device="mps"))

    assert done.returncode == observe.NOT_AS_PLANNED


@pytest.mark.e2e
def test_weights_in_16_bits_are_told_from_those_in_32(tmp_path: Path) -> None:
    program = STEP.replace("torch.nn.Linear(2, 2)", "torch.nn.Linear(2, 2).bfloat16()").replace(
        "torch.ones(1, 2)", "torch.ones(1, 2).bfloat16()"
    )

    assert run(tmp_path, program, promise(dtype="bf16")).returncode == 0
    assert "dtype fp16 was planned, and it is bf16" in run(tmp_path, program, promise(dtype="fp16")).stderr


@pytest.mark.e2e
def test_hooks_of_the_programs_own_and_a_compiled_step_work_as_ever_and_are_seen(tmp_path: Path) -> None:
    program = STEP.replace(
        "optimizer.step()",
        "seen = []\n"
        "from torch.optim.optimizer import register_optimizer_step_pre_hook as register\n"
        "register(lambda *_: seen.append(1))\n"
        "compiled = torch.compile(optimizer.step, backend='eager')\n"
        "compiled(); optimizer.step(); optimizer.step()\n"
        "assert len(seen) == 3",
    )

    done = run(tmp_path, program, promise(), TORCH_LOGS="-all")

    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
    assert shown(tmp_path)["differences"] == []


def test_a_child_that_the_program_forks_is_no_rank(tmp_path: Path) -> None:
    forked = (
        "import os\nif not os.fork(): optimizer.step(); os._exit(7)\nprint(os.waitstatus_to_exitcode(os.wait()[1]))"
    )

    done = run(tmp_path, STEP.replace("optimizer.step()", forked), promise(device="cuda"))

    assert (done.returncode, done.stdout) == (0, "7\nwent on\n"), done.stderr
    assert not (tmp_path / "shown").exists()


def test_torch_that_was_imported_before_is_watched_too(tmp_path: Path) -> None:
    place = Path(observe.__file__).parents[2]
    watched = f"import sys, torch\nsys.path.append({str(place)!r})\n"
    watched += "from trainkit import files\nfrom trainkit.verify.observe import watch\n"
    paths = (str(tmp_path / "expected.json"), str(tmp_path / "shown/rank-0.json"))
    (tmp_path / "expected.json").write_text(json.dumps(promise()))

    program = f"{watched}watch(*{paths!r}, files)\n{STEP}"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60, capture_output=True)

    assert shown(tmp_path)["strategy"] == "single"


def test_what_cannot_be_compared_is_said_and_stops_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, STEP, "no JSON")

    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert shown(tmp_path)["error"].startswith("JSONDecodeError")


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_has_the_place_of_an_account_is_replaced_and_nothing_is_written_through_it(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "shown").mkdir()
    for name in ("rank-0.json", "rank-0.json.part", "steps-rank-0.json", "steps-rank-0.json.part"):
        planted = tmp_path / "shown" / name
        planted.symlink_to(tmp_path / "victim") if kind == "link" else os.mkfifo(planted)

    done = run(tmp_path, STEP, promise())

    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
    assert (tmp_path / "victim").read_text() == "precious"
    assert shown(tmp_path)["strategy"] == "single"
    assert shown(tmp_path, "steps-rank-0.json")["steps"] == 1


def test_a_link_in_the_place_of_the_folder_is_said_once_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "shown").symlink_to("theirs")

    done = run(tmp_path, STEP, promise())

    assert (done.returncode, done.stdout) == (0, "went on\n")
    assert done.stderr.count("cannot be written: a link is in the place of a folder of the run") == 1
    assert list((tmp_path / "theirs").iterdir()) == []


@pytest.mark.parametrize("kind", ["fifo", "zero", "deep"])
def test_a_forged_plan_of_what_to_expect_holds_no_program_up(tmp_path: Path, kind: str) -> None:
    def plant(path: Path) -> None:
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "zero":
            path.symlink_to("/dev/zero")
        else:
            path.write_text("[" * 970 + "]" * 970)

    done = run(tmp_path, STEP, promise(), plant=plant)

    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")
    assert list(shown(tmp_path)) == ["error"]


def test_a_program_without_an_optimizer_leaves_no_account(tmp_path: Path) -> None:
    done = run(tmp_path, "import torch; print('evaluated')", promise(device="cuda"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "evaluated\n", "")
    assert not (tmp_path / "shown").exists()


def test_processes_that_the_program_starts_see_nothing_of_the_hook(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import os, sys; print(os.environ.get(\"PYTHONPATH\"), "
        '[name for name in os.environ if name in ("TRAINKIT_EXPECTED", "TRAINKIT_SHOWN")], '
        "sys.path[1:])'], check=True)"
    )

    done = run(tmp_path, program, promise(), PYTHONPATH=str(tmp_path))

    assert done.stdout.startswith(f"{tmp_path} []"), done
    assert HOOK not in done.stdout


def test_a_folder_that_a_shell_puts_before_it_does_not_hand_the_hook_on(tmp_path: Path) -> None:
    child = f"{shlex.quote(sys.executable)} -c 'import os; print(os.environ[\"PYTHONPATH\"])'"
    shell = f"PYTHONPATH=/first:$PYTHONPATH {child}"

    done = run(tmp_path, f"import subprocess; subprocess.run({shell!r}, shell=True)", promise(), PYTHONPATH="/last")
    assert done.stdout == "/first:/last\n"

    inside = observed({**os.environ, "PYTHONPATH": "/last"}, "expected.json", "shown.json")
    seen = subprocess.run(shell, shell=True, check=True, env=inside, capture_output=True, text=True, timeout=60)
    assert seen.stdout == "/first:/last\n"


def test_a_sitecustomize_of_the_users_own_runs_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine ran')")

    done = run(tmp_path, "import sitecustomize; print(sitecustomize.__file__)", promise(), PYTHONPATH=str(tmp_path))

    assert done.stdout == f"mine ran\n{tmp_path / 'sitecustomize.py'}\n", done.stderr


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_interpreter_that_takes_nothing_from_its_surroundings_runs_unwatched(tmp_path: Path, flag: str) -> None:
    inside = observed(os.environ, str(tmp_path / "expected.json"), str(tmp_path / "shown.json"))
    words = [sys.executable, flag, "-c", "import sys; print('trainkit_observe' in sys.modules, len(sys.meta_path))"]
    done = subprocess.run(words, check=True, env=inside, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    bare = subprocess.run(words, check=True, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (bare.stdout, "")
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_users_own_sitecustomize_is_reported_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import there_is_no_such_module")

    done = run(tmp_path, "print('ran')", promise(), PYTHONPATH=str(tmp_path))

    assert done.stdout == "ran\n"
    assert "there_is_no_such_module" in done.stderr


@pytest.mark.parametrize(
    ("promised", "actual", "says"),
    [
        ({}, {}, []),
        ({"dtype": None}, {"dtype": "bf16"}, []),  # not promised
        ({"dtype": "bf16"}, {"dtype": None}, []),  # not to be told
        ({"strategy": "ddp", "world_size": 1}, {"strategy": "single", "world_size": 1}, []),
        ({"strategy": "single", "world_size": 1}, {"strategy": "ddp", "world_size": 1}, []),
        ({"strategy": "single", "world_size": 2}, {"strategy": "ddp", "world_size": 2}, ["ddp is in force"]),
        ({"strategy": "single", "world_size": 1, "own_processes": True}, {"strategy": "ddp", "world_size": 2}, []),
        (
            {"strategy": "single", "world_size": 1, "own_processes": True},
            {"strategy": "dataparallel", "world_size": 1},
            ["strategy single"],
        ),
        ({"strategy": "zero1", "world_size": 1}, {"strategy": "single", "world_size": 1}, ["strategy zero1"]),
        ({"strategy": "zero2"}, {"strategy": "zero3"}, ["strategy zero2 was planned, and zero3 is in force"]),
        ({"strategy": "single"}, {"strategy": "dataparallel"}, ["with nn.DataParallel"]),
        ({"dtype": "bf16"}, {"dtype": "fp32"}, ["dtype bf16 was planned, and it is fp32"]),
    ],
)
def test_only_what_was_promised_and_is_not_so_is_a_difference(
    promised: dict[str, Any], actual: dict[str, Any], says: list[str]
) -> None:
    found = observe.differences(promise(**promised), {**promise(), **actual})

    assert len(found) == len(says)
    assert all(words in difference for words, difference in zip(says, found, strict=True)), found


def test_the_steps_of_the_first_optimizer_are_counted_with_their_time(tmp_path: Path) -> None:
    again = "for _ in range(4):\n    time.sleep(0.05)\n    optimizer.step()\n    other.step()\n"
    loop = f"{STEP}\nimport time\nother = torch.optim.SGD(model.parameters(), lr=0.1)\n{again}"
    assert run(tmp_path, loop, promise()).returncode == 0
    seen = shown(tmp_path, "steps-rank-0.json")
    assert seen["steps"] == 5
    assert 0.2 <= seen["seconds"] < 5
    assert 0.05 <= seen["first_seconds"] < seen["seconds"]


def test_steps_are_written_while_a_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "EVERY_SECONDS", 0.0)
    optimizer = object()
    counter = observe.StepCounter(str(tmp_path / "steps.json"), optimizer, publish)
    counter.count(object())
    assert not (tmp_path / "steps.json").exists()
    counter.count(optimizer)
    assert read(str(tmp_path / "steps.json"))["steps"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["steps.json"]
