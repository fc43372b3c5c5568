"""The texts that a model writes for held-out sources and prompts, beside their references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainkit.data.encode import IGNORE_INDEX
from trainkit.data.formats import KEEPS_APART
from trainkit.data.tokenizer import Encoder
from trainkit.trainer.data.source import Ids
from trainkit.trainer.distributed import gather_from_ranks
from trainkit.trainer.generate import beginning
from trainkit.trainer.models.base import Model
from trainkit.trainer.models.hf import EncoderDecoder, Transformer
from trainkit.trainer.prompts import stop_ids
from trainkit.trainer.settings import World

# The likeliest tokens: a model's own generation_config.json may ask for chance, of which no two ranks have the same.
_LIKELIEST: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class Text(NamedTuple):
    """A text of a batch: its row, and where it lies there. source, reference: ids; source is empty without a prompt."""

    row: int
    start: int
    stop: int
    source: Ids
    reference: Ids


def texts_of(inputs: Mapping[str, Tensor]) -> list[Text]:
    """The texts of a batch that have something to predict, with their prompts or sources."""
    found = {name: values.cpu().numpy() for name, values in inputs.items()}
    if "input_ids" in found:
        seen, labels = found.get("attention_mask", np.ones_like(found["input_ids"])), found["labels"]
        rows = enumerate(zip(found["input_ids"], seen, labels, strict=True))
        return [Text(row, 0, len(to), ids[mask == 1], to[to != IGNORE_INDEX]) for row, (ids, mask, to) in rows]
    return [*_of_causal(found)]


def _of_causal(found: Mapping[str, Any]) -> Iterator[Text]:
    """Each text of samples that may hold several, which begin where positions are 0."""
    for row, (tokens, targets) in enumerate(zip(found["tokens"], found["targets"], strict=True)):
        starts = np.flatnonzero(found["position_ids"][row] == 0) if "position_ids" in found else np.zeros(1, int)
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            learned = np.flatnonzero(targets[start:stop] != IGNORE_INDEX)
            if not len(learned):
                continue
            # The first answer, if there are several: what follows it depends on it.
            first = learned[0]
            length = next((place for place, each in enumerate(learned) if each != first + place), len(learned))
            answer = targets[start + first : start + first + length]
            # A text that is learned from its second token on has no prompt.
            prompt = tokens[start : start + first + 1] if first else tokens[:0]
            whole = answer if first else np.concatenate([tokens[start : start + 1], answer])
            yield Text(row, int(start), int(stop), prompt, whole)


@dataclass(frozen=True, slots=True)
class Writer:
    """A model of transformers that writes texts. sharded: whether every rank must take part in each pass."""

    model: Transformer
    encoder: Encoder
    world: World
    device: torch.device
    sharded: bool
    tokens: int  # that it writes at most

    def write(self, texts: Sequence[Text]) -> list[str]:
        """What the model writes for each source or prompt: its likeliest tokens. To be called on every rank."""
        groups = [*self._groups(texts)]
        # With sharded weights a rank with fewer goes along with the others.
        rounds = max(gather_from_ranks(len(groups), self.world)) if self.sharded else len(groups)
        spare = [Text(0, 0, 0, np.zeros(1, np.int64), np.zeros(0, np.int64))]
        written: list[str] = []
        for turn in range(rounds):
            group = groups[turn] if turn < len(groups) else spare
            made = self._generate(group)
            written += made if turn < len(groups) else []
        return written

    def _groups(self, texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
        """Texts that are written together: all, unless padding on the left would change them."""
        decodes = isinstance(self.model, EncoderDecoder)
        together = decodes or self.model.inner.config.model_type in KEEPS_APART
        size = max(1, len({text.row for text in texts})) if together else 1
        for start in range(0, len(texts), size):
            yield texts[start : start + size]

    # Not compiled: each length up to the limit would compile again.
    @torch.compiler.set_stance("force_eager")  # type: ignore[untyped-decorator]
    def _generate(self, texts: Sequence[Text]) -> list[str]:
        decodes = isinstance(self.model, EncoderDecoder)
        room = None if decodes else self.model.context
        sources = [text.source if room is None else text.source[-(room - 1) :] for text in texts]
        width = max(1, *map(len, sources))
        filler = self.model.padding if self.model.padding is not None else self.encoder.padding
        ids = torch.full((len(texts), width), filler, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, source in enumerate(sources):
            place = slice(0, len(source)) if decodes else slice(width - len(source), width)
            ids[row, place] = torch.from_numpy(source.astype(np.int64))
            mask[row, place] = 1
        options: dict[str, Any] = {**_LIKELIEST, "pad_token_id": filler, "max_new_tokens": self.tokens}
        begun, stops = width, self._stops()
        if isinstance(self.model, EncoderDecoder):
            start, end = beginning(self.encoder, self.model, self.device)
            begun, stops = start.shape[1], frozenset(() if end is None else (end,)) or stops
            options |= {"decoder_input_ids": start.expand(len(texts), -1), "decoder_start_token_id": int(start[0, 0])}
        if self.model.context is not None:  # of a decoder it limits what is written alone
            options["max_new_tokens"] = max(1, min(self.tokens, self.model.context - begun))
        if stops:
            options["eos_token_id"] = sorted(stops)
        made = self.model.write(
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), synced_gpus=self.sharded, **options
        )
        return [self.encoder.decode(_until(stops, row)) for row in made[:, begun:].tolist()]

    def _stops(self) -> frozenset[int]:
        configs = (self.model.inner.generation_config, self.model.inner.config)
        return stop_ids(self.encoder, [getattr(each, "eos_token_id", None) for each in configs])


def _until(stops: frozenset[int], ids: Sequence[int]) -> Sequence[int]:
    return ids[: next((place for place, each in enumerate(ids) if each in stops), len(ids))]


def writer_of(
    model: Model, encoder: Encoder, world: World, device: torch.device, *, tokens: int, sharded: bool
) -> Writer | None:
    """The writer of a model; None for one that cannot write, or whose limit is 0."""
    if not tokens or not isinstance(model, Transformer) or not model.inner.can_generate():
        return None
    return Writer(model, encoder, world, device, sharded and world.size > 1, tokens)
