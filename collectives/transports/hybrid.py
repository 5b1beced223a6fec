"""Messages between ranks on several hosts: through shared memory to those on the same host, else over the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from gangline.collectives.transports.base import (
    BootstrapAllGather,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
)
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.subgroup_exchange import within

_NAP_SECONDS = 0.0002
_CHECK_SECONDS = 0.01


class HybridTransport(Transport):
    """The transport of ranks that share memory with some of the others."""

    name = "tcp"

    def __init__(
        self, near: SharedMemoryTransport, neighbours: Sequence[int], far: Transport, wait_policy: WaitPolicy
    ) -> None:
        """Join two transports.

        Args:
            near: between the ranks of this host.
            neighbours: those ranks, by their number among all; in the order of their numbers on ``near``.
            far: between all ranks; it goes on by itself while this rank waits.
            wait_policy: asked while this rank waits.
        """
        self.rank, self.size = far.rank, far.size
        self._near, self._far = near, far
        self._wait_policy = wait_policy
        self._neighbours = {rank: place for place, rank in enumerate(neighbours)}

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102  as the base says
        place = self._neighbours.get(to)
        if place is None:
            return _FarTicket(self, self._far.send(to, data, message_tag))
        return self._near.send(place, data, message_tag)

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        place = self._neighbours.get(source)
        if place is not None:
            return self._near.receive(place)
        found: list[ReceiveRequest] = []

        def is_there() -> bool:
            found.extend(filter(None, [self._far.poll(source)]))
            return bool(found)

        self.move_near(is_there)
        return found[0] if found else self._far.receive(source)

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        place = self._neighbours.get(source)
        return self._far.poll(source) if place is None else self._near.poll(place)

    def progress(self) -> None:  # noqa: D102
        self._near.progress()
        self._far.progress()

    def empty(self, nbytes: int, exchange: BootstrapAllGather) -> Tensor:  # noqa: D102
        with within(exchange, list(self._neighbours)) as nearby:
            return self._near.empty(nbytes, nearby)

    def move_near(self, is_there: Callable[[], bool]) -> None:
        """Until ``is_there()``, move on what neighbours are to get: they may hold up the far rank that is waited for.

        Raises:
            GanglineError: what `WaitPolicy.check` raises.
        """
        checked = time.monotonic()
        while self._near.move() and not is_there():
            time.sleep(_NAP_SECONDS)
            if time.monotonic() - checked >= _CHECK_SECONDS:
                self._wait_policy.check([])
                checked = time.monotonic()

    def close(self) -> None:  # noqa: D102
        self._near.close()
        self._far.close()


class _FarTicket(SendRequest):
    def __init__(self, transport: HybridTransport, send_request: SendRequest) -> None:
        self._transport, self._send_request = transport, send_request

    def is_done(self) -> bool:
        return self._send_request.is_done()

    def wait(self) -> None:
        self._transport.move_near(self.is_done)
        self._send_request.wait()
