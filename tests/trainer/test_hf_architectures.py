"""The table of architectures against the installed transformers: it refuses nothing that transformers would train."""

from __future__ import annotations

import inspect

import pytest
import torch

from trainkit.errors import TrainingError
from trainkit.machine.host import transformers_architectures
from trainkit.tools.builtin.inputs import CLASSES, LOOKING_AHEAD, MIXTURES, UNPADDED, WRITING
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
def test_the_tables_that_are_read_as_text_are_those_of_the_installed_transformers(task: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    read = transformers_architectures()
    assert read.keys() == CONFIG_MAPPING_NAMES.keys()
    assert {name for name, tasks in read.items() if task in tasks} == installed(task)
    assert CLASSES[task] == TASKS[task][0]


@pytest.mark.needs("transformers>=5.23")
def test_what_is_known_of_types_by_hand_is_known_to_transformers() -> None:
    read = transformers_architectures()
    assert all("causal_lm" in read[name] for name in LOOKING_AHEAD)
    assert read.keys() >= UNPADDED | MIXTURES


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


@pytest.mark.needs("transformers>=5.23")
def test_what_has_no_padding_token_by_itself_has_none_in_transformers() -> None:
    assert {name: transformers.AutoConfig.for_model(name).pad_token_id for name in UNPADDED} == dict.fromkeys(UNPADDED)


@pytest.mark.needs("transformers>=5.23")
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "granitemoe", "llama"])
def test_the_experts_of_the_table_are_none_that_bitsandbytes_quantises(architecture: str) -> None:
    config = transformers.AutoConfig.for_model(architecture, num_hidden_layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if architecture in MIXTURES:
        with pytest.raises(TrainingError, match="in linear layers"):
            quantizable(model)
    else:
        assert quantizable(model)
