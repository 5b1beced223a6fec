"""Sessions of a server with its workers: acknowledgements, values, and releases of memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from gangline.collectives.transports.shm.segments import Segment
from gangline.kvstore.compression import Codec
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import CODED, DENSE, ROWS, Ack, Failed, Message, Release, Values
from gangline.kvstore.parameter_server.server.shards import Shard, Waiter
from gangline.kvstore.parameter_server.transport.frames import INLINE, frame_of
from gangline.kvstore.parameter_server.transport.listener import Listener

_REMEMBERED = 256
_MAX_DEFERRED = 64
_DEFER_SECONDS = 0.01
_BACKLOG_BYTES = 256 << 20
"""Bytes of open rounds that a server accepts from each worker, in addition to twice what it stores."""
_UNREAD_BYTES = 64 << 20
"""Bytes of copies of values on their way to a worker, beyond which its other requests wait."""
_AWAITED_SECONDS = 0.005
_AWAITED_SHARE = 20
"""The ranks that others wait for are looked for after this time at the earliest, and this many times what it took."""


@dataclass(eq=False)
class WorkerSession:
    """State of one worker."""

    identity: bytes
    rank: int
    memory: Segment | None
    shares_memory: bool
    """True if it reads values in this server's memory."""
    acks: list[int] = field(default_factory=list)
    """Acknowledgements to send, together and when the server is idle unless one is urgent."""
    acks_are_due: bool = False
    acks_since: float = 0.0
    """`time.monotonic` seconds when the first of them was added."""
    withheld_acks: list[int] = field(default_factory=list)
    """Acknowledgements to send when the backlog is small again; the worker's window stops it until then."""
    backlog: int = 0
    """Bytes pushed for rounds that are still open."""
    releases: list[int] = field(default_factory=list)
    in_use: dict[int, int] = field(default_factory=dict)
    """Number of entries whose memory is still read, by message."""
    handled: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Last messages that must not be handled twice."""
    ready: list[tuple[Waiter, Shard]] = field(default_factory=list)
    """Requests whose shard has the value that they wait for."""
    unread: dict[int, int] = field(default_factory=dict)
    """Bytes of copies of values that it has not confirmed, by the number of `Values`."""

    def subtract_from_backlog(self, nbytes: int, release: Callable[[], None] | None) -> None:
        """Subtract the bytes of a value that is not read any more, and release its memory, if it must be released."""
        self.backlog -= nbytes
        if release is not None:
            release()


@dataclass(frozen=True)
class _Read:
    """Values that a worker reads in place."""

    rank: int
    sequence: int
    shards: list[Shard]


class Sessions:
    """Sessions with all workers, and everything that is sent to them.

    A message of one worker costs nothing for each of the others: workers to which something is due are kept apart.

    Args:
        listener: sends the messages.
        mark_changed: called with shards that are no longer read.
        awaited: returns the ranks for whose pushes others wait, given those whose acknowledgements are withheld.
    """

    def __init__(
        self,
        listener: Listener,
        mark_changed: Callable[[Iterable[Shard]], None],
        awaited: Callable[[Collection[int]], Collection[int]],
    ) -> None:
        self.workers: dict[bytes, WorkerSession] = {}
        """Sessions by the identity of the worker's socket."""
        self.pull_codec: Codec | None = None
        """Compression of values; None: none."""
        self.max_backlog = math.inf
        """Bytes of backlog beyond which acknowledgements are withheld."""
        self.sent_bytes = 0
        """Bytes of values that workers were sent, or may read in place."""
        self._listener = listener
        self._mark_changed = mark_changed
        self._find_awaited = awaited
        self._awaited: Collection[int] = ()
        self._awaited_until = 0.0  # `time.monotonic` seconds when they are looked for again
        self._of_rank: dict[int, WorkerSession] = {}
        self._due: dict[WorkerSession, None] = {}  # acknowledgements, values or releases are to be sent now
        self._deferred: dict[WorkerSession, None] = {}  # acknowledgements may wait; by `acks_since`
        self._withheld: dict[WorkerSession, None] = {}
        self._reads: dict[int, _Read] = {}
        self._reads_of: dict[tuple[int, int], list[int]] = {}  # numbers by rank and sequence
        self.refusals: dict[int, tuple[int, Failed]] = {}
        """Rank and an error that it has not confirmed, by the number of the error."""
        self._number = 0

    def add(self, worker: WorkerSession) -> None:
        """Begin the session of a worker."""
        self.workers[worker.identity] = self._of_rank[worker.rank] = worker

    def of_rank(self, rank: int) -> WorkerSession | None:
        """Return the session of the worker of a rank; None if there is none."""
        return self._of_rank.get(rank)

    def drop(self, identity: bytes) -> WorkerSession | None:
        """End the session of a worker that has died; return it if there was one."""
        worker = self.workers.pop(identity, None)
        if worker is not None:
            del self._of_rank[worker.rank]
            self._due.pop(worker, None)
            self._deferred.pop(worker, None)
            self._withheld.pop(worker, None)
            for _, shard in worker.ready:
                shard.unsent -= 1
            self._mark_changed(shard for _, shard in worker.ready)
            self.end_reads(worker.rank)
        return worker

    def bound_backlogs(self, stored: int) -> None:
        """Allow each worker a backlog of about two rounds of the ``stored`` bytes."""
        self.max_backlog = 2 * stored + _BACKLOG_BYTES

    def acknowledge(self, worker: WorkerSession, sequences: Iterable[int], *, urgent: bool = True) -> None:
        """Acknowledge messages with the next flush; later, together with others, if none is urgent."""
        if not worker.acks:
            worker.acks_since = time.monotonic()
        worker.acks += sequences
        if urgent or len(worker.acks) >= _MAX_DEFERRED:
            worker.acks_are_due = True
            self._due[worker] = None
        else:
            self._deferred.setdefault(worker)

    def acknowledge_push(self, worker: WorkerSession, sequence: int, *, urgent: bool) -> None:
        """Acknowledge a push, or withhold the acknowledgement if the worker's backlog is too large."""
        if worker.backlog > self.max_backlog and self._is_ahead(worker):
            worker.withheld_acks.append(sequence)
            self._withheld[worker] = None
        else:
            self.acknowledge(worker, [sequence], urgent=urgent)

    def _is_ahead(self, worker: WorkerSession) -> bool:
        if worker.backlog <= self.max_backlog:
            return False
        began = time.monotonic()
        if began > self._awaited_until:
            self._awaited = self._find_awaited([one.rank for one in {**self._withheld, worker: None}])
            ended = time.monotonic()
            self._awaited_until = ended + max(_AWAITED_SECONDS, _AWAITED_SHARE * (ended - began))
        return worker.rank not in self._awaited

    def release(self, worker: WorkerSession, sequence: int) -> None:
        """Release an entry of a message; after the last one the worker is told that it may overwrite its memory."""
        left = worker.in_use.pop(sequence, 1) - 1
        if left:
            worker.in_use[sequence] = left
        else:
            worker.releases.append(sequence)
            self._due[worker] = None

    def send_value(self, waiter: Waiter, shard: Shard) -> None:
        """Send the current value of a shard to a waiter with the next `flush`."""
        worker = self._of_rank.get(waiter.rank)
        if worker is not None:
            worker.ready.append((waiter, shard))
            shard.unsent += 1
            self._due[worker] = None

    def flush(self) -> None:
        """Send acknowledgements that are due, values and releases.

        Values of a worker that does not read what was sent to it wait until it has, so that they do not pile up here.
        """
        if self._withheld:
            for worker in [one for one in self._withheld if not self._is_ahead(one)]:
                self._withheld.pop(worker, None)
                self.acknowledge(worker, worker.withheld_acks)
                worker.withheld_acks.clear()
        if self._deferred:
            before = time.monotonic() - _DEFER_SECONDS
            for worker in self._deferred:
                if worker.acks_since >= before:
                    break
                worker.acks_are_due = True
                self._due[worker] = None
        due, self._due = self._due, {}
        for worker in due:
            if worker.acks_are_due:
                self._send_acks(worker)
            if worker.ready:
                self._send_ready(worker)
            if worker.releases:
                self.send(worker.identity, Release(worker.releases))
                worker.releases.clear()

    def _send_ready(self, worker: WorkerSession) -> None:
        ready, worker.ready = worker.ready, []
        if len(ready) > 1:
            ready.sort(key=_sequence_of)
        for sequence, pairs in groupby(ready, key=_sequence_of):
            group = [*pairs]
            is_behind = worker.unread and sum(worker.unread.values()) > _UNREAD_BYTES
            if worker.ready or is_behind or self._listener.is_full(worker.identity):
                worker.ready += group
                self._due[worker] = None
                continue
            self._send_values(worker, sequence, group)
            for _, shard in group:
                shard.unsent -= 1
                if not shard.unsent and shard.open:
                    self._mark_changed([shard])

    def flush_acks(self) -> None:
        """Send all acknowledgements except withheld ones."""
        for worker in list(self._deferred):
            self._send_acks(worker)

    def _send_acks(self, worker: WorkerSession) -> None:
        self.send(worker.identity, Ack(worker.acks))
        worker.acks = []
        worker.acks_are_due = False
        self._deferred.pop(worker, None)

    def _send_values(self, worker: WorkerSession, sequence: int, ready: list[tuple[Waiter, Shard]]) -> None:
        """Send values of shards; large ones are read in place and do not change until the worker has read them."""
        if sequence in worker.acks:  # values acknowledge their request
            worker.acks.remove(sequence)
            if not worker.acks:
                self._deferred.pop(worker, None)
        codec = self.pull_codec
        shards: list[Shard] = []  # whose values are read in place
        others: list[tuple[Waiter, Shard]] = []
        for waiter, shard in ready:
            is_coded = codec is not None and shard.flat.is_floating_point()
            if waiter.rows is None and shard.flat.nbytes > INLINE and not is_coded:
                shards.append(shard)
            else:
                others += ((waiter, shard),)
        if shards:
            self._number += 1
            self.sent_bytes += sum(shard.flat.nbytes for shard in shards)
            lost = {(worker.rank, number) for number in self._reads_of.get((worker.rank, sequence), ())}
            for (
                shard
            ) in shards:  # earlier reads of a request that is answered again end: the new number replaces theirs
                shard.readers -= lost
                shard.readers.add((worker.rank, self._number))
            self._reads[self._number] = _Read(worker.rank, sequence, shards)
            self._reads_of.setdefault((worker.rank, sequence), []).append(self._number)
            entries = [(shard.number, shard.closed, DENSE, shard.flat.nbytes) for shard in shards]
            offsets = [shard.offset for shard in shards] if worker.shares_memory else []
            frames = [] if worker.shares_memory else [frame_of(shard.flat) for shard in shards]
            header = protocol.pack(Values(sequence, self._number, entries, offsets))
            self._listener.send(worker.identity, [header, *frames], in_place=True)
        if others:
            entries, nbytes, number = [], 0, 0
            datas: list[Tensor] = []
            for waiter, shard in others:
                data, kind = shard.flat, DENSE
                if waiter.rows is not None:
                    data, kind = shard.flat.view(-1, shard.width).index_select(0, waiter.rows), ROWS
                elif codec is not None and data.is_floating_point():
                    data, kind = codec.encode(data), CODED
                entries += ((shard.number, shard.closed, kind, data.nbytes),)
                datas += (data,)
                nbytes += data.nbytes
            self.sent_bytes += nbytes
            if nbytes > INLINE:
                self._number = number = self._number + 1
                worker.unread[number] = nbytes
            self.send(worker.identity, Values(sequence, number, entries, []), datas)

    def is_reading(self, waiter: Waiter, shard: Shard) -> bool:
        """Return whether a request has got a shard's value before and has not confirmed that it was read."""
        numbers = self._reads_of.get((waiter.rank, waiter.sequence)) if self._reads_of else None
        return numbers is not None and any((waiter.rank, number) in shard.readers for number in numbers)

    def end_read(self, rank: int, number: int) -> None:
        """End a worker's read of the `Values` of this number; their shards may change unless others read them."""
        if rank in self._of_rank:
            self._of_rank[rank].unread.pop(number, None)
        if number in self.refusals and self.refusals[number][0] == rank:
            del self.refusals[number]
        read = self._reads.get(number)
        if read is not None and read.rank == rank:
            del self._reads[number]
            self._reads_of[rank, read.sequence].remove(number)
            if not self._reads_of[rank, read.sequence]:
                del self._reads_of[rank, read.sequence]
            for shard in read.shards:
                shard.readers.discard((rank, number))
            self._mark_changed(read.shards)

    def end_reads(self, rank: int, most: int | None = None) -> None:
        """End a worker's reads at the end of a connection: those of `Values` up to a number; None: all."""
        if rank in self._of_rank:
            self._of_rank[rank].unread.clear()
        for number in [*self._reads, *self.refusals]:
            if most is None or number <= most:
                self.end_read(rank, number)

    def fail(self, waiter: Waiter, error: str, text: str, once: bool) -> None:
        """Send an error to a waiter of a request.

        With ``once`` it is known here only, so it is kept until the worker confirms it.
        """
        failed = Failed(waiter.sequence, error, text)
        if once:
            self._number += 1
            failed.number = self._number
            self.refusals[self._number] = waiter.rank, failed
        self.send_to_rank(waiter.rank, failed)

    def fail_again(self, rank: int, sequence: int) -> bool:
        """Send an error again if a repeated request has failed before; return whether it has."""
        for refused, failed in self.refusals.values():
            if (refused, failed.sequence) == (rank, sequence):
                self.send_to_rank(rank, failed)
                return True
        return False

    def send_to_rank(self, rank: int, message: Message) -> None:
        """Send a message to a worker."""
        worker = self._of_rank.get(rank)
        if worker is not None:
            self.send(worker.identity, message)

    def send(self, identity: bytes, message: Message, datas: Sequence[Tensor] = ()) -> None:
        """Send a message with a copy of each tensor."""
        self._listener.send(identity, [protocol.pack(message), *map(frame_of, datas)])


def _sequence_of(pair: tuple[Waiter, Shard]) -> int:
    return pair[0].sequence
