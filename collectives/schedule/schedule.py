"""A collective as data: the chunks of a tensor that each rank sends to each other rank, round by round.

The elements of a tensor are split into numbered chunks of nearly equal size: chunk i of n elements begins at
``i * n // chunks``. The meaning of the chunks depends on the collective:

- all_reduce, reduce, broadcast: slices of the one tensor, in a number chosen by the algorithm.
- all_gather, gather, scatter, reduce_scatter: ``size * k`` chunks; rank r's row is chunks r * k to (r + 1) * k.
- all_to_all: ``size * size`` chunks; chunk ``i * size + j`` goes from rank i to rank j.

A schedule touches no tensor and no socket. Any transport can run it (`gangline.collectives.engine.executor`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gangline.collectives.schedule.rounds import IntArray, Rounds, Transfers


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunks ``first`` to ``last`` (exclusive), with their values at the start of the round."""

    to: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Replace chunks ``first`` to ``last`` (exclusive) by the message from ``source``."""

    source: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine the chunks ``first`` to ``last`` (exclusive) of all ``ranks`` in ascending order, rounding once.

    This rank is one of them and contributes its own values; the others' are received.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    complete: bool
    """True if the chunks now hold every rank's contribution. A mean is divided here."""


Step = Send | Receive | Reduce
NumberedStep = tuple[int, Step]
"""The number of a round, from 0, and a step of that round."""

ROOTED = ("reduce", "broadcast", "gather", "scatter")
"""Collectives with a root."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The rounds of a collective between ``size`` ranks.

    All messages of a round carry values from the beginning of the round. A rank that forwards chunks which are not part
    of its result keeps them in a scratch buffer, of which nothing is read before it was written.
    """

    collective: str
    algorithm: str
    size: int
    """Number of ranks."""
    chunks: int
    rounds: Rounds
    root: int | None = None
    _programs: dict[int, tuple[Step, ...]] = field(default_factory=dict, init=False, repr=False)

    def program(self, rank: int) -> tuple[Step, ...]:
        """Return the steps of one rank, cached: in each round its sends, then its receives, in the order of the tables.

        All contributions that a rank combines into the same chunks in one round form a single `Reduce`.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a schedule of {self.size} ranks")
        if rank not in self._programs:
            self._programs[rank] = tuple(step for _, step in steps_by_rank(self, rank)[rank])
        return self._programs[rank]

    def steps(self) -> int:
        """Return the number of rounds."""
        return len(self.rounds)

    def bytes_on_wire(self, nbytes: int) -> int:
        """Return the largest number of bytes that a rank sends for a tensor of ``nbytes`` bytes, with all its rows."""
        sent = np.zeros(self.size, dtype=np.int64)
        for table in self._tables():
            sent[table.source] += self.message_bytes(table, nbytes)
        return int(sent.max(initial=0))

    def messages(self) -> int:
        """Return the number of messages that all ranks together send."""
        return sum(len(table) for table in self._tables())

    def message_bytes(self, table: Transfers, nbytes: int) -> IntArray:
        """Return the bytes of each message of a table; ``nbytes`` as in `bytes_on_wire`."""
        whole = nbytes * self.size if self.collective == "all_to_all" else nbytes
        each, rest = divmod(whole, self.chunks)
        return (table.last - table.first) * each + table.last * rest // self.chunks - table.first * rest // self.chunks

    @cached_property
    def last_reduced(self) -> IntArray:
        """Number of the last round that combines each chunk; -1 if none does.

        Sums are complete after that round: no schedule computes a partial sum last.
        """
        rounds = np.full(self.chunks, -1, dtype=np.int64)
        for number, tables in enumerate(self.rounds):
            for table in tables:
                if table.reduce:
                    for first, last in {*zip(table.first.tolist(), table.last.tolist(), strict=True)}:
                        rounds[first:last] = number
        return rounds

    def _tables(self) -> Iterator[Transfers]:
        return (table for tables in self.rounds for table in tables)


def steps_by_rank(schedule: Schedule, only: int | None = None) -> list[list[NumberedStep]]:
    """Return the numbered steps of each rank, or of rank ``only``."""
    steps: list[list[NumberedStep]] = [[] for _ in range(schedule.size)]
    last_reduced = schedule.last_reduced
    for number, tables in enumerate(schedule.rounds):
        incoming: dict[tuple[int, int, int, bool], list[int]] = {}
        for table in tables:
            wanted = table if only is None else table.of(only)
            for source, target, first, last in wanted.rows():
                if only is None or only == source:
                    steps[source].append((number, Send(target, first, last)))
                if only is None or only == target:
                    incoming.setdefault((target, first, last, table.reduce), []).append(source)
        for (rank, first, last, reduce), sources in incoming.items():
            if reduce:
                complete = bool((last_reduced[first:last] == number).all())
                steps[rank].append((number, Reduce(tuple(sorted([rank, *sources])), first, last, complete)))
            else:
                steps[rank] += [(number, Receive(source, first, last)) for source in sources]
    return steps
