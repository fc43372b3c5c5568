"""A model on shapes: its parameters by name, its blocks, and the calls that a strategy waits for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainkit.foresight.operators import Operators
from trainkit.foresight.tape import Tensor
from trainkit.foresight.trace import Kind, Module, Parameter, Trace, Wanted
from trainkit.tasks import CAUSAL, LABELLING, WRITING

CASTING = ("fsdp", "zero1", "zero2", "zero3")  # strategies that hand the model weights in the computation's format
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def quantized(parameter: Parameter, outer: int, inner: int, asked: Mapping[str, Any]) -> Parameter:
    """A weight in 4 or 8 bits, and the constants beside it (bitsandbytes/functional.py).

    4 bits: one for 64 values, itself in 8 bits with one for 256 of them where it is quantised twice, and the tables of
    both codes. 8 bits: one of each output.
    """
    if asked["bits"] == 8:
        return replace(parameter, shape=(outer, inner), item=1, scales=4 * outer)
    blocks = -(-outer * inner // 64)
    scales = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4 if asked["double_quant"] else 4 * blocks
    return replace(parameter, shape=(outer, inner), item=0.5, scales=scales + 4 * 16)


class Net(ABC):
    """A model: its parameters by name, and its blocks. Subclasses declare parameters and give `forward`."""

    tasks: tuple[str, ...] = (CAUSAL,)
    wide: tuple[str, ...] = ()  # ends of the names of layers that are never quantised

    def __init__(self, wanted: Wanted, settings: Mapping[str, Any]) -> None:
        self.wanted, self.settings = wanted, settings
        recipe = wanted.recipe
        self.task = recipe["model"].get("task", CAUSAL)
        self.kind, self.weights = recipe["strategy"]["kind"], recipe["precision"]["weights"]
        casts, dtype = self.kind in CASTING, wanted.dtype
        self.half = 0 if casts or dtype == "fp32" or self.weights != "fp32" else 2
        self.stored = BYTES[self.weights]
        cast = casts and (self.kind != "fsdp" or self.weights == "fp32")
        self.item = BYTES[dtype] if cast else self.stored
        self.casts, self.lora = casts, recipe["peft"] if recipe["peft"]["kind"] == "lora" else None
        self.length: int = recipe["data"]["sequence_length"]
        self.parts = recipe["strategy"].get("context", 1)  # of each sample, of which a rank computes one
        self.part = -(-self.length // self.parts)
        self.rows = (wanted.micro, self.part)
        self.quantize = recipe["model"].get("quantize") or {"bits": 0}
        self.bits = self.quantize["bits"]
        self.ranks = recipe["strategy"].get("tensor", 1)  # over which each matrix of a block is divided
        self.sums: set[str] = set()
        self.sharers = (recipe["model"].get("moe") or {}).get("parallel", 1)  # over which experts are shared out
        self.parameters: list[Parameter] = []
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []  # of parameters, tied ones in each of their places
        self.tied: dict[str, str] = {}
        self.shared: set[str] = set()  # further modules whose weight another place reads
        self.blocks: list[str] = []
        self.dense_layers: dict[str, bool] = {}  # whether turned
        self.kinds: set[str] = set()  # last parts of the names of linear layers in blocks: LoRA adapts all of that name
        self.unknown = False
        self.buffers = 0
        self.tape = Operators(cuda=wanted.device == "cuda", half=self.half, capability=wanted.capability)
        self.tape.formats = {4: "fp32", 2: "fp16" if dtype == "fp16" else "bf16"}
        self.declare()

    @abstractmethod
    def declare(self) -> None:
        """Name the parameters, in the order of the model's own."""

    @abstractmethod
    def forward(self) -> Tensor:
        """The loss."""

    # -- parameters

    def add(
        self,
        name: str,
        *shape: int,
        embedding: bool = False,
        trained: bool | None = None,
        parts: int = 1,
        sharers: int = 1,
    ) -> None:
        self.numbers[name] = len(self.parameters)
        self.names.append(name)
        if trained is None:
            trained = self.lora is None
        self.parameters.append(Parameter(name, shape, self.stored, trained, embedding, parts=parts, sharers=sharers))

    def tie(self, name: str, other: str) -> None:
        """A name by which another parameter is read, too."""
        self.names.append(name)
        self.tied[name] = other

    def norm(self, name: str, width: int, *, bias: bool = False) -> None:
        self.add(f"{name}.weight", width)
        if bias:
            self.add(f"{name}.bias", width)

    def by_outputs(self, name: str, inner: int, outer: int, *, bias: bool = False) -> None:
        """A linear layer of which each rank has some outputs."""
        self.dense(name, inner, outer // self.ranks, bias=bias, parts=(self.ranks, self.ranks))

    def by_inputs(self, name: str, inner: int, outer: int, *, bias: bool = False) -> None:
        """A linear layer of which each rank has some inputs, so that outputs are sums over ranks."""
        self.sums |= {name} if self.ranks > 1 else set()
        self.dense(name, inner // self.ranks, outer, bias=bias, parts=(self.ranks, 1))

    def entered(self, x: Tensor) -> Tensor:
        """What the ranks' parts of a block read."""
        return self.tape.shared(x) if self.ranks > 1 else x

    def dense(
        self,
        name: str,
        inner: int,
        outer: int,
        *,
        bias: bool = False,
        turned: bool = False,
        parts: tuple[int, int] = (1, 1),
    ) -> None:
        """A linear layer, with adapters where there are some. parts: of weight and bias, as of a parameter."""
        self.dense_layers[name] = turned
        shape = (inner, outer) if turned else (outer, inner)
        targets = self.lora["target_modules"] if self.lora else ()
        if any(name.startswith(f"{block}.") for block in self.blocks):
            self.kinds.add(name.rpartition(".")[2])
        chosen = any(f".{name}".endswith(f".{each}") for each in targets or self.kinds)
        own = f"{name}.base_layer" if self.lora and chosen else name
        self.add(f"{own}.weight", *shape, parts=parts[0])
        if self.bits and any(name.startswith(f"{block}.") for block in self.blocks) and not name.endswith(self.wide):
            self.parameters[-1] = quantized(self.parameters[-1], outer, inner, self.quantize)
        if bias:
            self.add(f"{own}.bias", outer, parts=parts[1])
        if self.lora and chosen:
            rank = self.lora["rank"]
            self.add(f"{name}.lora_A.default.weight", rank, inner, trained=True)
            self.add(f"{name}.lora_B.default.weight", outer, rank, trained=True)

    def output(self, name: str, width: int, table: str) -> None:
        """The layer that gives logits, whose weight may be the embeddings'."""
        if self.settings.get("tie_word_embeddings"):
            self.tie(f"{name}.weight", f"{table}.weight")
        else:
            self.dense(name, width, self.settings["vocab_size"])

    def block(self, name: str) -> str:
        self.blocks.append(name)
        return name

    def modules(self) -> tuple[Module, ...]:
        """Those that a strategy waits for: units, and for ZeRO-3 all with parameters of their own."""
        strategy, units = self.wanted.recipe["strategy"], set(self.blocks)
        found: dict[str, list[int]] = {}
        owners: dict[str, list[int]] = {}
        for name in self.names:
            parts = name.split(".")
            number = self.numbers[self.tied.get(name, name)]
            owners.setdefault(".".join(parts[:-1]), []).append(number)
            for end in range(1, len(parts)):
                prefix = ".".join(parts[:end])
                listed = end < len(parts) - 1 and parts[end].isdigit()
                if not listed:
                    found.setdefault(prefix, []).append(number)
        if self.kind == "fsdp" and strategy["auto_wrap"] == "none":
            units = set()
        elif self.kind == "fsdp" and strategy["auto_wrap"] == "size":
            units = self._by_size(found, strategy["min_params"])
        elif self.kind == "fsdp" and strategy["wrap_classes"]:
            self.unknown = True
        if self.sharers > 1:  # which are units of their own
            units |= {each.name.rpartition(".")[0] for each in self.parameters if each.sharers > 1}
        chosen = [name for name in found if name in units or (self.kind == "zero3" and name in owners)]
        return tuple(
            Module(name, tuple(owners.get(name, ())), tuple(dict.fromkeys(found[name])), name in units)
            for name in chosen
        )

    def _by_size(self, found: dict[str, list[int]], least: int) -> set[str]:
        """trainkit/trainer/parallel/fsdp.py: innermost modules of at least so many parameters; no tied ones."""
        shared = {each.rpartition(".")[0] for pair in self.tied.items() for each in pair} | self.shared
        taken: set[int] = set()
        units = set()
        for name in reversed(found):
            inside = sum(each == name or each.startswith(f"{name}.") for each in shared)
            own = set(found[name]) - taken
            split = name in shared or 0 < inside < len(shared)
            if sum(self.parameters[each].size for each in own) >= least and not split:
                taken |= own
                units.add(name)
        return units

    # -- calls

    def module(self, name: str, call: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Call a module, and mark it if a strategy waits for it."""
        number = self.watched.get(name)
        if number is None:
            return call(*tensors)
        tape = self.tape
        tape.mark(Kind.ENTER, number)
        seen = iter(tape.watch([each for each in tensors if each is not None], Kind.AFTER, number))
        made = call(*(each if each is None else next(seen) for each in tensors))
        tape.mark(Kind.LEAVE, number)
        if isinstance(made, Tensor):
            return tape.watch([made], Kind.REACH, number)[0]
        return tuple(tape.watch(made, Kind.REACH, number))

    def through(self, name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The same of a module that takes and gives one tensor."""
        made: Tensor = self.module(name, call, x)
        return made

    def call_block(self, number: int, call: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Call a block, which may be one that is computed again in backward."""
        asked = self.wanted.recipe["efficiency"]["gradient_checkpointing"]
        if asked["every"] and number % int(asked["every"]) == 0:
            inner, selective = call, bool(asked["selective"])

            def call(*given: Tensor | None) -> Any:
                return self.tape.checkpoint(partial(inner, *given), selective=selective)

        return self.module(self.blocks[number], call, *tensors)

    def get(self, name: str) -> Tensor:
        return self.leaves[self.numbers[self.tied.get(name, name)]]

    def has(self, name: str) -> bool:
        return name in self.numbers

    def linear(self, name: str, x: Tensor) -> Tensor:
        if self.has(f"{name}.lora_A.default.weight"):
            return self.through(name, partial(self._adapted, name), x)
        return self.through(name, partial(self._linear, name, self.dense_layers.get(name, False)), x)

    def _linear(self, name: str, turned: bool, x: Tensor) -> Tensor:
        bias = self.get(f"{name}.bias") if self.has(f"{name}.bias") else None
        held = self.parameters[self.numbers[self.tied.get(f"{name}.weight", f"{name}.weight")]]
        if held.item <= 1:
            made = self.tape.quantized(x, held.shape, BYTES[self.wanted.dtype])
            return self.tape.add(made, bias) if bias else made
        if name in self.sums:
            made = self.tape.summed(self.tape.linear(x, self.get(f"{name}.weight"), None, turned=turned))
            return self.tape.add(made, bias) if bias else made
        return self.tape.linear(x, self.get(f"{name}.weight"), bias, turned=turned)

    def _adapted(self, name: str, x: Tensor) -> Tensor:
        """peft/tuners/lora/layer.py: result + B(A(dropout(x))) * scaling, in the format of the result."""
        tape, lora = self.tape, self.lora
        assert lora is not None
        base, down, up = f"{name}.base_layer", f"{name}.lora_A.default", f"{name}.lora_B.default"
        result = self.through(base, partial(self._linear, base, self.dense_layers[name]), x)
        item = result.item
        x = tape.cast(x, self.get(f"{down}.weight").item)
        narrow = self.through(down, partial(self._linear, down, False), tape.dropout(x, lora["dropout"]))
        result = tape.add(result, tape.scale(self.through(up, partial(self._linear, up, False), narrow)))
        return tape.cast(result, item)

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        if not self.has(f"{name}.weight"):
            return x
        bias = self.get(f"{name}.bias")
        return self.through(name, lambda given: self.tape.layer_norm(given, self.get(f"{name}.weight"), bias), x)

    def rms_norm(self, name: str, x: Tensor, kind: str) -> Tensor:
        return self.through(name, lambda given: self.tape.rms_norm(given, self.get(f"{name}.weight"), kind), x)

    def embed(self, name: str, ids: Tensor) -> Tensor:
        return self.through(name, lambda given: self.tape.embedding(given, self.get(f"{name}.weight")), ids)

    def loss(self, name: str, x: Tensor) -> Tensor:
        """The output layer and the cross-entropy of its logits."""
        bias = self.get(f"{name}.bias") if self.has(f"{name}.bias") or f"{name}.bias" in self.tied else None
        scaled = self.wanted.dtype == "fp16"
        return self.through(
            name,
            lambda given: self.tape.linear_cross_entropy(given, self.get(f"{name}.weight"), bias, scaled=scaled),
            x,
        )

    def heads(self, x: Tensor, heads: int, width: int, back: str = "") -> Tensor:
        """(batch, length, heads x width) -> (batch, heads, length, width), the same memory."""
        return self.tape.view(x, x.shape[0], heads, x.shape[1], width, back=back)

    def apart(self) -> Tensor | None:
        """The mask of samples of several texts, a byte for each pair of places; None for others."""
        micro, part = self.rows
        shape = (micro, 1, part, part * self.parts)
        return self.tape.one("bitwise_and.Tensor", [], shape, 1) if self.wanted.packed else None

    def everywhere(self, keys: Tensor, heads: int) -> Tensor:
        """Keys, or values, of whole samples, of those of a part. heads: of the queries, for which each is copied."""
        if self.parts == 1:
            return keys
        batch, own, part, width = keys.shape
        whole = self.tape.gathered(keys, (batch, own, part * self.parts, width))
        return self.tape.copied(whole, batch, heads, part * self.parts, width) if own != heads else whole

    def later(self, mask: Tensor | None) -> Tensor | None:
        """The mask of a part's attention: torch makes one for a CPU, where nothing else says what comes later."""
        if self.parts == 1 or mask is not None or self.tape.cuda:
            return mask
        return self.tape.one("tril", [], (self.part, self.part * self.parts), 1)

    def ids(self, *shape: int) -> Tensor:
        """Numbers of tokens, which the batch holds."""
        return Tensor(shape or self.rows, 8)

    # -- trace

    def trace(self) -> Trace | None:
        """Both micro steps; None where something is unknown."""
        tape, modules = self.tape, self.modules()
        if self.unknown:
            return None
        self.watched = {each.name: number for number, each in enumerate(modules)}
        self.leaves = [
            tape.parameter(number, each.shape, self.item, each.trained) for number, each in enumerate(self.parameters)
        ]
        first = tape.micro_step(self.forward)
        work, recomputed = tape.works(), tape.recomputed
        further = first if self.casts else tape.micro_step(self.forward)
        return Trace(
            parameters=tuple(self.parameters),
            modules=modules,
            buffers=self.buffers,
            batch=self.batch(),
            sizes=tuple(tape.sizes),
            parts=tuple(tape.parts),
            operators=tuple(tape.operators),
            names=tuple(tape.names),
            gradients=dict(tape.gradients),
            first=first,
            further=further,
            work=work,
            recomputed=recomputed,
        )

    def batch(self) -> int:
        """Bytes of the inputs of a micro batch: numbers of 8 bytes."""
        micro, length = self.wanted.micro, self.length
        if self.task == CAUSAL:
            return micro * length * 8 * (3 if self.wanted.packed else 2)
        target = self.target if self.task == WRITING else 1 if self.task == LABELLING else length
        labels = micro if self.task == LABELLING else micro * target
        return (micro * length * (2 if self.wanted.padded else 1) + labels) * 8

    @property
    def target(self) -> int:
        data = self.wanted.recipe["data"]
        return int(data.get("target_length") or self.length)
