"""Eight different mistakes over three layers and the command line: all answered at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainkit.cli.diagnostics import render_diagnostics
from trainkit.errors import Diagnostic, ExitCode, RecipeError
from trainkit.recipe.resolved import Resolved

Refuse = Callable[..., list[Diagnostic]]

FILES = {
    "r.yaml": (
        "extends: [team.yaml, strategy/fspd]\n"
        "train: {steps: 10}\n"
        "batch:\n"
        "  global: 10\n"
        "  micro: 4\n"
        "  accumulation: 3\n"
        "program:\n"
        "  kind: torch\n"
        "  script: gone.py\n"
    ),
    "team.yaml": "extends: base.yaml\noptimizer:\n  weight_decya: 0.1\n  lr: '3e-4'\n",
    "base.yaml": "extends: team.yaml\nschedule: {name: cosin}\n",
}
EXPECTED = [
    ("base.yaml:1:10", "circle", "remove"),
    ("base.yaml:2:18", "schedule.name must be", "did you mean cosine?"),
    ("team.yaml:3:3", "no setting 'weight_decya'", "did you mean optimizer.weight_decay?"),
    ("team.yaml:4:7", "optimizer.lr must be a number", "remove the quotes"),
    ("r.yaml:1:22", "no preset 'strategy/fspd'", "did you mean strategy/fsdp?"),
    ("r.yaml:4:11", "contradict each other", "any two"),
    ("r.yaml:9:11", "there is no file gone.py", "check the path"),
    ("--per_device_train_batchsize", "unknown flag", "did you mean --per_device_train_batch_size?"),
]


def test_all_that_can_be_known_is_reported_at_once_with_place_and_next_step(refuse: Refuse) -> None:
    errors = refuse(FILES, overrides=("--per_device_train_batchsize", "8"))
    found = [(each.origin.place if each.origin else "", each.what, each.hint) for each in errors]
    assert len(found) == len(EXPECTED)
    for (place, what, hint), (wanted_place, words, next_step) in zip(found, EXPECTED, strict=True):
        assert place == wanted_place
        assert words in what
        assert next_step in hint
    assert RecipeError(errors).exit_code == ExitCode.USAGE


def test_each_is_shown_with_its_line_a_caret_its_layer_and_what_to_do(refuse: Refuse) -> None:
    text = render_diagnostics(refuse(FILES, overrides=("--per_device_train_batchsize", "8")))
    assert (
        "team.yaml:3:3: error: optimizer has no setting 'weight_decya'\n"
        "  3 |   weight_decya: 0.1\n"
        "    |   ^^^^^^^^^^^^\n"
    ) in text
    assert "r.yaml:4:11: error: " in text
    assert "  4 |   global: 10\n    |           ^^\n" in text
    assert text.count("  next: ") == len(EXPECTED)
    assert text.endswith("8 errors\n")
    assert "\x1b" not in text


def test_a_nul_byte_is_an_error_wherever_it_is(refuse: Refuse) -> None:
    text = 'train: {steps: 3}\noutput: {root: "a\\0b"}\nenv: {A: "x\\0"}\ndata: {path: ["x", "\\0"]}\n'
    errors = refuse(text)
    assert sorted(each.key for each in errors) == ["data.path.1", "env.A", "output.root"]
    assert all("holds a NUL byte" in each.what for each in errors)


OF_SLURM = ("account", "qos", "partition", "constraint", "reservation", "nodelist", "exclude", "gpu_kind", "python")
GIVEN = "train: {steps: 3}\n"
ONE_LINE = {
    **{f"cluster.{name}": f"cluster: {{kind: slurm, {name}: %s}}\n" for name in OF_SLURM},
    **{f"cluster.{name}.1": f"cluster: {{kind: slurm, {name}: [-x, %s]}}\n" for name in ("setup", "sbatch", "srun")},
    "cluster.options.0": "cluster: {kind: ssh, hosts: [a], options: [%s]}\n",
    "cluster.volumes.0": "cluster: {kind: kubernetes, volumes: [%s]}\n",
    "container.options.0": "container: {kind: docker, image: i, options: [%s]}\n",
    "env_from.0": "env_from: [%s]\n",
    "data.mix.1.path": "data: {kind: dataset, streaming: true, mix: [{path: a}, {path: %s}]}\n",
    "model.path": "model: {kind: hf, path: %s}\n",
    "output.root": "output: {root: %s}\n",
}


@pytest.mark.parametrize("key", ONE_LINE)
@pytest.mark.parametrize("char", ["\\n", "\\e", "\\t", "\\x7f", "\\x85", "\\u2028"])
def test_what_is_one_line_holds_no_line_end_and_no_other_control_character(refuse: Refuse, key: str, char: str) -> None:
    (found,) = [each for each in refuse(GIVEN + ONE_LINE[key] % f'"a{char}touch PWNED"') if " holds " in each.what]
    kind = "a control character" if char in {"\\e", "\\t", "\\x7f"} else "a line end"
    assert found.what.startswith(f"{key} holds {kind} (U+")
    assert found.origin is not None
    assert found.origin.place.startswith("r.yaml:2:")
    assert found.origin.text[found.origin.column - 1 :].startswith(f'"a{char}')
    assert found.hint == "remove it"


def test_names_of_the_users_own_are_one_line_too(refuse: Refuse) -> None:
    errors = refuse(GIVEN + 'env: {"A\\nB": 1}\nprogram: {kind: torch, script: /w/r.yaml, args: {"x\\ny": 1}}\n')
    assert [each.what.partition(" (")[0] for each in errors] == [
        "env.A\ufffdB holds a line end",
        "program.args.x\ufffdy holds a line end",
    ]


def test_a_line_end_that_a_reference_or_a_word_brings_is_an_error_too(refuse: Refuse) -> None:
    errors = refuse(
        GIVEN + "cluster: {kind: slurm, account: '${oc.env:WHO}'}\n",
        environ={"WHO": "a\nb", "TRAINKIT__CLUSTER__QOS": '"c\\nd"'},
        overrides=('cluster.partition="e\\nf"',),
    )
    assert sorted(each.key for each in errors) == ["cluster.account", "cluster.partition", "cluster.qos"]


def test_texts_of_several_lines_may_have_any_character_but_nul(solve: Callable[..., Resolved]) -> None:
    text = 'sample: {prompt: "a\\n\\tb"}\ndata: {kind: dataset, path: /w/r.yaml, prompt_prefix: "a\\n"}\n'
    text += 'env: {A: "a\\n\\e"}\nprogram: {kind: torch, script: /w/r.yaml, args: ["a\\r\\n\\x01"]}\n'
    recipe = solve(text).recipe
    assert (recipe.sample.prompt, recipe.env["A"], recipe.program.args) == ("a\n\tb", "a\n\x1b", ["a\r\n\x01"])


def test_bytes_that_are_no_text_are_an_error_wherever_they_come_from(refuse: Refuse) -> None:
    text = 'train: {steps: 3}\nenv: {A: "${oc.env:LATIN}"}\n'
    bad = "caf\udce9"  # as Python keeps a byte that is not UTF-8
    environ = {"LATIN": bad, "TRAINKIT__DATA__INCLUDE": bad}
    errors = refuse(text, environ=environ, overrides=(f"env.B={bad}",))
    assert sorted(each.key for each in errors) == ["data.include", "env.A", "env.B"]
    assert all("not UTF-8" in each.what for each in errors)


def test_words_that_other_tools_use_are_answered_with_the_ones_to_write(refuse: Refuse) -> None:
    text = "train: {steps: 3}\ndevices: {type: tpu}\nprecision: tf32\noutput: {root: ''}\nnodes: {count: 2..4}\n"
    hints = {each.key: each.hint for each in refuse(text)}
    assert hints["devices.type"] == "write xla"
    assert "is queued again" in hints["nodes.count"]
    assert "precision/tf32" in hints["precision.dtype"]
    assert "a folder" in hints["output.root"]


def test_a_kind_that_there_is_not_is_one_error_and_not_one_for_each_setting_below_it(refuse: Refuse) -> None:
    files = {
        "r.yaml": "extends: w.yaml\nstrategy: {kind: fspd}\nmodel: {kind: hff, path: x}\nprogram: {kind: tensorflow}\n",
        "w.yaml": "train: {steps: 3}\nstrategy: {offload: true}\nmodel: {layers: 2}\n",
    }
    errors = refuse(files, overrides=("data.kind=jsnl", "data.columns.text=y", "data.path=z"))
    assert sorted(each.key for each in errors) == ["data.kind", "model.kind", "program.kind", "strategy.kind"]


@pytest.mark.parametrize("name", ["my chats.jsonl", "rows.csv", "rows.parquet"])
def test_a_file_of_rows_is_no_recipe(refuse: Refuse, name: str) -> None:
    (error,) = refuse({name: b'{"text": "a"}\n\0'}, name)
    assert error.what == f"{name} is a file of rows, and no recipe"
    assert "`trainkit config --set " in error.hint
