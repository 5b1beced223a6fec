"""Binomial tree: in every round, each rank that has the data sends it to a rank that does not.

ceil(log2 p) rounds. Broadcast and reduce: the root sends (receives) n bytes in each round, so they suit small tensors
only. Scatter and gather: a rank forwards the rows of its whole subtree, so the root sends n (p - 1) / p bytes, the
minimum.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gangline.collectives.schedule import Rounds, Transfers, cyclic, transfers


def broadcast(size: int, root: int) -> tuple[int, Rounds]:
    """Broadcast down the tree."""
    return 1, tree(size, root)


def scatter(size: int, root: int) -> tuple[int, Rounds]:
    """Scatter: each rank receives the rows of its subtree and forwards them."""

    def at(number: int) -> Iterator[Transfers]:
        place, distance = _senders(size, number)
        to = place + distance
        below = np.minimum(distance, size - to)
        yield from cyclic((place + root) % size, (to + root) % size, to + root, below, size)

    return size, Rounds((size - 1).bit_length(), at)


def tree(size: int, root: int, chunks: int = 1) -> Rounds:
    """Return the rounds of the broadcast, with ``chunks`` chunks per message."""

    def at(number: int) -> Iterator[Transfers]:
        place, distance = _senders(size, number)
        yield transfers((place + root) % size, (place + distance + root) % size, 0, chunks)

    return Rounds((size - 1).bit_length(), at)


def _senders(size: int, number: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
    """Return the positions, relative to the root, that send in a round, and the distance, which halves every round."""
    distance = 1 << ((size - 1).bit_length() - 1 - number)
    return np.arange(0, size - distance, 2 * distance), distance
