"""Several whole texts in one sample: best-fit bins, in other company in each epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GROUP = 1 << 16  # texts that are packed among themselves: the memory of an epoch's bins has a bound
# How far the order of an epoch may be from that of falling lengths, in which texts fit best; the last is exact.
_NOISE = (0.5, 0.25, 0.1, 0.03, 0.0)
_SLACK = 200  # one more bin for so many, so that an order of falling lengths is not the only one that fits

Sizes = NDArray[np.int64]
Bins = list[list[int]]  # of each bin the places of its texts


def best_fit(sizes: Sequence[int], order: Sequence[int], width: int) -> Bins:
    """Texts in this order, each into the fullest bin that has room (best fit; Johnson 1974). Sizes are at most width.

    One step takes as long whatever the number of bins: bins of each room are on a stack, and a bit of `open_rooms`
    says which rooms there are.
    """
    bins: Bins = []
    with_room: list[list[int]] = [[] for _ in range(width + 1)]
    open_rooms = 0
    for place in order:
        size = sizes[place]
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                open_rooms ^= 1 << room
            bins[chosen].append(place)
        else:
            room, chosen = width, len(bins)
            bins.append([place])
        if left := room - size:
            with_room[left].append(chosen)
            open_rooms |= 1 << left
    return bins


def groups_of(count: int) -> int:
    """In how many groups so many texts are packed."""
    return max(1, math.ceil(count / GROUP))


def in_group(group: int, groups: int, count: int) -> slice:
    """The places of a group's texts: every n-th, so that a group has of everything in a sorted file."""
    return slice(group, count, groups)


def bins_needed(sizes: Sizes, width: int) -> int:
    """How many bins a group of texts gets in every epoch: those of falling lengths, and one more for each 200."""
    falling = np.argsort(-sizes, kind="stable")
    fewest = len(best_fit(sizes.tolist(), falling.tolist(), width))
    return min(len(sizes), fewest + fewest // _SLACK)


def epoch_bins(sizes: Sizes, width: int, count: int, seed: int) -> Bins:
    """`count` bins for a group of texts, in a random order. A function of its arguments alone."""
    chance = np.random.default_rng(seed)
    shuffled, listed = chance.permutation(len(sizes)), sizes.tolist()
    for noise in _NOISE:
        weights = sizes[shuffled] * (1 - noise * chance.random(len(sizes)))
        order = shuffled[np.argsort(-weights, kind="stable")]
        bins = best_fit(listed, order.tolist(), width)
        if len(bins) <= count:
            break
    bins.sort(key=len)
    while len(bins) < count:  # as many in every epoch: a step is at one place of it, whatever the epoch
        bins.append([bins[-1].pop()] if len(bins[-1]) > 1 else bins.pop())
        bins.sort(key=len)
    return [bins[place] for place in chance.permutation(len(bins)).tolist()]
