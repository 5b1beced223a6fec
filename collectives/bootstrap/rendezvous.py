"""Rendezvous of a job's ranks: a store that rank 0 serves, and an all-gather of bytes through it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistNetworkError, Store, TCPStore  # type: ignore[attr-defined]

from gangline.collectives.bootstrap.launcher_environment import find_rank_info
from gangline.collectives.bootstrap.store_all_gather import StoreAllGather, call_within, store_errors
from gangline.collectives.bootstrap.unix_store import ServedStore, UnixStore
from gangline.collectives.environments import LOOPBACK
from gangline.collectives.errors import StallError
from gangline.collectives.limits import BOOTSTRAP_WARN_SECONDS, limits
from gangline.collectives.liveness.process_state import kernel_identity
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.addresses import is_loopback, local_address, meeting_address, required_key
from gangline.collectives.transports.base import BootstrapAllGather

_log = logging.getLogger("gangline")


class Rendezvous:
    """A rank's membership in a job, and its all-gather with the other ranks: `exchange`."""

    def __init__(
        self,
        rank: int | None = None,
        size: int | None = None,
        address: str | None = None,
        *,
        timeout: float | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Connect to the job's store; arguments that are None come from the environment (`find_rank_info`).

        All ranks may join several jobs at one address, one after another and in the same order. A rank whose `exchange`
        failed, or which called `fail`, joins the same job again. The store is at "HOST:PORT", where rank 0 serves it
        until its process ends: at a Unix socket if HOST is a loopback address, by TCP otherwise. Under torchrun, the
        agent serves it by TCP. ``timeout`` counts here and in each exchange; None: GANGLINE_TIMEOUT.

        Raises:
            RuntimeError: if neither arguments nor environment describe a job, if other hosts can reach the address and
                there is no job key (`required_key`), or if rank 0 cannot listen at the address.
            TypeError: if the rank or the size is not an int.
            ValueError: if a value is missing, out of range or not a number.
            StallError: if rank 0 does not open the store in time.
        """
        self.rank, self.size, host, self.port = find_rank_info(rank, size, address, environment)
        self.host = meeting_address(host)
        self._timeout = time_limit(timeout)
        self._job_id = environment.get("GANGLINE_JOB_ID", "")
        self._where = f"{self.host}:{self.port}" + (f" as job {self._job_id}" if self._job_id else "")
        self._server = f"the process that serves the store at {self._where}, rank 0 or torchrun's agent"
        self._all_gather = self._connect(environment) if self.size > 1 else None

    def exchange(self, blob: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order. Collective: all ranks must call it.

        Raises:
            RuntimeError: if the rendezvous is closed.
            StallError: if ranks do not call it in time; the message names them.
            DeadNodeError: if the process that serves the store is gone.
        """
        if self.size == 1:
            return [blob]
        if self._all_gather is None:
            raise RuntimeError(f"rank {self.rank} has closed its rendezvous and cannot exchange any more")
        try:
            return self._all_gather(blob)
        except BaseException:
            self.fail()
            raise

    def interface(self) -> str:
        """Return the address of this host for other hosts."""
        if self.host == LOOPBACK:
            return LOOPBACK
        return local_address(self.host)

    def fail(self) -> None:
        """Make the next rendezvous of this process at this address retry the same job."""
        if self._all_gather is not None:
            _next_jobs[self.host, self.port] = _JobAttempt(self._job, self._all_gather.attempt + 1)

    def close(self) -> None:
        """Disconnect from the store. A store that rank 0 serves stays open for later jobs of its process."""
        self._all_gather = None

    def _connect(self, environment: Mapping[str, str]) -> StoreAllGather:
        key = required_key(self.host)
        has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        has_agent = has_agent and environment.get("MASTER_PORT") == str(self.port)
        address = self.host, self.port
        with store_errors(self.rank, self.size, self._server):
            if self.rank == 0 and not has_agent:
                store = _serve_store(*address, self._timeout)
            elif has_agent:
                store = _agent_stores.get(address) or _connect_store(*address, self._timeout, is_local=False)
                _agent_stores[address] = store
            else:
                store = _connect_store(*address, self._timeout, is_local=is_loopback(self.host))
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")  # an agent's store outlives its workers
        self._job, attempt = _next_jobs.get(address, _JobAttempt(0, 0))
        _next_jobs[address] = _JobAttempt(self._job + 1, 0)
        prefix = f"gangline/{self._job_id}/{restart}/{self._job}/"
        return StoreAllGather(
            store, self.rank, self.size, self._timeout, self._where, self._server, key, prefix, attempt
        )


_AnyStore = Store | ServedStore | UnixStore


class _JobAttempt(NamedTuple):
    job: int
    attempt: int
    """Number of failed attempts of this process."""


_next_jobs: dict[tuple[str, int], _JobAttempt] = {}
"""Number, from 0, of the next job of this process at each address."""
_served_stores: dict[tuple[str, int], _AnyStore] = {}
_agent_stores: dict[tuple[str, int], _AnyStore] = {}
"""Connections to the stores of torchrun's agents, which outlive this process. torch 2.13 asks the DNS for the names of
both ends of each new connection, and waits for 5 s whenever its server does not answer."""
_stores_of_parent: dict[tuple[str, int], _AnyStore] = {}
"""Stores that the process serves from which this one was forked; kept, as their threads do not run here."""


def _leave_to_parent() -> None:
    _agent_stores.clear()
    _stores_of_parent.update(_served_stores)
    _served_stores.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _serve_store(host: str, port: int, timeout: float) -> _AnyStore:
    """Serve a store until this process ends."""
    address = host, port
    if address in _stores_of_parent:
        raise RuntimeError(
            f"rank 0 cannot serve the store at {host}:{port}, as the process does from which this one was forked; "
            "choose another port"
        )
    if address in _served_stores:
        return _served_stores[address]
    try:
        if is_loopback(host):
            _served_stores[address] = ServedStore(unix_sockets.name_of("store", port))
        else:
            options = {"is_master": True, "wait_for_workers": False, "multi_tenant": True}
            _served_stores[address] = call_within(timeout, TCPStore, host, port, **options)
    except (DistNetworkError, OSError) as error:
        raise RuntimeError(f"rank 0 cannot serve the store at {host}:{port}; choose another port: {error}") from error
    return _served_stores[address]


def _connect_store(host: str, port: int, timeout: float, *, is_local: bool) -> _AnyStore:
    """Connect to the store at an address, a Unix socket if it is local, and wait until it is open."""
    begin, pause, is_warned = time.monotonic(), 0.005, False
    while True:
        left = begin + timeout - time.monotonic()
        try:
            if is_local:
                return UnixStore(unix_sockets.name_of("store", port), timeout)
            socket.create_connection((host, port), timeout=min(max(1.0, left), BOOTSTRAP_WARN_SECONDS)).close()
            options = {"is_master": False, "timeout": timedelta(seconds=timeout)}
            return call_within(max(left, pause), TCPStore, host, port, **options)
        except OSError as error:
            if time.monotonic() + pause > begin + timeout:
                raise StallError(
                    f"rank 0 did not open its store at {host}:{port} within {timeout:g} s: {error}"
                ) from error
            if not is_warned and time.monotonic() > begin + BOOTSTRAP_WARN_SECONDS:
                is_warned = True
                _log.warning("waiting for rank 0, which has not opened its store at %s:%d: %s", host, port, error)
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def hosts(all_gather_bytes: BootstrapAllGather) -> tuple[int, ...]:
    """Return the host of each rank (`number_hosts`). Collective: all ranks must call it."""
    return number_hosts(all_gather_bytes(host_identity().encode()))


def number_hosts(identities: Sequence[object]) -> tuple[int, ...]:
    """Number the hosts of ranks, given their identities, from 0 in the order of their first ranks."""
    numbers: dict[object, int] = {}
    return tuple(numbers.setdefault(identity, len(numbers)) for identity in identities)


def host_identity() -> str:
    """Return a text that is equal for processes that share a kernel and its network, pid and mount namespaces.

    Between such processes, loopback, ``/proc/PID/fd`` and sockets in the file system work. A container with namespaces
    of its own is therefore a host of its own.
    """
    return kernel_identity("net", "pid", "mnt")


def time_limit(timeout: float | None) -> float:
    """Return a time limit in seconds: ``timeout``, or GANGLINE_TIMEOUT if None.

    Raises:
        ValueError: if ``timeout`` is not above 0.
    """
    if timeout is None:
        return limits().timeout
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; expected seconds above 0, or None")
    return timeout
