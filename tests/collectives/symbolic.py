"""Symbolic execution of a schedule's programs, to prove that they implement the collective.

A chunk's value is represented by the set of ranks that contributed to it, as the bits of an int; 0 means "not written".
Messages wait in one FIFO channel for each ordered pair of ranks; sending never blocks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Never

from gangline.collectives.schedule import Receive, Schedule, Send, Step
from gangline.collectives.schedule.schedule import steps_by_rank


def verify(schedule: Schedule) -> None:
    """Run the ranks' programs on symbols and check that each result holds each contribution exactly once.

    Raises:
        ValueError: if a result is wrong, a chunk is read before it was written, the two ends of a message disagree, a
            message is never received, or ranks deadlock. Names rank, round and chunk.
    """
    programs, held = [deque(steps) for steps in steps_by_rank(schedule)], initial(schedule)
    channels: defaultdict[tuple[int, int], deque[tuple[int, Step, list[int]]]] = defaultdict(deque)

    def fail(rank: int, number: int, chunk: int, text: str) -> Never:
        raise ValueError(
            f"{schedule.algorithm} {schedule.collective}, rank {rank}, round {number}, chunk {chunk}: {text}"
        )

    def read(rank: int, number: int, step: Step) -> list[int]:
        contents = held[rank][step.first : step.last]
        if 0 in contents or not contents:
            fail(rank, number, step.first, "read before it was written")
        return contents

    def received(source: int, rank: int, number: int, step: Step) -> list[int]:
        sent, message, contents = channels[source, rank].popleft()
        if (sent, message.first, message.last) != (number, step.first, step.last):
            fail(rank, number, step.first, f"expects chunks up to {step.last} from rank {source}, which sent {message}")
        return contents

    def run(rank: int, number: int, step: Step) -> bool:
        """Run a step if its messages have been sent."""
        if isinstance(step, Send):
            channels[rank, step.to].append((number, step, read(rank, number, step)))
            return True
        sources = [step.source] if isinstance(step, Receive) else [other for other in step.ranks if other != rank]
        if any(len(channels[source, rank]) < sources.count(source) for source in sources):
            return False
        if isinstance(step, Receive):
            held[rank][step.first : step.last] = received(step.source, rank, number, step)
            return True
        total = read(rank, number, step)
        for source in sources:
            contributions = received(source, rank, number, step)
            if any(mine & theirs for mine, theirs in zip(total, contributions, strict=True)):
                fail(rank, number, step.first, f"adds contributions of rank {source} twice")
            total = [mine | theirs for mine, theirs in zip(total, contributions, strict=True)]
        is_complete = {one == (1 << schedule.size) - 1 for one in total}
        if is_complete != {step.complete} or list(step.ranks) != sorted({*sources, rank}):
            fail(rank, number, step.first, f"holds {total} after {step}")
        held[rank][step.first : step.last] = total
        return True

    runnable = deque(range(schedule.size))
    while runnable:
        rank = runnable.popleft()
        while programs[rank] and run(rank, *programs[rank][0]):
            _, step = programs[rank].popleft()
            if isinstance(step, Send) and step.to not in runnable:
                runnable.append(step.to)
    for rank, program in enumerate(programs):
        for number, step in program:
            fail(rank, number, step.first, "waits forever for a message")
    for (source, target), channel in channels.items():
        for number, step, _ in channel:
            fail(source, number, step.first, f"rank {target} never receives it")
    for rank, chunks in enumerate(held):
        for chunk, expected in final(schedule, rank).items():
            if chunks[chunk] != expected:
                fail(rank, schedule.steps(), chunk, f"ends with ranks {chunks[chunk]:b}; expected {expected:b}")


def initial(schedule: Schedule) -> list[list[int]]:
    """Return the contributions in each chunk of each rank before the first round."""
    size, chunks = schedule.size, schedule.chunks
    match schedule.collective:
        case "all_reduce" | "reduce" | "reduce_scatter":
            return [[1 << rank] * chunks for rank in range(size)]
        case "broadcast" | "scatter":
            return [[(rank == schedule.root) << rank] * chunks for rank in range(size)]
    return [[(chunk * size // chunks == rank) << rank for chunk in range(chunks)] for rank in range(size)]


def final(schedule: Schedule, rank: int) -> dict[int, int]:
    """Return the contributions that a rank's result chunks must hold after the last round, by chunk."""
    size, chunks, root = schedule.size, schedule.chunks, schedule.root
    every_rank, row = (1 << size) - 1, range(rank * chunks // size, (rank + 1) * chunks // size)
    match schedule.collective:
        case "all_reduce":
            return dict.fromkeys(range(chunks), every_rank)
        case "reduce":
            return dict.fromkeys(range(chunks), every_rank) if rank == root else {}
        case "reduce_scatter":
            return dict.fromkeys(row, every_rank)
        case "broadcast" | "scatter":
            return dict.fromkeys(row if schedule.collective == "scatter" else range(chunks), 1 << (root or 0))
        case "all_gather" | "gather":
            is_there = schedule.collective == "all_gather" or rank == root
            return {chunk: 1 << (chunk * size // chunks) for chunk in range(chunks) if is_there}
        case "all_to_all":
            parts = ((chunk, *divmod(chunk * size**2 // chunks, size)) for chunk in range(chunks))
            return {chunk: 1 << source for chunk, source, target in parts if target == rank}
    raise ValueError(f"cannot verify a schedule of the unknown collective {schedule.collective!r}")
