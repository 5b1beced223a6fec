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

_AnyQueue = TypeVar("_AnyQueue")
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
    pieces_left: int = 0
    is_posted: bool = False

    def is_done(self) -> bool:
        if self.kind == _STAGED:
            return self.is_posted and not self.pieces_left
        return self.queue.read[_READ] >= self.number

    def wait(self) -> None:
        if not self.is_done():
            self.queue.transport.wait_for(self.queue.peer, self.is_done)


class _CreatedOnUse(dict[int, _AnyQueue]):
    """Queues by rank: most ranks of a large group only exchange slots."""

    def __init__(self, create: Callable[[int], _AnyQueue]) -> None:
        super().__init__()
        self._create = create

    def __missing__(self, rank: int) -> _AnyQueue:
        queue = self[rank] = self._create(rank)
        return queue


class SharedMemoryTransport(Transport):
    """Transport between the processes of one host. Collective: all ranks must create it."""

    name = "shared_memory"

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        self.rank, self.size = group.rank, group.size
        self.group = group
        self.wakeup = FutexWakeup(group, wait_policy)
        self.segments = group.take(_staging_offset(self.size, self.size))
        self._send_queues = _CreatedOnUse(partial(_SendQueue, self))
        self._receive_queues = _CreatedOnUse(partial(_ReceiveQueue, self))
        self._backlog: set[int] = set()  # ranks with unfinished entries in their send queues

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return padded(FutexWakeup.nbytes(size)) + padded(_staging_offset(size, size))

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
        return queue.next()

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        queue = self._receive_queues[source]
        return queue.next() if queue.has_next() else None

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

    close = withdraw


class _Queue:
    """One direction between this rank and a peer; messages and pieces are counted from the first one.

    The sender's segment has the entries, the staging buffers and the number of pieces staged, the receiver's segment
    the numbers of messages and pieces read.
    """

    def __init__(self, transport: SharedMemoryTransport, peer: int, sender: int, receiver: int) -> None:
        self.transport, self.peer = transport, peer
        own, begin = transport.segments[sender], receiver * _PEER_BYTES
        self.sent = own.words(begin, _COUNTERS)
        self.entries = own.words(begin + 8 * _COUNTERS, _ENTRIES * _WORDS)
        staging = _staging_offset(transport.size, receiver)
        self.buffers = [own.tensor(staging + index * PIECE, PIECE) for index in range(_BUFFERS)]
        self.read = transport.segments[receiver].words(sender * _PEER_BYTES, _COUNTERS)


class _SendQueue(_Queue):
    """Queue from this rank to another rank."""

    def __init__(self, transport: SharedMemoryTransport, to: int) -> None:
        super().__init__(transport, to, transport.rank, to)
        self._is_readable = to in transport.group.readers
        self._messages = 0  # number of messages added
        self._staged = 0  # pieces copied into buffers
        self._planned = 0  # pieces of all messages added
        self._pending: deque[_Outgoing] = deque()  # messages to post, or with pieces to stage

    def add(self, data: Tensor, message_tag: MessageTag) -> _Outgoing:
        """Append a message; `progress` posts it."""
        self._messages += 1
        if data.numel() > _SMALL and self._is_readable:
            message = _Outgoing(self, self._messages, data, message_tag, _REMOTE, data.data_ptr())
        else:
            pieces = -(-data.numel() // PIECE)
            message = _Outgoing(self, self._messages, data, message_tag, _STAGED, self._planned, pieces)
            self._planned += pieces
        self._pending.append(message)
        return message

    def progress(self) -> bool:
        """Post entries and stage pieces while there is space; return whether any are left."""
        changed = False
        for message in self._pending:
            if message.is_posted:
                continue
            if message.number - self.read[_READ] > _ENTRIES:
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
            self.transport.wakeup.notify(self.peer)
        return bool(self._pending)

    def withdraw(self) -> None:
        """Remove the entries of unfinished messages; a receiver checks its entry again after reading."""
        unstaged = {message.number for message in self._pending}
        self._pending.clear()
        entries = self.entries
        for number in range(self.read[_READ] + 1, self._messages + 1):
            begin = (number % _ENTRIES) * _WORDS
            if entries[begin + _COUNT] == number and (entries[begin + _KIND] != _STAGED or number in unstaged):
                entries[begin + _COUNT] = 0

    def _has_buffer(self) -> bool:
        return self._staged - self.read[_PIECES_READ] < _BUFFERS

    def _post(self, message: _Outgoing) -> None:
        begin = (message.number % _ENTRIES) * _WORDS
        entries = self.entries
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
        self.buffers[self._staged % _BUFFERS][: piece.numel()].copy_(piece)
        self._staged += 1
        message.pieces_left -= 1
        self.sent[_PIECES_STAGED] = self._staged


class _ReceiveQueue(_Queue):
    """Queue from another rank to this rank."""

    def __init__(self, transport: SharedMemoryTransport, source: int) -> None:
        super().__init__(transport, source, source, transport.rank)
        self._messages = 0  # number of messages read

    @cached_property
    @torch.inference_mode(mode=False)
    def scratch(self) -> Tensor:
        """Buffer for pieces read from the source's memory: a new one each time would cost more than the read."""
        return torch.empty(PIECE, dtype=torch.uint8, device="cpu")

    def has_next(self) -> bool:
        """Return whether the next message is posted."""
        number = self._messages + 1
        return self.entries[(number % _ENTRIES) * _WORDS] == number

    def next(self) -> ReceiveRequest:
        """Return the next message, which is posted."""
        begin = ((self._messages + 1) % _ENTRIES) * _WORDS
        entry = self.entries[begin : begin + _WORDS]
        if (kind := entry[_KIND]) not in _RECEIVES:
            source, kinds = self.transport.group.members[self.peer], " or ".join(map(str, _RECEIVES))
            raise ProtocolError(f"rank {source} posted a message of kind {kind}; expected {kinds}")
        return _RECEIVES[kind](self, MessageTag(entry[_SEQUENCE], entry[_CODE]), entry[_NBYTES], entry[_LOCATION])

    def done(self, pieces: int | None = None) -> None:
        """Mark the next message as read, and all pieces before ``pieces``.

        Raises:
            GanglineError: if the sender has withdrawn the message, whose memory may have changed before it was read.
        """
        if not self.has_next():
            self.transport.wakeup.wait(self.peer, lambda: False)  # the wait policy raises the reason
        self._messages += 1
        if pieces is not None:
            self.read[_PIECES_READ] = pieces
        self.read[_READ] = self._messages
        self.transport.wakeup.notify(self.peer)

    def release(self, pieces: int) -> None:
        """Mark all pieces before ``pieces`` as read."""
        self.read[_PIECES_READ] = pieces
        self.transport.wakeup.notify(self.peer)


class _QueuedReceive(ReceiveRequest):
    def __init__(self, queue: _ReceiveQueue, message_tag: MessageTag, nbytes: int, location: int) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._queue, self._location = queue, location

    def done(self) -> None:
        self._queue.done()


class _RemoteReceive(_QueuedReceive):
    """Message in the sender's private memory; its location is an address there."""

    def piece(self, index: int) -> Tensor:
        piece = self._queue.scratch[: min(PIECE, self.nbytes - index * PIECE)]
        self._read(index * PIECE, piece)
        return piece

    def into(self, target: Tensor) -> None:
        self._read(0, target)
        self.done()

    def _read(self, offset: int, target: Tensor) -> None:
        transport, source = self._queue.transport, self._queue.peer
        try:
            cma.read(transport.group.processes[source], self._location + offset, target.data_ptr(), target.numel())
        except OSError:  # the sender is dead, or failed because another rank is: the wait policy raises the cause
            until = time.monotonic() + PEER_LOST_SECONDS
            transport.wait_for(source, lambda: time.monotonic() > until)
            raise


class _StagedReceive(_QueuedReceive):
    """Message that the sender copies into staging buffers; its location is the number of its first piece."""

    def piece(self, index: int) -> Tensor:
        queue, piece = self._queue, self._location + index
        if index:
            queue.release(piece)

        def is_staged() -> bool:
            return queue.sent[_PIECES_STAGED] > piece

        if not is_staged():
            queue.transport.wait_for(queue.peer, is_staged)
        return queue.buffers[piece % _BUFFERS][: min(PIECE, self.nbytes - index * PIECE)]

    def done(self) -> None:
        self._queue.done(self._location + self.pieces)


_RECEIVES: dict[int, type[_QueuedReceive]] = {_REMOTE: _RemoteReceive, _STAGED: _StagedReceive}


def _staging_offset(size: int, rank: int) -> int:
    """Return the offset of a rank's staging buffers in the segments of ``size`` ranks, after the queues."""
    return (-(-size * _PEER_BYTES // PIECE) + rank * _BUFFERS) * PIECE
