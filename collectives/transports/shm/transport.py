"""Messages between the processes of one host, through shared memory.

A message is an entry in a queue from one rank to another: what it belongs to, and where its bytes lie.

- registered: in memory from `empty`, which every rank has mapped. Nobody copies; the receiver reads in place.
- remote: anywhere in the sender's memory, and the receiver reads it with process_vm_readv. One copy.
- staged: the sender copies it, piece by piece, into slots that the receiver reads. For small messages, and for all
  where the kernel does not let ranks read each other.

Each rank writes only its own segment: its queues, its staging slots, and how far it has read the others'.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.base import (
    PIECE,
    BootstrapAllGather,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
)
from gangline.collectives.transports.shm import cma
from gangline.collectives.transports.shm.futex_wakeup import FutexWakeup
from gangline.collectives.transports.shm.host_group import HostGroup, padded
from gangline.collectives.transports.shm.registered import RegisteredMemory
from gangline.collectives.transports.shm.segments import Segment, share

_REGISTERED, _REMOTE, _STAGED = 1, 2, 3
_BROKEN_SECONDS = 30.0  # in which it comes out why a sender's memory cannot be read
_SMALL = 1 << 15  # bytes up to which a message is staged: two system calls cost more than copying it twice

_ENTRIES = 64
_WORDS = 8  # of an entry: count, sequence, code, nbytes, kind, place, offset, -
_COUNT, _SEQUENCE, _CODE, _NBYTES, _KIND, _PLACE, _OFFSET = range(7)
_SLOTS = 4
_MARKS = 8  # words a pair, a cache line: messages read, pieces read, pieces staged
_READ, _PIECES_READ, _PIECES_STAGED = range(3)
_PAIR_BYTES = 8 * (_MARKS + _ENTRIES * _WORDS)


@dataclass(slots=True)
class _Outgoing:
    """A message that has not left, or whose bytes the receiver still needs."""

    number: int
    data: Tensor
    message_tag: MessageTag
    kind: int
    place: int
    offset: int
    is_posted: bool = False
    pieces_left: int = 0


class SharedMemoryTransport(Transport):
    """The transport of the processes of one host."""

    name = "shared_memory"

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        rank, size = self.rank, self.size = group.rank, group.size
        self._wakeup = FutexWakeup(group, wait_policy)
        staging = _staging_offset(size)
        segments = group.take(staging + size * _SLOTS * PIECE)
        self._processes, readable = group.processes, group.readable
        peers = [other for other in range(size) if other != rank]
        self._out = {
            to: _Out(self._wakeup, segments[rank], segments[to], rank, to, staging, is_readable=rank in readable[to])
            for to in peers
        }
        self._in = {
            source: _In(self._wakeup, segments[source], segments[rank], rank, source, staging) for source in peers
        }
        self._backlog: set[int] = set()  # ranks for which something has not left yet
        self._registered = RegisteredMemory()

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return padded(FutexWakeup.nbytes(size)) + padded(_staging_offset(size) + size * _SLOTS * PIECE)

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102  as the base says
        out = self._out[to]
        message = out.add(data, message_tag, self._registered.find(data) if data.numel() > _SMALL else None)
        if out.move():
            self._backlog.add(to)
        return _SharedTicket(self, out, message)

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        queue = self._in[source]
        if not queue.has_next():
            self._wakeup.wait(source, queue.has_next, self.move)
        return self._receive_request(source)

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        return self._receive_request(source) if self._in[source].has_next() else None

    def progress(self) -> None:  # noqa: D102
        self.move()

    def move(self) -> bool:
        """Move on what is on its way out; gives whether something is left that this rank must move."""
        if self._backlog:
            self._backlog = {to for to in self._backlog if self._out[to].move()}
        return bool(self._backlog)

    def wait(self, peer: int, is_there: Callable[[], bool]) -> None:
        """Wait for a peer, and go on with what is on its way out."""
        self._wakeup.wait(peer, is_there, self.move)

    def empty(self, nbytes: int, exchange: BootstrapAllGather) -> Tensor:
        """A uint8 tensor in memory that all ranks have mapped; a collective.

        Raises:
            OSError: the ranks cannot share that much.
        """
        segments = share(self.rank, max(nbytes, 1), exchange)
        return self._registered.add(segments, self.rank, nbytes)

    def close(self) -> None:  # noqa: D102
        self.move()
        self._registered = RegisteredMemory()

    def _receive_request(self, source: int) -> ReceiveRequest:
        queue = self._in[source]
        entry = queue.next_entry()
        message_tag, nbytes, kind = MessageTag(entry[_SEQUENCE], entry[_CODE]), entry[_NBYTES], entry[_KIND]
        if kind == _REGISTERED:
            return _FromMemory(
                queue, message_tag, nbytes, self._registered.view(entry[_PLACE], source, entry[_OFFSET], nbytes)
            )
        if kind == _REMOTE:
            return _FromProcess(self, queue, message_tag, nbytes, self._processes[source], entry[_PLACE])
        if kind == _STAGED:
            return _FromSlots(self, queue, message_tag, nbytes, entry[_PLACE])
        raise ProtocolError(f"rank {source} posted a message of kind {kind}; expected {_REGISTERED} to {_STAGED}")


class _Out:
    """The queue to one rank."""

    def __init__(
        self, wakeup: FutexWakeup, own: Segment, theirs: Segment, rank: int, to: int, staging: int, *, is_readable: bool
    ) -> None:
        self.to = to
        self._wakeup = wakeup
        self._is_readable = is_readable
        self._marks = own.words(to * _PAIR_BYTES, _MARKS)
        self._entries = own.words(to * _PAIR_BYTES + 8 * _MARKS, _ENTRIES * _WORDS)
        self._slots = [own.tensor(staging + (to * _SLOTS + slot) * PIECE, PIECE) for slot in range(_SLOTS)]
        self._theirs = theirs.words(rank * _PAIR_BYTES, _MARKS)
        self._numbered = 0  # messages
        self._staged = 0  # pieces
        self._planned = 0  # pieces, of all messages given a place
        self._waiting: deque[_Outgoing] = deque()  # not yet in the queue, or with pieces to stage

    def add(self, data: Tensor, message_tag: MessageTag, registered: tuple[int, int] | None) -> _Outgoing:
        """Take a message; `move` posts it."""
        self._numbered += 1
        nbytes = data.numel()
        if registered is not None:
            message = _Outgoing(self._numbered, data, message_tag, _REGISTERED, *registered)
        elif nbytes > _SMALL and self._is_readable:
            message = _Outgoing(self._numbered, data, message_tag, _REMOTE, data.data_ptr(), 0)
        else:
            pieces = -(-nbytes // PIECE)
            message = _Outgoing(self._numbered, data, message_tag, _STAGED, self._planned, 0, pieces_left=pieces)
            self._planned += pieces
        self._waiting.append(message)
        return message

    def move(self) -> bool:
        """Post and stage what there is room for; gives whether something is left."""
        rang = False
        for message in self._waiting:
            if message.is_posted:
                continue
            if message.number - self._theirs[_READ] > _ENTRIES:
                break
            self._post(message)
            rang = True
        while self._waiting and self._waiting[0].is_posted:
            message = self._waiting[0]
            while message.pieces_left and self._staged - self._theirs[_PIECES_READ] < _SLOTS:
                self._stage(message)
                rang = True
            if message.pieces_left:
                break
            self._waiting.popleft()
        if rang:
            self._wakeup.ring(self.to)
        return bool(self._waiting)

    def is_done(self, message: _Outgoing) -> bool:
        """Whether the receiver needs the message's memory no more."""
        if message.kind == _STAGED:
            return message.is_posted and not message.pieces_left
        return self._theirs[_READ] >= message.number

    def _post(self, message: _Outgoing) -> None:
        at = (message.number % _ENTRIES) * _WORDS
        entries = self._entries
        entries[at + _SEQUENCE], entries[at + _CODE] = message.message_tag
        entries[at + _NBYTES] = message.data.numel()
        entries[at + _KIND] = message.kind
        entries[at + _PLACE] = message.place
        entries[at + _OFFSET] = message.offset
        has_room = self._staged - self._theirs[_PIECES_READ] < _SLOTS
        if message.pieces_left == 1 and has_room and self._waiting[0] is message:
            self._stage(message)  # with the entry, not behind it
        entries[at + _COUNT] = message.number  # last: who sees it sees the rest
        message.is_posted = True

    def _stage(self, message: _Outgoing) -> None:
        index = self._staged - message.place
        piece = message.data[index * PIECE : (index + 1) * PIECE]
        self._slots[self._staged % _SLOTS][: piece.numel()].copy_(piece)
        self._staged += 1
        message.pieces_left -= 1
        self._marks[_PIECES_STAGED] = self._staged


class _In:
    """The queue from one rank."""

    def __init__(
        self, wakeup: FutexWakeup, theirs: Segment, own: Segment, rank: int, source: int, staging: int
    ) -> None:
        self.source = source
        self._wakeup = wakeup
        self._entries = theirs.words(rank * _PAIR_BYTES + 8 * _MARKS, _ENTRIES * _WORDS)
        self._theirs = theirs.words(rank * _PAIR_BYTES, _MARKS)
        self._own = own.words(source * _PAIR_BYTES, _MARKS)
        self._slots = [theirs.tensor(staging + (rank * _SLOTS + slot) * PIECE, PIECE) for slot in range(_SLOTS)]
        self._read = 0

    @cached_property
    def scratch(self) -> Tensor:
        """Where pieces of the source's memory are read to; allocating it anew would cost more than reading."""
        return torch.empty(PIECE, dtype=torch.uint8)

    def has_next(self) -> bool:
        """Whether the next message is posted."""
        number = self._read + 1
        return self._entries[(number % _ENTRIES) * _WORDS] == number

    def next_entry(self) -> memoryview:
        at = ((self._read + 1) % _ENTRIES) * _WORDS
        return self._entries[at : at + _WORDS]

    def done(self, pieces: int | None = None) -> None:
        """The next message is read, and with it all pieces up to ``pieces``."""
        self._read += 1
        if pieces is not None:
            self._own[_PIECES_READ] = pieces
        self._own[_READ] = self._read
        self._wakeup.ring(self.source)

    def is_staged(self, piece: int) -> bool:
        """Whether a piece, counted over all messages, lies in its slot."""
        return self._theirs[_PIECES_STAGED] > piece

    def slot(self, piece: int) -> Tensor:
        return self._slots[piece % _SLOTS]

    def give_back(self, pieces: int) -> None:
        """All pieces before this one are read."""
        self._own[_PIECES_READ] = pieces
        self._wakeup.ring(self.source)


class _SharedTicket(SendRequest):
    def __init__(self, transport: SharedMemoryTransport, out: _Out, message: _Outgoing) -> None:
        self._transport, self._out, self._message = transport, out, message

    def is_done(self) -> bool:
        return self._out.is_done(self._message)

    def wait(self) -> None:
        if not self.is_done():
            self._transport.wait(self._out.to, self.is_done)


class _FromMemory(ReceiveRequest):
    """Bytes that lie where this rank can see them."""

    def __init__(self, queue: _In, message_tag: MessageTag, nbytes: int, view: Tensor) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._queue, self._view = queue, view

    def piece(self, index: int) -> Tensor:
        return self._view[index * PIECE : (index + 1) * PIECE]

    def into(self, target: Tensor) -> None:
        target.copy_(self._view)
        self.done()

    def done(self) -> None:
        self._queue.done()


class _FromProcess(ReceiveRequest):
    """Bytes in the sender's memory."""

    def __init__(
        self,
        transport: SharedMemoryTransport,
        queue: _In,
        message_tag: MessageTag,
        nbytes: int,
        process: int,
        address: int,
    ) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._transport = transport
        self._queue, self._process, self._address = queue, process, address

    def piece(self, index: int) -> Tensor:
        piece = self._queue.scratch[: min(PIECE, self.nbytes - index * PIECE)]
        self._read(index * PIECE, piece)
        return piece

    def into(self, target: Tensor) -> None:
        self._read(0, target)
        self.done()

    def done(self) -> None:
        self._queue.done()

    def _read(self, offset: int, target: Tensor) -> None:
        try:
            cma.read(self._process, self._address + offset, target.data_ptr(), target.numel())
        except OSError:  # the sender is dead, or has left the call because another one is: it will be known soon
            until = time.monotonic() + _BROKEN_SECONDS
            self._transport.wait(self._queue.source, lambda: time.monotonic() > until)
            raise


class _FromSlots(ReceiveRequest):
    """Bytes that the sender stages piece by piece."""

    def __init__(
        self, transport: SharedMemoryTransport, queue: _In, message_tag: MessageTag, nbytes: int, first: int
    ) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._transport, self._queue = transport, queue
        self._first = first  # piece, counted over all messages

    def piece(self, index: int) -> Tensor:
        piece = self._first + index
        if index:
            self._queue.give_back(piece)
        is_staged = partial(self._queue.is_staged, piece)
        if not is_staged():
            self._transport.wait(self._queue.source, is_staged)
        return self._queue.slot(piece)[: min(PIECE, self.nbytes - index * PIECE)]

    def into(self, target: Tensor) -> None:
        for index in range(-(-self.nbytes // PIECE)):
            piece = self.piece(index)
            target[index * PIECE : index * PIECE + piece.numel()].copy_(piece)
        self.done()

    def done(self) -> None:
        self._queue.done(self._first + -(-self.nbytes // PIECE))


def _staging_offset(size: int) -> int:
    """Return the offset of the staging slots in a rank's segment, after its queues."""
    return -(-size * _PAIR_BYTES // PIECE) * PIECE
