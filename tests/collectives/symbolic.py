"""Symbolic execution of a schedule's programs, to prove that they implement the collective.

A chunk's value is represented by the set of ranks that contributed to it, as the bits of an int; 0 means "not written".
Messages wait in one FIFO channel for each ordered pair of ranks; sending never blocks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from gangline.collectives.schedule import NumberedStep, Receive, Schedule, Send, Step
from gangline.collectives.schedule.schedule import steps_by_rank


def verify(schedule: Schedule, programs: Sequence[Sequence[NumberedStep]] | None = None) -> None:
    """Run the ranks' programs on symbols and check that each result holds each contribution exactly once.

    Args:
        schedule: what to check.
        programs: one program per rank in place of the schedule's own; None: `steps_by_rank`.

    Raises:
        ValueError: if a result is wrong, a chunk is read before it was written, the two ends of a message disagree, a
            message is never received, or ranks deadlock. Names rank, round and chunk.
    """
    run = _Run(schedule)
    programs = steps_by_rank(schedule) if programs is None else programs
    runnable = deque(range(schedule.size))
    position = [0] * schedule.size
    waits_for: dict[int, int] = {}
    while runnable:
        rank = runnable.popleft()
        while position[rank] < len(programs[rank]):
            number, step = programs[rank][position[rank]]
            missing = run.step(rank, number, step)
            if missing is not None:
                waits_for[rank] = missing
                break
            position[rank] += 1
            if isinstance(step, Send) and waits_for.get(step.to) == rank:
                del waits_for[step.to]
                runnable.append(step.to)
    for rank, source in waits_for.items():
        number, step = programs[rank][position[rank]]
        run.fail(rank, number, step.first, f"waits forever for a message from rank {source}, as do {list(waits_for)}")
    for (source, target), channel in run.channels.items():
        for number, first, *_ in channel:
            run.fail(source, number, first, f"rank {target} never receives it")
    for rank, held in enumerate(run.held):
        for chunk, expected in run.collective.final(rank).items():
            if held[chunk] != expected:
                text = f"ends with ranks {_ranks(held[chunk])}; expected {_ranks(expected)}"
                run.fail(rank, schedule.steps(), chunk, text)


class Collective(NamedTuple):
    """A collective between ``size`` ranks on a tensor of ``chunks`` chunks."""

    name: str
    size: int
    chunks: int
    root: int | None

    @classmethod
    def of(cls, schedule: Schedule) -> Collective:
        """Return the collective that a schedule implements."""
        return cls(schedule.collective, schedule.size, schedule.chunks, schedule.root)

    def initial(self) -> list[list[int]]:
        """Return the contributions in each chunk of each rank before the first round."""
        if self.name in ("all_reduce", "reduce", "reduce_scatter"):
            return [[1 << rank] * self.chunks for rank in range(self.size)]
        if self.name in ("broadcast", "scatter"):
            return [[1 << rank if rank == self.root else 0] * self.chunks for rank in range(self.size)]
        held = [[0] * self.chunks for _ in range(self.size)]
        for rank, chunks_of_rank in enumerate(held):
            for chunk in self._row(rank):
                chunks_of_rank[chunk] = 1 << rank
        return held

    def final(self, rank: int) -> dict[int, int]:
        """Return the contributions that a rank's result chunks must hold after the last round, by chunk.

        Raises:
            ValueError: if the collective is unknown.
        """
        size, root = self.size, self.root
        every_chunk, every_rank = range(self.chunks), (1 << size) - 1
        match self.name:
            case "all_reduce":
                return dict.fromkeys(every_chunk, every_rank)
            case "reduce":
                return dict.fromkeys(every_chunk, every_rank) if rank == root else {}
            case "broadcast":
                return dict.fromkeys(every_chunk, 1 << (root or 0))
            case "all_gather":
                return {chunk: 1 << owner for owner in range(size) for chunk in self._row(owner)}
            case "reduce_scatter":
                return dict.fromkeys(self._row(rank), every_rank)
            case "gather":
                owners = range(size) if rank == root else ()
                return {chunk: 1 << owner for owner in owners for chunk in self._row(owner)}
            case "scatter":
                return dict.fromkeys(self._row(rank), 1 << (root or 0))
            case "all_to_all":
                width = self.chunks // size**2
                begins = ((source, (source * size + rank) * width) for source in range(size))
                return {chunk: 1 << source for source, begin in begins for chunk in range(begin, begin + width)}
        raise ValueError(f"cannot verify a schedule of the unknown collective {self.name!r}")

    def _row(self, rank: int) -> range:
        """Return the chunks of a rank's row; in an all_to_all, those that the rank sends."""
        width = self.chunks // self.size
        return range(rank * width, (rank + 1) * width)


class _Run:
    """The chunks of all ranks and the channels between them while the programs run."""

    def __init__(self, schedule: Schedule) -> None:
        self.collective = Collective.of(schedule)
        self.held = self.collective.initial()
        self.channels: defaultdict[tuple[int, int], deque[tuple[int, int, int, list[int]]]] = defaultdict(deque)
        """(round, first, last, contributions) of the messages in flight, by source and target."""
        self._label = f"{schedule.algorithm} {schedule.collective}"

    def fail(self, rank: int, number: int, chunk: int, text: str) -> None:
        """Raise an error; rounds count from 0, and the final state is one past the last round."""
        raise ValueError(f"{self._label}, rank {rank}, round {number}, chunk {chunk}: {text}")

    def step(self, rank: int, number: int, step: Step) -> int | None:
        """Run a step if its messages have been sent; else return the rank whose message is missing."""
        size, chunks = self.collective.size, self.collective.chunks
        if not 0 <= step.first < step.last <= chunks:
            self.fail(rank, number, step.first, f"chunks {step.first} to {step.last} are not among {chunks}")
        if isinstance(step, Send):
            if step.to == rank or not 0 <= step.to < size:
                self.fail(rank, number, step.first, f"sends to rank {step.to}; expected another rank")
            contents = self._read(rank, number, step)
            self.channels[rank, step.to].append((number, step.first, step.last, contents))
            return None
        sources = [step.source] if isinstance(step, Receive) else [other for other in step.ranks if other != rank]
        for source in sources:
            if len(self.channels[source, rank]) < sources.count(source):
                return source
        if isinstance(step, Receive):
            self.held[rank][step.first : step.last] = self._receive(step.source, rank, number, step)
            return None
        if rank not in step.ranks or list(step.ranks) != sorted(step.ranks):
            self.fail(rank, number, step.first, f"combines ranks {step.ranks}; expected this one, in ascending order")
        total = self._read(rank, number, step)
        for source in sources:
            for index, contribution in enumerate(self._receive(source, rank, number, step)):
                if twice := total[index] & contribution:
                    self.fail(rank, number, step.first + index, f"adds ranks {_ranks(twice)} twice")
                total[index] |= contribution
        for index, contributions in enumerate(total):
            if (contributions == (1 << size) - 1) != step.complete:
                text = f"holds ranks {_ranks(contributions)}, but is {'' if step.complete else 'not '}marked complete"
                self.fail(rank, number, step.first + index, text)
        self.held[rank][step.first : step.last] = total
        return None

    def _read(self, rank: int, number: int, step: Step) -> list[int]:
        contents = self.held[rank][step.first : step.last]
        if 0 in contents:
            self.fail(rank, number, step.first + contents.index(0), "read before it was written")
        return contents

    def _receive(self, source: int, rank: int, number: int, step: Step) -> list[int]:
        sent, first, last, contents = self.channels[source, rank].popleft()
        if (sent, first, last) != (number, step.first, step.last):
            text = f"whose next message, of round {sent}, has chunks {first} to {last}"
            expects = f"expects chunks {step.first} to {step.last} from rank {source}"
            self.fail(rank, number, step.first, f"{expects}, {text}")
        return contents


def _ranks(contributions: int) -> list[int]:
    return [rank for rank in range(contributions.bit_length()) if contributions >> rank & 1]
