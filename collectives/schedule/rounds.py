"""What happens at once in a collective: tables of messages, and how rounds of them are put together.

Rounds are made when they are asked for, so that 4,096 ranks need no more memory than a table of theirs. Two ideas keep
the algorithms short. Turned back in time, with sums where there were copies, an all-gather is a reduce-scatter and a
broadcast is a reduce (`Rounds.backwards`). And what one group of ranks does, others can do beside it (`side_by_side`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """A table of messages in which no rank sends twice and none receives twice; all columns are equally long.

    Several of them make a round; in it, a rank sends and receives in the order of the tables.
    """

    source: IntArray
    target: IntArray
    first: IntArray
    """The first chunk of each message."""
    last: IntArray
    """The chunk after the last one of each message."""
    reduce: bool
    """Whether what arrives is combined with what is there, or replaces it."""

    def __len__(self) -> int:
        return len(self.source)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Source, target, first and last chunk of each message."""
        return zip(self.source.tolist(), self.target.tolist(), self.first.tolist(), self.last.tolist(), strict=True)

    def where(self, keep: NDArray[np.bool_]) -> Transfers:
        """The messages at which ``keep`` is true."""
        return Transfers(self.source[keep], self.target[keep], self.first[keep], self.last[keep], self.reduce)

    def of(self, rank: int) -> Transfers:
        """The messages that a rank sends or receives."""
        return self.where((self.source == rank) | (self.target == rank))


Round = Iterable[Transfers]


def transfers(
    source: ArrayLike, target: ArrayLike, first: ArrayLike, last: ArrayLike | None = None, *, reduce: bool = False
) -> Transfers:
    """A table from columns or single numbers; without ``last``, each message is one chunk."""
    begin = np.atleast_1d(np.asarray(first, dtype=np.int64))
    end = begin + 1 if last is None else last
    source, target, begin, end = np.broadcast_arrays(source, target, begin, end)
    return Transfers(source, target, begin, end, reduce)


def cyclic(source: ArrayLike, target: ArrayLike, start: IntArray, count: ArrayLike, size: int) -> Iterator[Transfers]:
    """Messages of ``count`` chunks from ``start`` on, where chunk 0 comes after ``size`` - 1: one or two for a pair."""
    begin = start % size
    whole = transfers(source, target, begin, begin + np.asarray(count))
    upto_end = transfers(whole.source, whole.target, whole.first, np.minimum(whole.last, size))
    from_zero = transfers(whole.source, whole.target, 0, whole.last - size)
    for table in (upto_end, from_zero):
        keep = table.last > table.first
        if keep.any():
            yield table.where(keep)


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """A sequence of rounds, each made when it is asked for."""

    count: int
    at: Callable[[int], Round]
    """Gives the round of a number from 0 to ``count`` - 1."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Round]:
        return map(self.at, range(self.count))

    def __add__(self, after: Rounds) -> Rounds:
        """These rounds, then those of ``after``."""
        return Rounds(
            self.count + after.count,
            lambda number: self.at(number) if number < self.count else after.at(number - self.count),
        )

    def backwards(self, *, reduce: bool) -> Rounds:
        """The last round first, and every message from its target to its source.

        Args:
            reduce: whether what arrives is then combined with what is there.
        """

        def at(number: int) -> Iterator[Transfers]:
            for table in self.at(self.count - 1 - number):
                yield Transfers(table.target, table.source, table.first, table.last, reduce)

        return Rounds(self.count, at)

    def among(self, ranks: Sequence[int], first_chunk: int = 0) -> Rounds:
        """The same between other ranks, rank i being ``ranks[i]`` there, and with chunk 0 being ``first_chunk``."""
        names = np.asarray(ranks, dtype=np.int64)

        def at(number: int) -> Iterator[Transfers]:
            for table in self.at(number):
                yield Transfers(
                    names[table.source],
                    names[table.target],
                    table.first + first_chunk,
                    table.last + first_chunk,
                    table.reduce,
                )

        return Rounds(self.count, at)


def side_by_side(groups: Sequence[Rounds]) -> Rounds:
    """The n-th rounds of all groups at once; the groups have no rank in common, and all sum or all copy."""

    def at(number: int) -> Iterator[Transfers]:
        rounds = [group.at(number) for group in groups if number < group.count]
        for found in zip_longest(*rounds):
            tables = [table for table in found if table is not None]
            source, target, first, last = (
                np.concatenate([getattr(table, column) for table in tables])
                for column in ("source", "target", "first", "last")
            )
            yield Transfers(source, target, first, last, tables[0].reduce)

    return Rounds(max((group.count for group in groups), default=0), at)
