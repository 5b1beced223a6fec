"""Client of the scheduler: registration, heartbeats, collectives, notices of dead processes, leaving."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.errors import DeadNodeError, GanglineError, ProtocolError, StallError
from gangline.collectives.limits import limits
from gangline.collectives.liveness.process_state import this_process
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import (
    Collective,
    CollectiveResult,
    Heartbeat,
    JobOver,
    Join,
    JoinResult,
    Leave,
    MemberGone,
    Message,
    Register,
    Registered,
    Rejected,
)

_log = logging.getLogger("gangline")
_TICK_MS = 100
_LEAVE_SECONDS = 5.0
_CONFIRM_SECONDS = 1.0
"""The scheduler counts as dead when its connection has been lost for this long."""


class SchedulerClient:
    """Membership of a worker or server in its job; a thread of its own talks to the scheduler.

    Args:
        role: "worker" or "server".
        scheduler: "tcp://HOST:PORT".
        rank: requested rank; -1: any.
        address: address of a server.
        timeout: seconds to wait for other processes; None: GANGLINE_TIMEOUT.

    Raises:
        StallError: if the scheduler or another process does not respond within the timeout.
        ValueError: if the scheduler rejects the process, for example because the rank is taken.
    """

    def __init__(
        self, role: str, scheduler: str, *, rank: int = -1, address: str = "", timeout: float | None = None
    ) -> None:
        self.role = role
        self.identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        """Identifies this incarnation of the process to ZeroMQ and servers."""
        self.gone: dict[tuple[str, int], str] = {}
        """(role, rank) -> reason; "" if the process has left."""
        self.rank = -1  # the thread reads it before it is assigned
        self.lost = ""
        """Reason why the scheduler counts as dead; "" while it is alive."""
        self.is_over = False
        """True once the scheduler has ended the job."""
        self.on_change: Callable[[], None] = lambda: None
        """Called in the thread when ``gone``, ``lost`` or ``is_over`` has changed."""
        bounds = limits()
        self._timeout = bounds.timeout if timeout is None else timeout
        self._number = 0
        self._heartbeat, self._limit = bounds.heartbeat, bounds.heartbeat_limit
        self._pending: dict[object, tuple[Future[Any], Message]] = {}  # by key of the expected answer
        self._lock = threading.Lock()
        self._outbox: list[Message] = []
        self._ending = threading.Event()
        self._address = scheduler
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._notifier, self._notified = self._make_pair()
        self._socket = self._make_dealer()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connections = 0
        self._disconnected_at = 0.0  # 0: connected, or not yet connected
        self._is_registered = False
        self._has_left = False
        self._socket.connect(scheduler)
        registering: Future[Registered] = Future()
        self._registration = Register(role, rank, this_process(), address)
        self._pending["registered"] = registering, self._registration
        self._outbox.append(self._registration)
        self._thread = threading.Thread(target=self._serve, name="gangline-scheduler-client", daemon=True)
        self._thread.start()
        try:
            registered = self._wait(registering, f"{role} waits for the job to begin at {scheduler}")
        except BaseException:
            self.close()
            raise
        self.rank = registered.rank
        self.view: int = registered.view
        self.num_workers: int = registered.workers
        self.servers: list[str] = registered.servers
        self._limit = registered.limit
        self._heartbeat = registered.heartbeat

    def all_gather(self, data: bytes, what: str = "exchange") -> list[bytes]:
        """Gather the bytes of all workers in rank order; empty for workers inside join(). Collective.

        Raises:
            DeadNodeError: if a worker has died or left.
            StallError: if a worker does not call it within the timeout.
            ValueError: if the data exceed 64 MiB.
        """
        if len(data) > protocol.MAX_COLLECTIVE:
            raise ValueError(
                f"{len(data)} bytes were given to a collective; expected at most {protocol.MAX_COLLECTIVE}"
            )
        with self._lock:
            self._number += 1
            number = self._number
        result: CollectiveResult = self._ask(
            Collective(number, data), number, f"{what}, number {number} of worker {self.rank}"
        )
        return result.data

    def join(self, data: bytes) -> JoinResult:
        """Wait until all workers have called it; meanwhile other collectives run without this worker.

        Returns:
            The worker that called it last, and the data of each worker in rank order.

        Raises:
            DeadNodeError: if a worker has died or left.
            StallError: if a worker does not call it within the timeout.
        """
        result: JoinResult = self._ask(Join(self._number, data), "join", f"join() of worker {self.rank}")
        self._number = result.number
        return result

    def leave(self, why: str = "") -> None:
        """Leave the job, but go on listening until `close`. Idempotent.

        Args:
            why: reason if others cannot go on, such as "ended with an error: ..."; they get it as an error.
        """
        if self._has_left or not self._is_registered or self.lost:
            return
        self._has_left = True
        leaving: Future[Any] = Future()
        self._pending["over"] = leaving, Leave(why)
        self._send(Leave(why))
        try:
            leaving.result(_LEAVE_SECONDS)
        except (TimeoutError, GanglineError):
            _log.debug("the scheduler did not acknowledge that %s %d leaves", self.role, self.rank)

    @property
    def is_job_over(self) -> bool:
        """True if all other workers have left or died, or the scheduler has."""
        others = {("worker", rank) for rank in range(self.num_workers)} - {(self.role, self.rank)}
        return bool(self.lost) or others <= self.gone.keys()

    def close(self) -> None:
        """Leave the job and end the thread. Idempotent."""
        if self._ending.is_set():
            return
        self.leave()
        self._ending.set()
        self._notify()
        self._thread.join()
        end(self._context)

    def _ask(self, message: Message, key: object, what: str) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._pending[key] = answer, message
            problem = self._problem()
        if problem:
            raise DeadNodeError(f"{problem} (worker {self.rank} waited in {what})")
        self._send(message)
        return self._wait(answer, what)

    def _wait(self, answer: Future[Any], what: str) -> Any:
        try:
            return answer.result(None if self._timeout == math.inf else self._timeout)
        except TimeoutError:
            raise StallError(f"{what} has waited {self._timeout:g} s") from None
        except DeadNodeError as error:
            raise DeadNodeError(f"{error} ({what})") from None

    def _problem(self) -> str:
        """Return why collectives can no longer complete; "" if they can."""
        if self.lost:
            return f"the scheduler {self.lost}"
        for (role, rank), why in self.gone.items():
            if role == "worker":
                return f"worker {rank} {why or 'has left the job'}"
        return ""

    def _send(self, message: Message) -> None:
        with self._lock:
            self._outbox.append(message)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            if not self._notifier.closed:
                self._notifier.send(b"", zmq.NOBLOCK)

    def _make_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        ends = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        name = f"inproc://{secrets.token_hex(8)}"
        for socket in ends:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        ends[0].bind(name)
        ends[1].connect(name)
        return ends

    def _make_dealer(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # otherwise sending blocks without limit once the queue of a lost peer is full
        socket.setsockopt(zmq.IPV6, int("[" in self._address))
        socket.setsockopt(zmq.MAXMSGSIZE, -1)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._socket, self._notified, self._monitor):
            poller.register(socket, zmq.POLLIN)
        heard_at = time.monotonic()
        heartbeat_at = 0.0
        while not self._ending.is_set():
            poller.poll(_TICK_MS)
            while self._notified.poll(0):
                self._notified.recv()
            while self._monitor.poll(0):
                if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    self._disconnected_at = time.monotonic()
                else:
                    self._on_connected()
            with self._lock:
                outgoing, self._outbox = self._outbox, []
            # heartbeats are also due while other processes have yet to register
            if time.monotonic() >= heartbeat_at and self._connections and not self._disconnected_at:
                outgoing.append(Heartbeat())
                heartbeat_at = time.monotonic() + self._heartbeat
            for message in outgoing:
                self._socket.send(protocol.pack(message))
            while self._socket.poll(0):
                heard_at = time.monotonic()
                self._receive(self._socket.recv())
            now = time.monotonic()
            if self._disconnected_at and now - self._disconnected_at > _CONFIRM_SECONDS and not self.lost:
                self._lose("was killed or left: connection lost")
            if self._is_registered and not self.lost and now - heard_at > self._limit:
                self._lose(f"gave no sign of life for {self._limit:g} s")
        with self._lock:
            self._socket.disable_monitor()
            for socket in (self._notifier, self._notified, self._monitor, self._socket):
                socket.close(0)

    def _on_connected(self) -> None:
        """Repeat pending requests after a reconnection, since messages of either direction may be lost."""
        self._connections += 1
        self._disconnected_at = 0.0
        if self._connections > 1:
            with self._lock:
                repeated = [message for _, message in self._pending.values() if message is not self._registration]
                others = [one for one in self._outbox if one not in repeated]
                self._outbox = [self._registration, *repeated, *others]

    def _receive(self, frame: bytes) -> None:
        try:
            message = protocol.unpack(frame, len(frame))  # no limit: a result holds the data of all workers
        except ProtocolError as error:
            _log.warning("%s drops a message of the scheduler: %s", self.role, error)
            return
        match message:
            case Registered(_, _, _, _, heartbeat, limit):
                self._heartbeat, self._limit, self._is_registered = heartbeat, limit, True
                self._settle("registered", message)
            case Rejected(kind, text):
                self._settle("registered", error=StallError(text) if kind == StallError.__name__ else ValueError(text))
            case CollectiveResult(number, _):
                self._settle(number, message)
            case JoinResult():
                self._settle("join", message)
            case MemberGone(role, rank, why) if self._is_registered and (role, rank) == (self.role, self.rank):
                self._lose(f"counts this process as dead: it {why}")
            case MemberGone(role, rank, why):
                with self._lock:
                    self.gone[role, rank] = why
                self._fail_collectives()
                self.on_change()
            case JobOver():
                self.is_over = True
                self._settle("over", message)
                self.on_change()
            case _:
                pass

    def _lose(self, why: str) -> None:
        self.lost = why
        self._fail_collectives()
        for key in ("registered", "over"):
            self._settle(key, error=DeadNodeError(f"the scheduler {why}"))
        self.on_change()

    def _fail_collectives(self) -> None:
        with self._lock:
            problem = self._problem()
            keys = [key for key in self._pending if isinstance(key, int) or key == "join"]
        for key in keys if problem else ():
            self._settle(key, error=DeadNodeError(problem))

    def _settle(self, key: object, value: Any = None, error: Exception | None = None) -> None:
        with self._lock:
            pending = self._pending.pop(key, None)
        if pending is None:
            return
        if error is not None:
            pending[0].set_exception(error)
        else:
            pending[0].set_result(value)
