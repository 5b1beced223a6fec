"""Collective calls of one communicator: numbering, choice of algorithm, order and failure."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from gangline.collectives import algorithms
from gangline.collectives import compiled_core as core
from gangline.collectives.call_signature import COLLECTIVES, CallSignature, nbytes_of
from gangline.collectives.eager import outside_modes
from gangline.collectives.engine.executor import MisplacedMessageError
from gangline.collectives.errors import GanglineError, StallError, nested_call
from gangline.collectives.limits import WAIT_CHECK_SECONDS
from gangline.collectives.liveness.membership import Membership
from gangline.collectives.liveness.status_socket import Part, publish, withdraw
from gangline.collectives.liveness.watchdog import Watchdog, mismatch
from gangline.collectives.schedule import Step
from gangline.collectives.timeline import recorder
from gangline.collectives.timeline.recorder import Timeline
from gangline.collectives.transports.base import MessageTag, Transport, wait_until
from gangline.collectives.transports.shm.slots import SlotExchange
from gangline.collectives.tuner import SLOTS, Table, without_slots
from gangline.collectives.work import NoThreadError, Work, WorkQueue

_GATHER_SECONDS = 0.6
"""Time for the other ranks to report their call after a message of another call has arrived."""
_TURN_SECONDS = 0.1
"""Additional time per rank number, so that one rank reports a mismatch and the others repeat its error."""
_MOST_TURNS = 16
_LEAVE_SECONDS = 5.0
"""Time for another thread to leave its collective once the communicator closes; takes about 10 ms."""
_RUNNING_SECONDS = 0.0001
"""Polling interval for a collective of another thread."""


class GroupSettings(NamedTuple):
    """Settings of a communicator, which `Communicator.split` passes on."""

    transport: str
    """Transport that the user asked for."""
    address: str
    """Address of the sockets: "ipc" or "tcp://HOST"."""
    table: Table
    timeout: float | None
    """The user's time limit of a call in seconds, or None for GANGLINE_TIMEOUT."""


@dataclass(frozen=True)
class GroupResources:
    """Everything that connects the ranks of one communicator."""

    membership: Membership
    hosts: tuple[int, ...]
    """Host of each rank, numbered from 0."""
    settings: GroupSettings
    watchdog: Watchdog
    """Deadlines of collectives."""
    messages_watchdog: Watchdog
    """Deadlines of send and recv."""
    transport: Transport
    """Transport of collectives."""
    messages: Transport
    """Transport of send and recv."""
    slot_exchange: SlotExchange | None
    """Slots for small collectives; None if not all ranks share memory."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.membership.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.membership.size


class Plan(NamedTuple):
    """One rank's part of a schedule."""

    steps: tuple[Step, ...]
    chunks: int
    """Number of chunks of the schedule."""


class Engine:
    """Bookkeeping of a communicator's collectives, which run one at a time in the order of the calls."""

    def __init__(self, resources: GroupResources) -> None:
        self.resources = resources
        self.error: GanglineError | None = None
        memory = bytearray(8 * core.SHARED)
        self.shared = memoryview(memory).cast("q")
        """Integers that `gangline._core` shares, as `compiled_core` numbers them."""
        timeline = recorder.current
        self.lock = _CallLock(self.shared, self._wait_check) if timeline is None else _RecordedLock(self, timeline)
        """Held by the thread that runs a collective, unless `gangline._core` runs it."""
        self.queue = WorkQueue(counter=self.shared[core.QUEUED : core.QUEUED + 1])
        self.is_inherited = False
        """True in a fork of the process that opened the communicator; a fork must not use its sockets."""
        self._watchdog = resources.watchdog
        self._next_check = 0.0
        self._number_of_hosts = len(set(resources.hosts))
        self.shared[core.MUST_LOCK] = timeline is not None
        self.run_core, self.begin_core, self.end_core = self._core_functions(memory)
        """Run, begin and end a collective without the lock if they can: `SlotExchange.caller` says more."""
        _engines.add(self)
        if resources.transport.name != "in_process":
            membership = resources.membership
            publish(self, "" if membership.label else membership.names([membership.rank])[0])

    @property
    def sequence(self) -> int:
        """The number of the communicator's last collective."""
        return self.shared[core.SEQUENCE]

    @property
    def bytes(self) -> int:
        """Bytes that this rank has passed to collectives."""
        return self.shared[core.BYTES]

    @property
    def next_number(self) -> int:
        """The number of the communicator's next collective."""
        return self.sequence + 1

    def submit(
        self, name: str, operation: Callable[[], None], result: object, join: Callable[[], None] = lambda: None
    ) -> Work:
        """Run an operation in the background, after all earlier calls; ``join`` orders the waiter's streams after it.

        Raises:
            GanglineError: if the communicator has failed or is closed.
        """
        self.check_open()
        work = Work(name, join, result)
        try:
            self.queue.submit(operation, work, keys=(self,), priority=0)
        except NoThreadError as error:
            self.refuse(name, error)
            raise
        return work

    def status(self) -> Part:
        """Return this communicator's state, for `gangline status`."""
        resources = self.resources
        return {
            "part": "communicator",
            "group": resources.membership.label,
            "counters": {"calls": self.sequence, "bytes": self.bytes},
            "waits": [*resources.watchdog.waits(), *resources.messages_watchdog.waits()],
        }

    def wait_for_pending(self) -> None:
        """Wait for all submitted operations.

        Raises:
            NestedCallError: if this thread is inside a collective.
        """
        shared, thread = self.shared, threading.get_ident()
        if shared[core.LOCKED] == thread or shared[core.RUNNING] == thread:
            self.check_outermost()
        if (begun := shared[core.BEGUN]) and self.error is None:
            self.end_begun(begun)
        if shared[core.QUEUED] and not self.queue.is_running_here():
            self.queue.run(lambda: None, Work("wait"), keys=(self,), priority=0)

    def check_open(self) -> None:
        """Check that the communicator has neither failed nor been closed.

        Raises:
            GanglineError: the error that ended the communicator.
        """
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def check_outermost(self) -> None:
        """Raise NestedCallError if this thread is inside a collective, which a signal handler may have interrupted."""
        thread = threading.get_ident()
        if self.shared[core.LOCKED] == thread or self.shared[core.RUNNING] == thread:
            raise nested_call("a collective")

    def _wait_check(self) -> Callable[[], None]:
        """Return the check of a thread that waits for a collective of another thread."""
        limit = self._watchdog.timeout
        until = time.monotonic() + limit

        def check() -> None:  # no lock: a signal handler that waits for this thread may have interrupted its holder
            self.check_open()
            if time.monotonic() > until:
                raise StallError(
                    f"rank {self.resources.rank} has waited {limit:g} s for a collective of another of its threads"
                )

        return check

    def begin(self, code: int, nbytes: int) -> int:
        """Begin a collective and return its number; the caller holds the lock.

        Raises:
            GanglineError: if the communicator has failed before.
        """
        if self.error is not None:
            self.check_open()
        if begun := self.shared[core.BEGUN]:
            self.end_begun(begun)
        self.shared[core.SEQUENCE] = sequence = self.shared[core.SEQUENCE] + 1
        self.shared[core.BYTES] += nbytes
        self._watchdog.begin(sequence, code)
        return sequence

    def _core_functions(self, memory: bytearray) -> tuple[Callable[..., int], ...]:
        slot_exchange, table = self.resources.slot_exchange, self.resources.settings.table
        if slot_exchange is None:
            return _decline, _decline, _decline
        key = (self.resources.size, self.resources.transport.name, self._number_of_hosts)
        for name in COLLECTIVES[: core.BARRIER]:
            self.shared[core.LIMITS + COLLECTIVES.index(name)] = table.shared_up_to(name, *key)
        return slot_exchange.caller(self._wait, self.failed, memory)

    def hold(self) -> None:
        """Make all later calls take the lock."""
        self.shared[core.MUST_LOCK] = 1

    def end_begun(self, number: int, *, waits: bool = True) -> bool:
        """End a collective that was begun; return whether it is over, which it is if this waits.

        Raises:
            GanglineError: if the communicator has failed before, or fails now.
        """
        if self.shared[core.BEGUN] != number:
            return True
        self.check_open()
        status = self.end_core(number, waits)
        if status == core.MISMATCHED:
            self.end_core(number, True)  # raises the error
        if waits and status == core.HELD:  # another thread ends it, or runs a later one
            wait_until(
                lambda: self.shared[core.BEGUN] != number, lambda _: time.sleep(_RUNNING_SECONDS), self._wait_check()
            )
        elif not waits and status == core.NOT_YET:
            self._check_late(number)
        return self.shared[core.BEGUN] != number

    def _check_late(self, number: int) -> None:
        """Check from time to time that the wait for late ranks of the collective that was begun can succeed."""
        assert self.resources.slot_exchange is not None
        if time.monotonic() < self._next_check or not self.lock.try_acquire():  # the call that holds it checks
            return
        try:
            if self.shared[core.BEGUN] != number:
                return
            self._next_check = time.monotonic() + WAIT_CHECK_SECONDS
            _, code = self.resources.slot_exchange.last_call
            self._watchdog.begin(number, code)
            self._watchdog.check(())
        except BaseException as error:  # noqa: BLE001  raised again
            raise self.failed(error) from None
        finally:
            self.lock.release()

    def is_idle(self) -> bool:
        """Return whether no call runs or is queued, and none must take the lock but to read announcements."""
        shared = self.shared
        return not (shared[core.RUNNING] or shared[core.LOCKED] or shared[core.QUEUED] or shared[core.MUST_LOCK])

    def run_compiled(
        self,
        collective: int,
        tensor: object,
        out: object = None,
        option: object = None,
        most: int = -1,
        *,
        begins: bool = False,
    ) -> int:
        """Take the lock and run a collective by `run_core`, or by `begin_core`, which have the arguments.

        Returns:
            What that function returns; after an error DECLINED.

        Raises:
            GanglineError: if the communicator fails now.
        """
        slot_exchange = self.resources.slot_exchange
        assert slot_exchange is not None
        with self.lock:
            if self.error is not None:
                return core.DECLINED
            if (begun := self.shared[core.BEGUN]) and not begins:
                self.end_begun(begun)
            self.shared[core.SEQUENCE] = sequence = self.shared[core.SEQUENCE] + 1
            run = self.begin_core if begins else self.run_core
            status = run(collective, tensor, out, option, most)
            if status < core.DONE:
                self.shared[core.SEQUENCE] = sequence - 1
                return status
            _, code = slot_exchange.last_call
            self.shared[core.BYTES] += nbytes_of(code)
            self._watchdog.begin(sequence, code)
        return status

    def _wait(self) -> None:
        """Wait for ranks that are late for the collective that `gangline._core` has begun.

        Raises:
            GanglineError: if the communicator fails.
        """
        slot_exchange = self.resources.slot_exchange
        assert slot_exchange is not None
        sequence, code = slot_exchange.last_call
        self._watchdog.begin(sequence, code)
        mismatched = slot_exchange.wait()
        if mismatched:
            raise self.mismatch(sequence, code, mismatched)

    def failed(self, error: BaseException, code: int | None = None) -> BaseException:
        """End the communicator on all ranks after an error inside a collective; return the error to raise.

        ``code`` is the `CallSignature.code` of the collective; None: the last one of the core.
        """
        if code is None:
            assert self.resources.slot_exchange is not None
            _, code = self.resources.slot_exchange.last_call
        if isinstance(error, MisplacedMessageError):
            error = self._disagreement(error, code)
        reason = error
        if not isinstance(reason, GanglineError):
            text = f"rank {self.resources.rank} left {CallSignature.from_code(code)} by {type(error).__name__}"
            reason = GanglineError(f"{text}: {error}" if str(error) else text)
        self.end(reason)
        self.resources.membership.fail(reason)
        return error

    def refuse(self, call: str, error: BaseException) -> None:
        """Count a collective that this rank does not begin because of ``error``; ranks that wait in it raise the error.

        If all ranks refuse it, the communicator stays usable.
        """
        self.check_outermost()
        with self.lock:
            if self.error is None:
                self.shared[core.SEQUENCE] += 1
                self.resources.membership.refuse(self.sequence, f"{call}: {type(error).__name__}: {error}")

    def end(self, error: GanglineError) -> None:
        """Make every later call raise an error."""
        if self.error is None:
            self.error = type(error)(*error.args)  # a copy, because the traceback refers to the caller's tensors
            self.hold()

    def plan(
        self, collective: str, nbytes: int, root: int | None = None, *, streams: bool = False, has_slots: bool = True
    ) -> Plan | None:
        """Return this rank's part of the schedule for a collective, or None to exchange the tensors through slots.

        ``nbytes`` are those of the whole tensor that a rank passes (the root, for broadcast and scatter). The slots can
        take tensors of any size if it ``streams``, and none unless ``has_slots``.
        """
        resources = self.resources
        choice = resources.settings.table.choose(
            collective, nbytes, resources.size, resources.transport.name, self._number_of_hosts, streams=streams
        )
        if choice.algorithm == SLOTS and has_slots and resources.slot_exchange is not None:
            return None
        name = choice.algorithm if choice.algorithm != SLOTS else without_slots(collective)
        schedule = algorithms.build(
            collective, name, resources.size, root=root, segments=choice.segments, hosts=resources.hosts
        )
        return Plan(schedule.program(resources.rank), schedule.chunks)

    def exchange_slots(self, sequence: int, code: int) -> int:
        """Publish this rank's slot, wait for all ranks, and return the parity of the slots to read.

        Raises:
            MismatchError: if a rank is in another call.
            GanglineError: if a rank is dead or late.
        """
        slot_exchange = self.resources.slot_exchange
        assert slot_exchange is not None
        parity, mismatched = slot_exchange.publish_and_wait(sequence, code)
        if mismatched:
            raise self.mismatch(sequence, code, mismatched)
        return parity

    def mismatch(self, sequence: int, code: int, mismatched: dict[int, tuple[int, int]]) -> GanglineError:
        """Return the error of a call in which other ranks are ``mismatched``: rank -> (sequence, code).

        Raises:
            MisplacedMessageError: if a rank has refused a call in between.
        """
        for source, message_tag in mismatched.items():
            if message_tag[0] != sequence:
                raise MisplacedMessageError(source, MessageTag(*message_tag))
        return mismatch({**dict.fromkeys(range(self.resources.size), (sequence, code)), **mismatched})

    def close(self) -> None:
        """Finish submitted operations, announce the end to the other ranks, and release all resources."""
        withdraw(self)
        self.queue.close()
        self.run_core = self.begin_core = self.end_core = _decline  # they refer to this engine
        closed = GanglineError("the communicator is closed")
        self.end(closed)
        membership = self.resources.membership
        membership.failure = membership.failure or closed  # ends the wait of another thread
        until = time.monotonic() + _LEAVE_SECONDS
        wait_until(
            lambda: self.lock.is_free() or time.monotonic() > until,
            lambda _: time.sleep(_RUNNING_SECONDS),
            lambda: None,
        )
        membership.close()
        for transport in (self.resources.transport, self.resources.messages):
            transport.close()

    def finalize(self) -> None:
        """Close a communicator that the user did not close; close only its membership if a call is still running.

        Pending messages are flushed, and the other ranks do not report this rank as killed. A forked process does
        nothing.
        """
        if self.is_inherited:
            return
        begun = self.shared[core.BEGUN]
        with suppress(Exception):  # a Work may wait for it
            if not begun or self.error is not None or self.end_begun(begun, waits=False):
                begun = 0
        if not begun and not self.queue.unfinished and self.lock.is_free():
            self.close()
        else:
            self.resources.membership.close()

    def leave_to_parent(self) -> None:
        """Make every call of a forked process raise an error; the lock may be in use by the parent's threads."""
        self.is_inherited = True
        self.shared[core.RUNNING] = self.shared[core.LOCKED] = 0
        self.lock = _CallLock(self.shared, self._wait_check)
        self.hold()
        self.error = GanglineError(
            f"this communicator belongs to process {os.getppid()}, from which this one was forked: open another one "
            "in the child, at another port, or start the child with multiprocessing's 'spawn' or 'forkserver' method"
        )

    def _disagreement(self, misplaced: MisplacedMessageError, code: int) -> GanglineError:
        """Return the error for a message of another call.

        The error names the calls of all ranks if they report them in time. Otherwise it is another rank's error, or
        names the message's call and this rank's call.
        """
        until = time.monotonic() + _GATHER_SECONDS + _TURN_SECONDS * min(self.resources.rank, _MOST_TURNS)
        try:
            wait_until(
                lambda: time.monotonic() >= until,
                lambda _: time.sleep(WAIT_CHECK_SECONDS),
                lambda: self.resources.watchdog.check(()),
            )
        except GanglineError as error:
            return error
        return mismatch({misplaced.source: misplaced.message_tag, self.resources.rank: (self.sequence, code)})


class RunningCall:
    """Context of a collective, which begins it and has its tag. An error there ends the communicator on all ranks.

    Raises:
        GanglineError: if the communicator has failed before, or fails now.
    """

    def __init__(self, engine: Engine, code: int) -> None:
        self._engine, self._code = engine, code

    def __enter__(self) -> MessageTag:
        engine = self._engine
        engine.lock.__enter__()
        try:
            return MessageTag(engine.begin(self._code, nbytes_of(self._code)), self._code)
        except BaseException:
            engine.lock.__exit__()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is not None:
                self._engine.resources.transport.withdraw()  # the caller may write its tensors again
                raise self._engine.failed(error, self._code) from None
        finally:
            self._engine.lock.__exit__()


class _CallLock:
    """Lock of an engine's collectives; acquiring it waits for collectives that `gangline._core` runs without it.

    It is reentrant, for calls of several collectives. `Engine.check_outermost` keeps signal handlers out.
    """

    def __init__(self, shared: memoryview, wait_check: Callable[[], Callable[[], None]]) -> None:
        """Use an engine's integers; ``wait_check`` returns the check of a thread that waits for another one's call."""
        self._shared = shared
        self._wait_check = wait_check
        self._lock = threading.RLock()
        self._depth = 0

    @contextmanager
    def over_several(self) -> Iterator[None]:
        """Hold the lock over several collectives of one call."""
        self.acquire()
        try:
            with outside_modes():
                yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Hold the lock; no collective is recorded."""
        if not self._lock.acquire(blocking=False):
            wait_until(lambda: self._lock.acquire(timeout=WAIT_CHECK_SECONDS), lambda _: None, self._wait_check())
        self._depth += 1
        self._shared[core.LOCKED] = threading.get_ident()
        if self._shared[core.RUNNING]:
            try:
                wait_until(
                    lambda: not self._shared[core.RUNNING], lambda _: time.sleep(_RUNNING_SECONDS), self._wait_check()
                )
            except BaseException:
                self.release()
                raise

    def try_acquire(self) -> bool:
        """Hold the lock if no collective runs; return whether it is held."""
        if not self.is_free() or not self._lock.acquire(blocking=False):
            return False
        self._depth += 1
        self._shared[core.LOCKED] = threading.get_ident()
        if self._shared[core.RUNNING]:
            self.release()
            return False
        return True

    def release(self, *_: object) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._shared[core.LOCKED] = 0
        self._lock.release()

    __enter__, __exit__ = acquire, release

    def is_free(self) -> bool:
        """Return whether no collective runs."""
        return not self._shared[core.LOCKED] and not self._shared[core.RUNNING]


class _RecordedLock(_CallLock):
    """Call lock that records each collective as a span of the timeline."""

    def __init__(self, engine: Engine, timeline: Timeline) -> None:
        super().__init__(engine.shared, engine._wait_check)
        self._engine, self._timeline = engine, timeline
        self._began = self._number = 0

    def __enter__(self) -> None:
        super().__enter__()
        self._began, self._number = time.monotonic_ns(), self._engine.next_number

    def __exit__(self, *_: object) -> None:
        engine, resources = self._engine, self._engine.resources
        if engine.sequence >= self._number:  # a collective was begun
            call = CallSignature.from_code(resources.watchdog.code)
            self._timeline.add(
                call.collective,
                self._began,
                bytes=call.count * call.dtype.itemsize,
                number=engine.sequence,
                group=resources.membership.label,
                ranks=resources.size,
            )
        self.release()


def _decline(*_: object) -> int:
    return core.DECLINED


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for engine in list(_engines):
        engine.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
