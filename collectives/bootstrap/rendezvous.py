"""How the ranks of a job find each other: what a launcher says of them, and a store through which they meet."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.launcher_environment import LOOPBACK, find_rank_info
from gangline.collectives.bootstrap.store_all_gather import StoreAllGather, store_errors
from gangline.collectives.errors import StallError
from gangline.collectives.liveness.limits import limits
from gangline.collectives.transports.addresses import check_address, local_address
from gangline.collectives.transports.base import BootstrapAllGather


class Rendezvous:
    """A rank's place in its job, and its way to the others: `exchange`."""

    def __init__(
        self,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        *,
        timeout: float | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Join the job; what is None comes from the environment (`find_rank_info`).

        Several jobs may be joined one after another at one address, by all ranks in the same order.

        Args:
            rank: the number of this process, from 0.
            size: how many processes there are.
            address: "HOST:PORT" at which rank 0 keeps the store, for this and for later jobs of its process. Under
                torchrun the agent keeps it.
            timeout: seconds to wait for the others, here and in each exchange; None for GANGLINE_TIMEOUT.
            environment: what a launcher has set.

        Raises:
            RuntimeError: nothing says what the place is; or the address is another than loopback, and
                GANGLINE_INSECURE=1 is not set; or rank 0 cannot listen there.
            TypeError: the rank or size is no int.
            ValueError: something is missing, out of range or no number.
            StallError: rank 0 did not open the store in time.
        """
        self.rank, self.size, self.host, self.port = find_rank_info(rank, size, address, environment)
        self._timeout = time_limit(timeout)
        self._where = f"{self.host}:{self.port}"
        self._keeper = f"the process that keeps the store at {self._where}, rank 0 or torchrun's agent"
        self._all_gather = self._join(environment) if self.size > 1 else None

    def exchange(self, blob: bytes) -> list[bytes]:
        """Everybody's bytes, in rank order; all ranks call it equally often.

        Raises:
            RuntimeError: the job is closed.
            StallError: ranks did not come in time; the message names them.
            DeadNodeError: the process that keeps the store is gone.
        """
        if self.size == 1:
            return [blob]
        if self._all_gather is None:
            raise RuntimeError(f"rank {self.rank} has closed its job and cannot exchange any more")
        return self._all_gather(blob)

    def interface(self) -> str:
        """The address of this machine by which the machines of other ranks reach it."""
        if self.host == LOOPBACK:
            return LOOPBACK
        return local_address(self.host)

    def close(self) -> None:
        """Let go of the store; what rank 0 keeps of it serves later jobs of its process."""
        self._all_gather = None

    def _join(self, environment: Mapping[str, str]) -> StoreAllGather:
        check_address(self.host)
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        agent = agent and environment.get("MASTER_PORT") == str(self.port)
        address = self.host, self.port
        with store_errors(self.rank, self.size, self._keeper):
            store = _keep_store(*address) if self.rank == 0 and not agent else _reach_store(*address, self._timeout)
            attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives its workers
            prefixed = PrefixStore(f"gangline/{attempt}/{next(_joined[address])}", store)
        return StoreAllGather(prefixed, self.rank, self.size, self._timeout, self._where, self._keeper)


_joined: defaultdict[tuple[str, int], Iterator[int]] = defaultdict(itertools.count)  # jobs so far, by address
_kept: dict[tuple[str, int], Store] = {}


def _keep_store(host: str, port: int) -> Store:
    """Keep the store at an address until this process ends; on loopback nobody from outside reaches it."""
    if (host, port) in _kept:
        return _kept[host, port]
    listening: int | None = None
    if host == LOOPBACK:
        try:
            listening = socket.create_server((host, port)).detach()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # torch.distributed keeps a store there, in this process: then it is shared. Or another program.
    try:
        _kept[host, port] = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening,
        )
    except DistNetworkError as error:
        raise RuntimeError(f"rank 0 cannot keep the store at {host}:{port}; choose another port: {error}") from error
    return _kept[host, port]


def _reach_store(host: str, port: int, timeout: float) -> Store:
    """Connect to the store at an address, as soon as it is there."""
    ends, pause = time.monotonic() + timeout, 0.005
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, ends - time.monotonic())).close()
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
        except OSError as error:
            if time.monotonic() + pause > ends:
                raise StallError(
                    f"rank 0 did not open its store at {host}:{port} within {timeout:g} s: {error}"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def hosts(exchange: BootstrapAllGather) -> tuple[int, ...]:
    """The host of each rank, numbered from 0 in the order of their first ranks; all ranks call it.

    Ranks are on one host if they have the kernel's boot, the network, the process ids and the mounts in common: then
    loopback, ``/proc/PID/fd`` and sockets in the file system reach from one to the other. A container that has
    namespaces of its own is a host of its own.
    """
    identities = exchange(_host_identity().encode())
    numbers: dict[bytes, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def _host_identity() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    words = [boot.read_text().strip() if boot.exists() else socket.gethostname()]
    for kind in ("net", "pid", "mnt"):
        with suppress(OSError):  # a kernel without namespaces has the same ones for all
            words.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(words)


def time_limit(timeout: float | None) -> float:
    """A limit in seconds, that of GANGLINE_TIMEOUT for None.

    Raises:
        ValueError: it is not above 0.
    """
    if timeout is None:
        return limits().timeout
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; expected seconds above 0, or None")
    return timeout
