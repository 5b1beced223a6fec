"""How the ranks of a torch process group meet: by the store that torch gives to each of its groups."""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import suppress

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.launcher_environment import LOOPBACK
from gangline.collectives.errors import DeadNodeError, StallError, name_ranks


class StoreExchange:
    """An `Exchange` over a store that all ranks of a group share, and nobody else writes under its keys.

    What the last rank has read it deletes, so that a store that outlives its group serves the next one.

    Args:
        store: TCPStore, FileStore, HashStore, or a prefix of one.
        rank: this process's number in the group.
        size: how many there are.
        timeout: seconds to wait for the others in each exchange.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store = PrefixStore("gangline", store)
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._rounds = itertools.count()

    def __call__(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, in rank order; all ranks call it equally often.

        Raises:
            StallError: ranks did not come in time; the message names them.
            DeadNodeError: the process that keeps the store is gone.
        """
        if self._size == 1:
            return [blob]
        try:
            return self._exchange(blob)
        except DistNetworkError as error:
            raise DeadNodeError(
                f"rank {self._rank} of {self._size} lost the process that keeps the process group's store: {error}"
            ) from error

    def _exchange(self, blob: bytes) -> list[bytes]:
        number = next(self._rounds)
        keys = [f"{number}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], blob)  # type: ignore[arg-type]  # the stub knows text only
        self._wait(keys)
        blobs = [bytes(self._store.get(key)) for key in keys]
        left = f"{number}/left"
        with suppress(DistNetworkError):  # the store is gone already, but everything is here
            if self._store.add(left, 1) == self._size:
                for key in [*keys, left]:
                    self._store.delete_key(key)
        return blobs

    def _wait(self, keys: list[str]) -> None:
        """Until the store has all the keys; by looking, for a store's own wait cannot be interrupted."""
        ends, pause = time.monotonic() + self._timeout, 0.001
        while not self._store.check(keys):
            if time.monotonic() > ends:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise StallError(
                    f"{name_ranks(missing)} of {self._size} did not come to the process group "
                    f"within {self._timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def own_address(store: Store) -> str:
    """The address of this machine by which the machines of other ranks reach it, as far as the store shows it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return LOOPBACK  # files and memory are shared by processes of one machine
    family, kind, _, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing, only chooses the way
        return str(probe.getsockname()[0])
