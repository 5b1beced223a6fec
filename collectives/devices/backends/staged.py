"""Staged backend: pieces pass through pinned host memory, for GPUs without peer access.

The GPU that combines a piece, its owner, receives the others' contributions through host buffers, and distributes the
result through another one. Copies from a GPU, copies to it and its arithmetic run on separate streams. Every such
buffer exists twice: while a piece is copied from one, the next piece is copied into the other. On CPU devices the same
operations run on ordinary tensors, one after another.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gangline.collectives.devices.backends.base import Backend, Flattened, Transfer, in_slices, join
from gangline.collectives.engine import host_staging, reduction

PIECE = 4 << 20
"""Bytes of a piece: smaller pieces idle the bus between copies, larger ones lengthen fill and drain."""
_STAGES = 5  # of `Staged._stages`

_Use = Literal["out", "in", "compute"]
"""Use of a stream: copies to the host, copies from the host, or arithmetic, on the caller's current stream."""


class Buffer:
    """Memory that operations on several streams use, and the events after which it can be read or written."""

    def __init__(self, memory: Tensor, written: Sequence[torch.cuda.Event] = ()) -> None:
        self.memory = memory
        self.tensor = memory
        """View of the memory for the values of a piece."""
        self.written = written
        """Event of the last write, if any."""
        self.read: list[torch.cuda.Event] = []
        """Events of the reads since then, each of which has waited for the write."""


class Staged(Backend):
    """Collectives through the host, in the order of the positions; float16 and bfloat16 in float32, rounded once.

    All GPUs combine the pieces of an all-reduce in turn. Pinned host memory: up to 2 pieces per GPU and 2 for results;
    each GPU needs as much for received contributions.
    """

    name = "staged"

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__(devices)
        self._lock = threading.Lock()  # threads share the buffers
        self._buffers: defaultdict[tuple[str, int, int], deque[Buffer]] = defaultdict(deque)
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    @classmethod
    def unsupported_reason(cls, devices: Sequence[torch.device]) -> str:  # noqa: D102  inherited
        return "some are GPUs and some are not" if len({device.type for device in devices}) > 1 else ""

    def all_reduce(self, tensors: Sequence[Tensor], op: str) -> None:  # noqa: D102  inherited
        with Flattened() as flattened:
            flats = [flattened.written(tensor) for tensor in tensors]
            count = max(len(self.owners), -(-flats[0].nbytes // PIECE))
            self._run(in_slices(flats, [*self.owners.values()], count), op)

    def move(self, transfers: Sequence[Transfer], op: str = "sum") -> None:  # noqa: D102  inherited
        pieces: list[Transfer] = []
        with Flattened() as flattened:
            for values, total, outs in flattened.transfers(transfers):
                step = PIECE // total.itemsize
                for start in range(0, len(total), step):
                    part = slice(start, start + step)
                    pieces.append(([one[part] for one in values], total[part], [one[part] for one in outs]))
            self._run(pieces, op)

    def _are_near(self, position: int, other: int) -> bool:
        """Return whether one stream can access the tensors of both positions: they are the same, or on one GPU."""
        device = self.devices[position]
        return position == other or (device.type == "cuda" and device == self.devices[other])

    def _run(self, pieces: Sequence[Transfer], op: str) -> None:
        """Run pieces after the work on the GPUs' current streams, and make these streams wait for them.

        A piece is one stage behind the previous piece. Operations are enqueued in this order, so no stream is idle
        while a piece is on another.
        """
        with self._lock:
            gpus = {device for device in self.devices if device.type == "cuda"}
            streams = [self._stream(device, use) for device in gpus for use in ("out", "in")]
            callers = [torch.cuda.current_stream(device) for device in gpus]
            join(streams, callers)
            stages = [self._stages(*piece, op) for piece in pieces]
            for newest in range(len(pieces) + _STAGES - 1):
                for of_piece in stages[max(0, newest - _STAGES + 1) : newest + 1]:
                    next(of_piece, None)
            join(callers, streams)

    def _stages(self, values: Sequence[Tensor], total: Tensor, outs: Sequence[Tensor], op: str) -> Iterator[None]:
        """Run a piece: its values to the host, to the owner, combined, to the host, and to the other devices."""
        owner = self.owners[total.device]
        targets = {position: out for position, out in enumerate(outs) if out.data_ptr() != total.data_ptr()}
        near = [targets.pop(position) for position in list(targets) if self._are_near(position, owner)]
        sources = [position for position in range(len(values)) if not self._are_near(position, owner)]
        result, inputs = Buffer(total), list(values)

        on_host = [self._next_buffer("value", position, position, total) for position in sources]
        for position, buffer in zip(sources, on_host, strict=True):
            self._copy(position, "out", Buffer(values[position]), buffer)
        yield
        received = [self._next_buffer("received", owner, position, total) for position in sources]
        for position, source, buffer in zip(sources, on_host, received, strict=True):
            self._copy(owner, "in", source, buffer)
            inputs[position] = buffer.tensor
        yield
        if values or near:
            self._enqueue(owner, "compute", received, result, partial(_combine, inputs, op, total, near))
        yield
        if targets:
            shared = self._next_buffer("result", owner, owner, total)
            self._copy(owner, "out", result, shared)
        yield
        for position, out in targets.items():
            self._copy(position, "in", shared, Buffer(out))

    def _copy(self, position: int, use: _Use, source: Buffer, target: Buffer) -> None:
        copy = partial(target.tensor.copy_, source.tensor, non_blocking=True)
        self._enqueue(position, use, [source], target, copy)

    def _enqueue(
        self, position: int, use: _Use, read: Sequence[Buffer], written: Buffer, operation: Callable[[], object]
    ) -> None:
        """Run an operation on a stream of a position's device, after those that wrote or used its memory before."""
        device = self.devices[position]
        if device.type == "cpu":
            operation()
            return
        stream = torch.cuda.current_stream(device) if use == "compute" else self._stream(device, use)
        for events in (*(buffer.written for buffer in read), written.read or written.written):
            for event in events:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            operation()
        done = stream.record_event()
        for buffer in read:
            buffer.read.append(done)
        written.written, written.read = [done], []

    def _next_buffer(
        self, kind: Literal["value", "received", "result"], position: int, source: int, like: Tensor
    ) -> Buffer:
        """Return the buffer of two that was used longer ago, with a tensor like another one of at most `PIECE` bytes.

        It holds values of ``source``, and is written by the device of ``position``: "received" on that device, else on
        the host.
        """
        pair = self._buffers[kind, position, source]
        if len(pair) < 2:
            pair.append(self._allocate(self.devices[position], on_host=kind != "received"))
        else:
            pair.rotate()
        pair[-1].tensor = pair[-1].memory[: like.nbytes].view(like.dtype)
        return pair[-1]

    @torch.inference_mode(mode=False)
    def _allocate(self, device: torch.device, *, on_host: bool) -> Buffer:
        if device.type == "cpu":
            return Buffer(torch.empty(PIECE, dtype=torch.uint8, device=device))
        if on_host:
            return Buffer(host_staging.pinned_memory(PIECE, torch.uint8))
        memory = torch.empty(PIECE, dtype=torch.uint8, device=device)
        return Buffer(memory, [torch.cuda.current_stream(device).record_event()])  # earlier work may still use it

    def _stream(self, device: torch.device, use: str) -> torch.cuda.Stream:
        if (device, use) not in self._streams:
            self._streams[device, use] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device, use]


def _combine(values: Sequence[Tensor], op: str, total: Tensor, outs: Sequence[Tensor]) -> None:
    if values:
        reduction.combine(values, op, total, len(values) if op == "mean" else 1)
    for out in outs:
        out.copy_(total)
