"""Pieces through pinned host memory, for GPUs that do not reach each other's memory.

The GPU that combines a piece gets the others' contributions through host buffers, and hands out the result through
another. Copies out of a GPU, copies into it and its arithmetic run on streams of their own, joined by events, so that
the pieces follow each other as in a pipe (`pipeline.py` says what waits for what). On the host
the same steps run over ordinary tensors, one after another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer
from gangline.collectives.devices.backends.pipeline import Buffer, Lane, Piece, Step, plan
from gangline.collectives.engine import reduction

PIECE = 4 << 20
"""Bytes of a piece: less leaves a bus idle between copies, more leaves the pipe empty at its ends."""
_ALIGN = 16  # elements


@dataclass(frozen=True)
class StagedWork:
    """The tensors of a piece, 1-d and equally long, by place."""

    piece: Piece
    values: Sequence[Tensor]
    total: Tensor
    outs: dict[int, Tensor]


class Workspace:
    """The buffers of the pipeline, and what a step does with them; made when first needed, and kept."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._buffers: dict[Buffer, Tensor] = {}

    def make(self, steps: Sequence[Step]) -> None:
        """Have the buffers of these steps."""
        for step in steps:
            for buffer in (*step.reads, *step.writes):
                if buffer.kind != "tensor" and buffer not in self._buffers:
                    self._buffers[buffer] = self._made(buffer)

    def _made(self, buffer: Buffer) -> Tensor:
        device = self._devices[buffer.place]
        if buffer.kind == "near":
            return torch.empty(PIECE, dtype=torch.uint8, device=device)
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def do(self, step: Step, work: StagedWork, op: str) -> None:
        """Start what the step does on the current streams."""
        if step.kind == "combine":
            self._combine(step, work, op)
            return
        [source] = [self._tensor(buffer, work, is_read=True) for buffer in step.reads]
        [target] = [self._tensor(buffer, work, is_read=False) for buffer in step.writes]
        target.copy_(source, non_blocking=True)

    def _combine(self, step: Step, work: StagedWork, op: str) -> None:
        near = {buffer.giver: buffer for buffer in step.reads if buffer.kind == "near"}
        values = [
            self._tensor(near[place], work, is_read=True) if place in near else value
            for place, value in enumerate(work.values)
        ]
        if values:
            reduction.combine(values, op, work.total, len(values) if op == "mean" else 1)
        for place, out in work.outs.items():
            if place not in work.piece.takers:  # on this device already
                out.copy_(work.total)

    def _tensor(self, buffer: Buffer, work: StagedWork, *, is_read: bool) -> Tensor:
        if buffer.kind != "tensor":
            return self._buffers[buffer][: work.total.nbytes].view(work.total.dtype)
        if buffer.place == work.piece.owner:
            return work.total
        return work.values[buffer.place] if is_read else work.outs[buffer.place]


class Staged(Backend):
    """Combines in the order of the places; float16 and bfloat16 in float32, rounded once.

    The pieces of an all-reduce are combined by all GPUs in turn. Host memory: up to 4 pieces a GPU and 4 for results,
    pinned; on each GPU as much for what it is given.
    """

    name = "staged"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._lock = threading.Lock()  # callers of several threads share the buffers
        self._workspace = Workspace(self.devices)
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._last: list[torch.cuda.Event] = []  # behind all of the call before: then its buffers are free

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        flattened = Flattened()
        flats = [flattened.written(tensor) for tensor in tensors]
        owners = [place for place in range(len(flats)) if not any(self._is_near(place, one) for one in range(place))]
        works = []
        for number, part in enumerate(cut(flats[0], len(owners))):
            owner = owners[number % len(owners)]
            pieces = [flat[part] for flat in flats]
            outs = {place: piece for place, piece in enumerate(pieces) if place != owner}
            works.append(self._work(owner, pieces, pieces[owner], outs))
        self._run(works, op)
        flattened.finish()

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        flattened = Flattened()
        works = []
        for values, total, outs in flattened.transfers(transfers):
            owner = self.devices.index(total.device)
            for part in cut(total, 1):
                given = {place: out[part] for place, out in enumerate(outs)}
                works.append(self._work(owner, [value[part] for value in values], total[part], given))
        self._run(works, op)
        flattened.finish()

    def _work(self, owner: int, values: Sequence[Tensor], total: Tensor, outs: dict[int, Tensor]) -> StagedWork:
        others = {place: out for place, out in outs.items() if out.data_ptr() != total.data_ptr()}
        givers = tuple(place for place in range(len(values)) if not self._is_near(place, owner))
        takers = tuple(place for place in others if not self._is_near(place, owner))
        combines = bool(values) or len(takers) < len(others)
        return StagedWork(Piece(owner, givers, takers, combines), values, total, others)

    def _is_near(self, place: int, owner: int) -> bool:
        """Whether the owner's stream reaches what is at a place: on the host each place is taken for a device."""
        device = self.devices[place]
        return place == owner or (device.type == "cuda" and device == self.devices[owner])

    def _run(self, works: Sequence[StagedWork], op: str) -> None:
        with self._lock:
            self._run_alone(works, op)

    def _run_alone(self, works: Sequence[StagedWork], op: str) -> None:
        steps = plan([work.piece for work in works])
        self._workspace.make(steps)
        gpus = {device for device in self.devices if device.type == "cuda"}
        lanes = [self._stream(device, use) for device in gpus for use in ("out", "in")]
        begun = [torch.cuda.current_stream(device).record_event() for device in gpus] + self._last
        for lane in lanes:
            _wait(lane, begun)
        events: list[torch.cuda.Event] = []
        for step in steps:
            stream = self._stream_of(step.lane)
            if stream is not None:
                _wait(stream, [events[number] for number in step.waits])
            with torch.cuda.stream(stream):
                self._workspace.do(step, works[step.piece], op)
            if stream is not None:
                events.append(stream.record_event())
        ended = [lane.record_event() for lane in lanes]
        for device in gpus:
            _wait(torch.cuda.current_stream(device), ended)
        self._last = [torch.cuda.current_stream(device).record_event() for device in gpus]

    def _stream_of(self, lane: Lane) -> torch.cuda.Stream | None:
        device = self.devices[lane.place]
        if device.type == "cpu":
            return None
        return torch.cuda.current_stream(device) if lane.use == "compute" else self._stream(device, lane.use)

    def _stream(self, device: torch.device, use: str) -> torch.cuda.Stream:
        if (device, use) not in self._streams:
            self._streams[device, use] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device, use]


def cut(tensor: Tensor, places: int) -> list[slice]:
    """A 1-d tensor in pieces of at most `PIECE` bytes, and of a size that gives each place one."""
    share = -(-len(tensor) // (places * _ALIGN)) * _ALIGN
    step = max(1, min(share, PIECE // tensor.itemsize))
    return [slice(start, min(start + step, len(tensor))) for start in range(0, len(tensor), step)]


def unfit(devices: Sequence[torch.device]) -> str:
    """Why these devices cannot be joined so whatever is installed; "" where they may be."""
    if len({device.type for device in devices}) > 1:
        return "some are GPUs and some are not"
    return ""


def _wait(stream: torch.cuda.Stream, events: Iterable[torch.cuda.Event]) -> None:
    for event in events:
        stream.wait_event(event)
