"""Transport interface: ordered messages between pairs of ranks. Transports know no algorithm.

To add a medium, implement `Transport`, `SendRequest` and `ReceiveRequest`. A transport is constructed collectively: all
ranks pass a `BootstrapAllGather`, through which they exchange addresses, and a `WaitPolicy`. Whenever the transport
blocks, it calls `wait_until`, which calls the policy. transports/in_process.py is the shortest complete example.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from torch import Tensor

from gangline.collectives.limits import PROGRESS_POLL_SECONDS, WAIT_CHECK_SECONDS

PIECE = 1 << 19
"""Bytes of one piece of a message: small enough to stay in a core's cache while it is reduced or copied."""

SLOT_BYTES = 1 << 20
"""Largest tensor of a rank, in bytes, that a slot exchange takes."""

BootstrapAllGather = Callable[[bytes], list[bytes]]
"""All-gather of bytes for bootstrap: returns every rank's bytes, in rank order. Collective: all ranks must call it."""

_CONTINUE, _DONE = b"+", b"-"


class MessageTag(NamedTuple):
    """Identifies the call that a message belongs to. Receivers compare it with their own call to detect mismatches."""

    sequence: int
    """Number of the call on its communicator, or the user's tag of a point-to-point message."""
    code: int
    """`CallSignature.code`."""


class WaitPolicy(Protocol):
    """Decides whether a transport keeps waiting; `Watchdog` is the implementation."""

    def check(self, missing: Iterable[int]) -> None:
        """Check that waiting for the ranks ``missing`` still makes sense; call it about every 10 ms of a wait.

        Raises:
            GanglineError: if the wait must end: a rank is dead, late beyond the timeout, or in another call.
        """


def wait_until(ready: Callable[[], bool], pause: Callable[[float], object], check: Callable[[], object]) -> None:
    """Block until ``ready()``. Every wait for another rank is this loop, so that all of them notice failures.

    Args:
        ready: returns whether the wait is over.
        pause: yields or sleeps, for about `WAIT_CHECK_SECONDS` at most. Its argument is the time waited, in seconds.
        check: called about every `WAIT_CHECK_SECONDS`; an error that it raises, such as one of `WaitPolicy.check`, ends
            the wait.
    """
    began = checked = time.monotonic()
    while not ready():
        now = time.monotonic()
        if now - checked >= WAIT_CHECK_SECONDS:
            checked = now
            check()
        pause(now - began)


@contextmanager
def within(all_gather: BootstrapAllGather, members: Sequence[int]) -> Iterator[BootstrapAllGather]:
    """Yield the all-gather of this rank's group, whose rank i is rank ``members[i]`` of all; it may be called at will.

    Collective over all ranks, not only the group: leaving the context blocks until all groups have left it.
    """

    def group_all_gather(data: bytes) -> list[bytes]:
        gathered = all_gather(_CONTINUE + data)
        return [gathered[rank][len(_CONTINUE) :] for rank in members]

    try:
        yield group_all_gather
    finally:
        while any(status != _DONE for status in all_gather(_DONE)):
            pass


class SendRequest:
    """Handle of one outgoing message; this class itself is that of a message that has been copied."""

    def is_done(self) -> bool:
        """Return whether the sent memory may be written again. Never blocks."""
        return True

    def wait(self) -> None:
        """Block until `is_done`, while other outgoing messages progress.

        Raises:
            GanglineError: if `WaitPolicy.check` raises it.
        """


class ReceiveRequest(ABC):
    """Handle of one incoming message. Its header has arrived; its bytes may still be in the sender's memory.

    Read it by `piece` and then call `done`, or call `into`.
    """

    message_tag: MessageTag
    nbytes: int

    @abstractmethod
    def piece(self, index: int) -> Tensor:
        """Return bytes ``index * PIECE`` up to the next piece or the end as a read-only uint8 tensor; may block.

        Pieces must be requested in ascending order, each at most once. A piece is valid until the next one of the same
        message is requested, or until `done`. Messages from different ranks may be read alternately.
        """

    def into(self, target: Tensor) -> None:
        """Copy the whole message into a contiguous uint8 tensor of ``nbytes`` elements; includes `done`.

        Must not be combined with `piece`.
        """
        for index in range(self.pieces):
            piece = self.piece(index)
            target[index * PIECE : index * PIECE + piece.numel()].copy_(piece)
        self.done()

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.nbytes // PIECE)

    @abstractmethod
    def done(self) -> None:
        """Release the message: the sender may write its memory again. Unread pieces are dropped."""


class Transport(ABC):
    """Messages between the ranks of one communicator. Not thread-safe."""

    name: str
    """Name of the medium as users see it, such as "shared_memory" or "tcp"."""
    rank: int
    size: int

    @abstractmethod
    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:
        """Start sending the bytes of a contiguous uint8 tensor (possibly empty) to another rank. Never blocks.

        Messages between two ranks arrive in the order of their sends. The tensor's memory must not be written before
        the request is done.
        """

    @abstractmethod
    def receive(self, source: int) -> ReceiveRequest:
        """Block until the next message from a rank has arrived and return it; outgoing messages progress meanwhile.

        The previous message from the same rank must be done.

        Raises:
            GanglineError: if `WaitPolicy.check` raises it.
        """

    @abstractmethod
    def poll(self, source: int) -> ReceiveRequest | None:
        """Return the next message from a rank if it has arrived, else None. Never blocks."""

    @abstractmethod
    def progress(self) -> bool:
        """Advance outgoing messages without blocking.

        Returns:
            Whether messages are left that need further calls.
        """

    def waiter(self, sources: Collection[int], targets: Collection[int]) -> Callable[[float], None]:  # noqa: ARG002
        """Return a function that sleeps for so many seconds, until a message arrives or leaves, or until `wake`.

        Messages from ``sources`` or to ``targets`` count, since `waiter` returned: call `poll` and `progress` in
        between. It is called once, by a thread that may run beside other calls of the transport.
        """
        return lambda seconds: time.sleep(min(seconds, PROGRESS_POLL_SECONDS))

    def wake(self) -> None:  # noqa: B027  for transports whose waiters sleep longer
        """End the sleep of a `waiter`."""

    @abstractmethod
    def withdraw(self) -> None:
        """Withdraw all outgoing messages that are not done, so that their memory may be written.

        Ranks that wait for one, or are reading it, wait until `WaitPolicy.check` raises the reason. Nothing can be sent
        afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources; outgoing messages that are not done may be lost, and nothing reads their memory."""
