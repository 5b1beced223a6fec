"""Pairwise exchange: an all-to-all in p - 1 rounds, in each of which every rank sends and receives one row.

Each rank sends n (p - 1) / p bytes, the minimum, and no rank receives from two at a time: best for large tensors. If p
is a power of two, the ranks of a round exchange in pairs; otherwise r sends to r + k and receives from r - k.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gangline.collectives.schedule import Rounds, Transfers, transfers


def all_to_all(size: int) -> tuple[int, Rounds]:
    """All-to-all in which every rank sends each other rank its row, one per round."""
    ranks = np.arange(size)
    is_power_of_two = size & (size - 1) == 0

    def at(number: int) -> Iterator[Transfers]:
        to = ranks ^ (number + 1) if is_power_of_two else (ranks + number + 1) % size
        yield transfers(ranks, to, ranks * size + to)

    return size * size, Rounds(size - 1, at)
