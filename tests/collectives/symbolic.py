"""Symbolic execution of a schedule's programs, to prove that they implement the collective.

A chunk's value is represented by the set of ranks that contributed to it, as the bits of an int; 0 means "not written".
Messages wait in one FIFO channel for each ordered pair of ranks; sending never blocks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gangline.collectives.schedule import NumberedStep, Receive, Reduce, Schedule, Send, Step
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
    collective = Collective.of(schedule)
    programs = steps_by_rank(schedule) if programs is None else programs
    run = _Run(collective, f"{schedule.algorithm} {schedule.collective}")
    runnable = deque(range(collective.size))
    position = [0] * collective.size
    waits_for: dict[int, int] = {}
    while runnable:
        rank = runnable.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            number, step = program[position[rank]]
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
        raise ValueError(
            f"{run.location(rank, number, step.first)}: waits forever for a message from rank {source}; "
            f"waiting ranks: {', '.join(map(str, waits_for))}"
        )
    run.check_channels_empty()
    run.check_final(schedule.steps())


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


@dataclass(slots=True)
class _SentMessage:
    number: int
    first: int
    last: int
    contents: list[int]


@dataclass(slots=True)
class _Run:
    """The chunks of all ranks and the channels between them while the programs run."""

    collective: Collective
    label: str
    held: list[list[int]] = field(init=False)
    channels: defaultdict[tuple[int, int], deque[_SentMessage]] = field(default_factory=lambda: defaultdict(deque))
    """Messages in flight, by (source, target)."""

    def __post_init__(self) -> None:
        self.held = self.collective.initial()

    def step(self, rank: int, number: int, step: Step) -> int | None:
        """Run a step if its messages have been sent; else return the rank whose message is missing."""
        chunks = self.collective.chunks
        if not 0 <= step.first < step.last <= chunks:
            raise ValueError(
                f"{self.location(rank, number, step.first)}: chunks {step.first} to {step.last} are out of range; "
                f"the tensor has {chunks}"
            )
        if isinstance(step, Send):
            self._send(rank, number, step)
            return None
        if isinstance(step, Receive):
            if not self.channels[step.source, rank]:
                return step.source
            self.held[rank][step.first : step.last] = self._receive(step.source, rank, number, step)
            return None
        for source in step.ranks:
            if source != rank and not self.channels[source, rank]:
                return source
        self._reduce(rank, number, step)
        return None

    def _send(self, rank: int, number: int, step: Send) -> None:
        if step.to == rank or not 0 <= step.to < self.collective.size:
            raise ValueError(
                f"{self.location(rank, number, step.first)}: sends to rank {step.to}; expected another rank"
            )
        contents = self._read(rank, number, step)
        self.channels[rank, step.to].append(_SentMessage(number, step.first, step.last, contents))

    def _reduce(self, rank: int, number: int, step: Reduce) -> None:
        if rank not in step.ranks or list(step.ranks) != sorted(step.ranks):
            raise ValueError(
                f"{self.location(rank, number, step.first)}: combines ranks {step.ranks}; expected this rank among "
                "them, in ascending order"
            )
        total = self._read(rank, number, step)
        for source in step.ranks:
            if source == rank:
                continue
            if not self.channels[source, rank]:
                raise ValueError(f"{self.location(rank, number, step.first)}: needs more messages from rank {source}")
            for index, contribution in enumerate(self._receive(source, rank, number, step)):
                if total[index] & contribution:
                    twice = _ranks(total[index] & contribution)
                    raise ValueError(f"{self.location(rank, number, step.first + index)}: adds ranks {twice} twice")
                total[index] |= contribution
        every_rank = (1 << self.collective.size) - 1
        for index, contributions in enumerate(total):
            if (contributions == every_rank) != step.complete:
                raise ValueError(
                    f"{self.location(rank, number, step.first + index)}: holds ranks {_ranks(contributions)}, but is "
                    f"{'' if step.complete else 'not '}marked complete"
                )
        self.held[rank][step.first : step.last] = total

    def _read(self, rank: int, number: int, step: Step) -> list[int]:
        contents = self.held[rank][step.first : step.last]
        if 0 in contents:
            chunk = step.first + contents.index(0)
            raise ValueError(f"{self.location(rank, number, chunk)}: read before it was written")
        return contents

    def _receive(self, source: int, rank: int, number: int, step: Step) -> list[int]:
        message = self.channels[source, rank].popleft()
        if (message.first, message.last, message.number) != (step.first, step.last, number):
            raise ValueError(
                f"{self.location(rank, number, step.first)}: expects chunks {step.first} to {step.last} from rank "
                f"{source}, whose next message, of round {message.number}, has chunks {message.first} to {message.last}"
            )
        return message.contents

    def check_channels_empty(self) -> None:
        for (source, target), channel in self.channels.items():
            if channel:
                left = channel[0]
                raise ValueError(f"{self.location(source, left.number, left.first)}: rank {target} never receives it")

    def check_final(self, round_count: int) -> None:
        for rank, held in enumerate(self.held):
            for chunk, expected in self.collective.final(rank).items():
                found = held[chunk]
                if found != expected:
                    raise ValueError(
                        f"{self.location(rank, round_count, chunk)}: ends with ranks {_ranks(found)}; "
                        f"expected {_ranks(expected)}"
                    )

    def location(self, rank: int, number: int, chunk: int) -> str:
        """Return the location of an error; rounds count from 0, and the final state is one past the last round."""
        return f"{self.label}, rank {rank}, round {number}, chunk {chunk}"


def _ranks(contributions: int) -> list[int]:
    return [rank for rank in range(contributions.bit_length()) if contributions >> rank & 1]
