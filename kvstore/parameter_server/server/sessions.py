"""Sessions of a server with its workers: acknowledgements, values, and releases of memory."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from gangline.collectives.transports.shm.segments import Segment, Words
from gangline.kvstore.compression import Codec
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import CODED, DENSE, ROWS, Ack, Failed, Message, Release, Values
from gangline.kvstore.parameter_server.server.shards import Shard, Slot, Waiter
from gangline.kvstore.parameter_server.transport.frames import INLINE, frame_of
from gangline.kvstore.parameter_server.transport.listener import Listener

if TYPE_CHECKING:
    from zmq import MessageTracker

_REMEMBERED = 256
_MAX_DEFERRED = 64
_DEFER_SECONDS = 0.01
_BACKLOG_BYTES = 256 << 20
"""Bytes of open rounds that a server accepts from each worker, in addition to twice what it stores."""
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
    word: Words | tuple[int] = (0,)
    """Word of its memory, or in its place the last one of a `Push`: number of the last `Values` that it has read."""
    number: int = field(default_factory=time.monotonic_ns)
    """Number of the last ones that it was sent; higher than those of a former process of the server."""
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
    ready: list[tuple[Waiter, Shard, Slot]] = field(default_factory=list)
    """Requests whose value is there; the value stays until it is sent."""
    refused: dict[int, Failed] = field(default_factory=dict)
    """Last errors that only this server knows, by sequence number: they are sent again if the request is repeated."""

    def subtract_from_backlog(self, nbytes: int, release: Callable[[], None] | None) -> None:
        """Subtract the bytes of a value that is not read any more, and release its memory, if it must be released."""
        self.backlog -= nbytes
        if release is not None:
            release()


class Sessions:
    """Sessions with all workers, and everything that is sent to them.

    A message of one worker costs nothing for each of the others: workers to which something is due are kept apart.
    ``awaited`` returns the ranks for whose pushes others wait, given those whose acknowledgements are withheld.
    """

    def __init__(self, listener: Listener, awaited: Callable[[Collection[int]], Collection[int]]) -> None:
        self.workers: dict[bytes, WorkerSession] = {}
        """Sessions by the identity of the worker's socket."""
        self.pull_codec: Codec | None = None
        """Compression of values; None: none."""
        self.is_sync = True
        """True if a pull that is repeated gets the same value."""
        self.max_backlog = math.inf
        """Bytes of backlog beyond which acknowledgements are withheld."""
        self.sent_bytes = 0
        """Bytes of values that workers were sent, or may read in place."""
        self.due: dict[WorkerSession, None] = {}
        """Workers to which acknowledgements, values or releases are to be sent now, or once they have read others."""
        self._listener = listener
        self._find_awaited = awaited
        self._awaited: Collection[int] = ()
        self._awaited_until = 0.0  # `time.monotonic` seconds when they are looked for again
        self._of_rank: dict[int, WorkerSession] = {}
        self._deferred: dict[WorkerSession, None] = {}  # acknowledgements may wait; by `acks_since`
        self._withheld: dict[WorkerSession, None] = {}

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
            self.due.pop(worker, None)
            self._deferred.pop(worker, None)
            self._withheld.pop(worker, None)
            self.end_reads(worker)
        return worker

    def end_reads(self, worker: WorkerSession) -> None:
        """Release the values that a dead worker reads or was to get, so that they may change."""
        worker.word = (sys.maxsize,)
        for _, _, slot in worker.ready:
            slot.pins -= 1
        worker.ready = []

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
            self.due[worker] = None
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
            self.due[worker] = None

    def send_value(self, waiter: Waiter, shard: Shard, slot: Slot) -> None:
        """Send a value of a shard to a waiter with the next `flush`."""
        worker = self._of_rank.get(waiter.rank)
        if worker is not None:
            worker.ready.append((waiter, shard, slot))
            slot.pins += 1
            self.due[worker] = None

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
                self.due[worker] = None
        due, self.due = self.due, {}
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
            if worker.ready or self._listener.is_full(worker.identity):
                worker.ready += group
                self.due[worker] = None
                continue
            self._send_values(worker, sequence, group)
            for _, _, slot in group:
                slot.pins -= 1

    def flush_acks(self) -> None:
        """Send all acknowledgements except withheld ones."""
        for worker in list(self._deferred):
            self._send_acks(worker)

    def _send_acks(self, worker: WorkerSession) -> None:
        self.send(worker.identity, Ack(worker.acks))
        worker.acks = []
        worker.acks_are_due = False
        self._deferred.pop(worker, None)

    def _send_values(self, worker: WorkerSession, sequence: int, ready: list[tuple[Waiter, Shard, Slot]]) -> None:
        """Send values of shards; large ones are read in place, and stay until the worker has read them."""
        if sequence in worker.acks:  # values acknowledge their request
            worker.acks.remove(sequence)
            if not worker.acks:
                self._deferred.pop(worker, None)
        codec = self.pull_codec
        placed: list[tuple[int, int, int, int]] = []
        copied: list[tuple[int, int, int, int]] = []
        offsets: list[int] = []
        datas: list[Tensor] = []
        transfers: list[MessageTracker] = []
        worker.number += 2
        for waiter, shard, slot in ready:
            data, kind, is_placed = slot.flat, DENSE, False
            if waiter.rows is not None:
                data, kind = slot.flat.view(-1, shard.width).index_select(0, waiter.rows), ROWS
            elif codec is not None and data.is_floating_point():
                data, kind = codec.encode(data), CODED
            elif data.nbytes > INLINE:
                is_placed = worker.shares_memory
                if not is_placed:
                    slot.transfers.append(transfers)
            entry = shard.number, min(slot.last, shard.closed), kind, data.nbytes
            if is_placed:
                placed += (entry,)
                offsets += (slot.offset,)
            else:
                copied += (entry,)
                datas += (data,)
            if is_placed or self.is_sync:
                slot.unread[worker] = worker.number
            self.sent_bytes += data.nbytes
        if placed:
            self.send(worker.identity, Values(sequence, worker.number - bool(copied), placed, offsets))
        if copied:
            header = protocol.pack(Values(sequence, worker.number, copied, []))
            self._listener.send(worker.identity, [header, *map(frame_of, datas)], transfers)

    def fail(self, waiter: Waiter, error: str, text: str, once: bool) -> None:
        """Send an error to a waiter of a request.

        With ``once`` it is known here only, so it is kept in case that the request is repeated.
        """
        failed, worker = Failed(waiter.sequence, error, text), self._of_rank.get(waiter.rank)
        if once and worker is not None:
            worker.refused[waiter.sequence] = failed
            if len(worker.refused) > _REMEMBERED:
                del worker.refused[next(iter(worker.refused))]
        self.send_to_rank(waiter.rank, failed)

    def send_to_rank(self, rank: int, message: Message) -> None:
        """Send a message to a worker."""
        worker = self._of_rank.get(rank)
        if worker is not None:
            self.send(worker.identity, message)

    def send(self, identity: bytes, message: Message, datas: Sequence[Tensor] = ()) -> None:
        """Send a message with a copy of each tensor."""
        self._listener.send(identity, [protocol.pack(message), *map(frame_of, datas)])


def _sequence_of(one: tuple[Waiter, Shard, Slot]) -> int:
    return one[0].sequence
