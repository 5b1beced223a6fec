"""Whether a schedule does what its collective promises: its programs are run on symbols.

What a chunk of a rank holds is the set of ranks that contributed to it, as bits of an int; 0 is "nothing written yet".
Messages wait in a channel for each ordered pair of ranks, first in, first out; sending never waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gangline.collectives.schedule.schedule import Receive, Reduce, Send, Step

if TYPE_CHECKING:
    from gangline.collectives.schedule.schedule import Schedule

Numbered = tuple[int, Step]
"""A step and the number of its round, from 0."""


def verify(schedule: Schedule, programs: Sequence[Sequence[Numbered]]) -> None:
    """Run one program a rank in place of the schedule's own (`Schedule.numbered_programs`).

    Raises:
        ValueError: as `Schedule.verify`.
    """
    run = _Run(schedule)
    runnable = deque(range(schedule.size))
    position = [0] * schedule.size
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
            f"{run.place(rank, number, step.first)}: waits for ever for a message of rank {source}; "
            f"ranks that wait: {', '.join(map(str, waits_for))}"
        )
    run.check_nothing_left()
    run.check_end()


def start(schedule: Schedule) -> list[list[int]]:
    """What each chunk of each rank holds before the first round: ranks as bits, 0 for nothing."""
    size, chunks = schedule.size, schedule.chunks
    if schedule.collective in ("all_reduce", "reduce", "reduce_scatter"):
        return [[1 << rank] * chunks for rank in range(size)]
    if schedule.collective in ("broadcast", "scatter"):
        return [[1 << rank if rank == schedule.root else 0] * chunks for rank in range(size)]
    held = [[0] * chunks for _ in range(size)]
    for rank, chunks_of_rank in enumerate(held):
        for chunk in _row(schedule, rank):
            chunks_of_rank[chunk] = 1 << rank
    return held


def end(schedule: Schedule, rank: int) -> dict[int, int]:
    """What the chunks that matter at a rank must hold after the last round: ranks as bits."""
    size, root = schedule.size, schedule.root
    every_chunk, every_rank = range(schedule.chunks), (1 << size) - 1
    match schedule.collective:
        case "all_reduce":
            return dict.fromkeys(every_chunk, every_rank)
        case "reduce":
            return dict.fromkeys(every_chunk, every_rank) if rank == root else {}
        case "broadcast":
            return dict.fromkeys(every_chunk, 1 << (root or 0))
        case "all_gather":
            return {chunk: 1 << owner for owner in range(size) for chunk in _row(schedule, owner)}
        case "reduce_scatter":
            return dict.fromkeys(_row(schedule, rank), every_rank)
        case "gather":
            owners = range(size) if rank == root else ()
            return {chunk: 1 << owner for owner in owners for chunk in _row(schedule, owner)}
        case "scatter":
            return dict.fromkeys(_row(schedule, rank), 1 << (root or 0))
        case "all_to_all":
            width = schedule.chunks // size**2
            begins = ((giver, (giver * size + rank) * width) for giver in range(size))
            return {chunk: 1 << giver for giver, begin in begins for chunk in range(begin, begin + width)}
    raise ValueError(f"there is no collective {schedule.collective!r} that can be verified")


def _row(schedule: Schedule, rank: int) -> range:
    """The chunks of a rank's row; in an all_to_all those that it gives."""
    width = schedule.chunks // schedule.size
    return range(rank * width, (rank + 1) * width)


@dataclass(slots=True)
class _Message:
    number: int
    first: int
    last: int
    contents: list[int]


@dataclass(slots=True)
class _Run:
    """All ranks' chunks and all channels, while the programs run."""

    schedule: Schedule
    held: list[list[int]] = field(init=False)
    channels: defaultdict[tuple[int, int], deque[_Message]] = field(default_factory=lambda: defaultdict(deque))
    """The messages on their way from a source to a target."""

    def __post_init__(self) -> None:
        self.held = start(self.schedule)

    def step(self, rank: int, number: int, step: Step) -> int | None:
        """Do a step, if what it needs has been sent; else give the rank whose message is missing."""
        if not 0 <= step.first < step.last <= self.schedule.chunks:
            raise ValueError(
                f"{self.place(rank, number, step.first)}: no chunks {step.first} to {step.last} among "
                f"{self.schedule.chunks}"
            )
        if isinstance(step, Send):
            self._send(rank, number, step)
            return None
        if isinstance(step, Receive):
            if not self.channels[step.source, rank]:
                return step.source
            self.held[rank][step.first : step.last] = self._take(step.source, rank, number, step)
            return None
        for source in step.ranks:
            if source != rank and not self.channels[source, rank]:
                return source
        self._reduce(rank, number, step)
        return None

    def _send(self, rank: int, number: int, step: Send) -> None:
        if step.to == rank or not 0 <= step.to < self.schedule.size:
            raise ValueError(f"{self.place(rank, number, step.first)}: sent to rank {step.to}, no other rank")
        contents = self._read(rank, number, step)
        self.channels[rank, step.to].append(_Message(number, step.first, step.last, contents))

    def _reduce(self, rank: int, number: int, step: Reduce) -> None:
        if rank not in step.ranks or list(step.ranks) != sorted(step.ranks):
            raise ValueError(
                f"{self.place(rank, number, step.first)}: combines ranks {step.ranks}; expected this rank among "
                "them, in ascending order"
            )
        total = self._read(rank, number, step)
        for source in step.ranks:
            if source == rank:
                continue
            if not self.channels[source, rank]:
                raise ValueError(f"{self.place(rank, number, step.first)}: needs more messages of rank {source}")
            for index, contribution in enumerate(self._take(source, rank, number, step)):
                if total[index] & contribution:
                    twice = _ranks(total[index] & contribution)
                    raise ValueError(f"{self.place(rank, number, step.first + index)}: adds ranks {twice} twice")
                total[index] |= contribution
        everyone = (1 << self.schedule.size) - 1
        for index, contributions in enumerate(total):
            if (contributions == everyone) != step.complete:
                raise ValueError(
                    f"{self.place(rank, number, step.first + index)}: holds ranks {_ranks(contributions)}, and is "
                    f"{'' if step.complete else 'not '}said to be complete"
                )
        self.held[rank][step.first : step.last] = total

    def _read(self, rank: int, number: int, step: Step) -> list[int]:
        contents = self.held[rank][step.first : step.last]
        if 0 in contents:
            chunk = step.first + contents.index(0)
            raise ValueError(f"{self.place(rank, number, chunk)}: read before it was written")
        return contents

    def _take(self, source: int, rank: int, number: int, step: Step) -> list[int]:
        message = self.channels[source, rank].popleft()
        if (message.first, message.last, message.number) != (step.first, step.last, number):
            raise ValueError(
                f"{self.place(rank, number, step.first)}: expects chunks {step.first} to {step.last} of rank {source}, "
                f"whose next message, of round {message.number}, has chunks {message.first} to {message.last}"
            )
        return message.contents

    def check_nothing_left(self) -> None:
        for (source, target), channel in self.channels.items():
            if channel:
                left = channel[0]
                raise ValueError(f"{self.place(source, left.number, left.first)}: rank {target} never takes it")

    def check_end(self) -> None:
        for rank, held in enumerate(self.held):
            for chunk, expected in end(self.schedule, rank).items():
                found = held[chunk]
                if found != expected:
                    raise ValueError(
                        f"{self.place(rank, self.schedule.steps(), chunk)}: ends with ranks {_ranks(found)}; "
                        f"expected {_ranks(expected)}"
                    )

    def place(self, rank: int, number: int, chunk: int) -> str:
        """Where something is wrong; rounds are numbered from 0, and the end is the round after the last."""
        schedule = self.schedule
        return f"{schedule.algorithm} {schedule.collective}, rank {rank}, round {number}, chunk {chunk}"


def _ranks(contributions: int) -> list[int]:
    return [rank for rank in range(contributions.bit_length()) if contributions >> rank & 1]
