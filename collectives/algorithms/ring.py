"""Ring: every rank sends to the next one only, so that each link carries as few bytes as can be.

| collective | rounds | bytes that a rank sends (p ranks, n bytes) |
| --- | --- | --- |
| all_gather, reduce_scatter | p - 1 | n (p - 1) / p |
| all_reduce | 2 (p - 1) | 2 n (p - 1) / p |
| broadcast, reduce (a chain, in S segments) | p - 2 + S | n |

Best for large tensors and few ranks. The ring follows the hosts, so that it enters and leaves each host once. In
segments, a chunk travels as several messages: while one is combined the next is on its way, and a chain has many on
its way at once.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gangline.collectives.schedule.rounds import Rounds, Transfers, transfers
from gangline.collectives.schedule.schedule import Schedule


def all_reduce(order: Sequence[int], segments: int = 1) -> Schedule:
    """A reduce-scatter and an all-gather of the parts of one tensor, around the ring ``order``."""
    rounds = _sums_around(order, segments) + _around(order, segments)
    return Schedule("all_reduce", "ring", len(order), len(order) * segments, rounds)


def all_gather(order: Sequence[int], segments: int = 1) -> Schedule:
    """Every row travels once around the ring ``order``."""
    return Schedule("all_gather", "ring", len(order), len(order) * segments, _around(order, segments))


def reduce_scatter(order: Sequence[int], segments: int = 1) -> Schedule:
    """The sum of each row is gathered on its way around the ring, and ends at its rank."""
    return Schedule("reduce_scatter", "ring", len(order), len(order) * segments, _sums_around(order, segments))


def broadcast(order: Sequence[int], root: int, segments: int = 1) -> Schedule:
    """Segment after segment along a chain that begins at the root."""
    return Schedule("broadcast", "ring", len(order), segments, _chain(order, root, segments), root)


def reduce(order: Sequence[int], root: int, segments: int = 1) -> Schedule:
    """The broadcast turned back, with sums."""
    rounds = _chain(order, root, segments).backwards(reduce=True)
    return Schedule("reduce", "ring", len(order), segments, rounds, root)


def _around(order: Sequence[int], segments: int) -> Rounds:
    """In round i the rank at place q passes on the row of the rank at place q - i."""
    ranks = np.asarray(order)
    following = np.roll(ranks, -1)

    def at(number: int) -> Iterator[Transfers]:
        rows = np.roll(ranks, number)
        for segment in range(segments):
            yield transfers(ranks, following, rows * segments + segment)

    return Rounds(len(order) - 1, at)


def _sums_around(order: Sequence[int], segments: int) -> Rounds:
    """The all-gather of the ring that runs the other way, turned back: so that all messages run the same way."""
    return _around(order[::-1], segments).backwards(reduce=True)


def _chain(order: Sequence[int], root: int, segments: int) -> Rounds:
    """In round i the rank at place q of the chain passes on segment i - q."""
    begin = order.index(root)
    chain = np.asarray([*order[begin:], *order[:begin]])
    size = len(chain)

    def at(number: int) -> Iterator[Transfers]:
        places = np.arange(max(0, number - segments + 1), min(size - 1, number + 1))
        yield transfers(chain[places], chain[places + 1], number - places)

    return Rounds(size - 2 + segments if size > 1 else 0, at)
