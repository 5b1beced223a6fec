"""Ring: every rank sends to the next one only, so that each link carries the minimum of bytes.

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

from gangline.collectives.schedule import Rounds, Schedule, Transfers, transfers


def all_reduce(order: Sequence[int], segments: int = 1) -> Schedule:
    """All-reduce: a reduce-scatter and an all-gather of the chunks of one tensor, around the ring ``order``."""
    rounds = _reduce_around(order, segments) + _around(order, segments)
    return Schedule("all_reduce", "ring", len(order), len(order) * segments, rounds)


def all_gather(order: Sequence[int], segments: int = 1) -> Schedule:
    """All-gather in which every row is forwarded once around the ring ``order``."""
    return Schedule("all_gather", "ring", len(order), len(order) * segments, _around(order, segments))


def reduce_scatter(order: Sequence[int], segments: int = 1) -> Schedule:
    """Reduce-scatter in which the sum of each row is forwarded around the ring and ends at its rank."""
    return Schedule("reduce_scatter", "ring", len(order), len(order) * segments, _reduce_around(order, segments))


def broadcast(order: Sequence[int], root: int, segments: int = 1) -> Schedule:
    """Broadcast segment after segment along a chain that begins at the root."""
    return Schedule("broadcast", "ring", len(order), segments, _chain(order, root, segments), root)


def _around(order: Sequence[int], segments: int) -> Rounds:
    """Return the rounds of the all-gather: in round i, position q of the ring forwards the row of position q - i."""
    ranks = np.asarray(order)
    following = np.roll(ranks, -1)

    def at(number: int) -> Iterator[Transfers]:
        rows = np.roll(ranks, number)
        for segment in range(segments):
            yield transfers(ranks, following, rows * segments + segment)

    return Rounds(len(order) - 1, at)


def _reduce_around(order: Sequence[int], segments: int) -> Rounds:
    """Return the rounds of the reduce-scatter: the reversed all-gather of the opposite ring."""
    return _around(order[::-1], segments).backwards(reduce=True)


def _chain(order: Sequence[int], root: int, segments: int) -> Rounds:
    """Return the rounds of the broadcast: in round i the rank at position q of the chain forwards segment i - q."""
    begin = order.index(root)
    chain = np.asarray([*order[begin:], *order[:begin]])
    size = len(chain)

    def at(number: int) -> Iterator[Transfers]:
        position = np.arange(max(0, number - segments + 1), min(size - 1, number + 1))
        yield transfers(chain[position], chain[position + 1], number - position)

    return Rounds(size - 2 + segments if size > 1 else 0, at)
