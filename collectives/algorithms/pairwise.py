"""Pairwise exchange: an all-to-all in p - 1 rounds, in each of which every rank sends one row and receives one.

Each rank sends n (p - 1) / p bytes, as few as can be, and nobody is sent to by two at a time: best for large tensors.
Where p is a power of two, the ranks of a round exchange with each other; else r sends to r + k and receives from r - k.

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gangline.collectives.schedule.rounds import Rounds, Transfers, transfers
from gangline.collectives.schedule.schedule import Schedule


def all_to_all(size: int) -> Schedule:
    """Every rank sends each other rank the row that is for it, one a round."""
    ranks = np.arange(size)
    is_power_of_two = size & (size - 1) == 0

    def at(number: int) -> Iterator[Transfers]:
        to = ranks ^ (number + 1) if is_power_of_two else (ranks + number + 1) % size
        yield transfers(ranks, to, ranks * size + to)

    return Schedule("all_to_all", "pairwise", size, size * size, Rounds(size - 1, at))
