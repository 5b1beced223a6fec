"""Staged backend: pieces pass through pinned host memory, for GPUs without peer access.

The GPU that combines a piece receives the others' contributions through host buffers, and distributes the result
through another one. Copies from a GPU, copies to it and its arithmetic run on separate streams, ordered by events, so
that pieces are pipelined (`plan`). On CPU devices the same steps run on ordinary tensors, one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer
from gangline.collectives.devices.backends.pipeline import Buffer, Piece, PipelineStep, StreamKey, plan
from gangline.collectives.engine import reduction

PIECE = 4 << 20
"""Bytes of a piece: smaller pieces idle the bus between copies, larger ones lengthen fill and drain."""
_ALIGN = 16  # elements


@dataclass(frozen=True)
class StagedWork:
    """Tensors of a piece, 1-D and of one length, by position."""

    piece: Piece
    values: Sequence[Tensor]
    total: Tensor
    outs: dict[int, Tensor]


class Workspace:
    """Executor of the pipeline's steps, and its buffers, which are allocated on first use and kept."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._buffers: dict[Buffer, Tensor] = {}

    def make(self, steps: Sequence[PipelineStep]) -> None:
        """Allocate the buffers of these steps."""
        for step in steps:
            for buffer in (*step.reads, *step.writes):
                if buffer.kind != "tensor" and buffer not in self._buffers:
                    self._buffers[buffer] = self._allocate(buffer)

    @torch.inference_mode(mode=False)
    def _allocate(self, buffer: Buffer) -> Tensor:
        device = self._devices[buffer.position]
        if buffer.kind == "device":
            return torch.empty(PIECE, dtype=torch.uint8, device=device)
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu")

    def do(self, step: PipelineStep, work: StagedWork, op: str) -> None:
        """Launch a step on the current streams."""
        if step.kind == "combine":
            self._combine(step, work, op)
            return
        [source] = [self._tensor(buffer, work, is_read=True) for buffer in step.reads]
        [target] = [self._tensor(buffer, work, is_read=False) for buffer in step.writes]
        target.copy_(source, non_blocking=True)

    def _combine(self, step: PipelineStep, work: StagedWork, op: str) -> None:
        copied = {buffer.source: buffer for buffer in step.reads if buffer.kind == "device"}
        values = [
            self._tensor(copied[position], work, is_read=True) if position in copied else value
            for position, value in enumerate(work.values)
        ]
        if values:
            reduction.combine(values, op, work.total, len(values) if op == "mean" else 1)
        for position, out in work.outs.items():
            if position not in work.piece.targets:  # on the owner's device
                out.copy_(work.total)

    def _tensor(self, buffer: Buffer, work: StagedWork, *, is_read: bool) -> Tensor:
        if buffer.kind != "tensor":
            return self._buffers[buffer][: work.total.nbytes].view(work.total.dtype)
        if buffer.position == work.piece.owner:
            return work.total
        return work.values[buffer.position] if is_read else work.outs[buffer.position]


class Staged(Backend):
    """Collectives through the host, in the order of the positions; float16 and bfloat16 in float32, rounded once.

    All GPUs combine the pieces of an all-reduce in turn. Pinned host memory: up to 4 pieces per GPU and 4 for results;
    each GPU needs as much for received contributions.
    """

    name = "staged"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._lock = threading.Lock()  # threads share the buffers
        self._workspace = Workspace(self.devices)
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._last: list[torch.cuda.Event] = []  # after these events the previous call's buffers are free

    @classmethod
    def unsupported_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        return "some are GPUs and some are not" if len({device.type for device in devices}) > 1 else ""

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            flats = [flattened.written(tensor) for tensor in tensors]
            owners = [
                position
                for position in range(len(flats))
                if not any(self._same_device(position, other) for other in range(position))
            ]
            works = []
            for number, part in enumerate(cut(flats[0], len(owners))):
                owner = owners[number % len(owners)]
                pieces = [flat[part] for flat in flats]
                outs = {position: piece for position, piece in enumerate(pieces) if position != owner}
                works.append(self._work(owner, pieces, pieces[owner], outs))
            self._run(works, op)

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            works = []
            for values, total, outs in flattened.transfers(transfers):
                owner = self.devices.index(total.device)
                for part in cut(total, 1):
                    given = {position: out[part] for position, out in enumerate(outs)}
                    works.append(self._work(owner, [value[part] for value in values], total[part], given))
            self._run(works, op)

    def _work(self, owner: int, values: Sequence[Tensor], total: Tensor, outs: dict[int, Tensor]) -> StagedWork:
        others = {position: out for position, out in outs.items() if out.data_ptr() != total.data_ptr()}
        sources = tuple(position for position in range(len(values)) if not self._same_device(position, owner))
        targets = tuple(position for position in others if not self._same_device(position, owner))
        combines = bool(values) or len(targets) < len(others)
        return StagedWork(Piece(owner, sources, targets, combines), values, total, others)

    def _same_device(self, position: int, owner: int) -> bool:
        """Return whether the owner's stream can access a position's tensors; distinct CPU positions never qualify."""
        device = self.devices[position]
        return position == owner or (device.type == "cuda" and device == self.devices[owner])

    def _run(self, works: Sequence[StagedWork], op: str) -> None:
        with self._lock:
            steps = plan([work.piece for work in works])
            self._workspace.make(steps)
            gpus = {device for device in self.devices if device.type == "cuda"}
            streams = [self._stream(device, use) for device in gpus for use in ("out", "in")]
            begun = [torch.cuda.current_stream(device).record_event() for device in gpus] + self._last
            for stream in streams:
                _wait(stream, begun)
            events: list[torch.cuda.Event] = []
            for step in steps:
                own_stream = self._stream_of(step.stream)
                if own_stream is not None:
                    _wait(own_stream, [events[number] for number in step.waits])
                with torch.cuda.stream(own_stream):
                    self._workspace.do(step, works[step.piece], op)
                if own_stream is not None:
                    events.append(own_stream.record_event())
            ended = [stream.record_event() for stream in streams]
            for device in gpus:
                _wait(torch.cuda.current_stream(device), ended)
            self._last = [torch.cuda.current_stream(device).record_event() for device in gpus]

    def _stream_of(self, key: StreamKey) -> torch.cuda.Stream | None:
        device = self.devices[key.position]
        if device.type == "cpu":
            return None
        return torch.cuda.current_stream(device) if key.use == "compute" else self._stream(device, key.use)

    def _stream(self, device: torch.device, use: str) -> torch.cuda.Stream:
        if (device, use) not in self._streams:
            self._streams[device, use] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device, use]


def cut(tensor: Tensor, positions: int) -> list[slice]:
    """Return slices of a 1-D tensor: at most `PIECE` bytes each, and small enough that each position gets one."""
    share = -(-len(tensor) // (positions * _ALIGN)) * _ALIGN
    step = max(1, min(share, PIECE // tensor.itemsize))
    return [slice(start, min(start + step, len(tensor))) for start in range(0, len(tensor), step)]


def _wait(stream: torch.cuda.Stream, events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        stream.wait_event(event)
