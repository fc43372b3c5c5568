"""Values that people know from other tools and that trainkit does not take: why, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

_GONE = "transformers' own AdamW was removed in transformers 5; PyTorch's does the same"
_NO_MEMORY = "write adamw_bnb_8bit, adafactor, or the class itself as pkg.mod:Class"
_CLASS = "name its class by import path, as in optimizer.name: pkg.mod:Class, with optimizer.args"
_OTHER_HARDWARE = "it is for hardware that trainkit does not drive"

# HF's names for optimizers (transformers, training_args.OptimizerNames) that are not names here.
_OPTIMIZERS: Mapping[str, tuple[str, str]] = {
    "adamw_hf": (_GONE, "write adamw_torch"),
    "adamw": ("which AdamW is meant decides speed and memory", "write adamw_torch or adamw_torch_fused"),
    "adamw_8bit": ("it is HF's other name of one of trainkit's", "write adamw_bnb_8bit"),
    "multi_tensor": ("PyTorch calls it foreach", "write adamw_torch_foreach"),
    "adamw_torch_xla": (_OTHER_HARDWARE, "write adamw_torch"),
    "adamw_torch_npu_fused": (_OTHER_HARDWARE, "write adamw_torch_fused"),
    "adamw_torch_4bit": ("its class is torchao's", "write torchao.optim:AdamW4bit, or adamw_bnb_8bit"),
    "adamw_torch_8bit": ("its class is torchao's", "write torchao.optim:AdamW8bit, or adamw_bnb_8bit"),
    "paged_adamw_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedAdamW8bit, or adamw_bnb_8bit"),
    "paged_adamw_32bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedAdamW, or adamw_torch"),
    "lion_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:Lion8bit"),
    "lion_32bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:Lion"),
    "paged_lion_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedLion8bit"),
    "paged_lion_32bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedLion"),
    "ademamix": ("its class is bitsandbytes'", "write bitsandbytes.optim:AdEMAMix"),
    "ademamix_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:AdEMAMix8bit"),
    "paged_ademamix_32bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedAdEMAMix"),
    "paged_ademamix_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:PagedAdEMAMix8bit"),
    "rmsprop": ("its class is PyTorch's", "write torch.optim:RMSprop"),
    "rmsprop_bnb": ("its class is bitsandbytes'", "write bitsandbytes.optim:RMSprop"),
    "rmsprop_bnb_8bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:RMSprop8bit"),
    "rmsprop_bnb_32bit": ("its class is bitsandbytes'", "write bitsandbytes.optim:RMSprop32bit"),
    "stable_adamw": ("its class is optimi's", "write optimi:StableAdamW"),
    "grokadamw": ("its class is that of the package grokadamw", _CLASS),
    **dict.fromkeys(
        ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"),
        (
            "it projects the gradients of chosen layers, which needs parameter groups that no recipe key describes",
            _NO_MEMORY,
        ),
    ),
    **dict.fromkeys(
        (
            "galore_adamw_layerwise",
            "galore_adamw_8bit_layerwise",
            "galore_adafactor_layerwise",
            "apollo_adamw_layerwise",
            "lomo",
            "adalomo",
        ),
        (
            "it updates weights inside the backward pass, where neither clipping nor accumulation can be done",
            _NO_MEMORY,
        ),
    ),
    **dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        ("it must be told of training and evaluation, which the loop does for no optimizer", "write adamw_torch"),
    ),
}

# Backends of torch.compile that are of no use in training.
_INFERENCE_ONLY: Mapping[str, tuple[str, str]] = dict.fromkeys(
    ("openxla_eval", "tvm", "ofi", "fx2trt", "onnxrt", "ipex", "tensorrt", "torch_tensorrt", "torchxla_trace_once"),
    ("it compiles for inference: there is no backward pass to train with", "write inductor"),
)

# Reached by zero1 and zero2 alone: zero3 takes the value.
_NVME: Mapping[str, tuple[str, str]] = {
    "nvme": (
        "DeepSpeed keeps the optimizer state of stages 1 and 2 in CPU memory, whatever it is told of NVMe",
        "choose strategy.kind: zero3, or write cpu",
    )
}

REFUSED_VALUES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "optimizer.name": _OPTIMIZERS,
    "efficiency.compile.backend": _INFERENCE_ONLY,
    "strategy.offload_optimizer": _NVME,
}


def refused(key: str, value: object) -> tuple[str, str] | None:
    """Why a known value is not taken, and what to do; None for a value that nothing is known of."""
    return REFUSED_VALUES.get(key, {}).get(value) if isinstance(value, str) else None
