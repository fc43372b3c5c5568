"""Samples of prepared rows: one text each, several whole texts in one, or texts end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainkit.data.encode import Limits, cut_places
from trainkit.data.packing import Bins, epoch_bins, in_group
from trainkit.data.prepared import Mapped, Tokens
from trainkit.seeds import derived_seed
from trainkit.trainer.data.sampler import Permutation
from trainkit.trainer.data.source import Batch, BatchFormat, Ids, Mask

Text = tuple[Ids, Mask]  # token ids, and which of them are learned


def fitted(text: Text, limits: Limits) -> Text:
    """A text within the limits, with its last tokens where these end it; in a pair both parts."""
    ids, learned = text
    if limits.target is None:
        head, end = cut_places(len(ids), limits.tokens, limits.ends[0])
        return text if head == len(ids) else (_without_middle(ids, head, end), _without_middle(learned, head, end))
    parts = [
        _without_middle(part, *cut_places(len(part), most, end))
        for part, most, end in (
            (ids[~learned], limits.tokens, limits.ends[0]),
            (ids[learned], limits.target, limits.ends[1]),
        )
    ]
    mask = np.zeros(len(parts[0]) + len(parts[1]), dtype=np.bool_)
    mask[len(parts[0]) :] = True
    return np.concatenate(parts), mask


def _without_middle(values: Any, head: int, end: int) -> Any:
    return np.concatenate([values[:head], values[len(values) - end :]]) if end else values[:head]


@dataclass(frozen=True)
class TextSamples:
    """Each text a sample. labels: of each, for a classifier."""

    tokens: Tokens
    spans: Mapped
    form: BatchFormat
    limits: Limits
    labels: Mapped | None = None

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen, ids, learned = list(indices), self.tokens.ids, self.tokens.learned
        spans = self.spans.array[chosen].tolist()
        texts = [fitted((ids[start:stop], learned[start:stop]), self.limits) for start, stop in spans]
        return self.form.batch(texts, None if self.labels is None else self.labels.array[chosen])


_KEPT = 2  # groups whose bins are remembered: consecutive samples are of one; others begin with an epoch


@dataclass(frozen=True)
class BinnedSamples:
    """Several whole texts in a sample. Numbers go on over epochs, each of which has bins of its own.

    bins: in each group of texts. seed: of the training.
    """

    tokens: Tokens
    spans: Mapped
    form: BatchFormat
    bins: tuple[int, ...]
    seed: int
    _kept: dict[tuple[int, int], Bins] = field(default_factory=dict, compare=False, repr=False)

    def __len__(self) -> int:
        return sum(self.bins)

    def batch(self, indices: Sequence[int]) -> Batch:
        ids, learned, spans = self.tokens.ids, self.tokens.learned, self.spans.array
        made = []
        for number in indices:
            places = self._places(number)
            made.append([(ids[start:stop], learned[start:stop]) for start, stop in spans[places].tolist()])
        return self.form.packed(made)

    def _places(self, number: int) -> list[int]:
        """Which texts a sample has."""
        epoch, place = divmod(number, len(self))
        groups = len(self.bins)
        order = Permutation(groups, derived_seed(self.seed, "groups", epoch))
        for turn in range(groups):
            group = order[turn]
            if place < self.bins[group]:
                return [group + each * groups for each in self._bins_of(epoch, group)[place]]
            place -= self.bins[group]
        raise IndexError(number)

    def _bins_of(self, epoch: int, group: int) -> Bins:
        found = self._kept.get((epoch, group))
        if found is None:
            spans = self.spans.array[in_group(group, len(self.bins), self.spans.shape[0])]
            seed = derived_seed(self.seed, "bins", epoch, group)
            found = epoch_bins(np.asarray(spans[:, 1] - spans[:, 0] - 1), self.form.length, self.bins[group], seed)
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[epoch, group] = found
        return found


@dataclass(frozen=True)
class JoinedSamples:
    """Texts end to end, cut into windows. joined: where each text begins among them, and the end."""

    tokens: Tokens
    spans: Mapped
    joined: Mapped
    form: BatchFormat
    ahead: int

    def batch(self, indices: Sequence[int]) -> Batch:
        samples = [self._window(number) for number in indices]
        batch = self.form.batch(samples)
        without = 0 if self.form.whole else sum(not learned[1:].any() for _, learned in samples)
        return batch._replace(targetless=without)

    def _window(self, number: int) -> Text:
        joined, spans = self.joined.array, self.spans.array
        first = number * self.form.length
        last = min(first + self.form.length + self.ahead, int(joined[-1]))
        text = int(np.searchsorted(joined, first, side="right")) - 1
        ids, learned = [], []
        while first < last:
            start = int(spans[text, 0]) + first - int(joined[text])
            stop = min(int(spans[text, 1]), start + last - first)
            mask = np.array(self.tokens.learned[start:stop])
            if start == spans[text, 0]:
                mask[:1] = False  # the first token has nothing before it to be predicted from
            ids.append(self.tokens.ids[start:stop])
            learned.append(mask)
            first, text = first + stop - start, text + 1
        return np.concatenate(ids), np.concatenate(learned)
