"""Models that a task cannot train are refused in the plan, by their config.json or their name; unknown ones never."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.made_up_plans import PACKAGES
from trainkit.errors import Diagnostic, RecipeError
from trainkit.machine.facts import Facts
from trainkit.planner.build import build_plan
from trainkit.planner.rules import input_rules
from trainkit.recipe.resolved import Asked, Resolved
from trainkit.rule import check
from trainkit.tools.builtin import inputs

Solve = Callable[..., Resolved]


CAUSAL, BOTH = ("causal_lm",), ("causal_lm", "sequence_classification")
# As the tables of transformers have them.
TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt2", "llama", "mixtral", "qwen3_moe", "xlnet"), BOTH),
    **dict.fromkeys(("granitemoehybrid",), CAUSAL),
    "bert": ("causal_lm", "masked_lm", "sequence_classification"),
    "bart": ("causal_lm", "masked_lm", "sequence_classification", "seq2seq_lm"),
    "t5": ("sequence_classification", "seq2seq_lm"),
    **dict.fromkeys(("nllb-moe", "switch_transformers"), ("seq2seq_lm",)),
    **dict.fromkeys(("qwen2_audio", "vit"), ()),
}


def architecture_problems(resolved: Resolved, version: str | None) -> list[Diagnostic]:
    """What is found where this release of transformers is installed; None for none."""
    asked = Asked(resolved, {"transformers": version}, TYPES) if version else Asked(resolved, {})
    return list(inputs.architecture_problems(asked))


def with_types(facts: Facts) -> Facts:
    return replace(facts, architectures=TYPES, packages={**PACKAGES, "transformers": "5.23.0"})


HEAD = "version: 1\ntrain: {steps: 1}\ndata: {kind: random}\n"


def of_folder(solve: Solve, settings: dict[str, Any] | str, task: str, more: str = "") -> Resolved:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    recipe = f"{HEAD}model:\n  kind: hf\n  path: /models/it\n  task: {task}\n{more}"
    return solve({"r.yaml": recipe, "/models/it/config.json": text, "/models/it": ""})


def refused(resolved: Resolved, machine: Callable[..., Facts]) -> list[Diagnostic]:
    with pytest.raises(RecipeError) as caught:
        build_plan(resolved, with_types(machine(0)))
    return list(caught.value.diagnostics)


def test_t5_as_a_causal_model_is_refused_with_the_task_that_trains_it(
    solve: Solve, machine: Callable[..., Facts]
) -> None:
    resolved = of_folder(solve, {"model_type": "t5", "is_encoder_decoder": True}, "causal_lm")
    (found,) = refused(resolved, machine)
    assert found.what == (
        "model.task causal_lm: t5 is an encoder-decoder, which writes a target for a source and continues no text"
    )
    assert found.hint == "set model.task: seq2seq_lm, with rows of source and target"
    assert found.origin is not None
    assert (found.key, found.origin.line) == ("model.task", 7)
    unsaid = solve(f"{HEAD}model: {{kind: hf, architecture: t5}}\n")
    (found,) = refused(unsaid, machine)
    assert found.key == "model.architecture", "nobody has written a task"


@pytest.mark.parametrize("more", ["", "  quantize: 4\npeft: {kind: lora}\n"])
def test_weights_that_are_quantised_already_are_refused_before_they_are_fetched(
    more: str, solve: Solve, machine: Callable[..., Facts]
) -> None:
    settings = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    found = refused(of_folder(solve, settings, "causal_lm", more), machine)[0]
    assert (found.key, found.what) == ("model.path", "model.path: the weights in /models/it are already quantised")


@pytest.mark.parametrize(
    ("architecture", "task", "what", "hint"),
    [
        ("gpt2", "seq2seq_lm", "gpt2 is not an encoder-decoder for text", "causal_lm or sequence_classification"),
        ("qwen2_audio", "seq2seq_lm", "qwen2_audio is not an encoder-decoder for text", "for none of the tasks"),
        ("llama", "masked_lm", "llama is not made for it", "causal_lm or sequence_classification"),
        ("vit", "causal_lm", "vit is not made for it", "for none of the tasks"),
        ("nllb-moe", "sequence_classification", "nllb-moe is not made for it", "set model.task: seq2seq_lm"),
        (
            "bert",
            "causal_lm",
            "bert sees the token that it is to predict",
            "masked_lm, or model.config.is_decoder: true",
        ),
        ("xlnet", "causal_lm", "xlnet sees the token", "set model.task: sequence_classification"),
    ],
)
def test_other_misfits_say_what_the_model_is_for(
    architecture: str, task: str, what: str, hint: str, solve: Solve
) -> None:
    resolved = of_folder(solve, {"model_type": architecture}, task, "  mask_token: 3\n" if task == "masked_lm" else "")
    (found,) = architecture_problems(resolved, "5.23.0")
    assert what in found.what
    assert hint in found.hint


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"model_type": "t5"}, "seq2seq_lm"),
        ({"model_type": "bart"}, "causal_lm"),  # its decoder alone
        ({"model_type": "bert", "is_decoder": True}, "causal_lm"),
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "causal_lm"),
        ({}, "seq2seq_lm"),
    ],
)
def test_what_may_be_trained_or_is_not_known_is_not_refused(
    settings: dict[str, Any] | str, task: str, solve: Solve, machine: Callable[..., Facts]
) -> None:
    resolved = of_folder(solve, settings, task)
    assert architecture_problems(resolved, "5.23.0") == []
    build_plan(resolved, with_types(machine(0)))


OWN_CODE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}


@pytest.mark.parametrize(
    ("settings", "version", "what", "why"),
    [
        ("no JSON", "5.23.0", "/models/it/config.json is no JSON: Expecting value", ""),
        ("[1]", "5.23.0", "/models/it/config.json is no JSON object", ""),
        (
            {"model_type": "a-model-of-tomorrow"},
            "5.23.0",
            "a-model-of-tomorrow is not a model of transformers 5.23.0",
            "",
        ),
        ({"hidden_size": 8}, "5.23.0", "the config.json of /models/it has no model_type", ""),
        (OWN_CODE, "5.23.0", "mine is not a model of transformers", "code that lies beside weights is not run"),
        (
            {**OWN_CODE, "model_type": "t5"},
            "5.23.0",
            "t5 is an encoder-decoder",
            "transformers 5.23.0 does not have it",
        ),
    ],
)
def test_what_transformers_would_refuse_after_seconds_is_refused_in_the_plan(
    settings: dict[str, Any] | str, version: str | None, what: str, why: str, solve: Solve
) -> None:
    (found,) = architecture_problems(of_folder(solve, settings, "causal_lm"), version)
    assert (what in found.what, why in found.why, bool(found.hint)) == (True, True, True)


def test_nothing_is_refused_of_types_where_no_transformers_is_installed(solve: Solve) -> None:
    for settings in ({"model_type": "a-model-of-tomorrow"}, {"hidden_size": 8}, OWN_CODE):
        assert architecture_problems(of_folder(solve, settings, "causal_lm"), None) == []


def test_a_folder_without_a_model_says_what_it_holds(solve: Solve) -> None:
    recipe = f"{HEAD}model: {{kind: hf, path: /models/it}}\n"
    (found,) = architecture_problems(solve({"r.yaml": recipe, "/models/it": ""}), None)
    assert found.what == "model.path: there is no /models/it/config.json, which says what the model is"
    adapters = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "ada/base"})
    files = {"r.yaml": recipe, "/models/it": "", "/models/it/adapter_config.json": adapters}
    (found,) = architecture_problems(solve(files), None)
    assert found.what == "model.path: /models/it holds adapters, and no model"
    assert found.hint == ("set model.path to the model that they belong to (ada/base), and peft.path to this folder")
    assert architecture_problems(solve({"r.yaml": recipe}), "5.23.0") == [], "another machine may have it"


def test_a_name_that_transformers_does_not_have_is_refused(solve: Solve) -> None:
    (found,) = architecture_problems(solve(f"{HEAD}model: {{kind: hf, architecture: lama}}\n"), "5.23.0")
    assert found.what == "model.architecture: lama is not a model of transformers 5.23.0"
    assert "did you mean llama?" in found.hint


QUANTISED = "  quantize: 4\npeft: {kind: lora}\n"


@pytest.mark.parametrize(
    ("settings", "refuses"),
    [
        ({"model_type": "mixtral"}, True),
        ({"model_type": "qwen3_moe", "num_experts": 128}, True),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, False),
        ({"model_type": "llama"}, False),
        ({"model_type": "switch_transformers"}, False),
    ],
)
def test_a_mixture_of_experts_is_not_quantised(settings: dict[str, Any], refuses: bool, solve: Solve) -> None:
    task = "seq2seq_lm" if settings["model_type"] == "switch_transformers" else "causal_lm"
    resolved = of_folder(solve, settings, task, QUANTISED)
    found = list(architecture_problems(resolved, "5.23.0"))
    assert [each.key for each in found] == ["model.quantize"] * refuses
    assert all("in one tensor" in each.why for each in found)
    assert architecture_problems(of_folder(solve, settings, task), "5.23.0") == []


@pytest.mark.parametrize(
    ("name", "data", "refuses"),
    [
        ("t5", "kind: random", True),
        ("bart", "kind: dataset, path: r, columns: {label: l}", True),
        ("t5", "kind: dataset, path: r, columns: {label: l}, tokenizer: t", False),
        ("t5", "kind: target, target: a:b", False),
        ("bert", "kind: random", False),
    ],
)
def test_a_label_that_is_read_at_the_end_of_a_text_wants_one(name: str, data: str, refuses: bool, solve: Solve) -> None:
    model = f"model: {{kind: hf, architecture: {name}, task: sequence_classification}}"
    found = list(architecture_problems(solve(f"version: 1\ntrain: {{steps: 1}}\ndata: {{{data}}}\n{model}\n"), None))
    assert ["reads the label at the token that ends a text" in each.what for each in found] == [True] * refuses


@pytest.mark.parametrize(
    ("settings", "more", "refuses"),
    [
        ({"model_type": "llama"}, "", True),
        ({"model_type": "llama", "pad_token_id": None}, "", True),
        ({"model_type": "llama", "pad_token_id": 0}, "", False),
        ({"model_type": "llama"}, "  config: {pad_token_id: 0}\n", False),
        ({"model_type": "bert"}, "", False),
        ({"model_type": "bert", "pad_token_id": None}, "", True),
    ],
)
def test_a_classifier_without_a_padding_token_is_refused(
    settings: dict[str, Any], more: str, refuses: bool, solve: Solve
) -> None:
    found = list(architecture_problems(of_folder(solve, settings, "sequence_classification", more), "5.23.0"))
    assert ["has no padding token" in each.what for each in found] == [True] * refuses
    assert (
        list(architecture_problems(of_folder(solve, settings, "causal_lm", "  config: {is_decoder: true}\n"), None))
        == []
    )


def test_the_installed_transformers_says_what_a_task_trains(solve: Solve) -> None:
    resolved = of_folder(solve, {"model_type": "t5"}, "causal_lm")
    learned = Asked(resolved, {"transformers": "9.0"}, {"t5": ("causal_lm",)})
    assert list(inputs.architecture_problems(learned)) == []


def warnings(resolved: Resolved, facts: Facts) -> list[str]:
    return [each.what for each in build_plan(resolved, with_types(facts)).plan.notices if each.severity == "warning"]


@pytest.mark.parametrize(
    ("architecture", "task", "warned"),
    [
        ("bart", "", True),
        ("bart", "\n  task: causal_lm", False),
        ("bart", "\n  task: seq2seq_lm", False),
        ("gpt2", "", False),
    ],
)
def test_an_encoder_decoder_of_which_nobody_said_that_its_decoder_alone_is_meant_is_warned_of(
    architecture: str, task: str, warned: bool, solve: Solve, machine: Callable[..., Facts]
) -> None:
    found = warnings(solve(f"{HEAD}model:\n  kind: hf\n  architecture: {architecture}{task}\n"), machine(0))
    assert any("bart is an encoder-decoder, and as causal_lm" in what for what in found) == warned


def test_a_decoder_that_was_saved_alone_is_not_warned_of(solve: Solve, machine: Callable[..., Facts]) -> None:
    saved = {"model_type": "bart", "is_encoder_decoder": False, "is_decoder": True}
    files = {"/models/it/config.json": json.dumps(saved), "/models/it": ""}
    resolved = solve({"r.yaml": f"{HEAD}model: {{kind: hf, path: /models/it}}\n", **files})
    assert not any("encoder-decoder" in what for what in warnings(resolved, machine(0)))


@pytest.mark.parametrize(("dtype", "warned"), [("fp16", True), ("bf16", False)])
def test_a_trained_t5_in_float16_is_warned_of(
    dtype: str, warned: bool, solve: Solve, machine: Callable[..., Facts]
) -> None:
    more = f"precision: {dtype}\n"
    trained = of_folder(solve, {"model_type": "t5"}, "seq2seq_lm", more)
    assert any("t5 was trained in bf16" in what for what in warnings(trained, machine(1, "NVIDIA A100"))) == warned
    drawn = solve(f"{HEAD}{more}model: {{kind: hf, architecture: t5, task: seq2seq_lm}}\n")
    assert not any("was trained" in what for what in warnings(drawn, machine(1, "NVIDIA A100")))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ("optimizer: {lr: 3.0e-3}\n", True),
        ("", False),
        ("optimizer: {lr: 3.0e-3}\npeft: {kind: lora}\n", False),
        ("optimizer: {name: adafactor, lr: 3.0e-3}\n", False),
    ],
)
def test_a_rate_for_random_weights_is_warned_of_where_they_are_not(
    more: str, warned: bool, solve: Solve, machine: Callable[..., Facts]
) -> None:
    found = warnings(of_folder(solve, {"model_type": "llama"}, "causal_lm", more), machine(0))
    assert any("optimizer.lr 0.003 is a rate for random weights" in what for what in found) == warned
    drawn = solve(f"{HEAD}optimizer: {{lr: 3.0e-3}}\nmodel: {{kind: hf, architecture: llama}}\n")
    assert not any("random weights" in what for what in warnings(drawn, machine(0)))


BOTH_SIDES = {"is_encoder_decoder": True}


@pytest.mark.parametrize(
    ("settings", "data", "longer"),
    [
        ({"max_position_embeddings": 64}, "sequence_length: 65", "sequence_length"),
        ({"n_positions": 64}, "sequence_length: 65", "sequence_length"),
        ({"max_position_embeddings": 64}, "sequence_length: 64", ""),
        ({"max_position_embeddings": 64, **BOTH_SIDES}, "sequence_length: 8, target_length: 65", "target_length"),
        ({"n_positions": 64, **BOTH_SIDES}, "sequence_length: 65", ""),  # as of T5: relative positions
        ({}, "sequence_length: 65", ""),
    ],
)
def test_samples_longer_than_a_model_reads_are_refused(
    settings: dict[str, Any], data: str, longer: str, solve: Solve
) -> None:
    def found(config: str = "{}") -> list[str]:
        files = {"/models/it": "", "/models/it/config.json": json.dumps({"model_type": "llama", **settings})}
        task = "seq2seq_lm" if "is_encoder_decoder" in settings else "causal_lm"
        model = f"{{kind: hf, path: /models/it, task: {task}, config: {config}}}"
        recipe = f"version: 1\ntrain: {{steps: 1}}\ndata: {{kind: random, {data}}}\nmodel: {model}\n"
        asked = Asked(solve({"r.yaml": recipe, **files}), {})
        return [each.what for each in inputs.lengths_are_those_of_the_model(asked)]

    assert found() == [f"data.{longer}: the model has 64 places, fewer than 65"] * bool(longer)
    assert found("{max_position_embeddings: 70}") == []


def test_settings_of_the_recipe_count_above_those_of_the_folder(solve: Solve) -> None:
    decoder = of_folder(solve, {"model_type": "bert"}, "causal_lm", "  config: {is_decoder: true}\n")
    assert architecture_problems(decoder, None) == []
    encoder = of_folder(
        solve, {"model_type": "bert", "is_decoder": True}, "causal_lm", "  config: {is_decoder: false}\n"
    )
    assert list(architecture_problems(encoder, None))


def test_a_program_of_the_users_own_decides_by_itself(layered: Callable[..., Resolved]) -> None:
    program = {"kind": "torch", "script": "a.py", "reads_recipe": True}
    resolved = layered({"model": {"kind": "hf", "architecture": "t5"}, "program": program})
    assert check(input_rules("torch"), Asked(resolved, {})) == []
