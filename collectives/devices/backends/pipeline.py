"""The schedule of a pipeline through host memory, as data: what is done to each piece, where, and after what.

A schedule is made from places and numbers alone, so that it is checked without a GPU: every step has the steps that
it depends on behind it, whatever the speed of the streams between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

_DEPTH = 4  # pieces under way: enough that copies out, arithmetic and copies in all have one to work on

Kind = Literal["give", "take", "combine", "return", "fetch"]
"""What a step does: copy a contribution to the host; copy it to the owner; combine; copy the result to the host; copy
it to one who wants it."""


class Lane(NamedTuple):
    """What runs its steps one after another: a stream of a place's device."""

    place: int
    use: Literal["out", "in", "compute"]


class Buffer(NamedTuple):
    """Memory that steps read and write."""

    kind: Literal["tensor", "host", "near", "result"]
    """The piece itself at its place; a contribution on the host, or at the owner; the result on the host."""
    place: int
    """Whose memory it is; on the host, whose device writes it."""
    giver: int
    """Whose contribution it holds; the place itself where it holds none."""
    slot: int
    """Which of several such buffers; of the piece itself, the piece."""


@dataclass(frozen=True)
class Piece:
    """What a schedule must know of a piece."""

    owner: int
    """The place that combines it, or that has it to give."""
    givers: tuple[int, ...]
    """The places whose contributions come through the host."""
    takers: tuple[int, ...]
    """The places that get the result through the host."""
    combines: bool
    """Whether the owner has anything to do but hand it out."""


@dataclass(frozen=True)
class Step:
    """One thing to do to a piece."""

    kind: Kind
    piece: int
    lane: Lane
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    waits: tuple[int, ...] = ()
    """The steps of other lanes that must be done before, by their index in the schedule."""


def plan(pieces: Sequence[Piece], depth: int = _DEPTH) -> list[Step]:
    """The steps of a pipeline, in an order in which they may be started, or done one by one.

    Piece p uses the buffers of slot p modulo ``depth``. A step waits for the last step that wrote what it reads, and
    for those that last read or wrote what it overwrites. In a lane, what begins a later piece comes before what ends an
    earlier one, so that no lane is idle while a piece is away.

    Args:
        pieces: in the order in which they are begun.
        depth: how many slots there are, from 1.
    """
    stages = [list(_stages(number, piece, number % depth)) for number, piece in enumerate(pieces)]
    order = sorted(
        ((number + stage, -stage, number) for number, of_piece in enumerate(stages) for stage in range(len(of_piece)))
    )
    steps: list[Step] = []
    writers: dict[Buffer, int] = {}
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)  # since the buffer was last written
    for _, stage, number in order:
        for step in stages[number][-stage]:
            after = [writers[buffer] for buffer in (*step.reads, *step.writes) if buffer in writers]
            after += [reader for buffer in step.writes for reader in readers[buffer]]
            waits = tuple(sorted({one for one in after if steps[one].lane != step.lane}))
            for buffer in step.reads:
                readers[buffer].append(len(steps))
            for buffer in step.writes:
                writers[buffer], readers[buffer] = len(steps), []
            steps.append(Step(step.kind, step.piece, step.lane, step.reads, step.writes, waits))
    return steps


def _stages(number: int, piece: Piece, slot: int) -> Iterator[list[Step]]:
    """What is done to a piece, in five stages, of which the first and the last may be empty."""
    owner = piece.owner
    near = [Buffer("near", owner, giver, slot) for giver in piece.givers]
    own, result = Buffer("tensor", owner, owner, number), Buffer("result", owner, owner, slot)

    def step(kind: Kind, lane: Lane, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Step:
        return Step(kind, number, lane, tuple(reads), tuple(writes))

    hosts = [Buffer("host", giver, giver, slot) for giver in piece.givers]
    tensors = [Buffer("tensor", giver, giver, number) for giver in piece.givers]
    yield [step("give", Lane(one.place, "out"), [one], [host]) for one, host in zip(tensors, hosts, strict=True)]
    yield [step("take", Lane(owner, "in"), [host], [one]) for host, one in zip(hosts, near, strict=True)]
    yield [step("combine", Lane(owner, "compute"), near, [own])] if piece.combines else []
    yield [step("return", Lane(owner, "out"), [own], [result])] if piece.takers else []
    takers = [Buffer("tensor", taker, taker, number) for taker in piece.takers]
    yield [step("fetch", Lane(one.place, "in"), [result], [one]) for one in takers]
