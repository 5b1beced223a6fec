"""Making communicators: what joins the ranks is found out here, by trying it."""

from __future__ import annotations

import itertools
import logging
import threading
from functools import partial

import torch

from gangline.collectives.bootstrap import rendezvous
from gangline.collectives.communicator import Communicator
from gangline.collectives.engine import host_collectives
from gangline.collectives.engine.engine import Engine, GroupResources
from gangline.collectives.liveness.limits import limits
from gangline.collectives.liveness.membership import Membership, ProcessMembership, ThreadMembership
from gangline.collectives.liveness.watchdog import Watchdog
from gangline.collectives.transports.base import BootstrapAllGather, Transport, WaitPolicy
from gangline.collectives.transports.hybrid import HybridTransport
from gangline.collectives.transports.in_process import InProcessTransport, ThreadGroup, ThreadSlotExchange
from gangline.collectives.transports.shm.slots import SharedSlotExchange, SlotExchange
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.subgroup_exchange import within
from gangline.collectives.transports.zmq.transport import ZmqTransport
from gangline.collectives.tuner import TRANSPORTS, Table, forced_transport

_log = logging.getLogger("gangline")

_MEDIA = ("auto", *(name for name in TRANSPORTS if name != "in_process"))


def connect(
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    *,
    transport: str = "auto",
    timeout: float | None = None,
) -> Communicator:
    """Join the processes of a job; every one of them calls it.

    Args:
        rank: the number of this process, from 0; None: from the environment, as torchrun (RANK, WORLD_SIZE,
            MASTER_ADDR, MASTER_PORT), mpirun or srun set it.
        size: the number of processes; None likewise.
        address: "HOST:PORT" where rank 0 waits for the others; None likewise.
        transport: as for `open_communicator`.
        timeout: seconds that a call may wait for other ranks; None: GANGLINE_TIMEOUT, else half an hour.

    Raises:
        RuntimeError: no launcher has set anything; or the address is not loopback and GANGLINE_INSECURE=1 is not set.
        ValueError: a number or name that cannot be.
        StallError: a rank did not come.
    """
    job = rendezvous.Rendezvous(rank, size, address, timeout=timeout)
    try:
        return open_communicator(
            job.rank, job.size, job.exchange, transport=transport, timeout=timeout, tcp_host=job.interface()
        )
    finally:
        job.close()


def open_communicator(
    rank: int,
    size: int,
    exchange: BootstrapAllGather,
    *,
    transport: str = "auto",
    timeout: float | None = None,
    tcp_host: str = "127.0.0.1",
) -> Communicator:
    """Join processes; a collective.

    Args:
        rank: of this process.
        size: number of ranks.
        exchange: how they reach each other until they are joined.
        transport: "auto" (shared memory within a host, tcp between hosts), or "shared_memory", "ipc" or "tcp" for all;
            the environment's GANGLINE_TRANSPORT goes before it, and rank 0's before the others'.
        timeout: seconds that a call may wait for other ranks; None: GANGLINE_TIMEOUT, else half an hour.
        tcp_host: the address of this host for the others.

    Raises:
        ValueError: an unknown transport, or one that cannot join these ranks; a bad GANGLINE_ variable.
        OSError: "shared_memory" was asked for, and the ranks cannot share memory.
        GanglineError: a rank did not come.
    """
    transport = forced_transport() or transport
    if transport not in _MEDIA:
        raise ValueError(f"transport is {transport!r}; expected one of {', '.join(_MEDIA)}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; expected seconds above 0")
    hosts = rendezvous.hosts(exchange)
    settings = exchange(f"{transport}\n{Table.from_environment().to_json()}".encode())[0].decode()  # rank 0's
    transport, _, table = settings.partition("\n")
    several = len(set(hosts)) > 1
    if several and transport in ("shared_memory", "ipc"):
        raise ValueError(f"transport is {transport!r}, but the ranks are on hosts {hosts}; expected auto or tcp")
    address = f"tcp://{tcp_host}" if several or transport == "tcp" else "ipc"
    return _join(rank, size, hosts, exchange, transport, address, Table.from_json(table), timeout)


def in_process(size: int, *, timeout: float | None = None) -> list[Communicator]:
    """The communicators of ``size`` ranks that are threads of this process, in rank order.

    Each thread uses its own. ``timeout`` is in seconds; None: GANGLINE_TIMEOUT, else half an hour.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"size is {size}; expected at least 1")
    table = Table.from_environment()
    gangs = ThreadGroup(size), ThreadGroup(size)
    return [
        _threads(rank, gangs, membership, table, timeout)
        for rank, membership in enumerate(ThreadMembership.group(size))
    ]


def split(resources: GroupResources, engine: Engine, color: int | None, key: int | None) -> Communicator | None:
    """A communicator of the ranks of the same color (`Communicator.split`)."""
    for name, value in (("color", color), ("key", key)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name} is {value!r}; expected an int or None")
    own = [0 if value is None else value for value in (color, key)]
    wishes = torch.empty((resources.size, 3), dtype=torch.int64)
    host_collectives.all_gather(engine, torch.tensor([color is not None, *own]), wishes)
    members = sorted(
        (rank for rank in range(resources.size) if wishes[rank, :2].tolist() == [1, own[0]]),
        key=lambda rank: (int(wishes[rank, 2]), rank),
    )
    with within(partial(host_collectives.exchange, engine), members) as exchange:
        return None if color is None else _of_members(resources, members, exchange)


def _of_members(resources: GroupResources, members: list[int], exchange: BootstrapAllGather) -> Communicator:
    rank, size = members.index(resources.rank), len(members)
    numbers = {host: number for number, host in enumerate(dict.fromkeys(resources.hosts[member] for member in members))}
    hosts = tuple(numbers[resources.hosts[member]] for member in members)
    if resources.medium == "in_process":
        gangs, memberships = _shared_by_threads(rank, size, exchange)
        return _threads(rank, gangs, memberships[rank], resources.table, resources.timeout)
    return _join(
        rank, size, hosts, exchange, resources.transport_word, resources.address, resources.table, resources.timeout
    )


_shared: dict[int, tuple[tuple[ThreadGroup, ThreadGroup], list[ThreadMembership]]] = {}
_numbers = itertools.count()
_lock = threading.Lock()


def _shared_by_threads(
    rank: int, size: int, exchange: BootstrapAllGather
) -> tuple[tuple[ThreadGroup, ThreadGroup], list[ThreadMembership]]:
    """What the first thread of a group makes for all of them."""
    number = 0
    if rank == 0:
        number = next(_numbers)
        with _lock:
            _shared[number] = (ThreadGroup(size), ThreadGroup(size)), ThreadMembership.group(size)
    number = int(exchange(str(number).encode())[0])
    found = _shared[number]
    exchange(b"")  # all have it
    with _lock:
        _shared.pop(number, None)
    return found


def _threads(
    rank: int, gangs: tuple[ThreadGroup, ThreadGroup], membership: ThreadMembership, table: Table, timeout: float | None
) -> Communicator:
    watchdog, messages_watchdog = _watches(membership, timeout)
    return Communicator(
        GroupResources(
            rank=rank,
            size=membership.size,
            hosts=(0,) * membership.size,
            transport=InProcessTransport(rank, gangs[0], watchdog),
            messages=InProcessTransport(rank, gangs[1], messages_watchdog),
            slot_exchange=ThreadSlotExchange(rank, gangs[0], watchdog),
            membership=membership,
            watchdog=watchdog,
            messages_watchdog=messages_watchdog,
            table=table,
            medium="in_process",
            transport_word="in_process",
            address="",
            timeout=timeout,
        )
    )


def _join(
    rank: int,
    size: int,
    hosts: tuple[int, ...],
    exchange: BootstrapAllGather,
    transport: str,
    address: str,
    table: Table,
    timeout: float | None,
) -> Communicator:
    bounds = limits()
    membership = ProcessMembership(
        rank, size, exchange, heartbeat=bounds.heartbeat, limit=bounds.heartbeat_limit, address=address
    )
    try:
        watchdog, messages_watchdog = _watches(membership, timeout)
        collective, slot_exchange = _transport(rank, size, hosts, exchange, watchdog, transport, address)
        messages, _ = _transport(rank, size, hosts, exchange, messages_watchdog, transport, address, is_quiet=True)
    except BaseException:
        membership.close()
        raise
    return Communicator(
        GroupResources(
            rank=rank,
            size=size,
            hosts=hosts,
            transport=collective,
            messages=messages,
            slot_exchange=slot_exchange,
            membership=membership,
            watchdog=watchdog,
            messages_watchdog=messages_watchdog,
            table=table,
            medium=collective.name,
            transport_word=transport,
            address=address,
            timeout=timeout,
        )
    )


def _transport(
    rank: int,
    size: int,
    hosts: tuple[int, ...],
    exchange: BootstrapAllGather,
    wait_policy: WaitPolicy,
    word: str,
    address: str,
    *,
    is_quiet: bool = False,
) -> tuple[Transport, SlotExchange | None]:
    """What carries messages, and the board where all ranks share memory."""
    if word in ("tcp", "ipc"):
        return ZmqTransport(rank, size, exchange, wait_policy, address=address), None
    neighbours = [other for other in range(size) if hosts[other] == hosts[rank]]
    place = neighbours.index(rank)
    problem = ""
    with within(exchange, neighbours) as nearby:
        try:
            near = SharedMemoryTransport(place, len(neighbours), nearby, wait_policy)
            slot_exchange = SharedSlotExchange(place, len(neighbours), nearby, wait_policy)
        except OSError as error:
            problem = str(error)
    problems = [said.decode() for said in exchange(problem.encode()) if said]
    if problems and word == "shared_memory":
        raise OSError(f"transport is 'shared_memory': {problems[0]}")
    if problems and not is_quiet:
        _log.warning("ranks talk by sockets, not by shared memory: %s", problems[0])
    if len(neighbours) == size and not problems:
        return near, slot_exchange
    far = ZmqTransport(rank, size, exchange, wait_policy, address=address)
    return (far, None) if problems else (HybridTransport(near, neighbours, far, wait_policy), None)


def _watches(membership: Membership, timeout: float | None) -> tuple[Watchdog, Watchdog]:
    bounds = limits()
    seconds = bounds.timeout if timeout is None else timeout
    return Watchdog(membership, seconds, bounds.stall_warn), Watchdog(membership, seconds, bounds.stall_warn)
