"""Ring: every rank sends only to the next rank, so that each link carries the minimum of bytes.

| collective | rounds | bytes sent per rank (p ranks, n bytes) |
| --- | --- | --- |
| all_gather, reduce_scatter | p - 1 | n (p - 1) / p |
| all_reduce | 2 (p - 1) | 2 n (p - 1) / p |
| broadcast, reduce (a chain, in S segments) | p - 2 + S | n |

Best for large tensors and few ranks. The ring follows the hosts, so that it enters and leaves each host once. With
segments, a chunk travels as several messages: one is combined while the next is in flight, and a chain has many in
flight at once.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gangline.collectives.schedule import Rounds, Transfers, transfers


def all_reduce(order: Sequence[int], segments: int = 1) -> tuple[int, Rounds]:
    """All-reduce: a reduce-scatter and an all-gather of the chunks of one tensor, around the ring ``order``."""
    chunks, summing = reduce_scatter(order, segments)
    return chunks, summing + all_gather(order, segments)[1]


def all_gather(order: Sequence[int], segments: int = 1) -> tuple[int, Rounds]:
    """All-gather around the ring ``order``: in round i, position q forwards the row of position q - i."""
    ranks = np.asarray(order)
    following = np.roll(ranks, -1)

    def at(number: int) -> Iterator[Transfers]:
        rows = np.roll(ranks, number)
        for segment in range(segments):
            yield transfers(ranks, following, rows * segments + segment)

    return len(order) * segments, Rounds(len(order) - 1, at)


def reduce_scatter(order: Sequence[int], segments: int = 1) -> tuple[int, Rounds]:
    """Reduce-scatter, in which a sum ends at its rank: the reversed all-gather of the opposite ring."""
    chunks, rounds = all_gather(order[::-1], segments)
    return chunks, rounds.backwards(reduce=True)


def broadcast(order: Sequence[int], root: int, segments: int = 1) -> tuple[int, Rounds]:
    """Broadcast along a chain from the root: in round i the rank at position q forwards segment i - q."""
    begin = order.index(root)
    chain = np.asarray([*order[begin:], *order[:begin]])
    size = len(chain)

    def at(number: int) -> Iterator[Transfers]:
        position = np.arange(max(0, number - segments + 1), min(size - 1, number + 1))
        yield transfers(chain[position], chain[position + 1], number - position)

    return segments, Rounds(size - 2 + segments if size > 1 else 0, at)
