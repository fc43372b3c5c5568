"""Operators on shapes alone, and autograd over them: which memory a micro step takes and gives back, and its work.

A tensor's memory lives as long as Python holds it, as with torch: forward functions that mirror a model's own code, and
nodes that save what torch's save (tools/autograd/derivatives.yaml), give the moments at which torch frees.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf, prod
from typing import Any

from trainkit.foresight.trace import ACTIVATIONS, GRADIENTS, TEMPORARIES, Events, Kind, Work

Shape = tuple[int, ...]
# What selective checkpointing keeps (trainkit/trainer/perf/efficiency.py).
KEPT = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention")  # fmt: skip


class Storage:
    """Memory, which ends with the last tensor that has it."""

    __slots__ = ("number", "tape")

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape, self.number = tape, number

    def __del__(self) -> None:
        self.tape.mark(Kind.FREE, self.number)
        self.tape.live.discard(self.number)


class Tensor:
    """item: bytes of a value. storage: None for parameters. node: that gives its gradient, in a slot of its outputs."""

    __slots__ = ("item", "node", "number", "shape", "slot", "storage", "trained")

    def __init__(self, shape: Shape, item: float, storage: Storage | None = None) -> None:
        self.shape, self.item, self.storage = shape, item, storage
        self.node: Node | None = None
        self.slot = 0
        self.number = -1  # of a parameter
        self.trained = False

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return int(self.size * self.item)

    def view(self, *shape: int) -> Tensor:
        """The same memory, without a gradient."""
        return Tensor(shape or self.shape, self.item, self.storage)


class Node:
    """A step of backward. edges: (node, slot) of each input with a gradient. order: the latest comes first."""

    __slots__ = ("backward", "edges", "order", "outputs", "saved")

    def __init__(self, order: float, edges: Sequence[Any], saved: list[Any], backward: Callable[..., Any]) -> None:
        self.order, self.edges, self.saved, self.backward = order, edges, saved, backward
        self.outputs: list[tuple[Shape, float]] = [((), 4)]


class Frame:
    """A checkpointed block: what it is made again from. made: what the nodes saved, once that is there again."""

    def __init__(self, forward: Callable[[], Any], selective: bool) -> None:
        self.forward, self.selective = forward, selective
        self.count = 0
        self.again = False
        self.made: dict[int, Tensor] = {}
        self.cache: dict[str, list[list[Tensor]]] = {}


class _Done(Exception):  # noqa: N818
    """Everything that was saved has been made again."""


class Tape:
    """Records events and work. cuda: the device. half: bytes of autocast's format, 0 without it."""

    def __init__(self, *, cuda: bool, half: int, capability: tuple[int, int]) -> None:
        self.cuda, self.half, self.capability = cuda, half, capability
        self.formats = {4: "fp32", 2: "bf16"}
        self.casting = False
        self.events: list[int] = []
        self.sizes: list[int] = []
        self.parts: list[int] = []
        self.operators: list[int] = []
        self.names: dict[str, int] = {}
        self.live: set[int] = set()
        self.work: Counter[tuple[float, float, str]] = Counter()
        self.recomputed = 0.0  # FLOPs of blocks that are called again in backward
        self.copies: dict[int, Tensor] = {}  # of trained parameters, in autocast's format
        self.gradients: dict[int, int] = {}
        self.held: dict[int, Tensor] = {}  # parameter -> its gradient
        self._order = 0
        self._frames: list[Frame] = []

    # -- memory and work

    def mark(self, kind: Kind, number: int = 0) -> None:
        self.events += (kind, number)

    def fresh(self, name: str, shape: Shape, item: float) -> Tensor:
        """New memory."""
        number = len(self.sizes)
        self.sizes.append(int(prod(shape) * item))
        self.parts.append(TEMPORARIES)
        self.operators.append(self.names.setdefault(name if "." in name else f"{name}.default", len(self.names)))
        self.mark(Kind.TAKE, number)
        self.live.add(number)
        return Tensor(shape, item, Storage(self, number))

    def run(self, name: str, inputs: Sequence[Tensor], *outputs: tuple[Shape, float], flops: float = 0) -> list[Tensor]:
        """An operator without a gradient; without outputs, it changes its first input."""
        frame = self._frames[-1] if self._frames and self._frames[-1].selective and name in KEPT else None
        if frame and frame.again:
            return frame.cache[name].pop(0)
        made = [self.fresh(name, *each) for each in outputs]
        moved = sum(each.bytes for each in (*inputs, *made)) + (0 if outputs else inputs[0].bytes)
        self.work[float(flops), float(moved), self.formats.get(int(inputs[0].item), "fp32") if inputs else "fp32"] += 1
        if self._frames and self._frames[-1].again:
            self.recomputed += flops
        if frame:
            frame.cache.setdefault(name, []).append([each.view() for each in made])
        return made

    def one(self, name: str, inputs: Sequence[Tensor], shape: Shape, item: float, flops: float = 0) -> Tensor:
        """An operator without a gradient, and its only output."""
        return self.run(name, inputs, (shape, item), flops=flops)[0]

    # -- graph

    def pack(self, tensor: Tensor) -> Any:
        """What a node keeps of a tensor."""
        bare = tensor.view()
        if not self._frames:
            return bare
        frame = self._frames[-1]
        if frame.again:
            frame.made[len(frame.made)] = bare
            if len(frame.made) == frame.count:
                raise _Done
            return None
        frame.count += 1
        return frame, frame.count - 1

    def attach(self, made: Sequence[Tensor], inputs: Sequence[Tensor], saved: list[Any], backward: Any) -> None:
        """Give outputs a node."""
        edges = [(each.node, each.slot) if each.node else None for each in inputs]
        node = Node(self._order, edges, saved, backward)
        self._order += 1
        node.outputs = [(each.shape, each.item) for each in made]
        for slot, each in enumerate(made):
            each.node, each.slot = node, slot

    def apply(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[tuple[Shape, float]],
        backward: Callable[..., Sequence[Tensor | None]],
        *,
        keep: Sequence[Tensor] = (),
        keeps: Sequence[int] = (),
        beside: Sequence[Tensor] = (),
        flops: float = 0,
    ) -> Tensor:
        """An operator. backward(gradient, *saved) -> of each input. keep, keeps: saved inputs, and numbers of outputs.

        beside: inputs that have no gradient.
        """
        wants = any(each.node for each in inputs)
        saved = [self.pack(each) for each in keep] if wants else []
        made = self.run(name, (*inputs, *beside), *outputs, flops=flops)
        made = [each.view() for each in made]
        if wants:
            saved += [self.pack(made[each]) for each in keeps]
            self.attach(made[:1], inputs, saved, lambda gradients, *kept: backward(gradients[0], *kept))
        return made[0]

    def view(self, tensor: Tensor, *shape: int, back: str = "") -> Tensor:
        """The same memory in another shape. back: the operator by which its gradient is laid out anew."""
        made = tensor.view(*shape)
        if tensor.node:
            of = tensor.shape

            def backward(gradients: list[Tensor]) -> list[Tensor]:
                if back:
                    return [self.one(back, gradients[:1], of, gradients[0].item)]
                return [gradients[0].view(*of)]

            self.attach([made], [tensor], [], backward)
        return made

    def split(self, tensor: Tensor, shapes: Sequence[Shape], back: str = "cat") -> list[Tensor]:
        """Parts of a tensor, whose gradients are joined."""
        made = [tensor.view(*each) for each in shapes]
        if tensor.node:
            of = tensor.shape

            def backward(gradients: list[Tensor]) -> list[Tensor]:
                return [self.one(back, gradients, of, gradients[0].item)]

            self.attach(made, [tensor], [], backward)
        return made

    def watch(self, tensors: Sequence[Tensor], kind: Kind, number: int) -> list[Tensor]:
        """Hand tensors on, and mark when their gradients come back."""
        chosen = [each for each in tensors if each.node]
        if not chosen:
            return list(tensors)
        made = {id(each): each.view() for each in chosen}

        def backward(gradients: list[Tensor]) -> list[Tensor]:
            self.mark(kind, number)
            return gradients

        self.attach(list(made.values()), chosen, [], backward)
        return [made.get(id(each), each) for each in tensors]

    def parameter(self, number: int, shape: Shape, item: float, trained: bool) -> Tensor:
        """A leaf, whose gradient is kept."""
        made = Tensor(shape, item)
        made.number, made.trained = number, trained
        if trained:
            made.node = Node(inf, (), [], lambda gradients: self._add(number, gradients))
        return made

    def _add(self, number: int, gradients: list[Tensor]) -> list[Tensor]:
        gradient = gradients.pop()
        if number in self.held:
            self.run("add_.Tensor", [self.held[number], gradient])
        else:
            assert gradient.storage is not None
            self.held[number] = gradient
            self.gradients[gradient.storage.number] = number
            self.parts[gradient.storage.number] = GRADIENTS
        del gradient
        self.mark(Kind.READY, number)
        return []

    @contextmanager
    def _inside(self, frame: Frame) -> Iterator[None]:
        self._frames.append(frame)
        try:
            yield
        finally:
            self._frames.pop()

    def checkpoint(self, forward: Callable[[], Any], *, selective: bool) -> Any:
        """Call a function, which is called again in backward instead of keeping what it saves."""
        frame = Frame(forward, selective)
        with self._inside(frame):
            return forward()

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        frame, number = saved
        if not frame.again:
            frame.again = True
            before, self.casting = self.casting, self.half > 0
            with self._inside(frame), suppress(_Done):
                frame.forward()
            self.casting = before
        made: Tensor = frame.made.pop(number)
        return made

    # -- backward

    def backward(self, loss: Tensor) -> None:
        """Run the nodes, the latest first, each once all gradients of its outputs are there."""
        assert loss.node is not None
        waiting: Counter[Node] = Counter()
        met, stack = {loss.node}, [loss.node]
        while stack:
            for edge in stack.pop().edges:
                if edge:
                    waiting[edge[0]] += 1
                    if edge[0] not in met:
                        met.add(edge[0])
                        stack.append(edge[0])
        gradients: dict[Node, dict[int, Tensor]] = {}
        gradients[loss.node] = {0: self.one("ones_like", [loss], loss.shape, loss.item)}
        ready, ticks = [(-loss.node.order, 0, loss.node)], 1
        met.clear()
        while ready:
            node = heapq.heappop(ready)[2]
            given = gradients.pop(node)
            made = self._called(node, [self._given(given, slot, *of) for slot, of in enumerate(node.outputs)])
            node.saved = []
            for place, edge in enumerate(node.edges):
                gradient, made[place] = made[place], None
                if not edge:
                    continue
                target, slot = edge
                if gradient is not None:
                    here = gradients.setdefault(target, {})
                    if slot in here:
                        item = max(gradient.item, here[slot].item)
                        here[slot] = self.one("add.Tensor", [here[slot], gradient], gradient.shape, item)
                    else:
                        here[slot] = gradient
                del gradient
                waiting[target] -= 1
                if not waiting[target] and target in gradients:
                    heapq.heappush(ready, (-target.order, ticks, target))
                    ticks += 1
            del node, made

    def _given(self, given: dict[int, Tensor], slot: int, shape: Shape, item: float) -> Tensor:
        """The gradient of an output: zeros where nothing came back."""
        return given.pop(slot) if slot in given else self.one("zeros", [], shape, item)

    def _called(self, node: Node, gradients: list[Tensor]) -> list[Tensor | None]:
        return list(node.backward(gradients, *map(self._unpack, node.saved)))

    def micro_step(self, forward: Callable[[], Tensor]) -> Events:
        """The events of a micro step; its gradients stay."""
        begin = len(self.events)
        self.mark(Kind.FORWARD)
        self.casting = self.half > 0
        loss = forward()
        self.casting = False
        self.mark(Kind.BACKWARD)
        for number in self.live:
            if self.parts[number] == TEMPORARIES:
                self.parts[number] = ACTIVATIONS
        self.backward(loss)
        del loss
        self.mark(Kind.END)
        return tuple(self.events[begin:])

    def works(self) -> tuple[Work, ...]:
        return tuple(Work(count, *key) for key, count in self.work.items())
