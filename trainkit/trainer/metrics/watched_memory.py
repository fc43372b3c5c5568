"""What a forward pass keeps for backward, and what an update takes for itself, seen as torch's operators run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_DEVICES = ("cpu", "cuda", "mps")
# Bytes by storage. A weak reference keeps its number from being given away again, and holds no memory.
Sizes = dict[StorageWeakRef, int]
_watched: list[Kept] = []  # the pass that is watched just now, if any


class Kept:
    """What is kept from a forward pass to its backward, in bytes; what several operators keep counts once."""

    def __init__(self) -> None:
        self._kept: Sizes = {}
        self._copies = Copies()
        self.weight_copies = 0  # in 16 bits, by autocast, for all passes of a step
        self.recomputed_block: int | None = (
            0  # what the largest block keeps that is computed again, from then on until it is done
        )

    @property
    def activations(self) -> int:
        """Of the whole pass, but for what is computed again."""
        return sum(self._kept.values())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around one forward pass, inside autocast."""
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(self._see, lambda tensor: tensor))
            if any(torch.is_autocast_enabled(device) for device in _DEVICES):
                stack.enter_context(self._copies)
            _watched.append(self)
            stack.callback(_watched.clear)
            yield
            self.weight_copies = sum(self._copies.made().values())

    @contextmanager
    def block(self, kept: Collection[object]) -> Iterator[None]:
        """Around a block whose activations are computed again, but for what the operators in `kept` give."""
        mine: Sizes = {}
        # The hooks of the checkpoint around it, which must see all that they would have seen; torch 2.8 can say them.
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
        if top is None:
            self.recomputed_block = None
            yield
            return
        pack, unpack = top(False)

        def see(tensor: Tensor) -> Any:
            self._note(tensor, mine)
            return pack(tensor)

        with saved_tensors_hooks(see, unpack), Outputs(kept, self._kept):
            yield
        rest = sum(size for storage, size in mine.items() if storage not in self._kept)
        self.recomputed_block = max(self.recomputed_block or 0, rest)

    def _see(self, tensor: Tensor) -> Tensor:
        self._note(tensor, self._kept)
        return tensor

    def _note(self, tensor: Tensor, sizes: Sizes) -> None:
        whole = tensor if tensor._base is None else tensor._base  # a saved view, such as a transposed weight
        if not isinstance(whole, nn.Parameter):
            storage, size = storage_of(tensor)
            if storage not in self._copies.known:
                sizes[storage] = size


def watched_block(forward: Callable[..., Any], kept: Collection[object], *args: Any, **kwargs: Any) -> Any:
    """Call a block whose activations are computed again; see :meth:`Kept.block`."""
    if not _watched:
        return forward(*args, **kwargs)
    with _watched[0].block(kept):
        return forward(*args, **kwargs)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, it finds what parameters are copied to in another format."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: Sizes = {}

    def made(self) -> Sizes:
        """Those that are still there."""
        return {storage: size for storage, size in self.known.items() if not expired(storage)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            storage, size = storage_of(made)
            self.known[storage] = size
        return made


class Outputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, it adds what some operators give to `sizes`."""

    def __init__(self, operators: Collection[object], sizes: Sizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._sizes = operators, sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operators:
            self._sizes |= dict(storage_of(each) for each in tree_leaves(made) if isinstance(each, Tensor))
        return made


class Temporaries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, it finds the most bytes that are there at once of what operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._there: Sizes = {}
        self._given: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [storage_of(each)[0] for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._given.update(storage for storage in given if storage not in self._there)
        made = func(*args, **(kwargs or {}))
        new = dict(storage_of(each) for each in tree_leaves(made) if isinstance(each, Tensor))
        new = {storage: size for storage, size in new.items() if storage not in self._given}
        self._there = {storage: size for storage, size in self._there.items() if not expired(storage)} | new
        self.peak = max(self.peak, sum(self._there.values()))
        return made


def storage_of(tensor: Tensor) -> tuple[StorageWeakRef, int]:
    """Of what lies on this rank, and its bytes."""
    storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
    return StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]


def expired(storage: StorageWeakRef) -> bool:
    """Whether nothing holds it any more."""
    return bool(storage.expired())  # type: ignore[no-untyped-call]
