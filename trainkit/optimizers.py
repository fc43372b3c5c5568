"""Every optimizer by its name in a recipe, and all that anyone asks of it: the trainer, the planner, the foreign tools.

A new optimizer is one entry here (and a class by its import path, `optimizer.name: pkg.mod:Class`, needs none).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

MOMENTS = ("beta1", "beta2", "eps")
ZERO = ("zero1", "zero2", "zero3")
ON_DEEPSPEED = ("zero0", *ZERO)  # the strategies of DeepSpeed's engine


# Of a tensor: two moments of its size; also in 8 bits; rows and columns of squares; sums of squares; a momentum; a
# momentum of a matrix of a block, and two moments of another tensor.
Keeps = Literal["moments", "8-bit moments", "factors", "squares", "momentum", "momentum of matrices"]
ROUTERS = {"router", "gate", "shared_expert_gate"}  # modules that choose experts, by their names in transformers


@dataclass(frozen=True, slots=True)
class Package:
    """What must be installed. install: the command, with {pip} for the interpreter's, where its name is not enough."""

    name: str
    minimum: str
    install: str = ""


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """Strategies and devices with which programs cannot use it. Both have to fit; empty fits all."""

    reason: str
    instead: str
    strategies: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    programs: tuple[str, ...] = ("builtin",)


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One optimizer.

    path: import path of its class. arguments: how the recipe's settings reach the class, by the class's own names;
        a tuple is handed over as one value. fixed: arguments that are always the same; fixed_on: on one device;
        fixed_sharded: for sharded tensors (fsdp's DTensor). by_matrix: whether its groups say which tensors are
        matrices of blocks (`matrices`), as `is_hidden_matrix` has it.
    state: optimizer state per parameter with fp32 weights, in words (tests measure it); state_bytes: the same as a
        number, None where it depends on shapes. speed, when: for the table of techniques; an empty `when` adds no row.
    deepspeed: the type that DeepSpeed makes of its own file; empty where it has none.
    hf: the settings that Trainer hands on to its optimizer of this name, and hf_args: those that go through
        --optim_args, by their name there; hf_unsupported: why Trainer has none, and what to do instead, from
        transformers' version hf_until on.
    hf_aliases: other names that Trainer has for it.
    keeps: what of each tensor, None where that is not known. together: whether it updates all tensors of a group in one
        pass, with temporaries for all of them (foreach); at_once: in one kernel without any (fused). lighter: what it
        costs to take it for its small state, as other than AdamW.
    elementwise: whether a value's update follows from its own gradients alone, with state of the same shape, so that
        parts of tensors train as whole ones do.
    keeps_rounding: whether it keeps what rounding to bf16 weights would lose. embeddings_in_32_bit: whether state of
        embeddings must stay in 32 bits. warning: what a reader of the recipe may not expect, and what to do about it.
    """

    path: str
    arguments: Mapping[str, str | tuple[str, ...]]
    state: str
    speed: str
    when: str = ""
    state_bytes: float | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    fixed_on: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    fixed_sharded: Mapping[str, object] = field(default_factory=dict)
    by_matrix: bool = False
    requires: Package | None = None
    unsupported: tuple[Incompatibility, ...] = ()
    deepspeed: str = ""
    hf: tuple[str, ...] = ()
    hf_args: Mapping[str, str] = field(default_factory=dict)
    hf_unsupported: tuple[str, str] | None = None
    hf_until: str = ""
    hf_aliases: tuple[str, ...] = ()
    keeps: Keeps | None = None
    together: bool = False
    at_once: bool = False
    lighter: str = ""
    elementwise: bool = False
    keeps_rounding: bool = False
    embeddings_in_32_bit: bool = False
    warning: tuple[str, str] | None = None

    @property
    def takes(self) -> tuple[str, ...]:
        """Which of MOMENTS the class is given."""
        used = {name for each in self.arguments.values() for name in (each if isinstance(each, tuple) else (each,))}
        return tuple(name for name in MOMENTS if name in used)


def is_hidden_matrix(name: str, dimensions: int, *, embedding: bool) -> bool:
    """Whether a parameter is the weight of a linear layer inside a list of blocks; embeddings and routers are none.

    What Muon is for (kellerjordan.github.io/posts/muon): embeddings, the output layer and heads, which stand outside
    the blocks, and whatever is no matrix stay with AdamW; so do the stacks of experts, of three dimensions.
    """
    *modules, leaf = name.split(".")
    inside = any(each.isdecimal() for each in modules[:-1])
    return inside and leaf == "weight" and dimensions == 2 and not embedding and not ROUTERS & set(modules)


ADAM: Mapping[str, str | tuple[str, ...]] = {"betas": ("beta1", "beta2"), "eps": "eps"}
_TWO_MOMENTS = "8 bytes of state per parameter"
_WHOLE_TENSORS = Incompatibility(
    "its kernels take whole tensors, and fsdp hands it sharded ones (DTensor)",
    "optimizer.name: adamw_torch_fused, or strategy.kind: ddp",
    strategies=("fsdp",),
)
_XLA = Incompatibility(
    "this optimizer has no step for XLA", "optimizer.name: adamw_torch", devices=("xla",), programs=("hf",)
)
_APEX = (
    # the package of that name on PyPI is something else
    "APEX_CPP_EXT=1 APEX_CUDA_EXT=1 {pip} install --no-build-isolation git+https://github.com/NVIDIA/apex, "
    "or use a container that has it; adamw_torch_fused needs neither"
)

_TORCH_ADAMW = partial(Optimizer, "torch.optim:AdamW", ADAM, state_bytes=8, keeps="moments", elementwise=True)

OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw_torch": _TORCH_ADAMW(
        _TWO_MOMENTS,
        "one kernel for the whole update on CUDA and CPU; elsewhere PyTorch's choice of implementation",
        # on a CPU 5 to 6 times as fast as PyTorch's own choice (scripts/bench/offloaded_update)
        fixed_on={device: {"fused": True} for device in ("cuda", "cpu")},
        deepspeed="AdamW",
        hf=MOMENTS,
        at_once=True,
    ),
    "adamw_torch_fused": _TORCH_ADAMW(
        _TWO_MOMENTS,
        "one kernel for the whole update",
        "a program of your own trains; the built-in trainer has it by itself on CUDA and CPU",
        fixed={"fused": True},
        unsupported=(_XLA,),
        hf=MOMENTS,
        at_once=True,
    ),
    "adamw_torch_foreach": _TORCH_ADAMW(
        f"{_TWO_MOMENTS}, and temporaries as large as the weights",
        "many tensors in one kernel",
        "the fused optimizer is unavailable",
        fixed={"foreach": True},
        hf_unsupported=("adamw_torch is foreach on CUDA by itself", "set optimizer.name to adamw_torch"),
        together=True,
    ),
    "adamw_apex_fused": Optimizer(
        "apex.optimizers:FusedAdam",
        ADAM,
        _TWO_MOMENTS,
        "one kernel for the whole update (NVIDIA apex)",
        "apex is there already, as in NVIDIA's containers",
        state_bytes=8,
        fixed={"adam_w_mode": True},
        requires=Package("apex", "0.1", install=_APEX),
        unsupported=(
            _WHOLE_TENSORS,
            Incompatibility(
                "apex's kernels run on CUDA only", "optimizer.name: adamw_torch_fused", devices=("cpu", "mps")
            ),
        ),
        hf=MOMENTS,
        hf_until="5.0",
        hf_unsupported=("transformers 5 no longer has it", "set optimizer.name to adamw_torch_fused"),
        keeps="moments",
        at_once=True,
    ),
    "adamw_anyprecision": Optimizer(
        "optimi:AdamW",
        ADAM,
        f"{_TWO_MOMENTS}; 6 with precision.weights bf16, rounding errors included",
        "fused where triton is (optimi)",
        "weights in bf16",
        fixed_sharded={"triton": False},  # its kernels, the default on CUDA, take whole tensors
        requires=Package("torch-optimi", "0.2"),
        unsupported=(
            Incompatibility(
                "ZeRO-3 calls the optimizer once for each group of parameters, and this one counts each call as a "
                "step of all: its bias correction comes out wrong",
                "optimizer.name: adamw_torch, or strategy.kind: fsdp or zero2",
                strategies=("zero3",),
            ),
        ),
        hf_unsupported=(
            "transformers takes it from torchdistx, which is no longer maintained",
            "set optimizer.name to adamw_torch",
        ),
        keeps_rounding=True,
        elementwise=True,
        keeps="moments",
        at_once=True,
    ),
    "adamw_bnb_8bit": Optimizer(
        "bitsandbytes.optim:AdamW8bit",
        ADAM,
        "about 2 bytes of state per parameter; 8 for embeddings and for tensors below 4096 elements",
        "quantizes its state in each step",
        "optimizer state is what does not fit",
        requires=Package("bitsandbytes", "0.50"),
        unsupported=(
            _WHOLE_TENSORS,
            Incompatibility(
                "DeepSpeed hands the optimizer one flat vector per rank, in which embeddings cannot be kept in 32-bit",
                "optimizer.name: adamw_torch, or strategy.kind: ddp",
                strategies=ZERO,
            ),
            Incompatibility(
                "bitsandbytes has no 8-bit optimizer for MPS",
                "optimizer.name: adafactor, or adamw_torch",
                devices=("mps",),
            ),
            _XLA,
        ),
        hf=MOMENTS,
        hf_aliases=("adamw_8bit",),
        # state of embeddings, which are rarely and unevenly hit, is unstable in 8 bits (bitsandbytes' documentation)
        embeddings_in_32_bit=True,
        keeps="8-bit moments",
        lighter="state in 8 bits",
    ),
    "adafactor": Optimizer(
        "torch.optim:Adafactor",
        {},
        "a row and a column of state per matrix, almost nothing",
        "slower update, no momentum",
        "8-bit state does not fit either; tune the learning rate again",
        unsupported=(
            Incompatibility(
                "torch's Adafactor needs the norms of whole matrices, and has no rule for sharded ones (DTensor)",
                "optimizer.name: adamw_torch, or strategy.kind: ddp",
                strategies=("fsdp",),
            ),
            Incompatibility(
                "DeepSpeed hands the optimizer one flat vector per rank, in which there are no rows and columns to "
                "factor",
                "optimizer.name: adamw_torch, or strategy.kind: ddp",
                strategies=ZERO,
            ),
        ),
        warning=(
            (
                "adafactor can converge slower than AdamW, or unstably. Its optimizer.lr is relative to the size of "
                "the weights (torch.optim.Adafactor), so that of an AdamW recipe means something else."
            ),
            "Start from lr 1e-2, PyTorch's default, and compare losses; adamw_bnb_8bit is small too and acts as AdamW.",
        ),
        keeps="factors",
        lighter="another learning rate",
    ),
    "muon": Optimizer(
        "trainkit.trainer.muon:MuonWithAdamW",
        ADAM,
        "4 bytes of state per parameter of the blocks' matrices (momentum), 8 of the others (AdamW)",
        "some matrix products for each matrix; under ddp and fsdp each rank computes all of them",
        "a model is trained from scratch: fewer steps than AdamW to the same loss (arXiv:2502.16982)",
        fixed_on={device: {"fused": True} for device in ("cuda", "cpu")},  # of the AdamW in it
        by_matrix=True,
        requires=Package("torch", "2.9"),
        unsupported=(
            Incompatibility(
                "DeepSpeed hands the optimizer one flat vector per rank, and Muon needs whole matrices",
                "optimizer.name: adamw_torch, or strategy.kind: fsdp",
                strategies=ZERO,
            ),
        ),
        hf_unsupported=("Trainer has no optimizer of this name", "set optimizer.name to adamw_torch"),
        keeps="momentum of matrices",
    ),
    "adagrad": Optimizer(
        "torch.optim:Adagrad",
        {"eps": "eps"},
        "4 bytes of state per parameter",
        "a short update",
        "sparse features",
        state_bytes=4,
        unsupported=(
            Incompatibility(
                "DeepSpeed makes torch's Adagrad again without its parameter groups, and then fails",
                "optimizer.name: sgd or adamw_torch, or strategy.kind: fsdp",
                strategies=ZERO,
            ),
        ),
        hf=("eps",),
        hf_args={"eps": "eps"},
        keeps="squares",
        elementwise=True,
    ),
    "sgd": Optimizer(
        "torch.optim:SGD",
        # torch's SGD adds the decay to the gradient, before momentum: it is not decoupled as AdamW's is
        {"momentum": "beta1"},
        "4 bytes of state per parameter (momentum; none with beta1: 0)",
        "the shortest update",
        "the model is known to train with it",
        state_bytes=4,
        deepspeed="SGD",
        hf=("beta1",),
        hf_args={"beta1": "momentum"},
        keeps="momentum",
        elementwise=True,
    ),
}


def optimizer(name: str) -> Optimizer:
    """The optimizer of a name, or what is known of a class by its import path: nothing but that."""
    return OPTIMIZERS.get(name) or Optimizer(name, {}, "whatever the class keeps", "that of the class", hf=MOMENTS)


_ANY_CLASS = "name its class by import path, as in optimizer.name: pkg.mod:Class, with optimizer.args"
_LITTLE_MEMORY = "write adamw_bnb_8bit, adafactor, or the class itself as pkg.mod:Class"
_PROJECTING = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw")
# Names of Trainer's (transformers, training_args.OptimizerNames) that stand for a class: what to write instead, the
# class first.
CLASSES: Mapping[str, str] = {
    "adamw_torch_4bit": "torchao.optim:AdamW4bit, or adamw_bnb_8bit",
    "adamw_torch_8bit": "torchao.optim:AdamW8bit, or adamw_bnb_8bit",
    "paged_adamw_8bit": "bitsandbytes.optim:PagedAdamW8bit, or adamw_bnb_8bit",
    "paged_adamw_32bit": "bitsandbytes.optim:PagedAdamW, or adamw_torch",
    "lion_8bit": "bitsandbytes.optim:Lion8bit",
    "lion_32bit": "bitsandbytes.optim:Lion",
    "paged_lion_8bit": "bitsandbytes.optim:PagedLion8bit",
    "paged_lion_32bit": "bitsandbytes.optim:PagedLion",
    "ademamix": "bitsandbytes.optim:AdEMAMix",
    "ademamix_8bit": "bitsandbytes.optim:AdEMAMix8bit",
    "paged_ademamix_32bit": "bitsandbytes.optim:PagedAdEMAMix",
    "paged_ademamix_8bit": "bitsandbytes.optim:PagedAdEMAMix8bit",
    "rmsprop": "torch.optim:RMSprop",
    "rmsprop_bnb": "bitsandbytes.optim:RMSprop",
    "rmsprop_bnb_8bit": "bitsandbytes.optim:RMSprop8bit",
    "rmsprop_bnb_32bit": "bitsandbytes.optim:RMSprop32bit",
    "stable_adamw": "optimi:StableAdamW",
}
# Names of Trainer's that are not names here: why, and what to write instead.
OTHER_NAMES: Mapping[str, tuple[str, str]] = {
    **{name: ("it is a class like any other", f"write {path}") for name, path in CLASSES.items()},
    **{
        alias: ("it is Trainer's other name for one of these", f"write {name}")
        for name, each in OPTIMIZERS.items()
        for alias in each.hf_aliases
    },
    "adamw_hf": ("transformers' own AdamW was removed in transformers 5; PyTorch's does the same", "write adamw_torch"),
    "adamw": ("which AdamW is meant decides speed and memory", "write adamw_torch or adamw_torch_fused"),
    "multi_tensor": ("PyTorch calls it foreach", "write adamw_torch_foreach"),
    "adamw_torch_xla": ("PyTorch's own computes the same on devices.type: xla", "write adamw_torch"),
    "adamw_torch_npu_fused": ("it is for hardware that trainkit does not drive", "write adamw_torch_fused"),
    "grokadamw": ("it is a class of the package grokadamw", _ANY_CLASS),
    **dict.fromkeys(
        _PROJECTING,
        (
            "it projects the gradients of chosen layers, which needs parameter groups that no recipe key describes",
            _LITTLE_MEMORY,
        ),
    ),
    **dict.fromkeys(
        (*(f"{name}_layerwise" for name in _PROJECTING), "lomo", "adalomo"),
        (
            "it updates weights inside the backward pass, where neither clipping nor accumulation can be done",
            _LITTLE_MEMORY,
        ),
    ),
    **dict.fromkeys(
        ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
        ("it must know of training and evaluation, which the loop says to no optimizer", "write adamw_torch"),
    ),
}
