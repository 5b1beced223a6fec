"""Transport through shared memory between the processes of one host.

A message is an entry in a queue from one rank to another: its tag and the location of its bytes.

- remote: anywhere in the sender's memory; the receiver reads it by cross-memory attach. One copy.
- staged: the sender copies it, piece by piece, into staging buffers that the receiver reads. For small messages, and
  for all messages if the kernel does not let ranks read each other's memory.

Each rank writes only its own segment: its queues, its staging buffers, and its read counters of the others' queues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.collectives.limits import PEER_LOST_SECONDS
from gangline.collectives.transports.base import (
    PIECE,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
)
from gangline.collectives.transports.shm import cma
from gangline.collectives.transports.shm.futex_wakeup import FutexWakeup
from gangline.collectives.transports.shm.host_group import HostGroup, padded
from gangline.collectives.transports.shm.segments import Segment, Words

_Queue = TypeVar("_Queue")
_REMOTE, _STAGED = 1, 2
_SMALL = 1 << 15  # maximum bytes of a staged message: two system calls cost more than a second copy

# Layout of a segment: per peer, counters (one cache line) and queue entries; then per peer, staging buffers.
_ENTRIES = 64
_WORDS = 8  # of an entry: count, sequence, code, nbytes, kind, location, two unused
_COUNT, _SEQUENCE, _CODE, _NBYTES, _KIND, _LOCATION = range(6)
_BUFFERS = 4
_COUNTERS = 8  # words per peer: messages read, pieces read, pieces staged, unused
_READ, _PIECES_READ, _PIECES_STAGED = range(3)
_PEER_BYTES = 8 * (_COUNTERS + _ENTRIES * _WORDS)


@dataclass(eq=False)
class _Outgoing(SendRequest):
    """Message that is not posted yet, or whose bytes the receiver still needs."""

    queue: _SendQueue
    number: int
    data: Tensor
    message_tag: MessageTag
    kind: int
    location: int
    """Address of a remote message, number of the first piece of a staged one."""
    is_posted: bool = False
    pieces_left: int = 0

    def is_done(self) -> bool:
        if self.kind == _STAGED:
            return self.is_posted and not self.pieces_left
        return self.queue.receiver_counters[_READ] >= self.number

    def wait(self) -> None:
        if not self.is_done():
            self.queue.transport.wait_for(self.queue.to, self.is_done)


class _MadeAtUse(dict[int, _Queue]):
    """Queues by rank, created on use: most ranks of a large group only exchange slots."""

    def __init__(self, make: Callable[[int], _Queue]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, rank: int) -> _Queue:
        queue = self[rank] = self._make(rank)
        return queue


class SharedMemoryTransport(Transport):
    """Transport between the processes of one host. Collective: all ranks must create it."""

    name = "shared_memory"

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        rank, size = self.rank, self.size = group.rank, group.size
        self.wakeup = FutexWakeup(group, wait_policy)
        staging = _staging_offset(size)
        segments = group.take(staging + size * _BUFFERS * PIECE)
        self._processes, self._members, readable = group.processes, group.members, group.readable
        self._send_queues = _MadeAtUse(
            lambda to: _SendQueue(self, segments[rank], segments[to], to, staging, is_readable=rank in readable[to])
        )
        self._receive_queues = _MadeAtUse(
            lambda source: _ReceiveQueue(self, segments[source], segments[rank], source, staging)
        )
        self._backlog: set[int] = set()  # ranks with unfinished entries in their send queues

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return padded(FutexWakeup.nbytes(size)) + padded(_staging_offset(size) + size * _BUFFERS * PIECE)

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102
        queue = self._send_queues[to]
        message = queue.add(data, message_tag)
        if queue.progress():
            self._backlog.add(to)
        return message

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        queue = self._receive_queues[source]
        if not queue.has_next():
            self.wait_for(source, queue.has_next)
        return self._receive_request(source)

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        return self._receive_request(source) if self._receive_queues[source].has_next() else None

    def progress(self) -> bool:  # noqa: D102
        if self._backlog:
            self._backlog = {to for to in self._backlog if self._send_queues[to].progress()}
        return bool(self._backlog)

    def wait_for(self, peer: int, ready: Callable[[], bool]) -> None:
        """Block until ``ready()``, which ``peer`` makes true, while outgoing messages progress."""
        self.wakeup.wait(peer, ready, self.progress)

    def waiter(self, sources: Collection[int], targets: Collection[int]) -> Callable[[float], None]:  # noqa: D102
        return self.wakeup.waiter({*sources, *targets})

    def wake(self) -> None:  # noqa: D102
        self.wakeup.wake()

    def withdraw(self) -> None:  # noqa: D102
        for queue in list(self._send_queues.values()):
            queue.withdraw()
        self._backlog.clear()

    def close(self) -> None:  # noqa: D102
        self.withdraw()

    def _receive_request(self, source: int) -> ReceiveRequest:
        queue = self._receive_queues[source]
        entry = queue.next_entry()
        message_tag, nbytes, kind = MessageTag(entry[_SEQUENCE], entry[_CODE]), entry[_NBYTES], entry[_KIND]
        if kind == _REMOTE:
            return _RemoteReceive(queue, message_tag, nbytes, self._processes[source], entry[_LOCATION])
        if kind == _STAGED:
            return _StagedReceive(queue, message_tag, nbytes, entry[_LOCATION])
        raise ProtocolError(
            f"rank {self._members[source]} posted a message of kind {kind}; expected {_REMOTE} or {_STAGED}"
        )


class _SendQueue:
    """Queue from this rank to another rank."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        own: Segment,
        theirs: Segment,
        to: int,
        staging: int,
        *,
        is_readable: bool,
    ) -> None:
        self.transport, self.to = transport, to
        self._wakeup = transport.wakeup
        self._is_readable = is_readable
        self._counters = own.words(to * _PEER_BYTES, _COUNTERS)
        self._entries = own.words(to * _PEER_BYTES + 8 * _COUNTERS, _ENTRIES * _WORDS)
        self._buffers = [own.tensor(staging + (to * _BUFFERS + index) * PIECE, PIECE) for index in range(_BUFFERS)]
        self.receiver_counters = theirs.words(transport.rank * _PEER_BYTES, _COUNTERS)
        self._messages = 0  # number of messages added
        self._staged = 0  # pieces copied into buffers
        self._planned = 0  # pieces of all messages added
        self._pending: deque[_Outgoing] = deque()  # messages to post, or with pieces to stage

    def add(self, data: Tensor, message_tag: MessageTag) -> _Outgoing:
        """Append a message; `progress` posts it."""
        self._messages += 1
        nbytes = data.numel()
        if nbytes > _SMALL and self._is_readable:
            message = _Outgoing(self, self._messages, data, message_tag, _REMOTE, data.data_ptr())
        else:
            pieces = -(-nbytes // PIECE)
            message = _Outgoing(self, self._messages, data, message_tag, _STAGED, self._planned, pieces_left=pieces)
            self._planned += pieces
        self._pending.append(message)
        return message

    def progress(self) -> bool:
        """Post entries and stage pieces while there is space; return whether any are left."""
        changed = False
        for message in self._pending:
            if message.is_posted:
                continue
            if message.number - self.receiver_counters[_READ] > _ENTRIES:
                break
            self._post(message)
            changed = True
        while self._pending and self._pending[0].is_posted:
            message = self._pending[0]
            while message.pieces_left and self._has_buffer():
                self._stage(message)
                changed = True
            if message.pieces_left:
                break
            self._pending.popleft()
        if changed:
            self._wakeup.notify(self.to)
        return bool(self._pending)

    def withdraw(self) -> None:
        """Remove the entries of unfinished messages; a receiver checks its entry again after reading."""
        unstaged = {message.number for message in self._pending}
        self._pending.clear()
        for number in range(self.receiver_counters[_READ] + 1, self._messages + 1):
            begin = (number % _ENTRIES) * _WORDS
            if self._entries[begin + _COUNT] == number and (
                self._entries[begin + _KIND] != _STAGED or number in unstaged
            ):
                self._entries[begin + _COUNT] = 0

    def _has_buffer(self) -> bool:
        return self._staged - self.receiver_counters[_PIECES_READ] < _BUFFERS

    def _post(self, message: _Outgoing) -> None:
        begin = (message.number % _ENTRIES) * _WORDS
        entries = self._entries
        entries[begin + _SEQUENCE], entries[begin + _CODE] = message.message_tag
        entries[begin + _NBYTES] = message.data.numel()
        entries[begin + _KIND] = message.kind
        entries[begin + _LOCATION] = message.location
        if message.pieces_left == 1 and self._has_buffer() and self._pending[0] is message:
            self._stage(message)  # before the receiver sees the entry and waits for the piece
        entries[begin + _COUNT] = message.number  # last: a receiver that sees it sees the rest
        message.is_posted = True

    def _stage(self, message: _Outgoing) -> None:
        index = self._staged - message.location
        piece = message.data[index * PIECE : (index + 1) * PIECE]
        self._buffers[self._staged % _BUFFERS][: piece.numel()].copy_(piece)
        self._staged += 1
        message.pieces_left -= 1
        self._counters[_PIECES_STAGED] = self._staged


class _ReceiveQueue:
    """Queue from another rank to this rank. Pieces are counted over all messages."""

    def __init__(
        self, transport: SharedMemoryTransport, theirs: Segment, own: Segment, source: int, staging: int
    ) -> None:
        self.transport, self.source = transport, source
        self._wakeup = transport.wakeup
        rank = transport.rank
        self._entries = theirs.words(rank * _PEER_BYTES + 8 * _COUNTERS, _ENTRIES * _WORDS)
        self._sender_counters = theirs.words(rank * _PEER_BYTES, _COUNTERS)
        self._counters = own.words(source * _PEER_BYTES, _COUNTERS)
        self._buffers = [theirs.tensor(staging + (rank * _BUFFERS + index) * PIECE, PIECE) for index in range(_BUFFERS)]
        self._read = 0

    @cached_property
    @torch.inference_mode(mode=False)
    def scratch(self) -> Tensor:
        """Buffer for pieces read from the source's memory: a new one each time would cost more than the read."""
        return torch.empty(PIECE, dtype=torch.uint8, device="cpu")

    def has_next(self) -> bool:
        """Return whether the next message is posted."""
        number = self._read + 1
        return self._entries[(number % _ENTRIES) * _WORDS] == number

    def next_entry(self) -> Words:
        begin = ((self._read + 1) % _ENTRIES) * _WORDS
        return self._entries[begin : begin + _WORDS]

    def done(self, pieces: int | None = None) -> None:
        """Mark the next message as read, and all pieces before ``pieces``.

        Raises:
            GanglineError: if the sender has withdrawn the message, whose memory may have changed before it was read.
        """
        if not self.has_next():
            self._wakeup.wait(self.source, lambda: False)  # the wait policy raises the reason
        self._read += 1
        if pieces is not None:
            self._counters[_PIECES_READ] = pieces
        self._counters[_READ] = self._read
        self._wakeup.notify(self.source)

    def is_staged(self, piece: int) -> bool:
        """Return whether a piece is in its buffer."""
        return self._sender_counters[_PIECES_STAGED] > piece

    def buffer(self, piece: int) -> Tensor:
        """Return the staging buffer of a piece."""
        return self._buffers[piece % _BUFFERS]

    def release(self, pieces: int) -> None:
        """Mark all pieces before ``pieces`` as read."""
        self._counters[_PIECES_READ] = pieces
        self._wakeup.notify(self.source)


class _QueuedReceive(ReceiveRequest):
    def __init__(self, queue: _ReceiveQueue, message_tag: MessageTag, nbytes: int) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._queue = queue

    def done(self) -> None:
        self._queue.done()


class _RemoteReceive(_QueuedReceive):
    """Message in the sender's private memory."""

    def __init__(self, queue: _ReceiveQueue, message_tag: MessageTag, nbytes: int, process: int, address: int) -> None:
        super().__init__(queue, message_tag, nbytes)
        self._process, self._address = process, address

    def piece(self, index: int) -> Tensor:
        piece = self._queue.scratch[: min(PIECE, self.nbytes - index * PIECE)]
        self._read(index * PIECE, piece)
        return piece

    def into(self, target: Tensor) -> None:
        self._read(0, target)
        self.done()

    def _read(self, offset: int, target: Tensor) -> None:
        try:
            cma.read(self._process, self._address + offset, target.data_ptr(), target.numel())
        except OSError:  # the sender is dead, or failed because another rank is: the wait policy raises the cause
            until = time.monotonic() + PEER_LOST_SECONDS
            self._queue.transport.wait_for(self._queue.source, lambda: time.monotonic() > until)
            raise


class _StagedReceive(_QueuedReceive):
    """Message that the sender copies piece by piece into staging buffers."""

    def __init__(self, queue: _ReceiveQueue, message_tag: MessageTag, nbytes: int, first: int) -> None:
        super().__init__(queue, message_tag, nbytes)
        self._first = first  # piece

    def piece(self, index: int) -> Tensor:
        piece = self._first + index
        if index:
            self._queue.release(piece)
        is_staged = partial(self._queue.is_staged, piece)
        if not is_staged():
            self._queue.transport.wait_for(self._queue.source, is_staged)
        return self._queue.buffer(piece)[: min(PIECE, self.nbytes - index * PIECE)]

    def into(self, target: Tensor) -> None:
        for index in range(-(-self.nbytes // PIECE)):
            piece = self.piece(index)
            target[index * PIECE : index * PIECE + piece.numel()].copy_(piece)
        self.done()

    def done(self) -> None:
        self._queue.done(self._first + -(-self.nbytes // PIECE))


def _staging_offset(size: int) -> int:
    """Return the offset of the staging buffers in a rank's segment, after its queues."""
    return -(-size * _PEER_BYTES // PIECE) * PIECE
