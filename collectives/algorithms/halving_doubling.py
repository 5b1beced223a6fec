"""Recursive halving and doubling: each round doubles the rows that a rank holds and the distance it sends over.

| collective | rounds | bytes sent per rank (p ranks, n bytes) |
| --- | --- | --- |
| all_gather (doubling), reduce_scatter (halving) | ceil(log2 p) | n (p - 1) / p |
| all_reduce (halving, then doubling) | 2 ceil(log2 p) | 2 n (p - 1) / p |
| broadcast (binomial scatter, then doubling) | 2 ceil(log2 p) | 2 n (p - 1) / p, the root |
| reduce (halving, then binomial gather) | 2 ceil(log2 p) | at most 3/2 n |

As few bytes as a ring in far fewer rounds, but most of them between distant ranks. If p is a power of two, ranks
exchange in pairs. Otherwise rank r sends to r - 1, r - 2, r - 4, ... the rows from its own on, never more than the
receiver lacks. This needs no folding of excess ranks, which would send up to n bytes more. A range of rows that wraps
around is sent as two messages.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH" (2005);
for other numbers of ranks J. Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997), and for its reverse as a reduce-scatter J. L. Traeff, "Optimal, non-pipelined
reduce-scatter and allreduce algorithms" (2024).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gangline.collectives.algorithms import binomial
from gangline.collectives.schedule import Rounds, Transfers, cyclic, transfers


def broadcast(size: int, root: int) -> tuple[int, Rounds]:
    """Broadcast: a scatter and an all-gather of the chunks of one tensor, one for each rank; the root only sends."""
    _, doubling = all_gather(size)

    def to_others(number: int) -> Iterator[Transfers]:
        for table in doubling.at(number):
            is_needed = table.target != root
            if is_needed.any():
                yield table.where(is_needed)

    return size, binomial.scatter(size, root)[1] + Rounds(len(doubling), to_others)


def reduce(size: int, root: int) -> tuple[int, Rounds]:
    """Reduce: a reduce-scatter and a gather of the chunks of one tensor, one for each rank."""
    halving = all_gather(size)[1].backwards(reduce=True)
    return size, halving + binomial.scatter(size, root)[1].backwards(reduce=False)


def all_reduce(size: int) -> tuple[int, Rounds]:
    """All-reduce: a reduce-scatter and an all-gather of the chunks of one tensor, one for each rank."""
    _, doubling = all_gather(size)
    return size, doubling.backwards(reduce=True) + doubling


def all_gather(size: int) -> tuple[int, Rounds]:
    """All-gather by doubling: before round i a rank holds 2**i rows."""
    ranks = np.arange(size)
    is_power_of_two = size & (size - 1) == 0

    def at(number: int) -> Iterator[Transfers]:
        held = 1 << number
        if is_power_of_two:
            first = ranks & -held
            yield transfers(ranks, ranks ^ held, first, first + held)
        else:
            yield from cyclic(ranks, (ranks - held) % size, ranks, min(held, size - held), size)

    return size, Rounds((size - 1).bit_length(), at)
