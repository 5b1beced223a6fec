"""Open the resources of a group of ranks: probe which transport connects them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from gangline.collectives.bootstrap import rendezvous
from gangline.collectives.engine.engine import GroupResources, GroupSettings
from gangline.collectives.engine.host_collectives import HostCollectives
from gangline.collectives.environments import LOOPBACK
from gangline.collectives.errors import name_ranks
from gangline.collectives.limits import limits
from gangline.collectives.liveness.membership import (
    GroupMembership,
    Membership,
    ProcessMembership,
    ThreadMembership,
)
from gangline.collectives.liveness.process_state import kernel_identity
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.timeline import recorder
from gangline.collectives.timeline.clock import measure_offsets
from gangline.collectives.transports.addresses import is_loopback, reachable_address
from gangline.collectives.transports.base import BootstrapAllGather, Transport, within
from gangline.collectives.transports.hybrid import HybridTransport
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup
from gangline.collectives.transports.shm import cma
from gangline.collectives.transports.shm.host_group import open_host_group
from gangline.collectives.transports.shm.slots import SlotExchange
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.zmq.context import SharedContext
from gangline.collectives.transports.zmq.transport import ZmqTransport
from gangline.collectives.tuner import TRANSPORTS, Table, forced_transport

_log = logging.getLogger("gangline")

_REQUESTS = ("auto", *(name for name in TRANSPORTS if name != "in_process"))


def open_group(
    rank: int,
    size: int,
    all_gather_bytes: BootstrapAllGather,
    *,
    transport: str = "auto",
    timeout: float | None = None,
    tcp_host: Callable[[], str] = lambda: LOOPBACK,
) -> GroupResources:
    """Connect processes. Collective: all ranks must call it.

    The ranks of one host need four calls of ``all_gather_bytes``: settings, sockets, shared memory and the outcome.
    ``tcp_host`` returns the address of this host for the others; the other arguments are those of `connect`.

    Raises:
        ValueError: on all ranks, if on one of them the transport is unknown or cannot connect these ranks, or a
            GANGLINE_ variable is invalid.
        OSError: if "shared_memory" was requested and the ranks cannot share memory.
        GanglineError: if a rank does not join in time.
    """
    timeline = recorder.current
    problem: Exception | None = None
    try:
        host, bounds = tcp_host(), limits()
        own = {
            "host": rendezvous.host_identity(),
            "network": kernel_identity("net"),
            "outward": reachable_address() if is_loopback(host) else host,
            "transport": _requested(transport, timeout),
            "table": Table.from_environment().to_json() if rank == 0 else "",
            "clock": "" if timeline is None else kernel_identity("time"),
        }
    except (OSError, RuntimeError, ValueError) as error:
        problem, own = error, {"problem": f"{type(error).__name__}: {error}"}
    every_rank: list[dict[str, str]] = [json.loads(packed) for packed in all_gather_bytes(json.dumps(own).encode())]
    if problem is not None:
        raise problem
    if problems := [f"rank {other}: {one['problem']}" for other, one in enumerate(every_rank) if "problem" in one]:
        raise ValueError("; ".join(problems))
    requested, clock = every_rank[0]["transport"], every_rank[0]["clock"]
    if len({one["clock"] for one in every_rank if one["clock"]} | {clock}) > 1:
        measure_offsets(rank, all_gather_bytes, timeline)
    if timeline is not None:
        timeline.set_process(f"rank {rank}")
    hosts = rendezvous.number_hosts([one["host"] for one in every_rank])
    has_several_hosts = len(set(hosts)) > 1
    if has_several_hosts and requested in ("shared_memory", "ipc"):
        raise ValueError(f"transport is {requested!r}, but the ranks are on hosts {hosts}; expected auto or tcp")
    if len({one["network"] for one in every_rank}) > 1:  # containers may share one, and with it loopback
        if confined := [other for other, one in enumerate(every_rank) if is_loopback(one["outward"])]:
            raise ValueError(
                f"{name_ranks(confined)} of {size} offers a loopback address, which the other hosts cannot reach; "
                "connect its host to their network, and name the network interface there in GANGLINE_INTERFACE"
            )
        host = own["outward"]
    address = f"tcp://{host}" if has_several_hosts or requested == "tcp" else "ipc"
    membership = ProcessMembership(
        rank, size, all_gather_bytes, heartbeat=bounds.heartbeat, limit=bounds.heartbeat_limit, address=address
    )
    settings = GroupSettings(requested, address, Table.from_json(every_rank[0]["table"]), timeout)
    return _connect_processes(membership, hosts, all_gather_bytes, settings)


def _requested(transport: str, timeout: float | None) -> str:
    """Return the transport to use, which the environment may force; check it and the time limit."""
    requested = forced_transport() or transport
    if requested not in _REQUESTS:
        raise ValueError(f"transport is {requested!r}; expected one of {', '.join(_REQUESTS)}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; expected seconds above 0")
    return requested


def open_in_process(size: int, *, timeout: float | None = None) -> list[GroupResources]:
    """Return the resources of ``size`` ranks that are threads of this process, in rank order (`in_process`).

    Raises:
        ValueError: if ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1")
    settings = GroupSettings("in_process", "", Table.from_environment(), timeout)
    shared = _ThreadResources(size)
    return [_connect_threads(rank, shared, settings) for rank in range(size)]


def split_group(
    resources: GroupResources, host: HostCollectives, number: int, color: int | None, key: int | None
) -> GroupResources | None:
    """Connect the ranks of the same color (`Communicator.split`); they share the membership's connections.

    ``number`` is that of the call on the group.

    Raises:
        TypeError: if the color or the key is neither an int nor None.
        GanglineError: if a rank is dead, late or in another call.
    """
    for name, value in (("color", color), ("key", key)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} is {value!r}; expected an int or None")
    requests = [json.loads(packed) for packed in host.exchange(json.dumps([color, key or 0]).encode())]
    members = sorted(
        (rank for rank, (other_color, _) in enumerate(requests) if other_color == color),
        key=lambda rank: (requests[rank][1], rank),
    )
    with within(host.exchange, members) as all_gather_bytes:
        return None if color is None else _connect_members(resources, members, number, all_gather_bytes)


def _connect_members(
    resources: GroupResources, members: list[int], number: int, all_gather_bytes: BootstrapAllGather
) -> GroupResources:
    if resources.transport.name == "in_process":
        rank = members.index(resources.rank)
        return _connect_threads(rank, _shared_by_threads(rank, len(members), all_gather_bytes), resources.settings)
    assert isinstance(resources.membership, GroupMembership)
    membership = resources.membership.subgroup(members, number)
    hosts = rendezvous.number_hosts([resources.hosts[member] for member in members])
    return _connect_processes(membership, hosts, all_gather_bytes, resources.settings)


class _ThreadResources:
    """Objects that the ranks of one in-process group share."""

    def __init__(self, size: int) -> None:
        self.collectives, self.messages = ThreadGroup(size), ThreadGroup(size)
        self.memberships = ThreadMembership.group(size)


_split_groups: WeakValueDictionary[int, _ThreadResources] = WeakValueDictionary()
"""Resources of in-process groups during a split, by id."""


def _shared_by_threads(rank: int, size: int, all_gather_bytes: BootstrapAllGather) -> _ThreadResources:
    """Return the object that all ranks of a new in-process group share; rank 0 creates it."""
    created = _ThreadResources(size) if rank == 0 else None
    if created is not None:
        _split_groups[id(created)] = created
    shared = _split_groups[int(all_gather_bytes(str(id(created)).encode())[0])]
    all_gather_bytes(b"")  # afterwards all ranks have looked it up
    return shared


def _connect_threads(rank: int, shared: _ThreadResources, settings: GroupSettings) -> GroupResources:
    membership = shared.memberships[rank]
    watchdogs = _watchdogs(membership, settings)
    transports = (
        InProcessTransport(rank, shared.collectives, watchdogs[0]),
        InProcessTransport(rank, shared.messages, watchdogs[1]),
    )
    return GroupResources(membership, (0,) * membership.size, settings, *watchdogs, *transports, None)


def _connect_processes(
    membership: GroupMembership, hosts: tuple[int, ...], all_gather_bytes: BootstrapAllGather, settings: GroupSettings
) -> GroupResources:
    try:
        watchdogs = _watchdogs(membership, settings)
        transports, slot_exchange = _open_transports(membership, hosts, all_gather_bytes, watchdogs, settings)
    except BaseException:
        membership.close()
        raise
    return GroupResources(membership, hosts, settings, *watchdogs, *transports, slot_exchange)


def _open_transports(
    membership: GroupMembership,
    hosts: tuple[int, ...],
    all_gather_bytes: BootstrapAllGather,
    watchdogs: tuple[Watchdog, Watchdog],
    settings: GroupSettings,
) -> tuple[tuple[Transport, Transport], SlotExchange | None]:
    """Open a transport for each watchdog, and a slot exchange for the first if all ranks share memory.

    If a rank cannot share memory with the others of its host, the ranks of all hosts use sockets.
    """
    rank, size = membership.rank, membership.size

    def by_sockets() -> tuple[Transport, Transport]:
        options: Any = {"address": settings.address, "context": SharedContext()}
        collectives = ZmqTransport(rank, size, all_gather_bytes, watchdogs[0], **options)
        try:
            return collectives, ZmqTransport(rank, size, all_gather_bytes, watchdogs[1], **options)
        except BaseException:
            collectives.close()
            raise

    if settings.transport in ("tcp", "ipc"):
        return by_sockets(), None
    members = [other for other in range(size) if hosts[other] == hosts[rank]]
    cma.allow_reads(membership.processes[member] for member in members)
    nbytes = 2 * SharedMemoryTransport.nbytes(len(members)) + SlotExchange.nbytes(len(members))
    try:
        group = open_host_group(rank, members, nbytes, all_gather_bytes)
    except OSError as error:
        if settings.transport == "shared_memory":
            raise OSError(f"transport is 'shared_memory': {error}") from error
        if size > 1:
            _log.warning("ranks communicate through sockets instead of shared memory: %s", error)
        return by_sockets(), None
    local = SharedMemoryTransport(group, watchdogs[0]), SharedMemoryTransport(group, watchdogs[1])
    if len(members) == size:
        return local, SlotExchange(group, watchdogs[0])
    network = by_sockets()
    return (
        HybridTransport(local[0], members, network[0], watchdogs[0]),
        HybridTransport(local[1], members, network[1], watchdogs[1]),
    ), None


def _watchdogs(membership: Membership, settings: GroupSettings) -> tuple[Watchdog, Watchdog]:
    bounds = limits()
    timeout = bounds.timeout if settings.timeout is None else settings.timeout
    first = Watchdog(membership, timeout, bounds.stall_warn)
    return first, first.another()
