"""What a server tells its workers: that it has what they sent, what they asked for, what they may write again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from torch import Tensor

from gangline.collectives.compression import Codec
from gangline.collectives.transports.shm.segments import Segment
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import CODED, DENSE, ROWS, Ack, Failed, Free, Message, Values
from gangline.kvstore.parameter_server.server.shards import Shard, Waiter
from gangline.kvstore.parameter_server.transport.frames import INLINE, memory_of
from gangline.kvstore.parameter_server.transport.listener import Listener

_REMEMBERED = 256
_MANY = 64
_LATE_SECONDS = 0.01
_AHEAD = 256 << 20
"""Bytes of open rounds that a server takes of each worker besides twice what it stores."""


@dataclass(eq=False)
class WorkerSession:
    """A worker, as its server knows it."""

    identity: bytes
    rank: int
    memory: Segment | None
    shares: bool
    """Whether it reads values in this server's memory."""
    acks: list[int] = field(default_factory=list)
    late_acks: list[int] = field(default_factory=list)
    """Those that nobody waits for: they go out with others, or when there is nothing else to do."""
    late_since: float = 0.0
    """When the first of them came, by `time.monotonic`."""
    withheld: list[int] = field(default_factory=list)
    """Those that go out when its backlog is small again: till then it sends no more than its window."""
    backlog: int = 0
    """Bytes that it gave to rounds which are still open."""
    frees: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    """Messages whose memory is still looked at."""
    done: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """The last messages that must not be followed twice."""
    ready: list[tuple[Waiter, Shard]] = field(default_factory=list)

    def free(self, sequence: int) -> None:
        """Tell it that a message's memory may be written again."""
        self.held.discard(sequence)
        self.frees.append(sequence)

    def is_overdue(self) -> bool:
        """Whether acknowledgements have waited long for a time when there is nothing else to do."""
        return bool(self.late_acks) and time.monotonic() - self.late_since > _LATE_SECONDS

    def count(self, nbytes: int, release: Callable[[], None]) -> Callable[[], None]:
        """Have bytes belong to the backlog until what this gives is called, which then calls ``release``."""
        self.backlog += nbytes
        return partial(self._end, nbytes, release)

    def _end(self, nbytes: int, release: Callable[[], None]) -> None:
        self.backlog -= nbytes
        release()


@dataclass(frozen=True)
class _Read:
    """Values that a worker reads where they lie."""

    rank: int
    sequence: int
    parts: list[Shard]


class Sessions:
    """The workers of a server, and all that goes out to them.

    Args:
        doors: by which it goes.
        touch: told of parts whose values nobody reads any more.
        lacks: whether somebody waits for what a worker has yet to give.
    """

    def __init__(self, doors: Listener, touch: Callable[[Iterable[Shard]], None], lacks: Callable[[int], bool]) -> None:
        self.workers: dict[bytes, WorkerSession] = {}
        """By identity."""
        self.pull_codec: Codec | None = None
        """How values go out; None: as they are."""
        self.most_backlog = math.inf
        """Bytes beyond which a worker is told late that its pushes have come."""
        self._doors = doors
        self._touch = touch
        self._lacks = lacks
        self._reads: dict[int, _Read] = {}
        self._number = 0

    def bound_backlogs(self, stored: int) -> None:
        """Let each worker be about two rounds ahead of the slowest, of all the bytes that are stored here."""
        self.most_backlog = 2 * stored + _AHEAD

    def has(self, worker: WorkerSession, sequence: int, *, late: bool) -> None:
        """Tell a worker that what it sent has come; ``late``: it does not wait for that."""
        if self._is_ahead(worker):
            worker.withheld.append(sequence)
        elif late:
            worker.late_since = worker.late_since if worker.late_acks else time.monotonic()
            worker.late_acks.append(sequence)
        else:
            worker.acks.append(sequence)

    def _is_ahead(self, worker: WorkerSession) -> bool:
        return worker.backlog > self.most_backlog and not self._lacks(worker.rank)

    def is_ready(self, waiter: Waiter, part: Shard) -> None:
        """Have a worker given a part's value by the next `flush`."""
        for worker in self._of_rank(waiter.rank):
            worker.ready.append((waiter, part))
            part.owed += 1

    def flush(self) -> None:
        """Send what has come together."""
        for worker in self.workers.values():
            if worker.withheld and not self._is_ahead(worker):
                worker.acks += worker.withheld
                worker.withheld.clear()
            if worker.acks or len(worker.late_acks) >= _MANY or worker.is_overdue():
                self._acknowledge(worker)
            if worker.ready:
                worker.ready.sort(key=lambda pair: pair[0].sequence)
                for sequence, group in groupby(worker.ready, key=lambda pair: pair[0].sequence):
                    self._give(worker, sequence, list(group))
                for _, part in worker.ready:
                    part.owed -= 1
                    if not part.owed and part.open:
                        self._touch([part])
                worker.ready = []
            if worker.frees:
                self.send(worker.identity, Free(worker.frees))
                worker.frees.clear()

    def flush_late(self) -> None:
        """Send acknowledgements that could wait."""
        for worker in self.workers.values():
            if worker.late_acks:
                self._acknowledge(worker)

    def _acknowledge(self, worker: WorkerSession) -> None:
        self.send(worker.identity, Ack([*worker.acks, *worker.late_acks]))
        worker.acks.clear()
        worker.late_acks.clear()

    def _give(self, worker: WorkerSession, sequence: int, ready: list[tuple[Waiter, Shard]]) -> None:
        """Values of parts: large ones are read where they lie, and stay until the worker has them."""
        if sequence in worker.late_acks:  # this says as much
            worker.late_acks.remove(sequence)
        codec = self.pull_codec
        in_place: list[tuple[Waiter, Shard]] = []
        others: list[tuple[Waiter, Shard]] = []
        for pair in ready:
            waiter, part = pair
            is_coded = codec is not None and part.flat.is_floating_point()
            lies_there = waiter.rows is None and part.flat.nbytes > INLINE and not is_coded
            (in_place if lies_there else others).append(pair)
        if in_place:
            self._number += 1
            parts = [part for _, part in in_place]
            self._end_lost_reads(worker.rank, sequence, parts)
            for part in parts:
                part.readers.add((worker.rank, self._number))
            self._reads[self._number] = _Read(worker.rank, sequence, parts)
            entries = [[part.number, part.closed, DENSE, part.flat.nbytes] for part in parts]
            places = [part.offset for part in parts] if worker.shares else []
            frames = [] if worker.shares else [memory_of(part.flat) for part in parts]
            message = protocol.pack(Values(sequence, self._number, entries, places))
            self._doors.send(worker.identity, [message, *frames], in_place=True)
        if others:
            entries, datas = [], []
            for waiter, part in others:
                data, kind = part.flat, DENSE
                if waiter.rows is not None:
                    data, kind = part.flat.view(-1, part.width).index_select(0, waiter.rows), ROWS
                elif codec is not None and data.is_floating_point():
                    data, kind = codec.encode(data), CODED
                entries.append([part.number, part.closed, kind, data.nbytes])
                datas.append(data)
            self.send(worker.identity, Values(sequence, 0, entries, []), datas)

    def end_read(self, rank: int, number: int) -> None:
        """Values may change again: a worker has read them, or is gone; those that another one reads may not."""
        read = self._reads.get(number)
        if read is not None and read.rank == rank:
            del self._reads[number]
            for part in read.parts:
                part.readers.discard((rank, number))
            self._touch(read.parts)

    def _end_lost_reads(self, rank: int, sequence: int, parts: Sequence[Shard]) -> None:
        """What is given again was lost on its way, or has been read when this comes; its new number tells of both."""
        for number, read in list(self._reads.items()):
            if (read.rank, read.sequence) == (rank, sequence):
                for part in parts:
                    part.readers.discard((rank, number))

    def fail(self, waiter: Waiter, kind: str, text: str) -> None:
        """Tell a worker that what it waits for cannot be."""
        for worker in self._of_rank(waiter.rank):
            self.send(worker.identity, Failed(waiter.sequence, kind, text))

    def _of_rank(self, rank: int) -> list[WorkerSession]:
        return [worker for worker in self.workers.values() if worker.rank == rank]

    def send(self, identity: bytes, message: Message, datas: Sequence[Tensor] = ()) -> None:
        """Send a message, with a copy of each tensor."""
        self._doors.send(identity, [protocol.pack(message), *map(memory_of, datas)])

    def end_reads(self, rank: int, most: int | None = None) -> None:
        """`end_read` of all messages up to a number; None: of all."""
        for number in list(self._reads):
            if most is None or number <= most:
                self.end_read(rank, number)
