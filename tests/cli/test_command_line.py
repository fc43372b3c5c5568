"""The commands as a user types them: output, exit codes, and what they never do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pexpect
import pytest
import yaml

from trainkit import __version__
from trainkit.cli.app import COMMANDS, FAMILIAR, HIDDEN
from trainkit.cli.file_system import FileSystem
from trainkit.cli.line import split_line
from trainkit.cli.options import LaunchCommand, RecipeCommand
from trainkit.launch_plan.model import plan_from_json, plan_to_json
from trainkit.recipe.flags import flags

Trainkit = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).resolve().parents[2]
SHIPPED_RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
HEAVY = ("torch", "numpy", "accelerate", "deepspeed", "transformers")


def test_version_is_answered_without_loading_the_command_line(trainkit: Trainkit) -> None:
    done = trainkit("--version")
    assert (done.returncode, done.stdout) == (0, f"trainkit {__version__}\n")


def test_help_names_every_command_in_its_group_on_one_line_of_80_columns(trainkit: Trainkit) -> None:
    done = trainkit("--help", environ={"COLUMNS": "80"})
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    titles = [line.split()[1] for line in lines if line.startswith("╭─")]
    assert titles == ["Options", "Start", "Train", "Look", "Clusters", "Tools"]
    rows = [line for line in lines if line.startswith("│ ") and not line.startswith("│ --")]
    assert [line.split()[1] for line in rows] == [*COMMANDS]
    assert all(entry.help in row for row, entry in zip(rows, COMMANDS.values(), strict=True))
    assert not [name for name in HIDDEN if f" {name} " in done.stdout]


@pytest.mark.parametrize("command", [name for name, entry in COMMANDS.items() if issubclass(entry.cls, LaunchCommand)])
def test_the_flags_of_the_schema_are_in_the_longer_help_alone(trainkit: Trainkit, command: str) -> None:
    short, long = (trainkit(command, word, environ={"COLUMNS": "80"}) for word in ("--help", "--help-all"))
    assert short.returncode == long.returncode == 0
    assert {"--with", "--help-all"} <= {*short.stdout.split()}
    assert "trainkit schema --flags" in " ".join(short.stdout.split())
    assert not {"--fsdp", "--learning_rate"} & {*short.stdout.split()}
    assert len(short.stdout.splitlines()) <= 40
    assert {"--with", *(f"--{name}" for name in flags())} <= {*long.stdout.split()}


def test_a_programs_own_help_is_the_programs(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text('#!/bin/sh\necho "got $1"\n')
    (tmp_path / "train.sh").chmod(0o755)
    words = ("program.kind=torch", "program.script=train.sh", "--")
    assert trainkit("run", *words, "--help-all", cwd=tmp_path).stdout == "got --help-all\n"


@pytest.mark.parametrize("command", ["run", "plan", "explain", "check", "doctor", "generate", "export", "config"])
def test_help_shows_the_grammar_of_a_line_and_fits_the_terminal(trainkit: Trainkit, command: str) -> None:
    done = trainkit(command, "--help", environ={"COLUMNS": "80"})
    lines = done.stdout.splitlines()
    usage = next(line for line in lines if "Usage:" in line)
    if issubclass(COMMANDS[command].cls, RecipeCommand):
        assert "RECIPE" in usage
        assert "schema --flags" in " ".join(done.stdout.split())
    assert not {"[[", "{", "}"} & {*usage}
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 50


def test_help_on_a_wide_terminal_stays_readable_and_an_example_is_one_line(trainkit: Trainkit) -> None:
    lines = trainkit("run", "--help", environ={"COLUMNS": "200"}).stdout.splitlines()
    assert max(map(len, lines)) == 100
    assert " $ trainkit run torchrun --nproc_per_node 2 train.py --lr 1e-3" in [line.rstrip() for line in lines]


@pytest.mark.parametrize(
    ("environ", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"GITHUB_ACTIONS": "true"}, False),
    ],
    ids=str,
)
def test_help_and_errors_are_coloured_as_the_user_says(
    trainkit: Trainkit, environ: dict[str, str], *, coloured: bool
) -> None:
    environ = {"GITHUB_ACTIONS": "", **environ}
    assert ("\x1b[" in trainkit("ls", "--help", environ=environ).stdout) == coloured
    refused = trainkit("check", "no-such-recipe", environ=environ).stderr
    assert ("\x1b[1;31merror\x1b[0m: " in refused, "\x1b[1;36mnext\x1b[0m: " in refused) == (coloured, coloured)
    assert "\x1b" not in trainkit("ls", "--json", environ=environ).stdout


@pytest.mark.parametrize("words", [(), ("plan",), ("env",), ("runs",), ("runs", "prune"), ("import",)], ids=" ".join)
def test_help_shows_no_type_behind_a_switch(trainkit: Trainkit, words: tuple[str, ...]) -> None:
    shown = trainkit(*words, "--help").stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()


def test_a_program_may_stand_for_a_recipe_and_other_overrides_may_not(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text('#!/bin/sh\necho "it has $1"\n')
    (tmp_path / "train.sh").chmod(0o755)

    done = trainkit("run", "program.kind=torch", "program.script=train.sh", "--", "a word", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "it has a word\n")

    done = trainkit("run", "program.kind=torch", cwd=tmp_path)
    assert done.returncode == 2
    assert "no recipe is named" in done.stderr


def test_a_line_without_a_recipe_is_explained_as_it_is_planned(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    words = ("explain", "program.kind=torch", "program.script=train.py", "strategy.kind=ddp")

    done = trainkit(*words, "strategy.kind", cwd=tmp_path)
    assert done.stdout.startswith('strategy.kind = "ddp"'), done.stderr
    assert 'program.kind = "torch"' in trainkit(*words, cwd=tmp_path).stdout
    assert "there is no file" in trainkit(*words, "no.such", cwd=tmp_path).stderr


@pytest.mark.torch
@pytest.mark.parametrize(("preset", "read"), [("strategy/single", True), ("strategy/ddp", False)])
def test_input_that_reaches_no_rank_is_said_to(trainkit: Trainkit, tmp_path: Path, preset: str, read: bool) -> None:
    (tmp_path / "read.sh").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "read.sh").chmod(0o755)
    words = ("run", "program.kind=torch", "program.script=read.sh", "--with", preset, "--with", "devices/cpu")

    done = trainkit(*words, cwd=tmp_path, stdin="a line\n")

    assert (done.returncode, done.stdout) == (0, "a line\n" if read else "")
    assert ("standard input is not passed on" in done.stderr) != read
    assert "standard input" not in trainkit(*words, cwd=tmp_path).stderr


def test_a_device_in_the_place_of_a_recipe_is_said_to_be_no_file(trainkit: Trainkit, tmp_path: Path) -> None:
    done = trainkit("plan", "/dev/zero", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "/dev/zero cannot be read: not a regular file" in done.stderr
    assert "permissions" not in done.stderr


def test_a_plan_folds_to_the_terminal(clean_environment: dict[str, str], tmp_path: Path) -> None:
    argv = ["-m", "trainkit", "plan", "ddp", "--on", "8xh100"]
    environ = {**clean_environment, "TERM": "xterm"}
    child = pexpect.spawn(sys.executable, argv, env=environ, cwd=str(tmp_path), timeout=60, dimensions=(24, 70))
    text = child.read().decode()
    child.close()
    assert "\x1b[1;36mnote\x1b[0m: planned for another machine" in text
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert lines[0].startswith("Plan of ")
    beyond = [line for line in lines if len(line) > 70]
    assert all(len(line.split()) <= 2 or "rank" in line for line in beyond), beyond


def test_no_command_at_all_shows_the_help_and_is_a_usage_error(trainkit: Trainkit) -> None:
    done = trainkit()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr


def test_an_unknown_command_is_a_usage_error(trainkit: Trainkit) -> None:
    done = trainkit("lanch", "x.yaml")
    assert done.returncode == 2
    assert "'lanch'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["pln", "x"], "did you mean plan?"),
        (["train", "x.yaml"], "did you mean trainkit run?"),
        (["Eval"], "did you mean trainkit run RECIPE --do_eval?"),
        (["resume"], "did you mean trainkit run RECIPE checkpoint.resume=auto?"),
        (["stop", "x"], "did you mean trainkit cancel?"),
        (["finetune"], "did you mean trainkit config?"),
        (["gpu"], "did you mean trainkit env gpus?"),
        (["env", "gpu"], "did you mean trainkit env gpus?"),
        (["--install-completion"], "did you mean trainkit completion?"),
        (["version"], "did you mean trainkit --version?"),
        (["runs", "rm"], "did you mean trainkit runs prune?"),
        (["runs", "lst"], "did you mean list?"),
        (["ls", "--jsn"], "did you mean --json?"),
        (["cp"], "`trainkit cp --help`"),
        (["runs", "prune", "--keep", "-1"], "`trainkit runs prune --help`"),
        (["run", "x.yaml", "--node-rank", "one"], "`trainkit run --help`"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_said_like_every_other_error(trainkit: Trainkit, words: list[str], hint: str) -> None:
    done = trainkit(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr.splitlines()[1]


def test_what_people_type_of_other_tools_leads_to_what_there_is() -> None:
    commands = {
        "trainkit": {*COMMANDS},
        "trainkit env": {"gpus", "facts"},
        "trainkit runs": {"list", "show", "diff", "prune"},
    }
    to_come = {"watch", "report"}
    for group, words in FAMILIAR.items():
        assert not words.keys() & (commands[group] - to_come)
        named = {target.partition(" ")[0] for target in words.values()} - {"--version", "--help"}
        assert named <= commands[group] | to_come


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "tiny.yaml"],
        ["check", "tiny.yaml"],
        ["explain", "tiny.yaml"],
        ["ls"],
        ["schema"],
        ["plan", "wrong.yaml"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_the_parent_never_imports_torch(
    tmp_path: Path, tiny_recipe: Path, clean_environment: dict[str, str], words: list[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text("version: 1\nmodel: {layers: many}\n")
    script = (
        "import sys, atexit\n"
        "from trainkit.__main__ import main\n"
        f"atexit.register(lambda: open('modules.txt', 'w').write('\\n'.join(sys.modules)))\n"
        f"sys.argv = ['trainkit', *{words!r}]\n"
        "main()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    loaded = {name.split(".")[0] for name in (tmp_path / "modules.txt").read_text().splitlines()}
    assert "trainkit" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.torch
def test_plan_shows_the_decisions_and_starts_nothing(trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path) -> None:
    done = trainkit("plan", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    for expected in ("single", "python", "4 = 2 \u00d7 2 \u00d7 1", "trainkit.trainer", "OMP_NUM_THREADS"):
        assert expected in done.stdout
    assert not (tmp_path / "runs").exists()


def test_plan_json_is_complete_and_round_trips(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "--json", "--with", "strategy/zero2")
    data = json.loads(done.stdout)
    assert plan_to_json(plan_from_json(data)) == data
    assert data["strategy"]["kind"] == "zero2"


def test_plan_json_is_the_same_each_time(trainkit: Trainkit, tiny_recipe: Path) -> None:
    assert trainkit("plan", "tiny.yaml", "--json").stdout == trainkit("plan", "tiny.yaml", "--json").stdout


@pytest.mark.torch
def test_plan_diff_names_what_differs_from_another_recipe(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "batch.micro=1", "--diff", "tiny.yaml")
    assert done.returncode == 0
    assert "batch.micro: 2 -> 1" in done.stdout
    assert "strategy" not in done.stdout


@pytest.mark.torch
def test_plan_diff_of_equal_recipes_says_so(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "--diff", "tiny.yaml")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "->" not in done.stdout


def test_plan_diff_plans_both_for_the_machine_that_is_named(trainkit: Trainkit, tiny_recipe: Path) -> None:
    tiny_recipe.write_text(tiny_recipe.read_text().replace("devices: {type: cpu}", "devices: {type: auto}"))
    done = trainkit("plan", "tiny.yaml", "--diff", "tiny.yaml", "--on", "8xh100")
    assert (done.returncode, "->" in done.stdout) == (0, False), done.stdout


def test_plan_diff_reads_no_plan_through_a_link_in_a_run_directory(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(trainkit("plan", "tiny.yaml", "--json").stdout)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "plan.json").symlink_to(tmp_path / "plan.json")
    assert trainkit("plan", "tiny.yaml", "--diff", "plan.json").returncode == 0
    done = trainkit("plan", "tiny.yaml", "--diff", "given")
    assert (done.returncode, "is not a plan of this trainkit" in done.stderr) == (2, True)


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"plan_version": 1}'])
def test_plan_diff_refuses_a_file_that_holds_no_plan(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "other.json").write_text(content)
    done = trainkit("plan", "tiny.yaml", "--diff", "other.json")
    assert done.returncode == 2
    assert "not a plan" in done.stderr


def test_plan_exits_4_when_this_machine_cannot_run_it_and_still_shows_it(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "devices.type=mps")
    assert done.returncode == 4
    assert "mps" in done.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.path=[corpus.txt, gone.txt]", "data.path gone.txt does not exist on this machine"),
        ("data.path=[corpus.txt, empty]", "data.path empty holds no file that '**/*.py' matches"),
        ("checkpoint.resume=gone/step-00000001", "checkpoint.resume gone/step-00000001 does not exist on this machine"),
    ],
)
def test_data_and_checkpoints_that_are_not_there_block_a_run_before_it_starts(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path, override: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert trainkit("check", "tiny.yaml", override).returncode == 0  # another machine may have them
    planned = trainkit("plan", "tiny.yaml", override)
    assert planned.returncode == 4
    assert f"blocker: {words}" in planned.stdout
    where = f"it would be {tmp_path}/gone.txt; check data.path, relative to the working folder"
    assert (where in " ".join(planned.stdout.split())) == ("gone.txt" in override)
    done = trainkit("run", "tiny.yaml", override)
    assert done.returncode == 4
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [("**/*.py", True), ("*.py", False), ("**", False), ("", False), ("/x", False), ("**x", False)],
)
def test_a_folder_holds_what_the_trainer_would_find_in_it(tmp_path: Path, pattern: str, holds: bool) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").touch()
    assert FileSystem().holds(str(tmp_path), pattern) is holds
    assert FileSystem().holds(str(tmp_path / "deep" / "a.py"), pattern)  # which is no folder


def test_run_refuses_what_this_machine_cannot_run_before_anything_starts(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    done = trainkit("run", "tiny.yaml", "devices.type=mps")
    assert done.returncode == 4
    assert "next:" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_outputs_of_plan_exclude_one_another(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "--json", "--shell")
    assert done.returncode == 2
    assert "exclude" in done.stderr


def test_a_recipe_with_mistakes_is_answered_with_exit_code_2_and_places(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("version: 1\noptmizer: {lr: 1}\ntrain: {steps: '20'}\n")
    done = trainkit("run", "wrong.yaml", "--bf17")
    assert done.returncode == 2
    assert "wrong.yaml:2:1: error" in done.stderr
    assert "wrong.yaml:3:16: error" in done.stderr
    assert "did you mean --bf16?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.torch
@pytest.mark.needs("torch>=2.7")  # before, FSDP2 has no CPU
def test_the_recipe_may_stand_after_flags_and_their_values(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "--fsdp", "full_shard auto_wrap", "--seed", "3", "tiny.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"]["kind"] == "fsdp"


def test_one_word_too_many_is_refused_not_dropped(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("plan", "tiny.yaml", "other.yaml")
    assert done.returncode == 2
    assert "other.yaml" in done.stderr


def test_words_after_two_dashes_reach_the_program_exactly(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "mine.yaml").write_text(
        "version: 1\nname: mine\nprogram: {kind: torch, script: script.py, args: [first]}\n"
    )
    words = [
        "--nnodes",
        "2",
        "--",
        "two words",
        "a'b\"c",
        "line\nbreak",
        "$HOME ${x}",
        "ünï",
        "",
        "-m",
        "batch.micro=3",
    ]
    done = trainkit("run", "mine.yaml", "devices.type=cpu", "--", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["first", *words]


def test_check_reports_each_recipe_and_fails_if_one_is_wrong(
    trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong.yaml").write_text("version: 2\n")
    done = trainkit("check", "tiny.yaml", "wrong.yaml")
    assert done.returncode == 2
    assert "tiny.yaml: ok" in done.stdout
    assert "wrong.yaml: wrong" in done.stdout
    report = json.loads(trainkit("check", "--json", "tiny.yaml", "wrong.yaml").stdout)
    assert [entry["valid"] for entry in report] == [True, False]
    assert report[1]["diagnostics"][0]["origin"]["line"] == 1


def test_check_and_plan_refuse_a_model_that_its_task_cannot_train(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "t5").mkdir()
    (tmp_path / "t5/config.json").write_text('{"model_type": "t5"}')
    recipe = tmp_path / "r.yaml"
    recipe.write_text("version: 1\ntrain: {steps: 1}\ndata: {kind: random}\nmodel: {kind: hf, path: t5}\n")
    for command in ("check", "plan"):
        done = trainkit(command, "r.yaml")
        assert done.returncode == 2
        assert "r.yaml:4" in done.stderr
        assert "model.task causal_lm: t5 is an encoder-decoder" in done.stderr
    assert trainkit("check", "r.yaml", "model.task=seq2seq_lm").returncode == 0


def test_check_takes_overrides_for_all_its_recipes(trainkit: Trainkit, tiny_recipe: Path) -> None:
    assert trainkit("check", "tiny.yaml", "quickstart", "--seed", "3").returncode == 0
    done = trainkit("check", "tiny.yaml", "quickstart", "batch.micro=none")
    assert done.returncode == 2
    assert done.stdout == "tiny.yaml: wrong\nquickstart: wrong\n"


def test_a_missing_recipe_is_one_error(trainkit: Trainkit) -> None:
    done = trainkit("check", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1


def test_every_shipped_recipe_is_valid_under_check_and_under_the_json_schema(trainkit: Trainkit) -> None:
    assert SHIPPED_RECIPES
    done = trainkit("check", *SHIPPED_RECIPES)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    schema = json.loads(trainkit("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)  # `jsonschema.validate` would check the schema for each file
    presets = [path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "machines"]
    for path in [*(ROOT / "recipes").glob("*.yaml"), *presets]:
        validator.validate(yaml.safe_load(path.read_text()))


def test_every_shipped_recipe_tells_editors_its_schema(trainkit: Trainkit) -> None:
    for path in (ROOT / "recipes").glob("*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema="), path
        assert (path.parent / first.partition("=")[2]).resolve() == ROOT / "configs" / "recipe.schema.json"


@pytest.mark.needs("pydantic>=2.11")  # older ones say the same in other words
def test_the_shipped_json_schema_is_what_the_command_prints(trainkit: Trainkit) -> None:
    shipped = (ROOT / "configs" / "recipe.schema.json").read_text()
    assert shipped == trainkit("schema").stdout, "renew it: trainkit schema > configs/recipe.schema.json"


def test_schema_prints_the_references_too(trainkit: Trainkit) -> None:
    assert "optimizer.lr" in trainkit("schema", "--reference").stdout
    assert "--learning_rate" in trainkit("schema", "--flags").stdout


def test_explain_shows_the_winner_and_what_it_beat(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit("explain", "tiny.yaml", "optimizer.lr", "--learning_rate", "0.5")
    assert done.returncode == 0, done.stderr
    assert "optimizer.lr = 0.5" in done.stdout
    assert "--learning_rate 0.5" in done.stdout
    assert "tiny.yaml:7:17" in done.stdout


def test_explain_says_which_recipe_line_made_a_token_of_the_plan(trainkit: Trainkit, tiny_recipe: Path) -> None:
    done = trainkit(
        "explain", "tiny.yaml", "strategy.kind=ddp", "nodes.processes_per_node=2", "--token=--nproc-per-node=2"
    )
    assert done.returncode == 0, done.stderr
    assert "nodes.processes_per_node = 2" in done.stdout
    assert "cores" in trainkit("explain", "tiny.yaml", "OMP_NUM_THREADS").stdout
    assert "torchrun's flags" in trainkit("explain", "tiny.yaml", "PET_NNODES").stdout
    assert trainkit("explain", "tiny.yaml", "RANK").stdout.count("because:") == 1


def test_explain_is_of_the_nodes_that_the_job_runs_on_as_the_plan_is(trainkit: Trainkit, tmp_path: Path) -> None:
    job = ("quickstart", "--with", "clusters/slurm", "--with", "strategy/ddp", "cluster.machine=8xh100")
    (planned,) = re.findall(r"#SBATCH --cpus-per-task=\d+", trainkit("plan", *job).stdout)
    explained = trainkit("explain", *job, "--token=--cpus-per-task").stdout
    assert f"{planned}   line 5 of job.sh" in explained
    assert int(planned.partition("=")[2]) == 224


@pytest.mark.parametrize("word", ["optimizer.lrr", "lr", "learning_rate"])
def test_explain_of_an_unknown_key_suggests(trainkit: Trainkit, tiny_recipe: Path, word: str) -> None:
    done = trainkit("explain", "tiny.yaml", word)
    assert done.returncode == 2
    assert "did you mean optimizer.lr?" in done.stderr


def test_explain_says_what_the_plan_makes_of_a_value(trainkit: Trainkit, tiny_recipe: Path) -> None:
    lines = trainkit("explain", "tiny.yaml", "batch").stdout.splitlines()
    assert lines[lines.index('batch.accumulation = "auto"') + 2] == "  the plan makes it 2"
    assert not any("makes it 4" in line for line in lines)  # batch.global is 4 already


def test_explain_of_a_dropped_key_names_no_default(trainkit: Trainkit, tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("env: {A: x}\ntrain: {steps: 3}\n")
    (tmp_path / "above.yaml").write_text("extends: ./below.yaml\nenv!: {B: y}\n")
    lines = trainkit("explain", "above.yaml", "env.A").stdout.splitlines()
    assert lines[0] == "env.A is not in force"
    assert lines[1].startswith('  beaten: "x" of file below.yaml:1:10')


def test_ls_lists_presets_and_recipes_and_filters(trainkit: Trainkit) -> None:
    everything = trainkit("ls").stdout
    assert "strategy/fsdp" in everything
    assert "recipes/quickstart" in everything
    assert "recipes/" not in trainkit("ls", "strategy").stdout
    assert trainkit("ls", "nothing-like-this").returncode == 2
    names = [row["name"] for row in json.loads(trainkit("ls", "--json").stdout)]
    assert "strategy/ddp" in names


def test_cp_copies_a_recipe_that_then_runs_from_where_it_is(trainkit: Trainkit, tmp_path: Path) -> None:
    assert trainkit("cp", "quickstart", "mine.yaml").returncode == 0
    assert trainkit("check", "mine.yaml").returncode == 0
    again = trainkit("cp", "quickstart", "mine.yaml")
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert trainkit("cp", "--force", "quickstart", "mine.yaml").returncode == 0
    assert trainkit("cp", "quikstart").returncode == 2
    assert "quickstart" in trainkit("cp", "quikstart").stderr


@pytest.mark.parametrize(("file", "name"), [("my-run.yaml", "my-run"), ("2024.yaml", '"2024"'), ("./", "quickstart")])
def test_a_copied_recipe_has_the_name_of_its_new_file(trainkit: Trainkit, tmp_path: Path, file: str, name: str) -> None:
    done = trainkit("cp", "quickstart", file)
    assert f"\nname: {name}\n" in (tmp_path / done.stdout.strip()).read_text()
    assert trainkit("check", done.stdout.strip()).returncode == 0


@pytest.mark.parametrize("name", ["quickstart", "strategy/fsdp"])
def test_a_copy_tells_editors_where_the_schema_is(trainkit: Trainkit, tmp_path: Path, name: str) -> None:
    done = trainkit("cp", name, "deep/er/")
    assert done.returncode == 0, done.stderr
    first, second = (tmp_path / done.stdout.strip()).read_text().splitlines()[:2]
    assert first == f"# yaml-language-server: $schema={(ROOT / 'configs' / 'recipe.schema.json').as_uri()}"
    assert "yaml-language-server" not in second
    assert trainkit("check", done.stdout.strip(), "--max_steps", "300").returncode == 0


def test_a_closed_pipe_is_no_error(tiny_recipe: Path, clean_environment: dict[str, str], tmp_path: Path) -> None:
    shell = f"{sys.executable} -m trainkit schema | head -n 1"
    done = subprocess.run(
        ["sh", "-c", shell],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_a_bug_leaves_a_report_and_exit_code_3(tmp_path: Path, clean_environment: dict[str, str]) -> None:
    script = (
        "import sys\n"
        "import trainkit.cli.pipeline as pipeline\n"
        "def broken(*a, **k): raise ZeroDivisionError('planted')\n"
        "pipeline.resolve = broken\n"
        "sys.argv = ['trainkit', 'plan', 'x.yaml', 'env.HF_TOKEN=hunter2']\n"
        "from trainkit.__main__ import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "bug in trainkit" in done.stderr
    assert "Traceback" not in done.stderr
    (report,) = tmp_path.glob("trainkit-bug-*.txt")
    assert str(report) in done.stderr
    text = report.read_text()
    assert "ZeroDivisionError: planted" in text
    assert "hunter2" not in text + done.stderr


@pytest.mark.torch
def test_runs_are_listed_shown_pruned_and_run_again(trainkit: Trainkit, tiny_recipe: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = trainkit("run", "tiny.yaml")
        assert done.returncode == 0, done.stderr
    listed = json.loads(trainkit("runs", "list", "--json").stdout)
    assert [run["state"] for run in listed] == ["done", "done"]
    assert [run["summary"]["steps"] for run in listed] == [3, 3]
    shown = trainkit("runs", "show", listed[0]["path"])
    assert shown.returncode == 0
    assert "exit code 0" in shown.stdout

    again = trainkit("run", str(Path(listed[0]["path"]).relative_to(tmp_path)))
    assert again.returncode == 0, again.stderr
    third = json.loads(trainkit("runs", "list", "tiny", "--json").stdout)[-1]
    assert third["summary"]["final_loss"] == listed[0]["summary"]["final_loss"]
    assert third["summary"]["recipe_digest"] == listed[0]["summary"]["recipe_digest"]
    difference = trainkit("plan", listed[0]["path"], "--diff", third["path"])
    assert difference.returncode == 0
    assert "->" not in difference.stdout

    assert trainkit("runs", "show", "tiny").stdout.startswith("done, exit code 0\n")
    assert listed[0]["path"] in trainkit("runs", "show", Path(listed[0]["path"]).name).stdout
    assert "nothing removed" in trainkit("runs", "prune", "--keep", "1", stdin="n\n").stdout
    unanswered = trainkit("runs", "prune", "--keep", "1")
    assert unanswered.returncode == 2
    assert "--yes" in unanswered.stderr
    assert trainkit("runs", "prune", "--keep", "1", "--yes").returncode == 0
    left = json.loads(trainkit("runs", "list", "--json").stdout)
    assert [run["path"] for run in left] == [third["path"]]
    assert trainkit("runs", "show", "nowhere").returncode == 2


def test_reading_a_command_line_leaves_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "one")
    before = dict(os.environ)
    split_line(["recipe.yaml", "batch.micro=1", "--seed", "3"], most=1, what="a recipe")
    assert dict(os.environ) == before
