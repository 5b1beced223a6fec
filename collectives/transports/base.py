"""What a transport is: messages between pairs of ranks, in order, and nothing that knows an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PIECE = 1 << 19
"""Bytes of a piece of a message: small enough to stay in a core's cache while it is added or copied."""

SLOT_BYTES = 1 << 20
"""The most bytes of a rank's tensor that a slot exchange takes."""

BootstrapAllGather = Callable[[bytes], list[bytes]]
"""Gives everybody's bytes, in rank order: how transports find each other. All ranks call it equally often."""


class MessageTag(NamedTuple):
    """What a message belongs to: the number of the call on its communicator (or its tag), and `Call.code`."""

    sequence: int
    code: int


class WaitPolicy(Protocol):
    """What a transport asks while it waits (`Watch` in watch.py)."""

    def check(self, missing: Iterable[int]) -> None:
        """To be called about every 10 ms of a wait for the ranks ``missing``.

        Raises:
            GanglineError: the wait is over: a rank is dead, late beyond the timeout, or at another call.
        """


class SendRequest(ABC):
    """A message on its way out."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the memory that was sent may be written again."""

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done; what else is on its way out goes on meanwhile."""


class ReceiveRequest(ABC):
    """A message that has been announced; its bytes may still lie with the sender."""

    message_tag: MessageTag
    nbytes: int

    @abstractmethod
    def piece(self, index: int) -> Tensor:
        """Bytes ``index * PIECE`` up to the next piece or the end, a uint8 tensor to be read, not written.

        Pieces are asked for in ascending order, each once; a piece is good until the next one of the same message, or
        `done`. Reading the pieces of several messages (of different ranks) side by side is fine.
        """

    @abstractmethod
    def into(self, target: Tensor) -> None:
        """Copy the whole message into a contiguous uint8 tensor of ``nbytes``, not reading pieces; then it is done."""

    @abstractmethod
    def done(self) -> None:
        """Everything needed has been read: the sender may write its memory again. Messages are done in order."""


class Transport(ABC):
    """Messages between the ranks of one communicator; one thread at a time may use it."""

    name: str
    rank: int
    size: int

    @abstractmethod
    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:
        """Send the bytes of a contiguous uint8 tensor (0 bytes too) to another rank; never waits.

        Messages between two ranks arrive in the order in which they were sent. The memory must not be written before
        the ticket is done.
        """

    @abstractmethod
    def receive(self, source: int) -> ReceiveRequest:
        """The next message of a rank; waits for it, and while it waits, what is on its way out goes on.

        The message before it of the same rank must be done.

        Raises:
            GanglineError: what `WaitPolicy.check` raises.
        """

    @abstractmethod
    def poll(self, source: int) -> ReceiveRequest | None:
        """The next message of a rank if there is one already."""

    @abstractmethod
    def progress(self) -> None:
        """Move on what is on its way out, as far as that goes without waiting."""

    def empty(self, nbytes: int, exchange: BootstrapAllGather) -> Tensor:  # noqa: ARG002  of those that share memory
        """A uint8 tensor, where that can be in memory that other ranks can reach: a collective."""
        return torch.empty(nbytes, dtype=torch.uint8)

    @abstractmethod
    def close(self) -> None:
        """Give everything back; what is still on its way out may be lost."""
