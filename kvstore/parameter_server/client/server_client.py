"""Client of all servers: sends requests by priority within a window of bytes per server, and handles the answers."""

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
from functools import partial

import zmq
from msgspec.structs import replace
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
from gangline.collectives.limits import limits
from gangline.collectives.liveness.status_socket import Part, Wait, publish, withdraw
from gangline.collectives.timeline import recorder
from gangline.collectives.transports.shm.segments import Segment, Words, open_offered
from gangline.collectives.transports.zmq.context import end
from gangline.collectives.work import GuardedLock
from gangline.kvstore.freed_memory import keep_freed_memory
from gangline.kvstore.group.remote_errors import hint, make_error, why_gone
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.protocol import Message
from gangline.kvstore.parameter_server.transport.client_channel import Channel, open_channel
from gangline.kvstore.parameter_server.transport.frames import tensor_of
from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller, Source
from gangline.kvstore.parameter_server.transport.shared_memory import SharedMemoryPool

_log = logging.getLogger("gangline")
_WINDOW = 16 << 20
"""Maximum bytes in flight to a server. Priorities only order unsent requests."""

_MAX_QUEUED = 256 << 20  # bytes of unsent requests beyond which `wait_for_room` blocks

_TICK_MS = 100
_WATCH_SECONDS = 0.5
"""Interval of checks of connections while the caller computes and servers may not have received all pushes."""

CLOSE_SECONDS = 10.0
"""Time to deliver sent requests if the caller has failed, or ends without closing its store."""


class _ServerConnection:
    def __init__(self, address: str, channel: Channel, hello: protocol.Hello) -> None:
        self.address = address
        self.channel = channel
        self.hello = hello
        self.has_hello = False  # sent on this channel, so that other messages may follow
        self.memory: Segment | None = None
        self.shares_memory = False
        self.greeted = False
        self.in_flight = 0  # bytes that the server has not received
        self.undelivered = 0  # number of requests in flight that completed when sent
        self.pending: dict[int, Request] = {}  # not answered
        self.unreleased: dict[int, Request] = {}  # answered, but the server still reads their memory


def _state(connection: _ServerConnection) -> str:
    """Return the state of a connection, for a StallError."""
    if connection.channel.disconnected_at:
        return f", which is not connected at {connection.address}"
    return "" if connection.greeted else f", which has not answered its Hello at {connection.address}"


class ServerClient:
    """Connections to all servers. Threads that wait for an answer drive the sockets, or else a background thread does.

    For ``mode`` and ``staleness`` see `protocol.Hello`. ``pool`` is the memory that this worker shares with servers of
    its host; None: none. An answer may take ``timeout`` seconds.

    Raises:
        MismatchError: if another worker has a different mode or staleness.
        DeadNodeError: if a server has died.
        StallError: if a server does not answer within the timeout.
    """

    def __init__(
        self, scheduler: SchedulerClient, mode: str, staleness: int, pool: SharedMemoryPool | None, timeout: float
    ) -> None:
        bounds = limits()
        self._timeout, self._stall_warn, self._limit = timeout, bounds.stall_warn, bounds.heartbeat_limit
        self._scheduler = scheduler
        count, handle, at = len(scheduler.servers), b"", 0
        self._last_read: Words | list[int] = [0] * count  # by server: see `protocol.Hello`
        if pool is not None:
            handle, at = pool.handle, pool.allocate(8 * count)
            self._last_read = pool.segment.words(at, count)
        hello = protocol.Hello(scheduler.rank, scheduler.view, mode, staleness, handle, at)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self._sequences = itertools.count(1)
        self._order = itertools.count()
        self._outbox: list[tuple[bool, int, int, Request]] = []  # heap: pulls, -priority, order
        self._queued = 0  # bytes in the outbox
        self._lock = GuardedLock()  # protects the outbox
        self._driving = threading.Lock()  # held by the thread that drives the sockets
        self.waiting: dict[int, bool] = {}
        """Ids of threads in `wait`, with True; a signal handler may interrupt them. (Sets would cost calls.)"""
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._idle = threading.Condition()  # protects the next two
        self._drives = False  # whether the thread drives the sockets all the time
        self._sleeps = True  # whether the thread is idle
        self._thread: threading.Thread | None = None
        self._failure: GanglineError | None = None  # an error of the thread that drove the sockets
        self.told_error: Exception | None = None
        """Last error of a request that all workers know."""
        self._blocked_at = 0  # number of the last collective that was failed because of a blocked request
        self._checked_at = 0.0
        self._warned = False
        self._poller = Poller()
        self._poller.add(self._event_fd)
        self._connections = [
            _ServerConnection(address, self._open(address), replace(hello, word=at + 8 * server if handle else 0))
            for server, address in enumerate(scheduler.servers)
        ]
        scheduler.on_change = self._on_change
        self._refusal: Exception | None = None  # of a Hello
        self._undelivered: list[str] | None = None  # requests that were lost during close()
        self._count = self._sent_bytes = 0  # of requests
        publish(self, f"worker {scheduler.rank}")
        try:
            self._greet_all()
        except BaseException:
            self.close()
            raise
        if not all(self.shares_memory):  # values arrive by socket, in buffers of up to 4 MiB
            keep_freed_memory()

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self._connections)

    @property
    def shares_memory(self) -> list[bool]:
        """True for each server that reads this worker's shared memory."""
        return [connection.shares_memory for connection in self._connections]

    def memory_of(self, server: int) -> Segment:
        """Return a server's shared memory, to which `protocol.Values` refer."""
        memory = self._connections[server].memory
        if memory is None:
            raise ProtocolError(f"server {server} names an offset in shared memory, but shares none")
        return memory

    def submit(self, request: Request) -> None:
        """Queue a request; its callbacks run in the thread that drives the sockets. ValueError if it is too large."""
        if request.nbytes > protocol.MAX_SHARD:
            raise ValueError(
                f"{request.what} has {request.nbytes} bytes for one message; expected at most {protocol.MAX_SHARD}"
            )
        if self._failure is not None:
            request.on_error(request, self._failure)
            return
        if (self._scheduler.gone or self._scheduler.lost) and (lost := self._lost(request.server)):
            request.on_error(request, self._dead(request, lost))
            return
        if not self._outbox and self._driving.acquire(blocking=False):  # nothing is queued
            try:
                if self._closed:
                    raise RuntimeError("the store is closed")
                is_sent = self._has_room(request)
                if is_sent:
                    try:
                        self._dispatch(request)
                    except Exception as error:  # noqa: BLE001  as in `wait`
                        self._stop_after(error)
            finally:
                self._driving.release()
            if is_sent:
                if self._outbox:
                    self._send_queued()
                return
        with self._lock:
            if self._closed:
                raise RuntimeError("the store is closed")
            # A pull goes before pushes, so that its server has it before a later push of its key.
            entry = type(request.message) is not protocol.Pull, -request.priority, next(self._order), request
            heapq.heappush(self._outbox, entry)
            self._queued += request.nbytes
        self._send_queued()

    def wait_for_room(self) -> None:
        """Wait until at most 256 MiB are queued."""
        if self._queued > _MAX_QUEUED:
            self.wait(lambda: self._queued <= _MAX_QUEUED)

    def drive_in_background(self) -> None:
        """Handle answers in a thread while no other thread waits, until all requests are answered."""
        self._wake_thread(drives=True)

    def watch_connections(self) -> None:
        """Check in a thread, twice a second, for lost connections until servers have received all pushes."""
        if self._sleeps:
            for one in self._connections:  # `any` would make calls, and every call of a store comes here
                if one.undelivered:
                    self._wake_thread(drives=False)
                    return

    def _wake_thread(self, *, drives: bool) -> None:
        with self._idle:
            self._drives |= drives
            self._sleeps = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gangline-server-client", daemon=True)
                self._thread.start()
            self._idle.notify()

    def flush(self, seconds: float = math.inf) -> bool:
        """Wait until servers have received all requests, whether answered or not; return False after the timeout."""

        def is_flushed() -> bool:
            return not self._outbox and not any(connection.in_flight for connection in self._connections)

        ends = time.monotonic() + seconds
        self.wait(lambda: is_flushed() or time.monotonic() > ends)
        if seconds == math.inf:
            self._check_failure()
        return is_flushed()

    def deliver(self) -> None:
        """Wait until servers have received, or lost, all requests that completed when sent."""
        self.wait(lambda: not any(connection.undelivered for connection in self._connections))
        self._check_failure()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Drive the sockets, or wait while another thread does, until a condition holds."""
        if not is_over():
            thread = threading.get_ident()
            is_outermost = thread not in self.waiting
            self.waiting[thread] = True
            try:
                self._drive_until(is_over)
            finally:
                if is_outermost:
                    del self.waiting[thread]
        for connection in self._connections:
            if connection.channel.is_full:  # bytes are left in its queue
                self.drive_in_background()

    def _drive_until(self, is_over: Callable[[], bool]) -> None:
        ended = False
        while not ended:
            if self._driving.acquire(timeout=0.002):
                try:
                    while not (ended := is_over()):
                        if self._failure is not None:
                            raise self._failure
                        try:
                            self._progress(_TICK_MS, SPIN_SECONDS)
                        except Exception as error:  # noqa: BLE001  whatever it is, nothing would answer the requests
                            self._stop_after(error)
                finally:
                    self._driving.release()
                if self._outbox:
                    self._send_queued()
            else:
                ended = is_over()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close the sockets once servers have received all requests; fail pending requests. Idempotent.

        If servers may be restarted, also wait until the rounds of all pushes are final, but at most CLOSE_SECONDS: a
        restarted server could not get these pushes again.

        Raises:
            StallError: if servers may not have received all requests; the sockets are closed anyway.
        """
        withdraw(self)
        self._undelivered = []
        if not self._closed and self._failure is None and not self.flush(seconds):
            in_flight = [request for one in self._connections for request in one.pending.values()]
            waiting = [*in_flight, *(request for *_, request in self._outbox)]
            self._undelivered += [request.what for request in waiting if not request.received]
        if self._scheduler.allows_restarts and not self._closed and self._failure is None:
            self._wait_for_releases(min(seconds, CLOSE_SECONDS))
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._notify()
        with self._idle:
            self._idle.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._driving:
            for connection in self._connections:
                connection.channel.close()
            self._poller.close()
            self._fail_all(RuntimeError("the store was closed"))
            end(self._context)
            with self._lock:  # a later _notify must not write to another file with the same descriptor
                event_fd, self._event_fd = self._event_fd, -1
                os.close(event_fd)
        if self._undelivered:
            names = ", ".join(dict.fromkeys(self._undelivered))
            raise StallError(
                f"worker {self._scheduler.rank} closed its store, but servers may not have received {names} within "
                f"{seconds:g} s"
            )

    def status(self) -> Part:
        """Return the unanswered requests, for `gangline status`."""
        now, name = time.monotonic(), f"worker {self._scheduler.rank}"
        oldest = [
            (server, min(pending, key=lambda request: request.sent_at))
            for server, connection in enumerate(self._connections)
            if (pending := list(connection.pending.values()))
        ]
        return {
            "part": "requests",
            "counters": {"calls": self._count, "sent_bytes": self._sent_bytes},
            "waits": [
                Wait(what=one.what, seconds=now - one.sent_at, missing=[f"server {server}"], waiting=[name])
                for server, one in oldest
            ],
        }

    def _wait_for_releases(self, seconds: float) -> None:
        """Wait until servers have released all pushes, unless a worker has left: no round closes without it."""
        ends = time.monotonic() + seconds

        def is_over() -> bool:
            is_late = time.monotonic() > ends or self._failure is not None
            return is_late or bool(self._scheduler.gone) or not any(one.unreleased for one in self._connections)

        self.wait(is_over)

    # Sending

    def _open(self, address: str) -> Channel:
        return open_channel(address, self._context, self._scheduler.identity, self._poller)

    def _on_change(self) -> None:
        """Check connections at once: a restarted server waits for a Hello from each worker, busy or not."""
        self._notify()
        if self._is_replaced() and not self._closed:
            self._wake_thread(drives=True)

    def _is_replaced(self) -> bool:
        """Return whether a server was restarted and has not welcomed this worker yet."""
        servers = self._scheduler.servers
        return any(not one.greeted or one.address != servers[i] for i, one in enumerate(self._connections))

    def _replace(self, connection: _ServerConnection, address: str) -> None:
        """Connect to the restarted process of a server; ignore messages of the former process."""
        connection.channel.close()
        connection.address, connection.channel = address, self._open(address)
        connection.greeted = connection.has_hello = False

    def _greet_all(self) -> None:
        ends = time.monotonic() + self._timeout
        with self._driving:
            while not all(connection.greeted for connection in self._connections):
                self._progress(_TICK_MS)
                if self._refusal is not None:
                    raise self._refusal
                for server, connection in enumerate(self._connections):
                    if connection.channel.problem:
                        raise ProtocolError(
                            f"worker {self._scheduler.rank}: server {server}: {connection.channel.problem}"
                        )
                    if lost := self._lost(server) or self._cut(server):
                        raise DeadNodeError(f"{lost} (worker {self._scheduler.rank} connected to it)")
                if time.monotonic() > ends:
                    silent = [index for index, one in enumerate(self._connections) if not one.greeted]
                    raise StallError(f"servers {silent} did not answer within {self._timeout:g} s")

    def _send_queued(self) -> None:
        """Send queued requests now, or notify the thread that drives the sockets."""
        while self._outbox:
            if not self._driving.acquire(blocking=False):
                self._notify()
                return
            try:
                self._flush_outbox()
            except Exception as error:  # noqa: BLE001  as in `wait`
                self._stop_after(error)
            finally:
                self._driving.release()
            if self._outbox:  # the window is full until an acknowledgement arrives
                return

    def _flush_outbox(self) -> None:
        if not self._outbox:
            return
        with self._lock:
            kept = []
            try:
                while self._outbox:
                    entry = heapq.heappop(self._outbox)
                    request = entry[-1]
                    if self._has_room(request):
                        self._queued -= request.nbytes
                        self._dispatch(request)
                    else:
                        kept.append(entry)
            finally:
                self._outbox = kept + self._outbox  # sorted, so still a heap

    def _has_room(self, request: Request) -> bool:
        """Return whether the request fits into its server's window."""
        in_flight = self._connections[request.server].in_flight
        return not in_flight or not request.nbytes or in_flight + request.nbytes <= _WINDOW

    def _dispatch(self, request: Request) -> None:
        connection = self._connections[request.server]
        request.sequence = request.message.sequence = next(self._sequences)
        request.sent_at = time.monotonic()
        if type(request.message) is protocol.Push:
            request.message.last_read = self._last_read[request.server]
        try:
            request.packed = protocol.pack(request.message)
        except Exception as error:  # noqa: BLE001  passed to the request; others are not affected
            request.sequence = 0  # not sent
            request.on_error(request, error)
            return
        connection.pending[request.sequence] = request
        self._count += 1
        self._sent_bytes += request.nbytes
        connection.in_flight += request.nbytes
        connection.undelivered += request.completes_when_sent
        if connection.has_hello:  # else it follows the Hello
            connection.channel.send([request.packed, *request.frames])
        if request.completes_when_sent:
            request.on_end()

    def _notify(self) -> None:
        with self._lock:
            if self._event_fd >= 0:
                os.eventfd_write(self._event_fd, 1)

    # Receiving

    def _serve(self) -> None:
        """Drive the sockets, or check them now and then, while requests are pending and no other thread does."""
        while True:
            with self._idle:
                self._sleeps = True  # before the next check: `watch_connections` reads in the other order
                busy = self._is_busy()
                self._drives &= busy
                self._sleeps = not busy
                if not self._drives and not self._closed:
                    self._idle.wait(None if self._sleeps else _WATCH_SECONDS)
                drives = self._drives
            if self._closed or self._failure is not None:
                return
            if self._driving.acquire(timeout=0.05):
                try:
                    if not self._closed:
                        self._progress(_TICK_MS if drives else 0)
                except Exception as error:  # noqa: BLE001  as in `wait`
                    self._stop_after(error)
                finally:
                    self._driving.release()
                self._send_queued()

    def _stop_after(self, error: Exception) -> None:
        """Fail all pending and later requests after an error in driving the sockets."""
        text = f"worker {self._scheduler.rank} cannot exchange messages with its servers any more"
        self._failure = GanglineError(f"{text}: {type(error).__name__}: {error}")
        self._failure.__cause__ = error
        self._fail_all(self._failure)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _is_busy(self) -> bool:
        return bool(self._outbox) or self._is_replaced() or any(c.pending or c.unreleased for c in self._connections)

    def _progress(self, timeout_ms: int, spin_seconds: float = 0.0) -> None:
        if self._outbox:
            self._flush_outbox()
        events = self._poller.wait(timeout_ms, spin_seconds)
        if self._event_fd in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        for server, connection in enumerate(self._connections):
            if connection.address != self._scheduler.servers[server]:
                self._replace(connection, self._scheduler.servers[server])
            if connection.channel.reconnected(events):
                self._greet(connection)
            self._receive(server, connection, events)
        self._check()
        if self._outbox:
            self._flush_outbox()

    def _greet(self, connection: _ServerConnection) -> None:
        """Send Hello on a new connection, then repeat unanswered requests, which may be lost, with their numbers."""
        connection.channel.send([protocol.pack(connection.hello)])
        connection.has_hello = True
        for _, request in sorted({**connection.unreleased, **connection.pending}.items()):
            connection.channel.send([request.packed, *request.frames])

    def _receive(self, server: int, connection: _ServerConnection, events: Set[Source]) -> None:
        for frames in connection.channel.receive(events):
            try:
                self._handle(server, connection, protocol.unpack(frames[0]), frames[1:])
            except ProtocolError as error:
                _log.warning("worker %d drops a message of server %d: %s", self._scheduler.rank, server, error)

    def _handle(self, server: int, connection: _ServerConnection, message: Message, frames: list[memoryview]) -> None:
        match message:
            case protocol.Welcome(shared, memory):
                if shared and memory and connection.memory is None:
                    try:
                        connection.memory = open_offered(memory)
                    except OSError as why:
                        _log.info("worker %d and server %d share no memory: %s", connection.hello.rank, server, why)
                        connection.hello = replace(connection.hello, memory=b"")
                        self._greet(connection)  # the server then sends values over the socket
                        return
                connection.greeted = True
                connection.shares_memory = shared and connection.memory is not None
                if self._scheduler.allows_restarts:
                    connection.channel.send([protocol.pack(protocol.Repeated())])
            case protocol.Ack(sequences):
                for sequence in sequences:
                    self._acknowledge(connection, sequence)
            case protocol.Release(sequences):
                for sequence in sequences:
                    request = connection.unreleased.pop(sequence, None) or connection.pending.get(sequence)
                    if request is None:
                        continue
                    request.is_held = False
                    if request.on_release is not None:
                        request.on_release()
                        request.on_release = None
            case protocol.Values(sequence, number, _, _):
                self._settle(connection, sequence, message, [*map(tensor_of, frames)])
                self._last_read[server] = number
            case protocol.CommandResult(sequence, _):
                self._settle(connection, sequence, message, [*map(tensor_of, frames)])
            case protocol.Blocked(sequence, number, text):
                if sequence in connection.pending:
                    connection.pending[sequence].blocked = number, text
            case protocol.Failed(sequence, kind, text):
                error = make_error(kind, text)
                if not sequence:  # of a Hello, or of a message whose number the server could not read
                    self._refusal = error
                    _log.warning("server %d rejects a message of worker %d: %s", server, self._scheduler.rank, text)
                self._fail(connection, sequence, error)
            case _:
                raise ProtocolError(f"received an unexpected {type(message).__name__}")

    def _settle(self, connection: _ServerConnection, sequence: int, message: Message, datas: list[Tensor]) -> None:
        request = connection.pending.get(sequence)
        if request is None:  # answered before: the request was repeated after a reconnection
            return
        self._mark_received(connection, request)
        try:
            is_complete = request.on_answer is None or request.on_answer(message, datas)
        except Exception as error:  # noqa: BLE001  passed to the request
            self._fail(connection, sequence, error)
            return
        if is_complete:
            if recorder.current is not None:
                begin = time.monotonic_ns() - round((time.monotonic() - request.sent_at) * 1e9)
                server = self._connections.index(connection)
                recorder.current.add_overlapping(request.what, begin, server=server, bytes=request.nbytes)
            del connection.pending[sequence]
            if request.is_held:
                connection.unreleased[sequence] = request
            if not request.completes_when_sent:
                request.on_end()

    def _acknowledge(self, connection: _ServerConnection, sequence: int) -> None:
        """Mark a request as received; this completes it unless it requests values."""
        request = connection.pending.get(sequence)
        if request is not None:
            if request.wants_values:
                self._mark_received(connection, request)
            else:
                self._settle(connection, sequence, protocol.Ack([sequence]), [])

    def _mark_received(self, connection: _ServerConnection, request: Request) -> None:
        if not request.received:
            request.received = True
            connection.in_flight -= request.nbytes
            connection.undelivered -= request.completes_when_sent

    def _fail(self, connection: _ServerConnection, sequence: int, error: Exception) -> None:
        request = connection.pending.pop(sequence, None)
        if request is None:
            return
        self._mark_received(connection, request)
        if request.is_held:
            connection.unreleased[sequence] = request
        request.on_error(request, error)

    def _check(self) -> None:
        """Fail requests to lost servers and requests that have timed out."""
        now = time.monotonic()
        has_news = bool(self._scheduler.gone or self._scheduler.lost)
        if now - self._checked_at < (0.02 if has_news else 0.1):
            return
        self._checked_at = now
        for server, connection in enumerate(self._connections):
            lost = self._lost(server) or (connection.pending and self._cut(server))
            if lost:
                self._fail_connection(connection, partial(self._dead, why=lost))
            for sequence, request in list(connection.pending.items()):
                if request.blocked is not None and request.work is not None and request.work.is_awaited:
                    self._fail_blocked(connection, sequence, request)
                    continue
                waited = now - request.sent_at
                if waited > self._timeout:
                    text = f"{request.what} has waited {waited:.3g} s for server {server}{_state(connection)}"
                    if self._undelivered is not None and not request.received:
                        self._undelivered.append(request.what)
                    self._fail(connection, sequence, StallError(text))
                elif waited > self._stall_warn and not self._warned:
                    self._warned = True
                    _log.warning("%s has waited %.3g s for server %d", request.what, waited, server)

    def _fail_blocked(self, connection: _ServerConnection, sequence: int, request: Request) -> None:
        """Fail a request in a deadlock between workers, on all workers."""
        assert request.blocked is not None
        number, text = request.blocked
        request.blocked = None
        text = f"{request.what} {text}; expected the same calls in the same order on all workers{hint(text)}"
        if self._blocked_at == number or self._scheduler.refuse(request.what, text, number):
            self._blocked_at = number
            self.told_error = MismatchError(f"rank {self._scheduler.rank}: {text}")
            self._fail(connection, sequence, self.told_error)

    def _lost(self, server: int) -> str:
        """Return why a server cannot answer any more; "" if it can."""
        if self._scheduler.lost:
            return f"the scheduler {self._scheduler.lost}"
        why = self._scheduler.gone.get(("server", server)) if self._scheduler.gone else None
        return "" if why is None else f"server {server} {why_gone(why)}"

    def _cut(self, server: int) -> str:
        """Return "" if a server can be reached; else leave the job and return why a living server cannot be reached."""
        connection = self._connections[server]
        channel = connection.channel
        if ("server", server) in self._scheduler.away:
            return ""
        if connection.address != self._scheduler.servers[server]:  # it came back since the last look at the channel
            return ""
        if not channel.disconnected_at:
            return ""
        if not channel.problem and time.monotonic() - channel.disconnected_at <= self._limit:
            return ""
        why = f"has had no connection to server {server} for {self._limit:g} s, though both reach the scheduler"
        if channel.problem:
            why = f"cannot talk to server {server}: {channel.problem}"
        self._scheduler.leave(why)  # others would wait for its pushes
        return f"worker {self._scheduler.rank} {why}"

    def _dead(self, request: Request, why: str) -> DeadNodeError:
        return DeadNodeError(f"{why} (worker {self._scheduler.rank} waited in {request.what})")

    def _fail_connection(self, connection: _ServerConnection, error_of: Callable[[Request], Exception]) -> None:
        for sequence, request in list(connection.pending.items()):
            self._fail(connection, sequence, error_of(request))
        with self._lock:
            unsent = [one for one in self._outbox if self._connections[one[-1].server] is connection]
            self._outbox = [one for one in self._outbox if self._connections[one[-1].server] is not connection]
            heapq.heapify(self._outbox)
            self._queued -= sum(request.nbytes for *_, request in unsent)
        for *_, request in unsent:
            request.on_error(request, error_of(request))

    def _fail_all(self, error: Exception) -> None:
        for connection in self._connections:
            self._fail_connection(connection, lambda _: error)
