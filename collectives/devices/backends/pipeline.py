"""Plan of a pipeline through host memory: the operations on each piece, their streams and their dependencies.

A plan is made from positions and numbers alone, so it can be tested without a GPU: every step names its dependencies on
other streams, so the result does not depend on their speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

_DEPTH = 4  # pieces in flight: enough to keep copies out, arithmetic and copies in busy

StepKind = Literal["send", "receive", "combine", "return", "fetch"]
"""Kind of a step.

"send" copies a contribution to the host, "receive" copies it to the owner, "combine" computes, "return" copies the
result to the host, and "fetch" copies it to another device.
"""


class StreamKey(NamedTuple):
    """A queue that runs its steps in order: a stream of a position's device."""

    position: int
    use: Literal["out", "in", "compute"]


class Buffer(NamedTuple):
    """Memory that steps read and write."""

    kind: Literal["tensor", "host", "device", "result"]
    """The piece itself; a contribution on the host or on the owner's device; or the result on the host."""
    position: int
    """Position that owns the memory; for host memory, the position whose device writes it."""
    source: int
    """Position whose contribution the memory holds; ``position`` if none."""
    slot: int
    """Number of the buffer among those of its kind; for the piece itself, the number of the piece."""


@dataclass(frozen=True)
class Piece:
    """Route of one piece of a tensor."""

    owner: int
    """Position that combines the piece, or whose piece is copied."""
    sources: tuple[int, ...]
    """Positions whose contributions pass through the host."""
    targets: tuple[int, ...]
    """Positions that receive the result through the host."""
    combines: bool
    """True if the owner computes or copies anything on its own device."""


@dataclass(frozen=True)
class PipelineStep:
    """One operation on a piece."""

    kind: StepKind
    piece: int
    stream: StreamKey
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    waits: tuple[int, ...] = ()
    """Indices in the plan of steps on other streams that must finish first."""


def plan(pieces: Sequence[Piece], depth: int = _DEPTH) -> list[PipelineStep]:
    """Return the steps of a pipeline, in an order in which they can be launched, or run one by one.

    Piece p uses the buffers of slot p modulo ``depth``. A step waits for the last step that wrote its inputs, and for
    those that last read or wrote its outputs. Within a stream, early steps of a later piece precede late steps of an
    earlier one, so that no stream idles while a piece is on another.

    Args:
        pieces: pieces in the order in which they start.
        depth: number of slots, from 1.
    """
    stages = [list(_stages(number, piece, number % depth)) for number, piece in enumerate(pieces)]
    order = sorted(
        ((number + stage, -stage, number) for number, of_piece in enumerate(stages) for stage in range(len(of_piece)))
    )
    steps: list[PipelineStep] = []
    writers: dict[Buffer, int] = {}
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)  # since the buffer was last written
    for _, stage, number in order:
        for step in stages[number][-stage]:
            after = [writers[buffer] for buffer in (*step.reads, *step.writes) if buffer in writers]
            after += [reader for buffer in step.writes for reader in readers[buffer]]
            waits = tuple(sorted({one for one in after if steps[one].stream != step.stream}))
            for buffer in step.reads:
                readers[buffer].append(len(steps))
            for buffer in step.writes:
                writers[buffer], readers[buffer] = len(steps), []
            steps.append(PipelineStep(step.kind, step.piece, step.stream, step.reads, step.writes, waits))
    return steps


def _stages(number: int, piece: Piece, slot: int) -> Iterator[list[PipelineStep]]:
    """Return the steps of a piece, in five stages, some of which may be empty."""
    owner = piece.owner
    copies = [Buffer("device", owner, source, slot) for source in piece.sources]
    own, result = Buffer("tensor", owner, owner, number), Buffer("result", owner, owner, slot)

    def step(kind: StepKind, stream: StreamKey, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> PipelineStep:
        return PipelineStep(kind, number, stream, tuple(reads), tuple(writes))

    hosts = [Buffer("host", source, source, slot) for source in piece.sources]
    tensors = [Buffer("tensor", source, source, number) for source in piece.sources]
    yield [
        step("send", StreamKey(tensor.position, "out"), [tensor], [host])
        for tensor, host in zip(tensors, hosts, strict=True)
    ]
    yield [step("receive", StreamKey(owner, "in"), [host], [copy]) for host, copy in zip(hosts, copies, strict=True)]
    yield [step("combine", StreamKey(owner, "compute"), copies, [own])] if piece.combines else []
    yield [step("return", StreamKey(owner, "out"), [own], [result])] if piece.targets else []
    targets = [Buffer("tensor", target, target, number) for target in piece.targets]
    yield [step("fetch", StreamKey(target.position, "in"), [result], [target]) for target in targets]
