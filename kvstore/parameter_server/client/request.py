"""Request of a worker to one server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gangline.kvstore.parameter_server.protocol import Command, Define, Pull, Push


class Awaitable(Protocol):
    """Work that completes with its requests."""

    is_awaited: bool
    """True while a thread waits for it without a limit."""


@dataclass(eq=False)
class Request:
    """Message to a server and the callbacks for its answers."""

    server: int
    message: Command | Define | Pull | Push
    """Message whose field ``sequence`` is set when it is sent."""
    what: str
    """Name of the call, for errors."""
    nbytes: int = 0
    """Bytes of data, which count as in flight until the server has received them."""
    frames: Sequence[bytes | memoryview] = ()
    """Data frames, one per entry, if the data are not in shared memory."""
    completes_when_sent: bool = False
    """True for a push without reply whose payload is a private copy: it completes before it is acknowledged."""
    on_answer: Callable[[Any, list[Tensor]], bool] | None = None
    """Called with each answer and its data; returns whether the request is complete. None: it is with the first one."""
    on_end: Callable[[], None] = lambda: None
    """Called when the request has completed, by its answer or because it was sent."""
    on_error: Callable[[Request, Exception], None] = lambda *_: None
    """Called with this request, which so needs no reference to itself, and its error."""
    on_release: Callable[[], None] | None = None
    """Called when the message's shared-memory region may be overwritten; None: it has none."""
    is_held: bool = False
    """True until the server has released the message: it is repeated after a lost connection, though answered."""
    priority: int = 0
    work: Awaitable | None = None
    """Work that completes with this request and others."""
    blocked: tuple[int, str] | None = field(default=None, init=False)
    """Number of a collective in which a worker waits whose push the request waits for, and a text that names both."""
    sequence: int = field(default=0, init=False)
    sent_at: float = field(default=0.0, init=False)
    packed: bytes = field(default=b"", init=False)
    received: bool = field(default=False, init=False)
    """True once the server has received it."""

    @property
    def wants_values(self) -> bool:
        """True if an answer with data follows; otherwise the request is complete when it is acknowledged."""
        return self.message.wants_values if type(self.message) is Push else type(self.message) is not Define
