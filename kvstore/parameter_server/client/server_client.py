"""A worker's lines to its servers: requests go out by priority, as far as servers keep up; answers come back."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Set
from dataclasses import replace

import zmq
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
from gangline.collectives.host_memory import keep_freed_memory
from gangline.collectives.liveness.limits import limits
from gangline.collectives.transports.shm.segments import Segment, open_offered
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.protocol import (
    Ack,
    Answer,
    Done,
    Failed,
    Free,
    Hello,
    Message,
    Values,
    Welcome,
)
from gangline.kvstore.parameter_server.transport.client_channel import Channel, open_channel
from gangline.kvstore.parameter_server.transport.frames import bytes_of
from gangline.kvstore.parameter_server.transport.poller import LOOKS_SECONDS, Poller, Source
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool

_log = logging.getLogger("gangline")
_WINDOW = 16 << 20
"""Bytes that may be on their way to a server before it has taken them: then priorities still have a say."""

_MOST_QUEUED = 256 << 20
"""Bytes that may wait here to be sent: what comes then stays with its caller until there is room."""

_TICK_MS = 100
_GRACE_SECONDS = 10.0
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (DeadNodeError, MismatchError, ProtocolError, StallError, ValueError, KeyError, TypeError, RuntimeError)
}


class _ServerConnection:
    """One server, as the wire knows it."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.memory: Segment | None = None
        self.shares = False
        self.greeted = False
        self.under_way = 0  # bytes that the server has not taken
        self.undelivered = 0  # requests that nobody waits for, of those
        self.pending: dict[int, Request] = {}  # not answered yet
        self.holding: dict[int, Request] = {}  # answered, but their memory is not free yet
        self.read = 0  # the highest number of Values in the server's memory that has been read


class ServerClient:
    """Sockets to all servers. Whoever waits for an answer moves them; a thread does while nobody waits.

    Args:
        member: this worker's.
        mode: "sync" or "async".
        staleness: see `protocol.Hello`.
        arena: what this worker shares with servers of its host; None: nothing.
        timeout: seconds that an answer may take.

    Raises:
        MismatchError: another worker's mode or staleness differs.
        DeadNodeError: a server is gone.
        StallError: one does not answer.
    """

    def __init__(
        self, member: SchedulerClient, mode: str, staleness: int, arena: SharedMemoryPool | None, timeout: float
    ) -> None:
        bounds = limits()
        self._timeout, self._stall_warn = timeout, bounds.stall_warn
        self._member = member
        self._hello = Hello(member.rank, member.view, mode, staleness, arena.card if arena is not None else b"", 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self._sequences = itertools.count(1)
        self._ticket = itertools.count()
        self._outbox: list[tuple[int, int, Request]] = []
        self._queued = 0  # bytes in it
        self._lock = threading.Lock()  # of the outbox
        self._turn = threading.Lock()  # held by whoever moves the sockets
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._idle = threading.Condition()
        self._thread: threading.Thread | None = None
        self._checked = 0.0
        self._warned = False
        self._lines = [
            _ServerConnection(open_channel(address, self._context, member.identity)) for address in member.servers
        ]
        self._watch = Poller()
        self._watch.add(self._bell)
        member.on_news = self._ring
        self._refusal: Exception | None = None  # of a hello
        try:
            self._greet_all()
        except BaseException:
            self.close()
            raise
        if not all(self.shares):  # values come by socket: 4 MiB again and again
            keep_freed_memory()

    @property
    def shares(self) -> list[bool]:
        """Of each server, whether it reads this worker's memory."""
        return [line.shares for line in self._lines]

    def memory_of(self, server: int) -> Segment:
        """A server's shared memory, of which `protocol.Values` name places."""
        memory = self._lines[server].memory
        if memory is None:
            raise ProtocolError(f"server {server} names a place in memory that it does not share")
        return memory

    def submit(self, request: Request) -> None:
        """Have a request sent; its callbacks run in whatever thread moves the sockets then."""
        lost = self._lost(request.server)
        if lost:
            request.on_error(self._dead(request, lost))
            return
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            heapq.heappush(self._outbox, (-request.priority, next(self._ticket), request))
            self._queued += request.nbytes
        self._kick()

    def wait_for_room(self) -> None:
        """Return when not too much waits to be sent."""
        if self._queued > _MOST_QUEUED:
            self.wait(lambda: self._queued <= _MOST_QUEUED)

    def go_on(self) -> None:
        """Have answers taken in also while nobody waits for them."""
        with self._idle:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gangline-wire", daemon=True)
                self._thread.start()
            self._idle.notify()

    def flush(self, seconds: float = math.inf) -> bool:
        """Return when servers have all that was to be sent, whatever they wait for with it; whether so in the time."""

        def is_over() -> bool:
            return not self._outbox and not any(line.under_way for line in self._lines)

        ends = time.monotonic() + seconds
        self.wait(lambda: is_over() or time.monotonic() > ends)
        return is_over()

    def deliver(self) -> None:
        """Return when servers have all that was over when it was sent, or are lost."""
        self.wait(lambda: not any(line.undelivered for line in self._lines))

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Move the sockets until something is over, or another thread does until then."""
        while not is_over():
            if self._turn.acquire(timeout=0.002):
                try:
                    while not is_over():
                        self._progress(_TICK_MS, LOOKS_SECONDS)
                finally:
                    self._turn.release()
                self._kick()
        if any(line.channel.is_full for line in self._lines):  # it was sent, but not all of it has gone out
            self.go_on()

    def say(self, server: int, message: Message) -> None:
        """Send something that needs no answer; only in a callback."""
        self._lines[server].channel.send([protocol.pack(message)])

    def close(self) -> None:
        """Close the sockets once servers have what was sent; fail what is still pending. Idempotent."""
        if not self._closed and not self.flush(_GRACE_SECONDS):
            _log.warning("worker %d leaves, and servers may not have all that it has pushed", self._member.rank)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._ring()
        with self._idle:
            self._idle.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._turn:
            for line in self._lines:
                line.channel.close()
            self._watch.close()
            self._fail_all(RuntimeError("the store was closed"))
            end(self._context)
            with self._lock:  # who rings afterwards must not ring another's bell of the same number
                bell, self._bell = self._bell, -1
                os.close(bell)

    # Sending

    def _greet_all(self) -> None:
        ends = time.monotonic() + self._timeout
        with self._turn:
            while not all(line.greeted for line in self._lines):
                self._progress(_TICK_MS)
                if self._refusal is not None:
                    raise self._refusal
                for server in range(len(self._lines)):
                    if lost := self._lost(server):
                        raise DeadNodeError(f"{lost} (worker {self._member.rank} said hello)")
                if time.monotonic() > ends:
                    silent = [index for index, line in enumerate(self._lines) if not line.greeted]
                    raise StallError(f"servers {silent} did not answer within {self._timeout:g} s")

    def _kick(self) -> None:
        """See that what is in the outbox goes out: now, or by whoever moves the sockets."""
        while self._outbox:
            if not self._turn.acquire(blocking=False):
                self._ring()
                return
            try:
                self._flush()
            finally:
                self._turn.release()
            if self._outbox:  # the window is full: an answer opens it
                return

    def _flush(self) -> None:
        if not self._outbox:
            return
        with self._lock:
            kept = []
            try:
                while self._outbox:
                    entry = heapq.heappop(self._outbox)
                    request = entry[2]
                    line = self._lines[request.server]
                    if line.under_way and line.under_way + request.nbytes > _WINDOW:
                        kept.append(entry)
                    else:
                        self._queued -= request.nbytes
                        self._dispatch(line, request)
            finally:
                self._outbox = kept + self._outbox  # in order, as a heap is

    def _dispatch(self, line: _ServerConnection, request: Request) -> None:
        request.sequence = next(self._sequences)
        request.since = time.monotonic()
        request.packed = protocol.pack(request.message(request.sequence))
        line.pending[request.sequence] = request
        line.under_way += request.nbytes
        line.undelivered += request.is_over_when_sent
        self._transmit(line, request)
        request.on_sent()

    def _transmit(self, line: _ServerConnection, request: Request) -> None:
        line.channel.send([request.packed, *request.frames])

    def _ring(self) -> None:
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # Receiving

    def _serve(self) -> None:
        """Move the sockets while requests are under way that nobody waits for."""
        while not self._closed:
            if not self._is_busy():
                with self._idle:
                    if not self._is_busy() and not self._closed:
                        self._idle.wait()
                continue
            if self._turn.acquire(timeout=0.05):
                try:
                    if not self._closed:
                        self._progress(_TICK_MS)
                finally:
                    self._turn.release()
                self._kick()

    def _is_busy(self) -> bool:
        return bool(self._outbox) or any(line.pending or line.holding for line in self._lines)

    def _progress(self, timeout_ms: int, looks_seconds: float = 0.0) -> None:
        self._flush()
        for line in self._lines:
            line.channel.arm(self._watch)
        events = self._watch.wait(timeout_ms, looks_seconds)
        if self._bell in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        for server, line in enumerate(self._lines):
            if line.channel.has_come(events):
                self._greet(line)
            self._receive(server, line, events)
        self._check()
        self._flush()

    def _greet(self, line: _ServerConnection) -> None:
        """Say hello on a new connection, and ask again what may be lost with the last: it is known by its number."""
        line.channel.send([protocol.pack(replace(self._hello, read=line.read))])
        for request in [*line.holding.values(), *line.pending.values()]:
            self._transmit(line, request)

    def _receive(self, server: int, line: _ServerConnection, events: Set[Source]) -> None:
        for frames in line.channel.receive(events):
            try:
                self._hear(server, line, protocol.unpack(frames[0]), frames[1:])
            except ProtocolError as error:
                _log.warning("worker %d drops what server %d sent: %s", self._member.rank, server, error)

    def _hear(self, server: int, line: _ServerConnection, message: Message, frames: list[memoryview]) -> None:
        match message:
            case Welcome(shared, memory):
                line.greeted = True
                if shared and memory and line.memory is None:
                    line.memory = open_offered(memory)
                line.shares = shared and line.memory is not None
            case Ack(sequences):
                for sequence in sequences:
                    self._take(line, sequence)
            case Free(sequences):
                for sequence in sequences:
                    holder = line.holding.pop(sequence, None) or line.pending.get(sequence)
                    if holder is not None and holder.on_free is not None:
                        holder.on_free()
                        holder.on_free = None
            case Values(sequence, number, _, _):
                self._settle(line, sequence, message, [bytes_of(frame) for frame in frames])
                if number:
                    line.read = max(line.read, number)
                    self.say(server, Done([number]))
            case Answer(sequence, _):
                self._settle(line, sequence, message, [bytes_of(frame) for frame in frames])
            case Failed(sequence, kind, text):
                error = _ERRORS.get(kind, GanglineError)(text)
                if not sequence:  # it could not be read far enough to be known by its number
                    self._refusal = error
                    _log.warning("server %d refuses what worker %d sent: %s", server, self._member.rank, text)
                self._fail(line, sequence, error)
            case _:
                raise ProtocolError(f"{type(message).__name__} came")

    def _settle(self, line: _ServerConnection, sequence: int, message: Message, datas: list[Tensor]) -> None:
        request = line.pending.get(sequence)
        if request is None:  # answered before, as happens where it was asked twice
            return
        self._take_off(line, request)
        try:
            is_over = request.on_answer(message, datas)
        except Exception as error:  # noqa: BLE001  it belongs to whoever asked
            self._fail(line, sequence, error)
            return
        if is_over:
            del line.pending[sequence]
            if request.on_free is not None:
                line.holding[sequence] = request

    def _take(self, line: _ServerConnection, sequence: int) -> None:
        """The server has what a request carried; one that wants no values is over."""
        request = line.pending.get(sequence)
        if request is not None:
            self._take_off(line, request)
            if not request.wants:
                self._settle(line, sequence, Ack([sequence]), [])

    def _take_off(self, line: _ServerConnection, request: Request) -> None:
        if not request.taken:
            request.taken = True
            line.under_way -= request.nbytes
            line.undelivered -= request.is_over_when_sent

    def _fail(self, line: _ServerConnection, sequence: int, error: Exception) -> None:
        request = line.pending.pop(sequence, None)
        if request is None:
            return
        self._take_off(line, request)
        if request.on_free is not None:
            line.holding[sequence] = request
        request.on_error(error)

    def _check(self) -> None:
        """See whether waiting still makes sense."""
        now = time.monotonic()
        news = bool(self._member.gone or self._member.lost)
        if now - self._checked < (0.02 if news else 0.1):
            return
        self._checked = now
        for server, line in enumerate(self._lines):
            lost = self._lost(server)
            if lost:
                self._fail_line(line, lost)
            for sequence, request in list(line.pending.items()):
                waited = now - request.since
                if waited > self._timeout:
                    text = f"{request.what} has waited {waited:.3g} s for server {server}"
                    self._fail(line, sequence, StallError(text))
                elif waited > self._stall_warn and not self._warned:
                    self._warned = True
                    _log.warning("%s has waited %.3g s for server %d", request.what, waited, server)

    def _lost(self, server: int) -> str:
        """Why a server can answer no more; "": it can."""
        if self._member.lost:
            return f"the scheduler {self._member.lost}"
        why = self._member.gone.get(("server", server)) if self._member.gone else None
        return "" if why is None else f"server {server} {why or 'has left the job'}"

    def _dead(self, request: Request, why: str) -> DeadNodeError:
        return DeadNodeError(f"{why} (worker {self._member.rank} waited in {request.what})")

    def _fail_line(self, line: _ServerConnection, why: str) -> None:
        for sequence, request in list(line.pending.items()):
            self._fail(line, sequence, self._dead(request, why))
        with self._lock:
            mine = [one for one in self._outbox if self._lines[one[2].server] is line]
            self._outbox = [one for one in self._outbox if self._lines[one[2].server] is not line]
            heapq.heapify(self._outbox)
            self._queued -= sum(request.nbytes for _, _, request in mine)
        for _, _, request in mine:
            request.on_error(self._dead(request, why))

    def _fail_all(self, error: Exception) -> None:
        for line in self._lines:
            for sequence in list(line.pending):
                self._fail(line, sequence, error)
        for _, _, request in self._outbox:
            request.on_error(error)
        self._outbox, self._queued = [], 0
