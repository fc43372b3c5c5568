"""Weights between a model of transformers and a folder: read one at a time, and given back in the folder's form.

transformers 5 may hold weights under other names, and in other pieces, than files do: experts in one stack, say.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from trainkit.trainer.checkpoint.shards import weight_files
from trainkit.trainer.models.adapters import OWN
from trainkit.trainer.models.base import Model

Tensors = Mapping[str, Tensor]
_BLOCK = re.compile(r".*?\.\d+(?=\.)")


class FolderWeights:
    """What a folder of safetensors holds of a model, by the model's names; a tensor is read when it is asked for.

    ImportError where transformers does not convert weights tensor by tensor, as before its release 5.
    """

    def __init__(self, model: Model, folder: Path) -> None:
        """model: on the meta device; it then knows in which form the folder has its weights."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        inner: Any = model.inner
        self._inner, self._stack, self._open = inner, ExitStack(), dict[Path, Any]()
        self._files = weight_files(folder) or {}
        # As of `from_pretrained` (core_model_loading.py, convert_and_load_state_dict_in_model).
        conversions = get_model_conversion_mapping(inner, None, None)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._converters = {pattern: each for each in converters for pattern in each.source_patterns}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}  # by the first name: keys in the files, patterns
        known, prefix = inner.state_dict(), inner.base_model_prefix
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], prefix, known)
            if name in known:
                self._sources.setdefault(name, []).append((key, pattern))
        if self._files:
            inner._weight_conversions = [each for each in conversions if each.was_used()]
        self._first = {name: first for first in self._sources for name in self._made(first, self._described)}
        self.names = frozenset(OWN + name for name in self._first)

    def __enter__(self) -> FolderWeights:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """The tensor as the folder has it; if it is as in the file, the file's own memory."""
        name = name.removeprefix(OWN)
        return self._made(self._first[name], lambda key: self._file(key).get_tensor(key))[name]

    def _made(self, first: str, read: Callable[[str], Tensor]) -> Tensors:
        """All that is made of what goes into a tensor."""
        sources = self._sources[first]
        key, pattern = sources[0]
        if pattern is None:
            return {first: read(key)}
        converter = copy.deepcopy(self._converters[pattern])
        for key, pattern in sources:
            converter.add_tensor(first, key, pattern, read(key))
        made = converter.convert(first, model=self._inner, config=self._inner.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def _described(self, key: str) -> Tensor:
        return torch.empty(self._file(key).get_slice(key).get_shape(), device="meta")

    def _file(self, key: str) -> Any:
        path = self._files[key]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
        return self._open[path]


def saved_once(inner: nn.Module) -> dict[str, Sequence[str]]:
    """The names of all that is saved of a model, and the other names of each: tied weights are saved by one name."""
    from transformers.modeling_utils import _get_tied_weight_keys

    tied = _get_tied_weight_keys(inner)  # patterns of names that `from_pretrained` ties to others
    ignored = set(getattr(inner, "_keys_to_ignore_on_save", None) or ())
    tensors: dict[str, Tensor] = dict(inner.named_parameters(remove_duplicate=False))
    tensors.update(inner.named_buffers(remove_duplicate=False))
    holders: dict[int, list[str]] = {}
    for name in inner.state_dict():
        if name not in ignored:
            holders.setdefault(id(tensors[name]), []).append(name)
    found: dict[str, Sequence[str]] = {}
    for names in holders.values():
        names.sort()  # as save_pretrained (modeling_utils.py, remove_tied_weights_from_state_dict)
        kept = next((name for name in names if not any(re.search(each, name) for each in tied)), names[-1])
        found[kept] = [name for name in names if name != kept]
    return found


def folder_form(inner: Any, tensors: Tensors) -> tuple[list[list[str]], Callable[[Tensors], Tensors]]:
    """How `save_pretrained` writes tensors: names that are converted together, and the conversion.

    tensors: all that are saved, on the meta device. If each alone gives what it gives among the others, each is alone;
    else those of a block are together, or all.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before release 5 models hold what files hold
        return [[name] for name in tensors], lambda some: some

    def converted(some: Tensors) -> Tensors:
        found: Tensors = revert_weight_conversion(inner, dict(some))
        return found

    def shapes(groups: Iterable[Sequence[str]]) -> dict[str, torch.Size]:
        made = (converted({name: tensors[name] for name in names}) for names in groups)
        return {name: each.shape for some in made for name, each in some.items()}

    blocks: dict[str, list[str]] = {}
    for name in tensors:
        blocks.setdefault(block[0] if (block := _BLOCK.match(name)) else name, []).append(name)
    together = [[*tensors]]
    for groups in ([[name] for name in tensors], list(blocks.values())):
        with suppress(LookupError, ValueError, RuntimeError):  # of a conversion that lacks a part
            if shapes(groups) == shapes(together):
                return groups, converted
    return together, converted
