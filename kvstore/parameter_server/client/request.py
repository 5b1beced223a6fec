"""What a worker asks of a server, on its way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gangline.kvstore.parameter_server.protocol import Message


@dataclass(eq=False)
class Request:
    """Something that a server is asked, and what to do with its answer."""

    server: int
    message: Callable[[int], Message]
    """Makes the message of a sequence number."""
    what: str
    """For errors: what waits."""
    nbytes: int = 0
    """How much data go along; they count until the server has them."""
    frames: Sequence[bytes | memoryview] = ()
    """The data of each entry, where they travel so."""
    is_own: bool = False
    """True if the payload is a private copy; a push without reply then completes when sent, not when acknowledged."""
    on_answer: Callable[[Message, list[Tensor]], bool] = lambda *_: True
    """Called with the answer and its data; whether the request is over."""
    on_sent: Callable[[], None] = lambda: None
    """Called when it has gone out for the first time."""
    on_error: Callable[[Exception], None] = lambda _: None
    on_free: Callable[[], None] | None = None
    """Called when the memory that the message names may be written again; None: it names none."""
    priority: int = 0
    wants: bool = False
    """Whether values answer it; else that the server has it is all there is to wait for."""
    sequence: int = field(default=0, init=False)
    since: float = field(default=0.0, init=False)
    packed: bytes = field(default=b"", init=False)
    taken: bool = field(default=False, init=False)

    @property
    def is_over_when_sent(self) -> bool:
        """Whether its sender waits no longer than until it has gone out."""
        return self.is_own and not self.wants
