"""Run one rank's part of a schedule over a transport."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gangline.collectives.engine.reduction import combine
from gangline.collectives.errors import GanglineError, ProtocolError
from gangline.collectives.schedule import Receive, Reduce, Send, Step
from gangline.collectives.transports.base import PIECE, MessageTag, ReceiveRequest, SendRequest, Transport


class Region(NamedTuple):
    """Memory of some numbered chunks of a schedule, which have nearly equal lengths."""

    flat: Tensor
    """Contiguous 1-d tensor."""
    chunks: range

    def holds(self, first: int, last: int) -> bool:
        """Return whether chunks ``first`` to ``last`` (exclusive) are side by side in this memory."""
        return first in self.chunks and last - 1 in self.chunks and (self.chunks.step == 1 or last - first == 1)

    def view(self, first: int, last: int) -> Tensor:
        """Return these chunks as a 1-d tensor."""
        begin, count, total = self.chunks.index(first), self.flat.numel(), len(self.chunks)
        return self.flat[begin * count // total : (begin + last - first) * count // total]


class Chunks:
    """Memory of all chunks of a schedule: each is read from the input until it is written.

    Chunks are written to the result, those of other ranks to scratch memory. The input is not changed, unless it is
    also the result.
    """

    def __init__(
        self, total: int, count: int, given: Region | None, result: Region | None, *, is_scratch: bool = False
    ) -> None:
        """Use an input and a result, whose memory may only overlap where they have the same chunks.

        ``total`` chunks have ``count`` elements together. A result may have another dtype. ``is_scratch``: the input
        may be overwritten.
        """
        first = result if given is None else given
        assert first is not None
        self._total, self._count, self._like = total, count, first.flat
        self._result, self._scratch = result, given if is_scratch else None
        self._target = result if result is not None and result.flat.dtype == self._like.dtype else None
        is_in_place = given is not None and self._target is not None and is_at(given, self._target)
        self._given = self._target if is_in_place else given
        self._written: dict[int, Region] = {}

    def source(self, first: int, last: int) -> Tensor:
        """Return chunks ``first`` to ``last`` (exclusive) for reading, as a contiguous 1-d tensor."""
        place = self._place(first)
        if any(self._place(chunk) is not place for chunk in range(first + 1, last)):
            place = self._region_for(first, last)
            self._copy(place, range(first, last))
        return place.view(first, last)

    def target(self, first: int, last: int) -> Tensor:
        """Return chunks ``first`` to ``last`` (exclusive) for writing, as a contiguous 1-d tensor."""
        place = self._region_for(first, last)
        self._written.update(dict.fromkeys(range(first, last), place))
        return place.view(first, last)

    def finish(self) -> None:
        """Copy the chunks of the result that are elsewhere."""
        if self._result is not None:
            self._copy(self._result, self._result.chunks)

    def _place(self, chunk: int) -> Region:
        place = self._written.get(chunk, self._given)
        assert place is not None, f"chunk {chunk} is read before it is written"
        return place

    def _region_for(self, first: int, last: int) -> Region:
        if self._target is not None and self._target.holds(first, last):
            return self._target
        if self._scratch is None or not self._scratch.holds(first, last):  # its unused parts take no physical memory
            self._scratch = Region(self._like.new_empty(self._count), range(self._total))
        return self._scratch

    def _copy(self, place: Region, chunks: range) -> None:
        for chunk in chunks:
            present = self._place(chunk)
            if present is place:
                continue
            values, into = present.view(chunk, chunk + 1), place.view(chunk, chunk + 1)
            if values.data_ptr() != into.data_ptr():
                into.copy_(values)
            self._written[chunk] = place


def is_at(inner: Region, outer: Region) -> bool:
    """Return whether a region is a part of another one, and has the same memory there."""
    if inner.flat is outer.flat:
        return inner.chunks == outer.chunks
    first, last = inner.chunks[0], inner.chunks[-1] + 1
    is_part = inner.holds(first, last) and outer.holds(first, last)
    return is_part and outer.view(first, last).data_ptr() == inner.flat.data_ptr()


class MisplacedMessageError(GanglineError):
    """A message of a different call; the engine turns it into a `MismatchError`."""

    def __init__(self, source: int, message_tag: MessageTag) -> None:
        super().__init__(f"rank {source} sent a message of call {message_tag.sequence}")
        self.source, self.message_tag = source, message_tag


class _Sent(NamedTuple):
    begin: int
    end: int
    """Addresses of the bytes."""
    request: SendRequest


def run(
    program: Iterable[Step],
    transport: Transport,
    chunks: Chunks,
    message_tag: MessageTag,
    op: str = "sum",
    divisor: int = 1,
) -> int:
    """Run one rank's steps and return when all its messages, which have this tag, have been read.

    ``program`` is `Schedule.program` of this rank; complete sums are divided by ``divisor``: the number of ranks for a
    mean.

    Returns:
        The time at which the first message had arrived, by `time.monotonic_ns`; 0 if there was none.

    Raises:
        MisplacedMessageError: if a message of another call arrives.
        ProtocolError: if a message has another length than expected.
        GanglineError: if a rank is dead, late or in another call.
    """
    pending: list[_Sent] = []
    arrived = 0
    for step in program:
        if isinstance(step, Send):
            data = chunks.source(step.first, step.last).view(torch.uint8)
            request = transport.send(step.to, data, message_tag)
            if not request.is_done():
                pending.append(_Sent(data.data_ptr(), data.data_ptr() + data.nbytes, request))
            continue
        if isinstance(step, Receive):
            now = _receive(step, transport, chunks, message_tag, pending)
        else:
            now = _reduce(step, transport, chunks, message_tag, pending, op, divisor if step.complete else 1)
        arrived = arrived or now
    for message in pending:
        message.request.wait()
    return arrived


def _receive(step: Receive, transport: Transport, chunks: Chunks, message_tag: MessageTag, pending: list[_Sent]) -> int:
    target = chunks.target(step.first, step.last)
    request = expect(transport, step.source, message_tag, target)
    arrived = time.monotonic_ns()
    unread = _unread(pending, target)
    received = torch.empty_like(target) if unread else target
    request.into(received.view(torch.uint8))
    _write_when_read(target, received, unread)
    return arrived


def _reduce(
    step: Reduce,
    transport: Transport,
    chunks: Chunks,
    message_tag: MessageTag,
    pending: list[_Sent],
    op: str,
    divisor: int,
) -> int:
    own = chunks.source(step.first, step.last)
    requests = [None if rank == transport.rank else expect(transport, rank, message_tag, own) for rank in step.ranks]
    arrived = time.monotonic_ns()
    target = chunks.target(step.first, step.last)
    unread = _unread(pending, target)
    result = torch.empty_like(target) if unread else target
    elements = PIECE // own.element_size()
    for index in range(-(-own.numel() // elements)):
        span = slice(index * elements, (index + 1) * elements)
        values: list[Tensor] = []
        for request in requests:  # no list comprehension, which would be another frame in Python 3.11
            if request is None:
                values.append(own[span])
            else:
                piece = request.piece(index)
                if own.is_complex() and piece.data_ptr() % own.element_size():
                    piece = piece.clone()  # torch's complex kernels end in a segmentation fault elsewhere
                values.append(piece.view(own.dtype))
        combine(values, op, result[span], divisor)
    for request in requests:
        if request is not None:
            request.done()
    _write_when_read(target, result, unread)
    return arrived


def expect(transport: Transport, source: int, message_tag: MessageTag, like: Tensor) -> ReceiveRequest:
    """Wait for a rank's next message and check that it has this tag and the length of ``like``."""
    request = transport.receive(source)
    if request.message_tag != message_tag:
        raise MisplacedMessageError(source, request.message_tag)
    expected = like.numel() * like.element_size()
    if request.nbytes != expected:
        raise ProtocolError(f"rank {source} sent {request.nbytes} bytes, expected {expected}")
    return request


def _unread(pending: list[_Sent], target: Tensor) -> list[_Sent]:
    """Return the messages sent from the memory of a tensor that have not been read yet."""
    pending[:] = [message for message in pending if not message.request.is_done()]
    begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
    return [message for message in pending if message.begin < end and begin < message.end]


def _write_when_read(target: Tensor, values: Tensor, unread: list[_Sent]) -> None:
    """Copy values that could not be written into ``target`` at once, after its old values have been read."""
    if unread:
        for message in unread:
            message.request.wait()
        target.copy_(values)
