"""The table of architectures against the installed transformers: it refuses nothing that transformers would train."""

from __future__ import annotations

import inspect

import pytest
import torch

from trainkit.architectures import LOOKING_AHEAD, MIXTURES, TASKS_OF, TRANSFORMERS, UNPADDED
from trainkit.errors import TrainingError
from trainkit.machine.facts import release
from trainkit.tools.builtin.architectures import CLASSES, WRITING
from trainkit.trainer.models.hf import TASKS
from trainkit.trainer.models.quantized import quantizable

transformers = pytest.importorskip("transformers")
MAPPINGS = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    WRITING: "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def installed(task: str) -> set[str]:
    """The types that the task's auto class takes; of those that write for a source, the ones with a decoder."""
    from transformers.models.auto import modeling_auto

    names: dict[str, str] = getattr(modeling_auto, MAPPINGS[task])
    if task != WRITING:
        return set(names)
    takes = {name: inspect.signature(getattr(transformers, names[name]).forward).parameters for name in names}
    return {name for name in names if "decoder_input_ids" in takes[name]}


@pytest.mark.parametrize("task", CLASSES)
def test_the_table_knows_what_the_installed_transformers_trains(task: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    trained, known = installed(task), set(CONFIG_MAPPING_NAMES)
    refused = {name for name, tasks in TASKS_OF.items() if task not in tasks}
    assert not refused & trained, f"add {task} to these in trainkit/architectures.py"
    assert CLASSES[task] == TASKS[task][0]
    if release(transformers.__version__)[:2] == release(TRANSFORMERS):
        assert known <= TASKS_OF.keys()
        # A few were of a task in an older release.
        assert {name for name in known - trained if task in TASKS_OF[name]} <= {"wav2vec2", "led"}


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 96}
SIZES |= {"embedding_size": 32, "d_model": 32, "n_layers": 2, "n_heads": 2, "emb_dim": 32, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize("architecture", ["bert", "electra", "roberta", "xlm", "xlnet"])
def test_what_looks_ahead_does_so_until_its_setting_is_true(architecture: str) -> None:
    known = transformers.AutoConfig.for_model(architecture)
    sizes = {name: value for name, value in SIZES.items() if name in {*known.to_dict(), *known.attribute_map}}
    switch = LOOKING_AHEAD[architecture]
    for setting in ({}, {switch: True}) if switch else ({},):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(type(known)(**sizes, **setting)).eval()
        tokens = torch.arange(5, 13)[None]
        with torch.no_grad():
            first, second = (
                model(input_ids=each).logits[0, 0] for each in (tokens, tokens.index_fill(1, torch.tensor(7), 50))
            )
        assert torch.equal(first, second) == bool(setting)


def test_what_has_no_padding_token_by_itself_has_none_in_transformers() -> None:
    if release(transformers.__version__)[:2] != release(TRANSFORMERS):
        pytest.skip("the table is of another release")
    assert {name: transformers.AutoConfig.for_model(name).pad_token_id for name in UNPADDED} == dict.fromkeys(UNPADDED)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "granitemoe", "llama"])
def test_the_experts_of_the_table_are_none_that_bitsandbytes_quantises(architecture: str) -> None:
    if release(transformers.__version__)[:2] != release(TRANSFORMERS):
        pytest.skip("the table is of another release")
    config = transformers.AutoConfig.for_model(architecture, num_hidden_layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if architecture in MIXTURES:
        with pytest.raises(TrainingError, match="in linear layers"):
            quantizable(model)
    else:
        assert quantizable(model)
