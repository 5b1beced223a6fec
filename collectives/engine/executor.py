"""Run one rank's part of a schedule over a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gangline.collectives.engine.reduction import combine
from gangline.collectives.errors import GanglineError, ProtocolError
from gangline.collectives.schedule import Receive, Reduce, Send, Step
from gangline.collectives.transports.base import PIECE, MessageTag, ReceiveRequest, SendRequest, Transport


class Chunks(ABC):
    """Memory of the numbered chunks of a schedule."""

    @abstractmethod
    def source(self, first: int, last: int) -> Tensor:
        """Return chunks ``first`` to ``last`` (exclusive) for reading, as a contiguous 1-d tensor."""

    @abstractmethod
    def target(self, first: int, last: int) -> Tensor:
        """Return chunks ``first`` to ``last`` (exclusive) for writing, as a contiguous 1-d tensor."""


class EqualChunks(Chunks):
    """Chunks of nearly equal length, cut from one contiguous 1-d tensor."""

    def __init__(self, flat: Tensor, chunks: int) -> None:
        self._flat = flat
        self._count = flat.numel()
        self._chunks = chunks

    def source(self, first: int, last: int) -> Tensor:  # noqa: D102  as the base says
        count, chunks = self._count, self._chunks
        return self._flat[first * count // chunks : last * count // chunks]

    target = source


class AllToAllChunks(Chunks):
    """Chunks of an all-to-all: chunk ``i * size + j`` is the row that rank i sends to rank j."""

    def __init__(self, rank: int, size: int, sent: Tensor, received: Tensor) -> None:
        """Use two contiguous (size, n) tensors: the rows that this rank sends, and the rows that it receives."""
        self._rank, self._size = rank, size
        self._sent, self._received = sent, received

    def source(self, first: int, last: int) -> Tensor:  # noqa: D102
        begin = first - self._rank * self._size
        return self._sent[begin : begin + last - first].view(-1)

    def target(self, first: int, last: int) -> Tensor:  # noqa: D102
        if last - first != 1:
            raise ValueError(f"chunks {first} to {last} of an all-to-all come from several ranks; expected one chunk")
        return self._received[first // self._size]


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
) -> None:
    """Run one rank's steps and return when all its messages have been read.

    Args:
        program: `Schedule.program` of this rank.
        transport: connects the schedule's ranks.
        chunks: memory of the schedule's chunks.
        message_tag: tag of every message of this call.
        op: a name in `reduction.OPERATIONS`.
        divisor: divisor of complete sums: the number of ranks for a mean.

    Raises:
        MisplacedMessageError: if a message of another call arrives.
        ProtocolError: if a message has another length than expected.
        GanglineError: if a rank is dead, late or in another call.
    """
    pending: list[_Sent] = []
    for step in program:
        if isinstance(step, Send):
            data = chunks.source(step.first, step.last).view(torch.uint8)
            request = transport.send(step.to, data, message_tag)
            if not request.is_done():
                pending.append(_Sent(data.data_ptr(), data.data_ptr() + data.nbytes, request))
        elif isinstance(step, Receive):
            _receive(step, transport, chunks, message_tag, pending)
        else:
            _reduce(step, transport, chunks, message_tag, pending, op, divisor if step.complete else 1)
    for message in pending:
        message.request.wait()


def _receive(
    step: Receive, transport: Transport, chunks: Chunks, message_tag: MessageTag, pending: list[_Sent]
) -> None:
    target = chunks.target(step.first, step.last)
    request = expect(transport, step.source, message_tag, target)
    unread = _unread(pending, target)
    received = torch.empty_like(target) if unread else target
    request.into(received.view(torch.uint8))
    _write_when_read(target, received, unread)


def _reduce(
    step: Reduce,
    transport: Transport,
    chunks: Chunks,
    message_tag: MessageTag,
    pending: list[_Sent],
    op: str,
    divisor: int,
) -> None:
    own = chunks.source(step.first, step.last)
    requests = [None if rank == transport.rank else expect(transport, rank, message_tag, own) for rank in step.ranks]
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
