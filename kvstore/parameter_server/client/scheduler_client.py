"""A process's line to the scheduler: joining, signs of life, meeting the others, news of who is gone, goodbye."""

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
from gangline.collectives.liveness.limits import limits
from gangline.collectives.liveness.process_state import this_process
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import (
    Beat,
    Gone,
    Join,
    Joined,
    Leave,
    Meet,
    Message,
    Met,
    Over,
    Refused,
    Rest,
    Rested,
)

_log = logging.getLogger("gangline")
_TICK_MS = 100
_GOODBYE_SECONDS = 5.0
_CONFIRM_SECONDS = 1.0
"""A connection that is lost for so long was the scheduler's end."""


class SchedulerClient:
    """What a worker or server is in its job; a thread of its own talks with the scheduler.

    Args:
        role: "worker" or "server".
        scheduler: "tcp://HOST:PORT".
        rank: the rank wanted; -1: any.
        address: where a server is to be reached.
        timeout: seconds to wait for the others; None: GANGLINE_TIMEOUT.

    Raises:
        StallError: the scheduler, or somebody else, did not come in time.
        ValueError: the scheduler refuses, for a rank that is taken say.
    """

    def __init__(
        self, role: str, scheduler: str, *, rank: int = -1, address: str = "", timeout: float | None = None
    ) -> None:
        self.role = role
        self.identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        """This process's incarnation, by which ZeroMQ and servers know it."""
        self.gone: dict[tuple[str, int], str] = {}
        """(role, rank) -> why; "" where it said goodbye."""
        self.rank = -1  # until it is dealt, in whichever thread hears of others meanwhile
        self.lost = ""
        """Why the scheduler counts as dead."""
        self.is_over = False
        """Whether the scheduler says that the job is over."""
        self.on_news: Callable[[], None] = lambda: None
        """Called in the thread when ``gone``, ``lost`` or ``is_over`` has changed."""
        bounds = limits()
        self._timeout = bounds.timeout if timeout is None else timeout
        self._number = 0
        self._heartbeat, self._limit = bounds.heartbeat, bounds.heartbeat_limit
        self._answers: dict[object, tuple[Future[Any], Message]] = {}  # what is waited for, and how it was asked
        self._lock = threading.Lock()
        self._outbox: list[Message] = []
        self._ending = threading.Event()
        self._address = scheduler
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._bell = self._pair()
        self._socket = self._dealer()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._connections = 0
        self._cut = 0.0  # when the connection was lost; 0: it is there, or never was
        self._has_joined = False
        self._socket.connect(scheduler)
        joining: Future[Joined] = Future()
        self._join = Join(role, rank, this_process(), address)
        self._answers["joined"] = joining, self._join
        self._outbox.append(self._join)
        self._thread = threading.Thread(target=self._serve, name="gangline-member", daemon=True)
        self._thread.start()
        try:
            joined = self._answer(joining, f"{role} waits for the job to begin at {scheduler}")
        except BaseException:
            self.close()
            raise
        self.rank = joined.rank
        self.view: int = joined.view
        self.num_workers: int = joined.workers
        self.servers: list[str] = joined.servers
        self._limit = joined.limit
        self._heartbeat = joined.heartbeat

    def meet(self, data: bytes, what: str = "exchange") -> list[bytes]:
        """Give bytes to all workers, and get what each gave in rank order (of those that rest: nothing).

        Raises:
            DeadNodeError: a worker is gone.
            StallError: one did not come within the timeout.
            ValueError: too many bytes.
        """
        if len(data) > protocol.MAX_EXCHANGED:
            raise ValueError(f"{len(data)} bytes are given to an exchange; expected at most {protocol.MAX_EXCHANGED}")
        with self._lock:
            self._number += 1
            number = self._number
        met: Met = self._ask(Meet(number, data), number, f"{what}, number {number} of worker {self.rank}")
        return met.data

    def rest(self, data: bytes) -> Rested:
        """Take no further part until all workers rest; gives who came last and what each gave.

        Raises:
            DeadNodeError: a worker is gone.
            StallError: one worked on for longer than the timeout.
        """
        rested: Rested = self._ask(Rest(self._number, data), "rest", f"join() of worker {self.rank}")
        self._number = rested.number
        return rested

    def close(self) -> None:
        """Say goodbye and end the thread; again: nothing."""
        if self._ending.is_set():
            return
        if self._has_joined and not self.lost:
            goodbye: Future[Any] = Future()
            self._answers["over"] = goodbye, Leave()
            self._say(Leave())
            try:
                goodbye.result(_GOODBYE_SECONDS)
            except (TimeoutError, GanglineError):
                _log.debug("the scheduler did not answer the goodbye of %s %d", self.role, self.rank)
        self._ending.set()
        self._ring()
        self._thread.join()
        end(self._context)

    def _ask(self, message: Message, key: object, what: str) -> Any:
        answer: Future[Any] = Future()
        with self._lock:
            self._answers[key] = answer, message
            problem = self._problem()
        if problem:
            raise DeadNodeError(f"{problem} (worker {self.rank} waited in {what})")
        self._say(message)
        return self._answer(answer, what)

    def _answer(self, answer: Future[Any], what: str) -> Any:
        try:
            return answer.result(None if self._timeout == math.inf else self._timeout)
        except TimeoutError:
            raise StallError(f"{what} has waited {self._timeout:g} s") from None
        except DeadNodeError as error:
            raise DeadNodeError(f"{error} ({what})") from None

    def _problem(self) -> str:
        """Why workers can meet no more."""
        if self.lost:
            return f"the scheduler {self.lost}"
        for (role, rank), why in self.gone.items():
            if role == "worker":
                return f"worker {rank} {why or 'has left the job'}"
        return ""

    def _say(self, message: Message) -> None:
        with self._lock:
            self._outbox.append(message)
        self._ring()

    def _ring(self) -> None:
        with self._lock:
            if not self._bell[0].closed:
                self._bell[0].send(b"", zmq.NOBLOCK)

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        ends = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        name = f"inproc://{secrets.token_hex(8)}"
        for socket in ends:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
        ends[0].bind(name)
        ends[1].connect(name)
        return ends

    def _dealer(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self.identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)  # without a connection a send would wait for room some time, and for ever
        socket.setsockopt(zmq.IPV6, int("[" in self._address))
        socket.setsockopt(zmq.MAXMSGSIZE, -1)
        return socket

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell[1], zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        heard = time.monotonic()
        due = 0.0
        while not self._ending.is_set():
            poller.poll(_TICK_MS)
            while self._bell[1].poll(0):
                self._bell[1].recv()
            while self._monitor.poll(0):
                if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    self._cut = time.monotonic()
                else:
                    self._connected()
            with self._lock:
                leaving, self._outbox = self._outbox, []
            if time.monotonic() >= due and self._connections and not self._cut:  # also while others have yet to join
                leaving.append(Beat())
                due = time.monotonic() + self._heartbeat
            for message in leaving:
                self._socket.send(protocol.pack(message))
            while self._socket.poll(0):
                heard = time.monotonic()
                self._hear(self._socket.recv())
            now = time.monotonic()
            if self._cut and now - self._cut > _CONFIRM_SECONDS and not self.lost:
                self._lose("was killed or left: connection lost")
            if self._has_joined and not self.lost and now - heard > self._limit:
                self._lose(f"gave no sign of life for {self._limit:g} s")
        with self._lock:
            self._socket.disable_monitor()
            for socket in (*self._bell, self._monitor, self._socket):
                socket.close(0)

    def _connected(self) -> None:
        """After a lost connection, ask again: what was on its way either way may be lost."""
        self._connections += 1
        self._cut = 0.0
        if self._connections > 1:
            with self._lock:
                asked = [message for _, message in self._answers.values() if message is not self._join]
                self._outbox = [self._join, *asked, *(one for one in self._outbox if one not in asked)]

    def _hear(self, frame: bytes) -> None:
        try:
            message = protocol.unpack(frame, len(frame))  # it holds what all workers gave
        except ProtocolError as error:
            _log.warning("%s drops what the scheduler sent: %s", self.role, error)
            return
        match message:
            case Joined(_, _, _, _, heartbeat, limit):
                self._heartbeat, self._limit, self._has_joined = heartbeat, limit, True
                self._give("joined", message)
            case Refused(kind, text):
                self._give("joined", error=StallError(text) if kind == StallError.__name__ else ValueError(text))
            case Met(number, _):
                self._give(number, message)
            case Rested():
                self._give("rest", message)
            case Gone(role, rank, why) if self._has_joined and (role, rank) == (self.role, self.rank):
                self._lose(f"takes this process for dead: it {why}")
            case Gone(role, rank, why):
                with self._lock:
                    self.gone[role, rank] = why
                self._fail_meetings()
                self.on_news()
            case Over():
                self.is_over = True
                self._give("over", message)
                self.on_news()
            case _:
                pass

    def _lose(self, why: str) -> None:
        self.lost = why
        self._fail_meetings()
        for key in ("joined", "over"):
            self._give(key, error=DeadNodeError(f"the scheduler {why}"))
        self.on_news()

    def _fail_meetings(self) -> None:
        with self._lock:
            problem = self._problem()
            waiting = [key for key in self._answers if isinstance(key, int) or key == "rest"]
        for key in waiting if problem else ():
            self._give(key, error=DeadNodeError(problem))

    def _give(self, key: object, value: Any = None, error: Exception | None = None) -> None:
        with self._lock:
            answer = self._answers.pop(key, None)
        if answer is None:
            return
        if error is not None:
            answer[0].set_exception(error)
        else:
            answer[0].set_result(value)
