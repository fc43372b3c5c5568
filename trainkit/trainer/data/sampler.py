"""The order of samples: a pure function of seed and step, independent of the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainkit.launch_plan.model import SolvedBatch
from trainkit.seeds import derived_seed

_ROUNDS = 4  # of the Feistel network; enough to mix, and cheap (Luby and Rackoff 1988)
_MASK = 2**64 - 1


def _mixed(value: int) -> int:
    """Finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Permutation:
    """A pseudo-random permutation of range(size) that needs no memory: a Feistel network with cycle walking."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._half_bits = size, max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [derived_seed(seed, "feistel", place) for place in range(_ROUNDS)]

    def __getitem__(self, index: int) -> int:
        half, keys, size = self._half_bits, self._keys, self._size
        mask = (1 << half) - 1
        # the network permutes a power of 4 below 4 x size; repeat until the result is inside: under 4 times on average
        while True:
            left, right = index >> half, index & mask
            for key in keys:
                left, right = right, left ^ (_mixed(right + key & _MASK) & mask)
            index = left << half | right
            if index < size:
                return index


class RankSamples(list[int]):
    """The samples of one rank in an optimizer step. first: position of the first one in the global batch."""

    def __init__(self, samples: list[int], step: int, first: int) -> None:
        super().__init__(samples)
        self.step, self.first = step, first


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which sample is at which position of which global batch. Every epoch is a new permutation.

    samples: None for a stream, which has no end. drawn: the source draws the order, and its numbers go on over epochs.
    """

    seed: int
    samples: int | None
    global_batch: int
    drawn: bool = False

    def indices(self, step: int, start: int, stop: int) -> RankSamples:
        """The samples at positions start..stop of the global batch of `step`, counted from 0."""
        first = step * self.global_batch
        if self.samples is None or self.drawn:
            return RankSamples(list(range(first + start, first + stop)), step, start)
        epoch, offset = divmod(first + start, self.samples)
        permutation = _of_epoch(self.samples, self.seed, epoch)
        chosen = []
        for _ in range(start, stop):
            if offset == self.samples:
                epoch, offset = epoch + 1, 0
                permutation = _of_epoch(self.samples, self.seed, epoch)
            chosen.append(permutation[offset])
            offset += 1
        return RankSamples(chosen, step, start)


@lru_cache(maxsize=4)  # every step of an epoch asks for it
def _of_epoch(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, derived_seed(seed, "epoch", epoch))


def positions_of_rank(batch: SolvedBatch, rank: int) -> range:
    """The positions of the global batch for one rank: one slice, micro batch after micro batch."""
    share = batch.micro * batch.accumulation
    return range(rank * share, (rank + 1) * share)
