"""Messages between ranks on several hosts: through shared memory to those on the same host, else over the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from gangline.collectives.transports.base import Exchange, Incoming, Patience, Stamp, Ticket, Transport
from gangline.collectives.transports.shm.transport import SharedMemory
from gangline.collectives.transports.subgroup_exchange import within

_NAP_SECONDS = 0.0002
_CHECK_SECONDS = 0.01


class Mixed(Transport):
    """The transport of ranks that share memory with some of the others."""

    name = "tcp"

    def __init__(self, near: SharedMemory, neighbours: Sequence[int], far: Transport, patience: Patience) -> None:
        """Join two transports.

        Args:
            near: between the ranks of this host.
            neighbours: those ranks, by their number among all; in the order of their numbers on ``near``.
            far: between all ranks; it goes on by itself while this rank waits.
            patience: asked while this rank waits.
        """
        self.rank, self.size = far.rank, far.size
        self._near, self._far = near, far
        self._patience = patience
        self._neighbours = {rank: place for place, rank in enumerate(neighbours)}

    def send(self, to: int, data: Tensor, stamp: Stamp) -> Ticket:  # noqa: D102  as the base says
        place = self._neighbours.get(to)
        if place is None:
            return _FarTicket(self, self._far.send(to, data, stamp))
        return self._near.send(place, data, stamp)

    def receive(self, source: int) -> Incoming:  # noqa: D102
        place = self._neighbours.get(source)
        if place is not None:
            return self._near.receive(place)
        found: list[Incoming] = []

        def is_there() -> bool:
            found.extend(filter(None, [self._far.poll(source)]))
            return bool(found)

        self.move_near(is_there)
        return found[0] if found else self._far.receive(source)

    def poll(self, source: int) -> Incoming | None:  # noqa: D102
        place = self._neighbours.get(source)
        return self._far.poll(source) if place is None else self._near.poll(place)

    def progress(self) -> None:  # noqa: D102
        self._near.progress()
        self._far.progress()

    def empty(self, nbytes: int, exchange: Exchange) -> Tensor:  # noqa: D102
        with within(exchange, list(self._neighbours)) as nearby:
            return self._near.empty(nbytes, nearby)

    def move_near(self, is_there: Callable[[], bool]) -> None:
        """Until ``is_there()``, move on what neighbours are to get: they may hold up the far rank that is waited for.

        Raises:
            GanglineError: what `Patience.check` raises.
        """
        checked = time.monotonic()
        while self._near.move() and not is_there():
            time.sleep(_NAP_SECONDS)
            if time.monotonic() - checked >= _CHECK_SECONDS:
                self._patience.check([])
                checked = time.monotonic()

    def close(self) -> None:  # noqa: D102
        self._near.close()
        self._far.close()


class _FarTicket(Ticket):
    def __init__(self, transport: Mixed, ticket: Ticket) -> None:
        self._transport, self._ticket = transport, ticket

    def is_done(self) -> bool:
        return self._ticket.is_done()

    def wait(self) -> None:
        self._transport.move_near(self.is_done)
        self._ticket.wait()
