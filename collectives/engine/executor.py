"""Runs one rank's part of a schedule over a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.collectives.engine.reduction import combine
from gangline.collectives.errors import GanglineError, ProtocolError
from gangline.collectives.schedule import Receive, Reduce, Send, Step
from gangline.collectives.transports.base import PIECE, MessageTag, ReceiveRequest, SendRequest, Transport


class Chunks(ABC):
    """Where the numbered chunks of a schedule lie."""

    @abstractmethod
    def source(self, first: int, last: int) -> Tensor:
        """Chunks ``first`` to ``last`` (exclusive) to be read, a contiguous 1-d tensor."""

    @abstractmethod
    def target(self, first: int, last: int) -> Tensor:
        """The same chunks to be written."""


class Parts(Chunks):
    """Chunks that are nearly equal parts of one tensor."""

    def __init__(self, flat: Tensor, chunks: int) -> None:
        """Cut a contiguous 1-d tensor."""
        self._flat = flat
        self._count = flat.numel()
        self._chunks = chunks

    def source(self, first: int, last: int) -> Tensor:  # noqa: D102  as said above
        count, chunks = self._count, self._chunks
        return self._flat[first * count // chunks : last * count // chunks]

    target = source


class Rows(Chunks):
    """The chunks of an all-to-all: chunk ``i * size + j`` is what rank i has for rank j."""

    def __init__(self, rank: int, size: int, given: Tensor, taken: Tensor) -> None:
        """Lay out two contiguous (size, n) tensors: what this rank gives, and what it gets."""
        self._rank, self._size = rank, size
        self._given, self._taken = given, taken

    def source(self, first: int, last: int) -> Tensor:  # noqa: D102
        begin = first - self._rank * self._size
        return self._given[begin : begin + last - first].view(-1)

    def target(self, first: int, last: int) -> Tensor:  # noqa: D102
        if last - first != 1:
            raise ValueError(f"chunks {first} to {last} of an all-to-all come from several ranks; expected one chunk")
        return self._taken[first // self._size]


@dataclass(slots=True)
class _OnTheWay:
    first: int
    last: int
    send_request: SendRequest


class MisplacedMessageError(GanglineError):
    """A message of another call than this rank's: what the caller makes a `MismatchError` of."""

    def __init__(self, source: int, message_tag: MessageTag) -> None:
        super().__init__(f"rank {source} sent a message of call {message_tag.sequence}")
        self.source, self.message_tag = source, message_tag


def run(
    program: Iterable[Step],
    transport: Transport,
    chunks: Chunks,
    message_tag: MessageTag,
    op: str = "sum",
    divisor: int = 1,
) -> None:
    """Run one rank's steps; when it returns, all that this rank sent has been read.

    Args:
        program: `Schedule.program` of this rank.
        transport: to the others.
        chunks: where the chunks lie.
        message_tag: what the messages belong to.
        op: how values are combined.
        divisor: what complete sums are divided by: the number of ranks for a mean.

    Raises:
        MisplacedMessageError: a rank is at another call.
        GanglineError: a rank is dead, late or elsewhere.
    """
    execution = _Execution(transport, chunks, message_tag, op, divisor)
    for step in program:
        if isinstance(step, Send):
            execution.send(step)
        elif isinstance(step, Receive):
            execution.receive(step)
        else:
            execution.reduce(step)
    execution.finish()


class _Execution:
    def __init__(self, transport: Transport, chunks: Chunks, message_tag: MessageTag, op: str, divisor: int) -> None:
        self._transport, self._chunks, self._message_tag = transport, chunks, message_tag
        self._op, self._divisor = op, divisor
        self._on_the_way: list[_OnTheWay] = []

    def send(self, step: Send) -> None:
        data = _bytes(self._chunks.source(step.first, step.last))
        send_request = self._transport.send(step.to, data, self._message_tag)
        if not send_request.is_done():
            self._on_the_way.append(_OnTheWay(step.first, step.last, send_request))

    def receive(self, step: Receive) -> None:
        target = self._chunks.target(step.first, step.last)
        receive_request = self._expect(step.source, target)
        if self._is_needed(step.first, step.last):
            aside = torch.empty_like(target)
            receive_request.into(_bytes(aside))
            self._wait_for(step.first, step.last)
            target.copy_(aside)
        else:
            receive_request.into(_bytes(target))

    def reduce(self, step: Reduce) -> None:
        own = self._chunks.source(step.first, step.last)
        receive_request = [None if rank == self._transport.rank else self._expect(rank, own) for rank in step.ranks]
        target = self._chunks.target(step.first, step.last)
        is_needed = self._is_needed(step.first, step.last)
        out = torch.empty_like(target) if is_needed else target
        divisor = self._divisor if step.complete else 1
        elements = PIECE // own.element_size()
        for index in range(-(-own.numel() // elements)):
            span = slice(index * elements, (index + 1) * elements)
            values = [own[span] if one is None else one.piece(index).view(own.dtype) for one in receive_request]
            combine(values, self._op, out[span], divisor)
        for one in receive_request:
            if one is not None:
                one.done()
        if is_needed:
            self._wait_for(step.first, step.last)
            target.copy_(out)

    def finish(self) -> None:
        for message in self._on_the_way:
            message.send_request.wait()

    def _expect(self, source: int, like: Tensor) -> ReceiveRequest:
        receive_request = self._transport.receive(source)
        if receive_request.message_tag != self._message_tag:
            raise MisplacedMessageError(source, receive_request.message_tag)
        expected = like.numel() * like.element_size()
        if receive_request.nbytes != expected:
            raise ProtocolError(f"rank {source} sent {receive_request.nbytes} bytes, expected {expected}")
        return receive_request

    def _is_needed(self, first: int, last: int) -> bool:
        """Whether somebody still has to read what lies in these chunks."""
        self._on_the_way = [message for message in self._on_the_way if not message.send_request.is_done()]
        return any(message.first < last and first < message.last for message in self._on_the_way)

    def _wait_for(self, first: int, last: int) -> None:
        for message in self._on_the_way:
            if message.first < last and first < message.last:
                message.send_request.wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
