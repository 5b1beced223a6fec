"""What happens inside a collective call: numbering, choosing a way, running it, and what failure means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gangline.collectives import algorithms
from gangline.collectives.call_signature import CallSignature
from gangline.collectives.engine.executor import Chunks, MisplacedMessageError, run
from gangline.collectives.errors import GanglineError
from gangline.collectives.liveness.membership import Membership
from gangline.collectives.liveness.watchdog import Watchdog, mismatch
from gangline.collectives.schedule import Step
from gangline.collectives.transports.base import MessageTag, Transport
from gangline.collectives.transports.shm.slots import SlotExchange
from gangline.collectives.tuner import SHARED, Choice, Table
from gangline.collectives.work import Work, WorkQueue

_GATHER_SECONDS = 0.6  # in which the others say where they are
_TURN_SECONDS = 0.1  # after which the next rank says what it knows, so that all say the same


@dataclass(frozen=True)
class GroupResources:
    """What joins the ranks of a communicator."""

    rank: int
    size: int
    hosts: tuple[int, ...]
    """The host of each rank, numbered from 0."""
    transport: Transport
    """For collectives."""
    messages: Transport
    """For send and recv."""
    slot_exchange: SlotExchange | None
    """For small collectives, where all ranks share memory."""
    membership: Membership
    watchdog: Watchdog
    """Of collectives."""
    messages_watchdog: Watchdog
    table: Table
    medium: str
    """What the table calls the transport."""
    transport_word: str
    """By what the ranks were asked to be joined: what `split` asks for again."""
    address: str
    """Where sockets are, "ipc" or "tcp://HOST"."""
    timeout: float | None
    """Seconds that a call may wait, if the caller gave them."""


class Engine:
    """Runs the collectives of one communicator, one at a time, in the order of the calls."""

    def __init__(self, resources: GroupResources) -> None:
        self.resources = resources
        self.error: GanglineError | None = None
        self._number_of_hosts = len(set(resources.hosts))
        self._sequence = 0
        self.lock = threading.Lock()  # held while a collective runs, by whichever thread runs it
        self.queue = WorkQueue()

    @property
    def next_number(self) -> int:
        """The number that the next collective of this communicator will have."""
        return self._sequence + 1

    def submit(
        self, name: str, operation: Callable[[], None], result: object, join: Callable[[], None] = lambda: None
    ) -> Work:
        """Have an operation, which calls this engine, run behind all that was called before it.

        Args:
            name: of the Work.
            operation: what is to be done.
            result: the Work's.
            join: orders the waiter's GPU streams behind the operation.
        """
        self.check_open()
        work = Work(name, join, result)
        self.queue.submit(operation, work, keys=(self,), priority=0)
        return work

    def settle(self) -> None:
        """Wait for what was submitted: what is called now comes behind it."""
        if not self.queue.is_idle():
            self.queue.run(lambda: None, Work("settle"), keys=(self,), priority=0)

    def check_open(self) -> None:
        """See that calls can still be made.

        Raises:
            GanglineError: what an earlier collective failed with.
        """
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    @contextmanager
    def call(self, code: int) -> Iterator[int]:
        """Around a collective: gives its number. What goes wrong within is told to all ranks and ends the communicator.

        Raises:
            GanglineError: the communicator has failed before, or fails now.
        """
        with self.lock:
            sequence = self.begin(code)
            try:
                yield sequence
            except BaseException as error:  # noqa: BLE001  raised again
                raise self.failed(error, code) from None

    def begin(self, code: int) -> int:
        """Begin a collective, with the lock held: gives its number.

        Raises:
            GanglineError: the communicator has failed before.
        """
        self.check_open()
        self._sequence = sequence = self._sequence + 1
        self.resources.watchdog.begin(sequence, code)
        return sequence

    def failed(self, error: BaseException, code: int) -> BaseException:
        """End the communicator for what happened within a collective, on all ranks; gives what is to be raised."""
        if isinstance(error, MisplacedMessageError):
            error = self._disagreement(error, code)
        reason = error
        if not isinstance(reason, GanglineError):
            words = f"rank {self.resources.rank} left {CallSignature.from_code(code)} by {type(error).__name__}"
            reason = GanglineError(f"{words}: {error}" if str(error) else words)
        self.end(reason)
        self.resources.membership.fail(reason)
        return error

    def end(self, error: GanglineError) -> None:
        """Have every later call raise an error."""
        if self.error is None:
            self.error = type(error)(*error.args)  # without the traceback, which holds the caller's tensors

    def is_shared(self, collective: str, nbytes: int) -> bool:
        """Whether a collective goes over the board, not by a schedule.

        Args:
            collective: its name.
            nbytes: of the whole tensor that a rank gives (the root's, for broadcast and scatter).
        """
        return self.resources.slot_exchange is not None and self._choose(collective, nbytes).algorithm == SHARED

    def program(self, collective: str, nbytes: int, root: int | None) -> tuple[tuple[Step, ...], int]:
        """This rank's part of the schedule for a collective of so many bytes, and the schedule's number of chunks."""
        resources = self.resources
        choice = self._choose(collective, nbytes)
        schedule = algorithms.build(
            collective, choice.algorithm, resources.size, root=root, segments=choice.segments, hosts=resources.hosts
        )
        return schedule.program(resources.rank), schedule.chunks

    def run(self, program: tuple[Step, ...], chunks: Chunks, sequence: int, code: int, op: str = "sum") -> None:
        """Run a program on its chunks."""
        resources = self.resources
        run(program, resources.transport, chunks, MessageTag(sequence, code), op, resources.size if op == "mean" else 1)

    def meet(self, sequence: int, code: int) -> int:
        """Exchange what lies on the board; gives the parity of the slots to read.

        Raises:
            MismatchError: a rank came for another call.
        """
        slot_exchange = self.resources.slot_exchange
        assert slot_exchange is not None
        parity, elsewhere = slot_exchange.meet(sequence, code)
        if elsewhere:
            raise mismatch({**dict.fromkeys(range(self.resources.size), (sequence, code)), **elsewhere})
        return parity

    def close(self) -> None:
        """Finish what was submitted, say goodbye, and give everything back."""
        self.queue.close()
        if self.error is None:
            self.error = GanglineError("the communicator is closed")
        self.resources.membership.close()
        for transport in (self.resources.transport, self.resources.messages):
            transport.close()

    def leave(self) -> None:
        """Close what nobody closed; where a call is still under way, say goodbye and no more.

        So what was sent still goes out, and the others do not take this rank for killed.
        """
        if self.queue.is_idle() and not self.lock.locked():
            self.close()
        else:
            self.resources.membership.close()

    def _disagreement(self, misplaced: MisplacedMessageError, code: int) -> GanglineError:
        """The error for a message of another call: all ranks' calls if said soon, or others' words, or those two."""
        until = time.monotonic() + _GATHER_SECONDS + _TURN_SECONDS * self.resources.rank
        while time.monotonic() < until:
            try:
                self.resources.watchdog.check(())
            except GanglineError as error:
                return error
            time.sleep(0.01)
        return mismatch(
            {
                misplaced.source: (misplaced.message_tag.sequence, misplaced.message_tag.code),
                self.resources.rank: (self._sequence, code),
            }
        )

    def _choose(self, collective: str, nbytes: int) -> Choice:
        resources = self.resources
        return resources.table.choose(collective, nbytes, resources.size, resources.medium, self._number_of_hosts)
