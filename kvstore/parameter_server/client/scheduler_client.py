"""Client of the scheduler: registration, heartbeats, collectives, notices of dead processes, leaving."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import FrameType
from typing import Any, NamedTuple

import zmq

from gangline.collectives.errors import (
    DeadNodeError,
    GanglineError,
    MismatchError,
    ProtocolError,
    StallError,
    name_ranks,
)
from gangline.collectives.limits import JOIN_REPORT_SECONDS, limits
from gangline.collectives.liveness.process_state import ending_error, this_process
from gangline.collectives.timeline import recorder
from gangline.collectives.timeline.clock import ClockOffset
from gangline.collectives.transports.zmq.context import end
from gangline.collectives.work import GuardedLock
from gangline.kvstore.group.remote_errors import why_gone
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.protocol import ROUND, Message
from gangline.kvstore.parameter_server.transport.client_channel import open_channel, scheduler_address, start_echo
from gangline.kvstore.parameter_server.transport.poller import Poller
from gangline.kvstore.restart_variables import IF_POSSIBLE, LEAVING, PROCESS_RESTARTS, incarnation

_log = logging.getLogger("gangline")
_TICK_MS = 100
_LEAVE_SECONDS = 5.0
_NOTICE_SECONDS = 5.0  # time after which a process logs what it waits for if the job has not begun
_CONFIRM_SECONDS = 1.0
"""Time for a lost connection to recover before checking whether the scheduler still listens."""
_WITHDRAW_SECONDS = 1.0
"""Time for the scheduler to name the missing ranks of a collective that has timed out."""
_CHUNK = 16 << 20
"""Bytes per worker in one collective; the scheduler holds those of all workers in memory."""
_LENGTH = 8
_SET_UP = ("init", "set_optimizer", "set_gradient_compression", "order of buckets")
"""Collectives that set up the store: a restarted worker repeats them, whatever its round."""


class CollectiveNumbers(NamedTuple):
    """Numbers of a worker's last collectives; 0: it has called none."""

    set_up: int = 0
    """Last collective of the set-up or before the first push; last of all if no worker can come late."""
    in_step: int = 0
    """Last other collective."""


class SchedulerClient:
    """Membership of a worker or server in its job; a separate thread talks to the scheduler.

    The scheduler is at "tcp://HOST:PORT". ``memory`` has the bytes of a server, and whether the user has set them; for
    ``role``, ``rank`` and ``address`` see `protocol.Register`. ``timeout``: seconds to wait for other processes; None:
    GANGLINE_TIMEOUT.

    Raises:
        StallError: if the scheduler or another process does not respond within the timeout.
        ValueError: if the scheduler rejects the process, for example because the rank is taken.
        RuntimeError: if the scheduler is on another host and there is no job key (`required_key`).
        ProtocolError: if the scheduler has another job key.
    """

    def __init__(
        self,
        role: str,
        scheduler: str,
        *,
        rank: int = -1,
        address: str = "",
        memory: tuple[int, bool] = (0, False),
        timeout: float | None = None,
    ) -> None:
        self.role = role
        self.identity = secrets.token_bytes(16).replace(b"\0", b"\1")
        """Identifies this incarnation of the process to ZeroMQ and servers."""
        self.gone: dict[tuple[str, int], str] = {}
        """(role, rank) -> reason; "" if it has left. Replaced, never modified: other threads iterate over it."""
        self.errors: dict[tuple[str, int], str] = {}
        """(role, rank) -> error that has ended a process which has left."""
        self._error = ""  # that ends this process
        self.view = 0
        """Number of the membership, incremented when a restarted process replaces another."""
        self.servers: list[str] = []
        """Addresses of the servers."""
        self.server_memory: list[int] = []
        """Memory of the servers in bytes; empty: all have the same."""
        self.allows_restarts = os.environ.get(PROCESS_RESTARTS, "0") != "0"
        """True if other processes wait for the restart of a dead process."""
        self.is_restarted = False
        """True if this process replaces one that died after the start, or has joined an elastic job."""
        self.is_elastic = False
        """True if workers come and go while the job runs."""
        self.views: list[tuple[int, frozenset[int]]] = []
        """First round and ranks of each view; a single view unless the job is elastic."""
        self.confirmed = 0
        """Number of views that this server has confirmed to follow."""
        self.begun: int | None = 0
        """Last step that this worker has begun; None if it was restarted and does not know it yet."""
        self._floor = 0  # step that its former process may have begun
        self._asked = 0  # number of the view without which no further step begins
        self._view_known = threading.Condition()  # protects views, begun and the last two; its lock is reentrant
        self._wants_to_leave = False  # set by a signal handler
        self._leave_request: Future[Any] | None = None
        self.away: dict[tuple[str, int], str] = {}
        """(role, rank) -> cause of death, for processes that other processes wait for to restart."""
        self.fenced: set[bytes] = set()
        """Identities of dead processes, whose messages are rejected."""
        self.rank = -1  # the thread reads it before it is assigned
        self.lost = ""
        """Why the scheduler counts as dead; "" while it is alive."""
        self._cause: Exception | None = None  # error that has ended the thread
        self.waiting: dict[int, tuple[str, int]] = {}
        """On servers: workers that wait in collectives for other workers, with name and number of the call."""
        self.is_over = False
        """True once the scheduler has ended the job."""
        self.on_change: Callable[[], None] = lambda: None
        """Called in the thread when ``gone``, ``lost`` or ``is_over`` has changed."""
        self.position: Callable[[], int] = lambda: 0
        """Returns the number of rounds that this worker has pushed, to find its collectives after a restart."""
        bounds = limits()
        self._timeout = bounds.timeout if timeout is None else timeout
        self.numbers = CollectiveNumbers()
        """Numbers of the last collectives."""
        self._recorded: set[int] = set()  # collectives that were over before this worker was restarted
        self._heartbeat, self._limit = bounds.heartbeat, bounds.heartbeat_limit
        self._restart_limit = bounds.restart_limit
        self._pending: dict[object, tuple[Future[Any], Message]] = {}  # by key of the expected answer
        self._lock = GuardedLock()
        self._numbering = GuardedLock()  # protects numbers; collectives are sent in their order
        self._outbox: list[Message] = []
        self._ending = threading.Event()
        self._address = scheduler
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = Poller()
        try:
            endpoint = scheduler_address(scheduler)
            self._channel = open_channel(endpoint, self._context, self.identity, self._poller)
            if not endpoint.startswith("unix:"):
                start_echo(endpoint, self._context, self.identity)
        except BaseException:
            self._poller.close()
            self._context.term()
            raise
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.add(self._event_fd)
        self._connections = 0
        is_here = endpoint.startswith("unix:")
        self._clock = None if recorder.current is None or is_here else ClockOffset(recorder.current)
        self._is_registered = False
        self.has_left = False
        """True if this process leaves the job, or has left it."""
        registering: Future[protocol.Registered] = Future()
        job = os.environ.get("GANGLINE_JOB_ID", "")
        self._registration = protocol.Register(role, rank, this_process(), address, job, incarnation(), *memory)
        self._pending["registered"] = registering, self._registration
        self._outbox.append(self._registration)
        self._thread = threading.Thread(target=self._serve, name="gangline-scheduler-client", daemon=True)
        self._thread.start()
        try:
            registered = self._wait_for_start(registering)
        except BaseException:
            self.close()
            raise
        self.num_workers: int = registered.workers
        self.rank = registered.rank
        if recorder.current is not None:
            recorder.current.set_process(f"{role} {self.rank}")
        self.is_joining = self.is_restarted and self.in_view() is None
        """True if this worker joined an elastic job after its start, and has not asked to take part yet."""

    def _wait_for_start(self, registering: Future[protocol.Registered]) -> protocol.Registered:
        """Wait until the job begins; log what is missing after some seconds."""
        limit = min(_NOTICE_SECONDS, self._timeout)
        try:
            return registering.result(limit)
        except TimeoutError:
            address = f"{self._address.removeprefix('tcp://')} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)"
            if self._connections:
                _log.info("%s waits for other processes to register with the scheduler at %s", self.role, address)
            else:
                _log.warning("%s waits for the scheduler at %s", self.role, address)
        # the scheduler's limit expires at about the same time, and its error names who is missing
        seconds = self._timeout - limit + (JOIN_REPORT_SECONDS if self._connections else 0)
        self._wait(registering, f"{self.role} waits for the job to begin at {self._address}", seconds)
        return registering.result()

    def exchange(self, data: bytes, name: str, root: int | None = None) -> list[bytes]:
        """All-gather bytes of any length in chunks; see `worker_group.Exchange`. Collective.

        MismatchError, with the same text on all workers, if a worker makes another call or refuses this one. After a
        StallError the next call replaces this one.
        """
        length = len(data).to_bytes(_LENGTH, "big")
        if root is None:
            gathered = self._collective(length + data[:_CHUNK], name)
            lengths = [int.from_bytes(one[:_LENGTH], "big") for one in gathered]
            whole, begin = [bytearray(one[_LENGTH:]) for one in gathered], _CHUNK
        else:  # the other ranks get lengths only
            name = f"{name}, to rank {root}"
            lengths = [int.from_bytes(one, "big") for one in self._collective(length, name)]
            whole, begin = [bytearray() for _ in lengths], 0
        for offset in range(begin, max(lengths), _CHUNK):
            chunks = self._collective(data[offset : offset + _CHUNK], f"{name}, bytes from {offset}", root)
            for own, chunk in zip(whole, chunks, strict=False):
                own += chunk
        return [bytes(own) for own in whole] if root in (None, self.rank) else []

    def refuse(self, name: str, text: str, number: int | None = None) -> bool:
        """Fail this worker's next collective for all workers, without waiting for them; ``text`` is the reason.

        With ``number``, fail it only if it has this number; return whether it was failed.
        """
        with self._numbering:
            following = self._following(name)
            if number is not None and number not in (following, self.numbers.set_up + 1):
                return False
            following = number or following
            self._count(following)
            message = protocol.Collective(following, name, -1, b"", text)
            with self._lock:
                self._pending[following] = Future(), message
            self._send(message)
        return True

    def _following(self, name: str) -> int:
        """Return the number of the next collective."""
        position = self.position() if self.keeps_positions and not name.startswith(_SET_UP) else 0
        return max(self.numbers.in_step, ROUND * position) + 1 if position else self.numbers.set_up + 1

    def _count(self, number: int, step: int = 0) -> None:
        """Set the number of the last collective to ``number + step``."""
        kind = "in_step" if self.keeps_positions and number >= ROUND else "set_up"
        self.numbers = self.numbers._replace(**{kind: number + step})

    def restore_numbers(self, numbers: CollectiveNumbers) -> None:
        """Restore the numbers of the last collectives after a restart."""
        with self._numbering:
            self.numbers = numbers

    @property
    def address(self) -> str:
        """Address of the scheduler, HOST:PORT."""
        return self._address.removeprefix("tcp://")

    # Views

    @property
    def keeps_positions(self) -> bool:
        """True if collectives are numbered by rounds, because workers may restart or join late."""
        return self.allows_restarts or self.is_elastic

    def in_view(self) -> int | None:
        """Return the first round in which this worker takes part; None if there is none yet."""
        return next((first for first, ranks in self.views if self.rank in ranks), None)

    def begin(self, step: int) -> frozenset[int]:
        """Begin a step, unless it has begun; return the ranks that take part in it."""
        with self._view_known:
            if step > (self.begun or 0):
                self._wait_for_view(lambda: self._asked < len(self.views), f"step {step}")
                self.begun = step
            return next(ranks for first, ranks in reversed(self.views) if first <= step)

    def continue_after(self, step: int, *, may_have_begun_next: bool) -> None:
        """Set the last step of a worker that came late; before its restart it may have begun the next one."""
        with self._view_known:
            self.begun, self._floor = step, step + may_have_begun_next
            self._answer_query()

    def enter(self) -> int | None:
        """Take part in an elastic job from the next view on; return its first round, None if the job ends before."""
        self._request_view(enters=True)
        self.is_joining = False
        with self._view_known:
            self._wait_for_view(lambda: self.in_view() or "" in self.gone.values(), "the next view")
            first = self.in_view()
            if first is not None:
                self.continue_after(first - 1, may_have_begun_next=False)
        return first

    def check_members(self, what: str) -> None:
        """Raise DeadNodeError if a worker has died or left that ``what`` may wait for."""
        if problem := self._problem("view"):
            raise self._dead(f"{problem} (worker {self.rank} waited for {what})")

    def ask_to_leave(self) -> str:
        """Ask to leave an elastic job with the next view; return why this worker cannot leave, "" if it can."""
        if self.is_joining:
            return f"worker {self.rank} does not take part yet; expected leave() after a pull or share()"
        return self._request_view(enters=False)

    def leave_on_sigterm(self) -> None:
        """Leave an elastic job at SIGTERM; end this process at a second SIGTERM, or if it cannot leave.

        A worker that was restarted after such a request asks at once. Without effect outside the main thread, or if the
        program handles SIGTERM itself.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return
        member = weakref.ref(self)

        def handle(number: int, _: FrameType | None) -> None:
            found = member()
            if found is None or found.has_left or found.is_joining or found._wants_to_leave:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            else:  # the client's thread does the rest: this thread may hold its locks
                found._wants_to_leave = True

        signal.signal(signal.SIGTERM, handle)
        if os.environ.get(LEAVING):
            os.kill(os.getpid(), signal.SIGTERM)

    def _leave_by_signal(self) -> None:
        """Ask to leave because of a signal, without waiting for the answer."""
        with self._lock:
            self._leave_request, message = self._pending.setdefault(
                ("view", False), (Future(), protocol.ViewRequest(enters=False))
            )
        self._leave_request.add_done_callback(self._end_if_refused)
        self._send(message)

    def _end_if_refused(self, answer: Future[Any]) -> None:
        text = str(answer.exception()) if answer.exception() else answer.result().text
        if text and os.environ.get(LEAVING) == IF_POSSIBLE:
            _log.warning("%s; it goes on", text)
        elif text:
            _log.error("%s; it ends by SIGTERM", text)
            os.kill(os.getpid(), signal.SIGTERM)  # the handler ends the process at the second signal

    def _request_view(self, *, enters: bool) -> str:
        what = f"request of worker {self.rank} to {'take part' if enters else 'leave'}"
        text: str = self._wait(self._ask(protocol.ViewRequest(enters), ("view", enters), what), what).text
        return text

    def _wait_for_view(self, is_known: Callable[[], object], what: str) -> None:
        ends = time.monotonic() + self._timeout
        while not is_known():
            self.check_members(what)
            if time.monotonic() > ends:
                raise StallError(f"worker {self.rank} has waited {self._timeout:g} s for {what}")
            self._view_known.wait(0.1)

    def _answer_query(self) -> None:
        if self._asked >= len(self.views) and self.begun is not None:
            self._send(protocol.ViewAnswer(self._asked, max(self.begun, self._floor)))

    def confirm_views(self, count: int) -> None:
        """Confirm to the scheduler that this server follows ``count`` views."""
        with self._view_known:
            self.confirmed = count
            self._send(protocol.ViewAnswer(self.confirmed - 1, 0))

    def _set_views(self, views: Iterable[tuple[int, Iterable[int]]]) -> None:
        with self._view_known:
            self.views = [(first, frozenset(ranks)) for first, ranks in views]
            self.confirmed = 0
            self._view_known.notify_all()

    def _check_takes_part(self, name: str) -> None:
        """Check that this worker has not left an elastic job: the others would never join its collectives."""
        first, begun = self.in_view(), self.begun
        if first and begun and begun >= first and self.rank not in self.begin(begun):
            raise RuntimeError(
                f"{name} of worker {self.rank} comes after it has left the job, before step {begun - 1}; expected "
                "close()"
            )

    def is_recorded(self, name: str) -> bool:
        """Return whether the next collective was over before this worker was restarted."""
        return self.is_restarted and self._recall(self._following(name))

    def skip_collectives(self) -> None:
        """Complete collectives of earlier rounds without this restarted worker, which never calls them."""
        self._recall(ROUND * self.position(), skips=True)

    def _recall(self, number: int, *, skips: bool = False) -> bool:
        what = f"question of worker {self.rank} about earlier collectives"
        is_over: bool = self._wait(self._ask(protocol.Recall(number, skips), ("recall", number), what), what).is_over
        return is_over

    def _collective(self, data: bytes, name: str, root: int | None = None) -> list[bytes]:
        self._check_takes_part(name)
        with self._numbering:
            number = self._following(name)
            self._count(number)
            if self.is_restarted and self._recall(number):
                self._recorded.add(number)
            message = protocol.Collective(number, name, -1 if root is None else root, data, "")
            answer = self._ask(message, number, f"{name} of worker {self.rank}")
        try:
            result: protocol.CollectiveResult = self._wait(answer, f"{name} of worker {self.rank}")
        except StallError as error:
            result = self._withdraw(number, answer, error)
        except KeyboardInterrupt as error:
            self._withdraw(number, answer, error)
            raise
        return result.data

    def _withdraw(self, number: int, answer: Future[Any], error: BaseException) -> protocol.CollectiveResult:
        """Withdraw from a collective, so that the next call replaces it; return its result if it has completed.

        Otherwise raise ``error``, a StallError with the ranks that are missing.
        """
        self._send(protocol.Withdraw(number))
        try:
            result: protocol.CollectiveResult = answer.result(_WITHDRAW_SECONDS)
        except (StallError, TimeoutError) as missing:
            with self._lock:
                self._pending.pop(number, None)
            with self._numbering:
                if number in self.numbers:
                    self._count(number, -1)
            if isinstance(error, StallError) and isinstance(missing, StallError):
                raise StallError(f"{error} for {missing}") from None
            raise error from None
        return result

    def silent_members(self, seconds: float) -> list[str]:
        """Return the names of processes that the scheduler has not heard for ``seconds``; none if it is dead."""
        if self.lost:
            return []
        message = protocol.SilenceQuery(max(seconds, 0.0))
        with self._lock:
            answer, _ = self._pending.setdefault("silence", (Future(), message))
        self._send(message)
        members: list[str] = self._wait(answer, "num_dead_nodes").members
        return members

    def join(self, data: bytes) -> protocol.JoinResult:
        """Wait until all workers have called `join`; meanwhile other collectives run without this worker."""
        call = f"join() of worker {self.rank}"
        result: protocol.JoinResult = self._wait(self._ask(protocol.Join(max(self.numbers), data), "join", call), call)
        with self._numbering:
            self._count(result.number)
        return result

    def leave(self, why: str = "", *, remains: bool = False) -> None:
        """Leave the job, but keep listening until `close`. Idempotent. For ``remains`` see `protocol.Leave`.

        Other processes that cannot continue get ``why`` as an error, such as "ended with an error: ...".
        """
        if self.has_left or not self._is_registered or self.lost:
            return
        self.has_left = True
        leaving: Future[Any] = Future()
        with self._lock:
            self._pending["over"] = leaving, protocol.Leave(why, self._error, remains)
        self._send(protocol.Leave(why, self._error, remains))
        try:
            leaving.result(_LEAVE_SECONDS)
        except (TimeoutError, GanglineError):
            _log.debug("the scheduler did not acknowledge that %s %d leaves", self.role, self.rank)

    def abandon(self) -> None:
        """Close because of the error in flight, without leaving if the others may wait for a restart."""
        self._error = ending_error()
        if self.allows_restarts or (self.is_elastic and self.rank in self.views[-1][1]):
            self.leave(remains=True)

    @property
    def is_job_over(self) -> bool:
        """True if all other workers have left or died, or the scheduler has."""
        others = {("worker", rank) for rank in range(self.num_workers)} - {(self.role, self.rank)}
        return bool(self.lost) or others <= self.gone.keys()

    def has_ended(self, rank: int) -> bool:
        """Return whether a DeadNodeError was raised because a worker has closed its store.

        A server may report this before the scheduler does, so wait until the scheduler reports that worker or a death,
        for at most the heartbeat limit.
        """
        ends = time.monotonic() + self._limit
        while ("worker", rank) not in self.gone and not any(self.gone.values()):
            if self.lost or time.monotonic() > ends:
                return False
            time.sleep(0.01)
        return self.gone.get(("worker", rank)) == ""

    def close(self) -> None:
        """Leave the job and end the thread. Idempotent."""
        if self._ending.is_set():
            return
        self.leave()
        self._ending.set()
        self._notify()
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            _log.error("the thread of %s %d that talks to the scheduler does not end", self.role, self.rank)
        else:
            end(self._context)

    def _ask(self, message: Message, key: object, what: str) -> Future[Any]:
        """Send a request and return the future of its answer."""
        answer: Future[Any] = Future()
        with self._lock:
            self._pending[key] = answer, message
            problem = self._problem(key)
        if problem:
            raise self._dead(f"{problem} (worker {self.rank} waited in {what})")
        self._send(message)
        return answer

    def _wait(self, answer: Future[Any], what: str, seconds: float | None = None) -> Any:
        """Return an answer; StallError after the timeout, or after ``seconds``."""
        seconds = self._timeout if seconds is None else seconds
        try:
            return answer.result(None if seconds == math.inf else seconds)
        except TimeoutError:
            raise StallError(f"{what} has waited {self._timeout:g} s") from None
        except DeadNodeError as error:
            raise DeadNodeError(f"{error} ({what})") from error.__cause__

    def _problem(self, key: object) -> str:
        """Return why a collective, join or question can no longer be answered; "" if it can."""
        if self.lost:
            return f"the scheduler {self.lost}"
        if isinstance(key, tuple) or key in self._recorded:  # the scheduler knows the answer
            return ""
        for (role, rank), why in self.gone.items():
            if role == "worker":
                error = self.errors.get((role, rank), "")
                others = self.gone.items() if not (why or error) else ()
                causes = [f"; {other} {one} {text}" for (other, one), text in others if text]
                return f"worker {rank} {why_gone(why, error)}{''.join(causes)}"
        return ""

    def _send(self, message: Message) -> None:
        with self._lock:
            self._outbox.append(message)
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            if self._event_fd >= 0:
                os.eventfd_write(self._event_fd, 1)

    def _serve(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  whatever it is, nothing would answer the waiting calls
            self._lose(f"cannot be reached any more: {type(error).__name__}: {error}", error)
        finally:
            with self._lock:
                self._channel.close()
                self._poller.close()
                os.close(self._event_fd)
                self._event_fd = -1

    def _run(self) -> None:
        heard_at = looked_at = time.monotonic()
        heartbeat_at = 0.0
        while not self._ending.is_set():
            if self._wants_to_leave and self._leave_request is None:
                self._leave_by_signal()
            events = self._poller.wait(_TICK_MS)
            looked_at, former = time.monotonic(), looked_at
            if looked_at - former > self._limit / 2:  # this thread could not read what the scheduler has sent
                heard_at = looked_at
            if self._event_fd in events:
                os.eventfd_read(self._event_fd)
            if self._channel.reconnected(events):
                self._on_connected()
            if self._channel.problem:
                self._settle("registered", error=ProtocolError(f"{self.role}: {self._channel.problem}"))
                self._lose(f"cannot be reached any more: {self._channel.problem}")  # if it was registered before
                return
            is_connected = not self._channel.disconnected_at
            outgoing: list[Message] = []
            if is_connected:
                with self._lock:
                    outgoing, self._outbox = self._outbox, []
            # heartbeats are also due while other processes have yet to register
            if time.monotonic() >= heartbeat_at and is_connected:
                outgoing.append(
                    protocol.Heartbeat() if self._clock is None else protocol.Heartbeat(time.monotonic_ns())
                )
                heartbeat_at = time.monotonic() + self._heartbeat
            for message in outgoing:
                self._channel.send([protocol.pack(message)])
            for frames in self._channel.receive(events):
                heard_at = time.monotonic()
                self._receive(frames[0])
            if not self.lost and (why := self._death(heard_at)):
                self._lose(why)

    def _death(self, heard_at: float) -> str:
        """Return why the scheduler counts as dead; "" if it does not, or may be restarted."""
        now, disconnected_at = time.monotonic(), self._channel.disconnected_at
        silent = now - heard_at
        waits = self.allows_restarts and not self.has_left
        limit = max(self._limit, self._restart_limit) if waits else self._limit
        if self._connections and disconnected_at and now - disconnected_at > _CONFIRM_SECONDS:
            if self._channel.is_refused():
                if waits and now - disconnected_at < self._restart_limit:
                    return ""
                return "was killed or left: connection lost"
            if silent > limit:
                return f"at {self._address} could not be reached for {limit:g} s"
        return f"gave no sign of life for {limit:g} s" if self._is_registered and silent > limit else ""

    def _on_connected(self) -> None:
        """Repeat pending requests after a reconnection, since messages of either direction may be lost."""
        self._connections += 1
        if self._connections > 1:
            with self._lock:
                repeated = [message for _, message in self._pending.values() if message is not self._registration]
                others = [one for one in self._outbox if one not in repeated]
                self._outbox = [self._registration, *repeated, *others]

    def _receive(self, frame: memoryview) -> None:
        try:
            self._handle(protocol.unpack(frame, is_bounded=False))
        except ProtocolError as error:
            _log.warning("%s drops a message of the scheduler: %s", self.role, error)

    def _handle(self, message: Message) -> None:
        match message:
            case protocol.Registered():
                if message.is_restarted and not self._is_registered:
                    self.begun = None
                self._heartbeat, self._limit, self._is_registered = message.heartbeat, message.limit, True
                self.view, self.servers = message.view, message.servers
                self.allows_restarts, self.is_restarted = message.restarts, message.is_restarted
                self.is_elastic, self.server_memory = message.is_elastic, message.memory
                self._set_views([(first, ranks) for first, ranks in message.views])
                self.on_change()
                self._settle("registered", message)
            case protocol.Heartbeat(sent, answered) if sent and self._clock is not None:
                self._clock.add(sent, answered, time.monotonic_ns())
            case protocol.Rejected(kind, text):
                self._settle("registered", error=StallError(text) if kind == StallError.__name__ else ValueError(text))
            case protocol.CollectiveResult(number, _):
                self._settle(number, message)
            case protocol.CollectiveFailed(number, text):
                self._settle(number, error=MismatchError(text))
            case protocol.Withdrawn(number, missing):
                self._settle(number, error=StallError(name_ranks(missing)))
            case protocol.Recalled(number, _):
                self._settle(("recall", number), message)
            case protocol.SilenceResult():
                self._settle("silence", message)
            case protocol.ViewQuery(number):
                with self._view_known:
                    self._asked = number
                    self._answer_query()
            case protocol.ViewChange(number, first, ranks):
                if number == len(self.views):
                    self._set_views([*self.views, (first, ranks)])
                self.on_change()
            case protocol.ViewRequested(enters, _):
                self._settle(("view", enters), message)
            case protocol.Waiting(ranks, calls, numbers):
                self.waiting = dict(zip(ranks, zip(calls, numbers, strict=False), strict=False))
                self.on_change()
            case protocol.JoinResult():
                self._settle("join", message)
            case protocol.MemberGone(role, rank, why) if self._is_registered and (role, rank) == (self.role, self.rank):
                self._lose(f"counts this process as dead: it {why}")
            case protocol.MemberAway(role, rank, why, identity):
                self.away[role, rank] = why
                self.fenced.add(identity)
                _log.info("%s %d %s; waiting for its restart", role, rank, why)
                self.on_change()
            case protocol.MemberBack(role, rank, view, address):
                self.view = view
                if role == "server":
                    self.servers[rank] = address
                self.away.pop((role, rank), None)
                _log.info("%s %d is back", role, rank)
                self.on_change()
            case protocol.MemberGone(role, rank, why, error):
                self.away.pop((role, rank), None)
                if error:
                    self.errors[role, rank] = error
                if why or "server" in (role, self.role) or rank in self.views[-1][1]:
                    self.gone = {**self.gone, (role, rank): why}
                self._fail_collectives()
                self.on_change()
            case protocol.JobOver():
                self.is_over = True
                self._settle("over", message)
                self.on_change()
            case _:
                pass

    def _lose(self, why: str, cause: Exception | None = None) -> None:
        self.lost = why
        self._cause = cause
        self._fail_collectives()
        for key in ("registered", "over", "silence"):
            self._settle(key, error=self._dead(f"the scheduler {why}"))
        self.on_change()

    def _dead(self, text: str) -> DeadNodeError:
        error = DeadNodeError(text)
        error.__cause__ = self._cause
        return error

    def _fail_collectives(self) -> None:
        with self._lock:
            keys = [key for key in self._pending if isinstance(key, (int, tuple)) or key == "join"]
            problems = {key: self._problem(key) for key in keys}
        for key, problem in problems.items():
            if problem:
                self._settle(key, error=self._dead(problem))

    def _settle(self, key: object, value: Any = None, error: Exception | None = None) -> None:
        with self._lock:
            pending = self._pending.pop(key, None)
        if pending is None:
            return
        if error is not None:
            pending[0].set_exception(error)
        else:
            pending[0].set_result(value)
