"""Frozen weights in 4 or 8 bits through bitsandbytes: the linear layers of the blocks (QLoRA, arXiv:2305.14314).

Embeddings, norms, the output layer and a classifier's head stay as they are.
"""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.errors import TrainingError
from trainkit.recipe.schema import HfModel, Quantize
from trainkit.tools.builtin.inputs import quantized_already
from trainkit.trainer.models.base import blocks_of, is_linear
from trainkit.trainer.tracing.stand_in import device_type

BLOCK, NESTED = 64, 256  # values that share a constant, and constants that do
LEAST = 0.9  # share of the blocks' matrices that must be in linear layers, or the recipe would promise what is not


def quantizable(inner: nn.Module) -> list[str]:
    """The names of the linear layers in the blocks, but for those that the model has to have in 32 bits (T5's `wo`).

    TrainingError where linear layers hold too little of the blocks.
    """
    inside = {each for block in blocks_of(inner) for each in block.modules()}
    found = {name: each for name, each in inner.named_modules() if each in inside and is_linear(each)}
    matrices = {each for module in inside for each in module.parameters(recurse=False) if each.dim() > 1}
    linear = sum(cast("Tensor", each.weight).numel() for each in found.values())
    if not found or linear < LEAST * sum(each.numel() for each in matrices):
        share = linear / max(1, sum(each.numel() for each in matrices))
        raise TrainingError(
            f"model.quantize: {share:.0%} of the weights in this model's blocks are in linear layers, and bitsandbytes "
            "quantises no others (experts that lie in one tensor are none)",
            hint="leave model.quantize out, or take a dense model",
        )
    kept = set(getattr(inner, "_keep_in_fp32_modules", None) or ())
    return [name for name in found if not kept.intersection(name.split("."))]


def reading_options(inner: nn.Module, asked: Quantize, device: str) -> dict[str, Any]:
    """What `from_pretrained` takes to quantise weights while it reads them, on a device, where they stay.

    inner: the model; on the meta device will do.
    """
    from transformers import BitsAndBytesConfig

    _quiet()
    chosen = set(quantizable(inner))
    others = [name for name, each in inner.named_modules() if is_linear(each) and name not in chosen]
    config = BitsAndBytesConfig(
        load_in_4bit=asked.bits == 4,
        load_in_8bit=asked.bits == 8,
        bnb_4bit_quant_type=asked.quant_type,
        bnb_4bit_use_double_quant=asked.double_quant,
        llm_int8_skip_modules=others or ["none of this name"],  # of an empty list it makes its own choice
    )
    return {"quantization_config": config, "device_map": device_map(device)}


def device_map(device: str) -> dict[str, Any]:
    """transformers' word for a whole model on a kind of device, of which this process has one."""
    return {"": torch.cuda.current_device() if device == "cuda" else device}


def refuse_quantized(config: Any, folder: str) -> None:
    """TrainingError for a folder whose weights are already quantised: transformers takes those as they are."""
    if getattr(config, "quantization_config", None) is not None:
        what, hint = quantized_already(folder)
        raise TrainingError(what, hint=hint)


def as_plain(inner: Any) -> None:
    """Let transformers forget that it has quantised a model, which it would not save, cast or move otherwise."""
    for name in ("quantization_config", "_pre_quantization_dtype"):
        vars(inner.config).pop(name, None)
    inner.hf_quantizer = inner.quantization_method = None
    inner.is_quantized = False


def quantize_in_place(inner: nn.Module, asked: Quantize, device: str) -> None:
    """Quantise weights that are there already, those of random models: on the device, where they stay."""
    _quiet()
    for name in quantizable(inner):
        layer: Any = inner.get_submodule(name)
        inner.set_submodule(name, _quantized(layer, asked).to(device))
    inner.to(device)


def _quantized(layer: Any, asked: Quantize) -> nn.Module:
    """The layer that bitsandbytes has for it; it quantises once it is moved, to its own device too."""
    layers: Any = importlib.import_module("bitsandbytes.nn")  # whose names are none to a type checker
    weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T.contiguous()
    made: Any = _empty(layer, asked)
    if asked.bits == 4:
        made.weight = layers.Params4bit(weight, requires_grad=False, module=made, **_options(asked))
    else:
        made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    return cast("nn.Module", made.requires_grad_(False))


def _empty(layer: Any, asked: Quantize) -> Any:
    """The same without weights, on the meta device."""
    layers: Any = importlib.import_module("bitsandbytes.nn")
    inputs, outputs = layer.weight.shape[::-1] if isinstance(layer, nn.Linear) else layer.weight.shape
    with torch.device("meta"):
        if asked.bits == 4:
            made = layers.Linear4bit(inputs, outputs, layer.bias is not None, **_options(asked))
        else:  # outliers above 6 in 16 bits: LLM.int8(), arXiv:2208.07339, and transformers' default
            made = layers.Linear8bitLt(inputs, outputs, layer.bias is not None, has_fp16_weights=False, threshold=6.0)
    made.bias, made.source_cls = layer.bias, type(layer)
    return made.requires_grad_(False)


def _options(asked: Quantize) -> dict[str, Any]:
    return {"compress_statistics": asked.double_quant, "quant_type": asked.quant_type}


def quantize_without_weights(model: Any, asked: HfModel) -> None:
    """The same for a model on the meta device, as a run will have it: frozen layers of packed weights."""
    _quiet()
    held = getattr(model.inner.config, "dtype", None) if asked.path else None
    for name in quantizable(model.inner):
        layer: Any = model.inner.get_submodule(name)
        packed: Any = _packed(_empty(layer, asked.quantize), asked.quantize, held or torch.float32)
        model.inner.set_submodule(name, packed)
        if model.slices is not None:
            model.slices.follow(layer.weight, packed.weight)


def quantize_later(layer: Any, whole: Tensor, device: torch.device) -> Tensor:
    """The packed values (bytes, 1) of a layer of :func:`quantize_without_weights`, whose constants the layer gets.

    whole: of the plain layer.
    """
    functional: Any = importlib.import_module("bitsandbytes.functional")
    weight, planned = whole if layer.source_cls is nn.Linear else whole.T.contiguous(), layer.quant_state
    packed, state = functional.quantize_4bit(
        weight.to(device, planned.dtype),
        blocksize=planned.blocksize,
        compress_statistics=planned.nested,
        quant_type=planned.quant_type,
    )
    layer.quant_state = state
    return cast("Tensor", packed)


def packed_parameter(layer: Any, packed: Tensor) -> nn.Parameter:
    """The weight of a layer from its packed values, beside constants that the layer has."""
    layers: Any = importlib.import_module("bitsandbytes.nn")
    state = layer.quant_state
    return cast(
        "nn.Parameter",
        layers.Params4bit(
            packed, requires_grad=False, quant_state=state, blocksize=state.blocksize, compress_statistics=state.nested,
            quant_type=state.quant_type, bnb_quantized=True, module=layer,
        ),
    )  # fmt: skip


def _packed(made: Any, asked: Quantize, held: torch.dtype) -> nn.Module:
    """What quantisation leaves of a weight on meta. held: the format that it was in, which its values come back in."""
    layers: Any = importlib.import_module("bitsandbytes.nn")
    shape = made.weight.shape
    size = shape.numel()
    with torch.device("meta"):
        if asked.bits == 8:
            weight = torch.empty(shape, dtype=torch.int8)
            options = {"CB": weight, "SCB": torch.empty(shape[0], dtype=torch.float32)}
            made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False, **options)
            if device_type(weight) == "cpu":
                made.forward = partial(_multiply_on_cpu, made)
        else:
            state = _constants(size, asked)
            state.shape, state.dtype, state.quant_type = shape, held, asked.quant_type
            weight = torch.empty((size + 1) // 2, 1, dtype=torch.uint8)
            made.weight = layers.Params4bit(
                weight, quant_state=state, bnb_quantized=True, module=made, **_options(asked)
            )
            made.quant_state = state
    return cast("nn.Module", made)


def _constants(size: int, asked: Quantize) -> Any:
    """The largest value of each block of 64, itself in blocks of 256 where it is quantised, and what bits stand for."""
    functional: Any = importlib.import_module("bitsandbytes.functional")
    blocks = -(-size // BLOCK)
    code = torch.empty(16)
    if not asked.double_quant:
        return functional.QuantState(torch.empty(blocks), blocksize=BLOCK, code=code)
    second = functional.QuantState(
        torch.empty(-(-blocks // NESTED)), blocksize=NESTED, code=torch.empty(256), dtype=torch.float32
    )
    largest = torch.empty(blocks, dtype=torch.uint8)
    return functional.QuantState(largest, blocksize=BLOCK, code=code, offset=torch.empty(()), state2=second)


def _multiply_on_cpu(layer: Any, x: Tensor) -> Tensor:
    """As a layer of 8 bits on a CPU, where it computes with plain weights (bitsandbytes: matmul)."""
    functions: Any = importlib.import_module("bitsandbytes.autograd._functions")
    if layer.weight.CB is not None:
        layer.init_8bit_state()
    if layer.bias is not None and layer.bias.dtype != x.dtype:
        layer.bias.data = layer.bias.data.to(x.dtype)
    return cast("Tensor", functions.MatMul8bitFp.apply(x, layer.weight, None, layer.bias, layer.state))


def tell_peft(model: Any, bits: int) -> None:
    """Say on the model that peft is given what its layers are: it asks no layer by itself."""
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have 4-bit layers compute in a format, in evaluation as in training; others follow autocast.

    To be called once adapters are in place, which would take that format, too.
    """
    quantized: Any = filter(is_quantized, model.modules())
    for layer in quantized:
        if hasattr(layer, "compute_dtype"):
            layer.compute_dtype, layer.compute_type_is_set = dtype, True
            # An evaluation would lay the weights out for a kernel without a gradient, for good (bitsandbytes 0.50).
            layer.support_avx512bf16_for_cpu = False


def scales(model: nn.Module) -> Iterator[Tensor]:
    """What quantised layers hold beside their weights: the constants that give the values back."""
    for module in model.modules():
        state = getattr(module, "quant_state", None)
        for each in (state, getattr(state, "state2", None)):
            yield from (value for value in vars(each).values() if isinstance(value, Tensor)) if each else ()
        for holder in (getattr(module, "state", None), getattr(module, "weight", None)):
            if isinstance(found := getattr(holder, "SCB", None), Tensor):
                yield found


def dequantize(inner: nn.Module) -> None:
    """Give every quantised layer its weights in 32 bits again, as they are after quantisation."""
    quantized: Any = [each for each in inner.named_modules() if is_quantized(each[1])]
    for name, layer in quantized:
        inner.set_submodule(name, _dequantized(layer))


def rounded_weight(layer: nn.Module, weight: Tensor, asked: Quantize) -> Tensor:
    """What quantisation leaves of the weight of a linear layer, in 32 bits. layer: of its kind, on the meta device."""
    made = copy.deepcopy(layer)
    made.weight, made.bias = nn.Parameter(weight, requires_grad=False), None  # type: ignore[assignment]
    _quiet()
    return cast("Tensor", _dequantized(_quantized(made, asked).to("cpu")).weight).detach()


def is_quantized(module: nn.Module) -> bool:
    """Whether it is a layer of bitsandbytes'."""
    return type(module).__module__.startswith("bitsandbytes.")


def _dequantized(layer: Any) -> nn.Module:
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant

    if (state := getattr(layer.weight, "quant_state", None)) is not None:
        weight = dequantize_4bit(layer.weight.data, state)
    else:
        scale = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        weight = int8_vectorwise_dequant(layer.weight.data, scale)
    transposed = layer.source_cls is not nn.Linear
    with torch.device("meta"):
        sizes = (layer.out_features, layer.in_features)
        made = layer.source_cls(*sizes) if transposed else nn.Linear(*sizes[::-1], bias=layer.bias is not None)
    made.weight = nn.Parameter((weight.T if transposed else weight).float().contiguous())
    made.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().float())
    return cast("nn.Module", made)


def _quiet() -> None:
    # It warns of kernels for inference, and at each product of 8 bits of a cast that is meant.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
