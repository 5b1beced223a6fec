"""A collective as data: who sends which chunks of the tensor to whom, round by round.

The elements of a tensor are cut into numbered chunks, nearly equal parts: chunk i of n elements begins at
``i * n // chunks``. What the numbers mean depends on the collective:

- all_reduce, reduce, broadcast: parts of the one tensor, as many as the algorithm likes.
- all_gather, gather, scatter, reduce_scatter: ``size * k`` chunks, rank r's row being chunks r * k to (r + 1) * k.
- all_to_all: ``size * size`` chunks, chunk ``i * size + j`` being what rank i has for rank j.

A schedule touches no tensor and no socket. It is checked (`Schedule.verify`) and priced (`Schedule.cost`) on paper, and
executed over any transport (execution.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gangline.collectives.schedule.cost import Price, price
from gangline.collectives.schedule.rounds import IntArray, Rounds, Transfers

ROOTED = ("reduce", "broadcast", "gather", "scatter")
"""Collectives with a root."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunks ``first`` to ``last`` (exclusive), as they are at the beginning of the round."""

    to: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Replace chunks ``first`` to ``last`` (exclusive) by what ``source`` sends."""

    source: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine what ``ranks`` have in chunks ``first`` to ``last`` (exclusive), in ascending order, rounding once.

    This rank is among them, with its own value; the others' are received.
    """

    ranks: tuple[int, ...]
    first: int
    last: int
    complete: bool
    """Whether the chunks now hold every rank's contribution (for a mean, this is where it is divided)."""


Step = Send | Receive | Reduce


@dataclass(frozen=True, eq=False)
class Schedule:
    """The rounds of a collective between ``size`` ranks.

    In a round all ranks act at once: what is sent are values from the beginning of the round. A rank that only passes
    chunks on keeps them in a buffer of its own, where nothing is read before it was written.
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
        """What one rank does: in each round first its sends, then what it receives, in the order of the tables.

        All that a rank has to combine in one place in one round is a single `Reduce`. Made once for each rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a schedule of {self.size} ranks")
        if rank not in self._programs:
            self._programs[rank] = tuple(step for _, step in _steps_by_rank(self, rank)[rank])
        return self._programs[rank]

    def numbered_programs(self) -> list[list[tuple[int, Step]]]:
        """The program of every rank, each step with the number of its round, from 0."""
        return _steps_by_rank(self)

    def steps(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    def bytes_on_wire(self, nbytes: int) -> int:
        """The most bytes that any one rank sends.

        Args:
            nbytes: bytes of the tensor; of all its rows, where it has one for each rank.
        """
        return int(self._bytes_sent(nbytes).max(initial=0))

    def total_bytes(self, nbytes: int) -> int:
        """The bytes that all ranks together send; ``nbytes`` as in `bytes_on_wire`."""
        return int(self._bytes_sent(nbytes).sum())

    def messages(self) -> int:
        """The messages that all ranks together send."""
        return sum(len(table) for table in self._tables())

    def cost(self, nbytes: int, alpha: Price, beta: Price, gamma: float) -> float:
        """Seconds until the last rank is done, in the model of pricing.py.

        Args:
            nbytes: as in `bytes_on_wire`.
            alpha: seconds a message; a number, or a function of the arrays of its sources and targets.
            beta: seconds a byte of a message; likewise.
            gamma: seconds a byte that is reduced.
        """
        return price(self.rounds, self.size, lambda table: self.message_bytes(table, nbytes), alpha, beta, gamma)

    def message_bytes(self, table: Transfers, nbytes: int) -> IntArray:
        """Bytes of each message of a table; ``nbytes`` as in `bytes_on_wire`."""
        whole = nbytes * self.size if self.collective == "all_to_all" else nbytes
        each, rest = divmod(whole, self.chunks)
        return (table.last - table.first) * each + table.last * rest // self.chunks - table.first * rest // self.chunks

    def verify(self) -> None:
        """Run the ranks' programs on symbols: every rank must end with each contribution exactly once.

        Raises:
            ValueError: it does not; or a chunk is read before it was written, the two ends of a message disagree, a
                message is left over, or ranks wait for each other. Names rank, round and chunk.
        """
        from gangline.collectives.schedule.verification import verify

        verify(self, self.numbered_programs())

    @cached_property
    def last_reduced(self) -> IntArray:
        """For each chunk the number of the last round that combines it, -1 if none does.

        Sums are complete then: a sum that still misses a contribution would be of no use to anybody.
        """
        found = np.full(self.chunks, -1, dtype=np.int64)
        for number, tables in enumerate(self.rounds):
            for table in tables:
                if table.reduce:
                    for first, last in {*zip(table.first.tolist(), table.last.tolist(), strict=True)}:
                        found[first:last] = number
        return found

    def __str__(self) -> str:
        from gangline.collectives.schedule.drawing import drawing

        return drawing(self)

    def _tables(self) -> Iterator[Transfers]:
        return (table for tables in self.rounds for table in tables)

    def _bytes_sent(self, nbytes: int) -> IntArray:
        sent = np.zeros(self.size, dtype=np.int64)
        for table in self._tables():
            sent[table.source] += self.message_bytes(table, nbytes)
        return sent


def _steps_by_rank(schedule: Schedule, only: int | None = None) -> list[list[tuple[int, Step]]]:
    """The numbered steps of each rank; with ``only``, those of this rank and none of others."""
    steps: list[list[tuple[int, Step]]] = [[] for _ in range(schedule.size)]
    last_reduced = schedule.last_reduced
    for number, tables in enumerate(schedule.rounds):
        arriving: dict[tuple[int, int, int, bool], list[int]] = {}
        for table in tables:
            wanted = table if only is None else table.of(only)
            for source, target, first, last in wanted.rows():
                if only is None or only == source:
                    steps[source].append((number, Send(target, first, last)))
                if only is None or only == target:
                    arriving.setdefault((target, first, last, table.reduce), []).append(source)
        for (rank, first, last, reduce), sources in arriving.items():
            if reduce:
                complete = bool((last_reduced[first:last] == number).all())
                steps[rank].append((number, Reduce(tuple(sorted([rank, *sources])), first, last, complete)))
            else:
                steps[rank] += [(number, Receive(source, first, last)) for source in sources]
    return steps
