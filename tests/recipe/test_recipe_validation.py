"""Validation: one good message for each wrong value, at its place, with what to do."""

from __future__ import annotations

from collections.abc import Callable

import annotated_types
import pytest

from trainkit.errors import Diagnostic
from trainkit.recipe.resolved import Resolved
from trainkit.recipe.schema.fields import members, schema, tagged_sections

Solve = Callable[..., Resolved]
Refuse = Callable[..., list[Diagnostic]]
Places = Callable[..., list[tuple[str, str]]]


@pytest.mark.parametrize(
    ("line", "column", "what", "hint"),
    [
        (
            "devices: {select: foo}",
            19,
            "devices.select must be auto, all, free, none, a whole number (1 or more, at most 4096) or a list of",
            "",
        ),
        ("devices: {select: 0}", 19, "devices.select must be auto, all, free, none,", ""),
        (
            "batch: {micro: '8'}",
            16,
            "batch.micro must be auto, a whole number (1 or more) or null, not the text '8'",
            "remove the quotes",
        ),
        ("batch: {micro: 2.0}", 16, "batch.micro must be", "write 2"),
        (
            "optimizer: {lr: '3e-4'}",
            17,
            "optimizer.lr must be a number (0 or more), not the text '3e-4'",
            "remove the quotes",
        ),
        ("optimizer: {lr: -1}", 17, "optimizer.lr must be a number (0 or more), not -1", ""),
        ("optimizer: {beta1: 1.0}", 20, "optimizer.beta1 must be a number (0 or more, below 1), not 1.0", ""),
        ("optimizer: {lr: .inf}", 17, "optimizer.lr must be a finite number", ""),
        ("optimizer: {lr: }", 17, "not empty", "take the default"),
        (
            "precision: bf61",
            12,
            "precision.dtype must be auto, fp32, fp16 or bf16, not the text 'bf61'",
            "did you mean bf16?",
        ),
        ("precision: {tf32: 'true'}", 19, "precision.tf32 must be true or false or null", "remove the quotes"),
        ("precision: [1]", 12, "precision must be a mapping, not the list [1]", ""),
        ("efficiency: {compile: maybe}", 23, "efficiency.compile.enabled must be true or false", ""),
        ("name: 7", 7, "name must be a name of letters", "put it in quotes"),
        ("name: 'a b'", 7, "name must be a name of letters", ""),
        ("name: true", 7, "name must be a name of letters", "put it in quotes"),
        ("nodes: {rendezvous: here}", 21, "nodes.rendezvous must be `auto` or host:port", ""),
        ("nodes: {rendezvous: 'here:65536'}", 21, "with a port from 1 to 65535, not the text 'here:65536'", ""),
        ("nodes: {rendezvous: '[::1]:0'}", 21, "with a port from 1 to 65535, not the text '[::1]:0'", ""),
        (
            "strategy: {kind: fdsp}",
            18,
            "strategy.kind must be one of auto, single, ddp, fsdp, zero0, zero1, zero2, zero3, not the text 'fdsp'",
            "did you mean fsdp?",
        ),
        ("strategy: {kind: ddp, offload_param: cpu}", 38, "strategy.kind ddp has no setting 'offload_param'", "zero3"),
        (
            "strategy: {kind: zero2, offload_optimizer: nvme}",
            44,
            "strategy.offload_optimizer must be none or cpu, not the text 'nvme'",
            "choose strategy.kind: zero3",
        ),
        (
            "strategy: {kind: zero3, offload_param: nvme}",
            40,
            "strategy.offload_param nvme requires strategy.nvme_path",
            "add strategy.nvme_path",
        ),
        (
            "strategy: {kind: zero3, nvme_path: /disk}",
            36,
            "strategy.nvme_path is for what is offloaded to nvme, and nothing is",
            "or remove nvme_path",
        ),
        ("strategy: {offload: true}", 21, "strategy.kind single has no setting 'offload'", "strategy.kind: fsdp"),
        ("strategy: zero2", 11, "strategy must be a mapping, not the text 'zero2'", "strategy:"),
        (
            "logging: {report_to: [tensorbord]}",
            23,
            "logging.report_to.0 must be tensorboard, wandb or trackio, not the text 'tensorbord'",
            "did you mean tensorboard?",
        ),
        ("logging: {report_to: tensorboard}", 22, "logging.report_to must be a list of", "[a, b]"),
        ("env: {A: [1]}", 10, "env.A must be a text or a whole number, not the list ['1']", ""),
        ("env: {A: }", 10, "env.A must be a text or a whole number, not empty", "write a value"),
        ("env_from: [A, 3]", 15, "env_from.1 must be a text, not 3", "put it in quotes"),
        ("data: {path: []}", 14, "data.path must be a text or a list of texts (not empty), not the list []", ""),
        ("data: {path: [a, 3]}", 18, "data.path.1 must be a text, not 3", "put it in quotes"),
        ("devices: {select: [0, 1.5]}", 23, "devices.select.1 must be a whole number or a text, not 1.5", ""),
        ("model: {heads: 3, hidden_size: 128}", 16, "model: hidden_size 128 is not divisible by heads 3", "change one"),
        ("model: {heads: 3}", 16, "model: hidden_size 128 is not divisible by heads 3", "change one"),
        ("nodes: {processes_per_node: 99999999999999999999}", 29, "(1 or more, at most 4096)", "the default is auto"),
        ("data: {path: 3}", 14, "data.path must be a text or a list of texts (not empty), not 3", "put it in quotes"),
        ("checkpoint: {resume: ''}", 22, "checkpoint.resume must be a text (not empty)", ""),
        ("version: 2", 10, "version must be 1, not 2", ""),
        (
            "train: {steps: 3, seed: 9223372036854775808}",
            25,
            "train.seed must be a whole number (0 or more, below 9223372036854775808)",
            "",
        ),
        ("bacth: {micro: 1}", 1, "there is no section or setting 'bacth'", "did you mean batch?"),
        ("devices: {count: 2}", 11, "devices has no setting 'count'", "did you mean devices.select?"),
        ("strategy: {kind: ddp, processes: 2}", 23, "no setting 'processes'", "did you mean nodes.processes_per_node?"),
        ("micro_batch: 4", 1, "there is no section or setting 'micro_batch'", "did you mean batch.micro?"),
        ("lr: 1e-3", 1, "there is no section or setting 'lr'", "did you mean optimizer.lr?"),
        (
            "optimizer: {learning_rate: 1.0}",
            13,
            "optimizer has no setting 'learning_rate'",
            "did you mean optimizer.lr?",
        ),
        (
            "optimizer: {warmup_steps: 1}",
            13,
            "optimizer has no setting 'warmup_steps'",
            "did you mean schedule.warmup_steps?",
        ),
        ("container: {kind: docker}", 12, "container: image must name the image", "set container.image"),
        ("container: {kind: docker, image: i, mounts: [d]}", 45, "container: mounts has d,", "change container.mounts"),
        ("batch: {global_: 4}", 9, "batch has no setting 'global_'", "did you mean batch.global?"),
        ("batch: {zzzz: 4}", 9, "batch has no setting 'zzzz'", "known are: accumulation"),
        (
            "efficiency: {compile: {beckend: x}}",
            24,
            "efficiency.compile has no setting 'beckend'",
            "efficiency.compile.backend?",
        ),
        ("model: {path: m, task: dpo}", 24, "model.task must be", "start from `trainkit cp dpo`"),
        ("model: {path: m, task: reward}", 24, "model.task must be", "start from `trainkit cp reward-model`"),
        ("model: {path: m, task: kto}", 24, "model.task must be", "with program.module: trl.scripts.kto"),
        ("model: {path: m, task: ppo}", 24, "model.task must be", "launch the script: trainkit run train.py"),
        ("model: {path: m, task: sft}", 24, "model.task must be", "write causal_lm"),
        ("strategy: {kind: ddp, xyzzy: 1}", 23, "strategy has no setting 'xyzzy'", "known are"),
        ("extend: strategy/fsdp", 1, "there is no section or setting 'extend'", "did you mean extends?"),
    ],
)
def test_a_wrong_value_is_one_error_at_its_place(refuse: Refuse, line: str, column: int, what: str, hint: str) -> None:
    text = line if line.startswith("train") else f"{line}\ntrain: {{steps: 3}}"
    (error,) = refuse(text + "\n")
    assert error.what.startswith(what) or what in error.what
    assert hint in error.hint
    assert error.hint
    assert error.origin is not None
    assert error.origin.place == f"r.yaml:1:{column}"
    assert error.origin.text == line


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("program: {kind: torch}\n", "r.yaml:1:17", "requires a script or a module"),
        ("program: {kind: torch, script: t.py, module: m}\n", "r.yaml:1:46", "both given"),
        ("program: {kind: torch, script: gone.py}\n", "r.yaml:1:32", "there is no file gone.py"),
        ("program: {kind: torch, module: pkg/train.py}\n", "r.yaml:1:32", "takes a dotted name"),
        ("program: {script: t.py}\n", "r.yaml:1:19", "program.script requires program.kind"),
        ("train: {steps: 1}\nprogram: {kind: builtin, script: t.py}\n", "r.yaml:2:34", "builtin takes no script"),
        ("program: {module: m}\n", "r.yaml:1:19", "program.module requires program.kind"),
        ("train: {steps: 1}\nprogram: {kind: builtin, module: m}\n", "r.yaml:2:34", "builtin takes no module"),
        ("train: {steps: 1}\nprogram: {kind: hf, module: ''}\n", "r.yaml:2:17", "requires a script or a module"),
        ("train: {seed: 1}\n", "r.yaml:1:8", "train requires steps or epochs"),
        ("train: {steps: 5}\nschedule: {name: constant, warmup_steps: 2}\n", "r.yaml:2:42", "constant has no warm-up"),
        (
            "train: {steps: 5}\nstrategy: {kind: fsdp, auto_wrap: size, wrap_classes: [A]}\n",
            "r.yaml:2:55",
            "counts only with",
        ),
        ("train: {steps: 5}\ndevices: {select: [1, 1]}\n", "r.yaml:2:19", "a GPU twice"),
        ("train: {steps: 5}\ndevices: {type: cuda, select: none}\n", "r.yaml:2:31", "leaves no GPU"),
        ("train: {steps: 5}\nnodes: {processes_per_node: 2}\n", "r.yaml:2:29", "single is one process"),
        ("train: {steps: 5}\nschedule: {decay_steps: 2}\n", "r.yaml:2:25", "schedule.name cosine has no decay_steps"),
        ("train: {steps: 5}\nenv: {'A=B': x}\n", "r.yaml:2:14", "cannot be the name"),
        ("train: {steps: 5}\nenv: {A: x}\nenv_from: [A]\n", "r.yaml:2:10", "under env and under env_from"),
    ],
)
def test_rules_over_several_settings_are_checked(places: Places, text: str, place: str, words: str) -> None:
    ((found, what),) = places({"r.yaml": text, "t.py": ""})
    assert found == place
    assert words in what


def test_a_warm_up_that_outlasts_the_run_is_a_warning_at_its_place(solve: Solve) -> None:
    (warning,) = solve({"r.yaml": "train: {steps: 5}\nschedule: {warmup_steps: 6}\n"}).warnings
    assert warning.severity == "warning"
    assert "longer than the whole run" in warning.what
    assert warning.origin is not None
    assert warning.origin.place == "r.yaml:2:26"


def test_a_decay_that_does_not_fit_into_the_run_is_a_warning(solve: Solve) -> None:
    schedule = "schedule: {name: wsd, decay_steps: 4, warmup_steps: 2}\n"
    (warning,) = solve({"r.yaml": f"train: {{steps: 5}}\n{schedule}"}).warnings
    assert "take 6 steps, and the whole run has 5" in warning.what
    assert not solve({"r.yaml": f"train: {{steps: 6}}\n{schedule}"}).warnings


def test_a_profile_that_outlasts_the_run_is_a_warning_and_one_that_fits_is_none(solve: Solve) -> None:
    (warning,) = solve({"r.yaml": "train: {steps: 4}\nprofile: {steps: 3, after: 2}\n"}).warnings
    assert (warning.severity, warning.key) == ("warning", "profile.steps")
    assert "set train.steps to 5 or more" in warning.hint
    assert not solve({"r.yaml": "train: {steps: 5}\nprofile: {steps: 3, after: 2}\n"}).warnings
    assert not solve({"r.yaml": "train: {steps: 0}\nprofile: {steps: 3, after: 2}\n"}).warnings


def test_a_program_of_ones_own_needs_no_length(solve: Solve) -> None:
    assert solve({"r.yaml": "program: {kind: torch, script: t.py}\n", "t.py": ""}).recipe.program.script == "t.py"


@pytest.mark.parametrize(
    ("batch", "extra", "wrong"),
    [
        ("{global: 10, micro: 4, accumulation: 3}", "", True),
        ("{global: 24, micro: 4, accumulation: 3}", "", False),
        ("{global: 24, micro: 4, accumulation: 3}", "nodes: {processes_per_node: 4}", True),
        ("{global: 48, micro: 4, accumulation: 3}", "nodes: {processes_per_node: 4}", False),
        ("{global: 10, micro: 4}", "", False),
        ("{global: 10, micro: 4, accumulation: auto}", "", False),
    ],
)
def test_three_corners_of_the_batch_in_one_file_must_agree(
    solve: Solve, refuse: Refuse, batch: str, extra: str, wrong: bool
) -> None:
    text = f"train: {{steps: 3}}\nstrategy: {{kind: ddp}}\n{extra}\nbatch: {batch}\n"
    if not wrong:
        assert solve(text)
        return
    (error,) = refuse(text)
    assert error.key == "batch.global"
    for name in ("batch.global", "batch.micro", "batch.accumulation"):
        assert name in error.what
    assert "r.yaml:4:" in error.why


def test_corners_from_several_layers_are_left_to_planning(solve: Solve) -> None:
    text = "train: {steps: 3}\nbatch: {global: 10, micro: 4}\n"
    assert solve(text, overrides=("batch.accumulation=3",)).recipe.batch.accumulation == 3


def test_errors_in_values_that_a_stronger_layer_replaces_are_reported_too(places: Places) -> None:
    files = {
        "r.yaml": "extends: a.yaml\ntrain: {steps: 3}\noptimizer: {lr: 1.0}\nstrategy: {kind: ddp}\n",
        "a.yaml": "optimizer: {lr: fast}\nstrategy: {kind: zero2, offload_optimizer: gpu, bukket: 1}\n",
    }
    assert [place for place, _ in places(files)] == ["a.yaml:1:17", "a.yaml:2:44", "a.yaml:2:49"]


FOREIGN = [
    pytest.param(section, kind, name, id=f"{section}.{name} under {kind}")
    for section in sorted(tagged_sections())
    for kind, model in schema().sections[section].kinds.items()
    for name in sorted({field for other in schema().sections[section].kinds.values() for field in other.model_fields})
    if name not in model.model_fields
]


@pytest.mark.parametrize(("section", "kind", "name"), FOREIGN)
def test_a_setting_of_another_kind_is_named_also_where_a_stronger_layer_chooses_the_kind(
    refuse: Refuse, section: str, kind: str, name: str
) -> None:
    value = "{}" if f"{section}.{name}" in schema().sections else "null"
    text = f"train: {{steps: 3}}\n{section}: {{{name}: {value}}}\n"
    errors = {error.key: error for error in refuse(text, overrides=(f"{section}.kind={kind}",))}
    assert errors[f"{section}.{name}"].what == f"{section}.kind {kind} has no setting {name!r}"
    assert "it yields to the kind of a stronger layer" in errors[f"{section}.{name}"].hint


@pytest.mark.parametrize(
    ("line", "column", "hint"),
    [
        ("batch.micro: 4", 1, "write `batch: {micro: …}`; only flags have dots: batch.micro=VALUE"),
        ("batch.micro: x", 1, "batch.micro=VALUE"),
        ("train.steps: 3", 1, "train.steps=VALUE"),
        ("efficiency: {compile.enabled: true}", 14, "write `compile: {enabled: …}`; only flags"),
        ("program.kind: {a: 1}", 1, "program.kind=VALUE"),
        ("variants: {a: {batch.micro: 4}}", 16, "batch.micro=VALUE"),
        ("batch.micrro: 4", 1, "did you mean batch.micro?"),
    ],
)
def test_a_key_with_dots_is_no_setting_of_a_file(refuse: Refuse, line: str, column: int, hint: str) -> None:
    steps = "" if "steps" in line else "train: {steps: 3}\n"
    (error,) = refuse(f"{line}\n{steps}")
    assert error.origin is not None
    assert error.origin.place == f"r.yaml:1:{column}"
    assert hint in error.hint


def test_an_interpolated_value_is_judged_by_what_it_becomes(places: Places) -> None:
    assert places("name: x\ntrain: {steps: '${name}'}\n")[0][1].startswith("train.steps must be")


def test_a_thousand_unknown_keys_are_all_reported(places: Places) -> None:
    text = "".join(f"unknown{n}: {n}\n" for n in range(1000))
    assert len(places(text + "train: {steps: 1}\n")) == 1000


def test_ten_thousand_leaves_resolve_in_every_kind_of_place(solve: Solve) -> None:
    env = "".join(f"  VARIABLE_{n}: value {n}\n" for n in range(4000))
    args = "".join(f"    argument_{n}: {n}\n" for n in range(3000))
    paths = "".join(f"    - ${{name}}/{n}\n" if n < 100 else f"    - p/{n}\n" for n in range(3000))
    text = f"train: {{steps: 1}}\nenv:\n{env}program:\n  args:\n{args}data:\n  path:\n{paths}"
    resolved = solve(text, overrides=("env.VARIABLE_7=other",))
    assert (
        len(resolved.recipe.env),
        len(resolved.recipe.program.args),
        len(resolved.recipe.data.model_dump()["path"]),
    ) == (
        4000,
        3000,
        3000,
    )
    assert resolved.recipe.env["VARIABLE_7"] == "other"
    assert [entry.value for entry in resolved.history["env.VARIABLE_7"]] == ["value 7", "other"]
    assert resolved.recipe.data.model_dump()["path"][99] == "run/99"


def test_each_wrong_element_of_a_list_or_mapping_is_an_error(refuse: Refuse) -> None:
    errors = refuse(
        "train: {steps: 3}\nenv: {A: [], B: x, C: {}}\ndata: {path: [a, 1, 2]}\ndevices: {select: [0, 1.5, x]}\n"
    )
    assert [each.key for each in errors] == ["env.A", "env.C", "data.path.1", "data.path.2", "devices.select.1"]


def test_a_contradiction_in_a_section_stands_at_the_strongest_layer(refuse: Refuse) -> None:
    (error,) = refuse("train: {steps: 3}\nmodel: {heads: 2, hidden_size: 16}\n", overrides=["model.heads=3"])
    assert error.origin is not None
    assert error.origin.place == "model.heads=3"


def test_a_kind_without_its_section_is_answered_with_the_section(refuse: Refuse) -> None:
    (error,) = refuse("train: {steps: 3}\nstrategy: fsdp\n")
    assert error.hint == "write `strategy: {kind: fsdp}`"


def test_a_variable_cannot_be_given_and_taken_at_once(refuse: Refuse) -> None:
    (error,) = refuse("train: {steps: 3}\nenv: {X: '1'}\nenv_from: [X]\n")
    assert error.what == "X is under env and under env_from"


def test_every_number_has_an_upper_bound() -> None:
    for setting in schema().all_settings():
        for kind, constraints in members(setting.annotation, setting.metadata):
            if kind in (int, float):
                bounds = [each for each in constraints if isinstance(each, annotated_types.Le | annotated_types.Lt)]
                assert bounds, setting.key


@pytest.mark.parametrize(
    "text",
    [
        "devices: {select: 2147483648}\n",
        f"devices: {{select: {10**30}}}\n",
        f"model: {{layers: {10**30}}}\n",
        f"model: {{hidden_size: {10**30}}}\n",
        f"batch: {{global: {10**30}}}\n",
        "optimizer: {lr: 1.0e308}\n",
        "strategy: {kind: ddp, bucket_mb: 1.0e308}\n",
        "launcher: {grace_seconds: 1.0e308}\n",
    ],
)
def test_a_number_beyond_all_sense_is_one_error_that_says_the_bound(refuse: Refuse, text: str) -> None:
    (error,) = refuse(text + "train: {steps: 1}\n")
    assert error.what.count("at most") == 1


@pytest.mark.parametrize(
    ("line", "why", "hint"),
    [
        ("strategy: {kind: pipeline}", "no pipeline parallelism", "strategy.kind: fsdp"),
        ("strategy: {kind: fsdp, pp_size: 2}", "no pipeline parallelism", "strategy.tensor inside a node"),
        ("strategy: {kind: tp}", "divides blocks under fsdp", "{kind: fsdp, tensor: 2}"),
        ("strategy: {kind: hsdp}", "in several copies", "{kind: fsdp, sharding: hybrid_shard}"),
        ("strategy: {kind: fsdp, tp_size: 2}", "", "did you mean strategy.tensor?"),
        ("strategy: {kind: fsdp, dp_replicate_size: 2}", "", "did you mean strategy.replicate?"),
        ("model: {kind: gpt, expert_parallel: 2}", "", "did you mean model.moe.parallel?"),
    ],
)
def test_meshes_of_other_tools_lead_to_what_there_is(refuse: Refuse, line: str, why: str, hint: str) -> None:
    (error,) = refuse(f"{line}\ntrain: {{steps: 3}}\n")
    assert why in (error.why or "")
    assert hint in (error.hint or "")
