"""Rounds of messages, as tables, and the ways to combine them.

Rounds are generated on demand, so 4,096 ranks need no more memory than one table. Two operations keep the algorithms
short. An all-gather reversed in time, with sums in place of copies, is a reduce-scatter, and a reversed broadcast is a
reduce (`Rounds.backwards`). Disjoint groups of ranks can run their rounds in parallel (`in_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Table of messages in which no rank sends twice and none receives twice; all columns have the same length.

    A round consists of one or more tables; in it, a rank sends and receives in the order of the tables.
    """

    source: IntArray
    target: IntArray
    first: IntArray
    """First chunk of each message."""
    last: IntArray
    """One past the last chunk of each message."""
    reduce: bool
    """True if a received chunk is combined with the current chunk; False if it replaces the current chunk."""

    def __len__(self) -> int:
        return len(self.source)

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Return (source, target, first chunk, last chunk) of each message."""
        return zip(self.source.tolist(), self.target.tolist(), self.first.tolist(), self.last.tolist(), strict=True)

    def where(self, keep: NDArray[np.bool_]) -> Transfers:
        """Return the messages for which ``keep`` is true."""
        return Transfers(self.source[keep], self.target[keep], self.first[keep], self.last[keep], self.reduce)

    def of(self, rank: int) -> Transfers:
        """Return the messages that a rank sends or receives."""
        return self.where((self.source == rank) | (self.target == rank))


Round = Iterable[Transfers]


def transfers(
    source: ArrayLike, target: ArrayLike, first: ArrayLike, last: ArrayLike | None = None, *, reduce: bool = False
) -> Transfers:
    """Return a table made from columns or scalars; without ``last``, each message is one chunk."""
    begin = np.atleast_1d(np.asarray(first, dtype=np.int64))
    end = begin + 1 if last is None else last
    source, target, begin, end = np.broadcast_arrays(source, target, begin, end)
    return Transfers(source, target, begin, end, reduce)


def cyclic(source: ArrayLike, target: ArrayLike, start: IntArray, count: ArrayLike, size: int) -> Iterator[Transfers]:
    """Return messages of ``count`` chunks from ``start`` on, modulo ``size``; a wrapped range becomes two messages."""
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
    """Sequence of rounds, each generated on demand."""

    count: int
    at: Callable[[int], Round]
    """Function that returns the round with a number from 0 to ``count`` - 1."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Round]:
        return map(self.at, range(self.count))

    def __add__(self, after: Rounds) -> Rounds:
        """Return these rounds, followed by those of ``after``."""
        return Rounds(
            self.count + after.count,
            lambda number: self.at(number) if number < self.count else after.at(number - self.count),
        )

    def backwards(self, *, reduce: bool) -> Rounds:
        """Return the rounds in reverse order and direction; ``reduce``: chunks are combined with those present."""

        def at(number: int) -> Iterator[Transfers]:
            for table in self.at(self.count - 1 - number):
                yield Transfers(table.target, table.source, table.first, table.last, reduce)

        return Rounds(self.count, at)

    def among(self, ranks: Sequence[int], first_chunk: int = 0) -> Rounds:
        """Return these rounds with rank i renamed to ``ranks[i]`` and chunk 0 to ``first_chunk``."""
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


def in_parallel(groups: Sequence[Rounds]) -> Rounds:
    """Return rounds that run the n-th rounds of all groups at once.

    The groups must have no rank in common, as many tables in a round as each other, and either all reduce or all copy.
    """

    def at(number: int) -> Iterator[Transfers]:
        rounds = [group.at(number) for group in groups if number < group.count]
        for tables in zip(*rounds, strict=True):
            source, target, first, last = (
                np.concatenate([getattr(table, column) for table in tables])
                for column in ("source", "target", "first", "last")
            )
            yield Transfers(source, target, first, last, tables[0].reduce)

    return Rounds(max((group.count for group in groups), default=0), at)
