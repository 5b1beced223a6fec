"""Check of a job: whether its ranks join, and what the links between their hosts carry."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from itertools import permutations
from typing import Any, NamedTuple

from gangline.collectives.bootstrap.launcher_environment import RankInfo, find_rank_info
from gangline.collectives.bootstrap.rendezvous import Rendezvous, host_identity, number_hosts
from gangline.collectives.communicator import open_communicator
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.addresses import is_loopback, meeting_address, required_key, resolved
from gangline.doctor.finding import Finding, Status
from gangline.doctor.host import loopback_remedy
from gangline.doctor.links import (
    CONNECT_SECONDS,
    REMEDIES,
    LinkReport,
    answer,
    findings_of_links,
    measure,
    problem_of,
    reach,
    rounds_of_pairs,
)
from gangline.doctor.this_host import HOST_STEPS, check_host
from gangline.doctor.two_ranks import finding_of_all_reduce, measure_all_reduce

_RETRY_SECONDS = 0.2
_MOST_HOSTS = 4096
_RENDEZVOUS, _ALL_REDUCE = "rendezvous", "all-reduce of the job"


class _Member(NamedTuple):
    """A rank, as it describes itself to the others."""

    rank: int
    name: str
    identity: str
    address: str
    port: int
    problem: str


def job(seconds: float, names: Sequence[str] = ()) -> dict[str, Any]:
    """Check the job of this process, and by name the hosts, by the first rank of each. Collective.

    Returns:
        ``findings`` and ``links`` of the whole job, equal on all ranks. If this rank has not joined the others,
        ``has_joined`` is False and the findings are its own.
    """
    own = _scheduler(os.environ.get("DMLC_PS_ROOT_URI"), os.environ.get("DMLC_PS_ROOT_PORT", ""))
    try:
        info = find_rank_info(None, None, None, os.environ)
        info = info._replace(host=meeting_address(info.host))
    except (OSError, RuntimeError, ValueError) as error:
        return _alone(own, Finding(Status.BROKEN, "launcher", str(error), "`gangline env` shows what was found"))
    try:
        required_key(info.host)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = (
            "give all ranks the same job key, or set GANGLINE_INSECURE=1 in every process on a network that you trust"
        )
        return _alone(own, Finding(Status.BROKEN, "job key", str(error), remedy))
    try:
        closed = _reach_itself(info) if info.rank == 0 else _reach_rank_0(info, seconds)
        return _of_all(names, own, seconds) if closed is None else _alone(own, closed)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = (
            "the output of the rank that is named says why it did not come: it has not started, cannot reach "
            f"{info.host}:{info.port} (firewall, wrong MASTER_ADDR), or has another job key"
        )
        return _alone(own, _unreached(_RENDEZVOUS, info.host, f"{type(error).__name__}: {error}", remedy))


def _alone(own: Sequence[Finding], closed: Finding) -> dict[str, Any]:
    return {"findings": [asdict(one) for one in (*own, closed)], "links": [], "has_joined": False}


def _unreached(name: str, host: str, measured: str, remedy: str) -> Finding:
    """Return that rank 0 was not reached; if the name of its host resolves to a loopback address, that is why."""
    if loopback := _loopback_behind(host):
        measured, remedy = f"{loopback}; {measured}", loopback_remedy(host)
    return Finding(Status.BROKEN, name, measured, remedy)


def _loopback_behind(host: str) -> str:
    """Return a text on the loopback address that a host's name resolves to; "" if it does not, or is an address."""
    with suppress(OSError):
        address = resolved(host)
        if is_loopback(address) and host not in (address, "localhost"):
            return f"{host} resolves to {address} on {socket.gethostname()}, a loopback address"
    return ""


def _reach_rank_0(info: RankInfo, seconds: float) -> Finding | None:
    """Connect to the address of rank 0, which may start later; return why that fails."""
    until = time.monotonic() + seconds
    while True:
        try:
            _connect("store", info.host, info.port)
            return None
        except OSError as error:
            if time.monotonic() > until:
                kind, measured = problem_of(error, info.host, info.port)
                return _unreached(f"rank {info.rank} to rank 0", info.host, measured, REMEDIES[kind])
        time.sleep(_RETRY_SECONDS)


def _reach_itself(info: RankInfo) -> Finding | None:
    """Check that rank 0's address leads back to it; torch's store would wait 5 minutes for itself."""
    elsewhere = ""
    try:
        address = resolved(info.host)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, 0), family=family).close()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            elsewhere = "this host does not have the address; "  # address translation may lead here all the same
            with socket.create_server(("", info.port), family=family):
                socket.create_connection((address, info.port), timeout=CONNECT_SECONDS).close()
        return None
    except OSError as error:
        kind, measured = problem_of(error, info.host, info.port)
    remedy = "MASTER_ADDR must be an address of the host of rank 0"
    if kind == "unknown name":
        remedy = REMEDIES[kind]
    return Finding(Status.BROKEN, "rank 0 to itself", elsewhere + measured, remedy)


def _scheduler(host: str | None, port: str) -> list[Finding]:
    """Check that the scheduler of a job with servers can be reached."""
    if not host or not port.isdecimal() or os.environ.get("DMLC_NUM_SERVER") == "0":
        return []
    try:
        _connect("scheduler", meeting_address(host), int(port))
    except OSError as error:
        kind, measured = problem_of(error, host, int(port))
        return [Finding(Status.BROKEN, "scheduler", measured, REMEDIES[kind])]
    return [Finding(Status.OK, "scheduler", f"answers at {host}:{port}")]


def _connect(purpose: str, host: str, port: int) -> None:
    """Connect to rank 0's store or the scheduler, as its users do, and disconnect."""
    if purpose == "store":
        is_unix = is_loopback(host) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    else:
        is_unix = unix_sockets.replaces_tcp(host)
    if is_unix:
        unix_sockets.connect(unix_sockets.name_of(purpose, port)).close()
    else:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()


def _of_all(checks: Sequence[str], own: Sequence[Finding], seconds: float) -> dict[str, Any]:
    rendezvous = Rendezvous(timeout=seconds)
    with ExitStack() as stack:
        member = _listen(rendezvous, stack)
        members = [_Member(*one) for one in _shared(rendezvous, member)]
        rendezvous.close()
        rendezvous = Rendezvous(timeout=HOST_STEPS * seconds)  # all have come; the checks of a host may take long
        hosts = number_hosts([one.identity for one in members])
        firsts = [members[hosts.index(host)] for host in range(max(hosts) + 1)]
        names = [one.name for one in firsts]  # with their numbers if two are equal, as in containers from one image
        names = [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names)]
        if member in firsts:
            own = [*check_host(checks, seconds), *own]
        of_hosts = _shared(rendezvous, list(map(asdict, own)))
        findings = _findings_of_addresses(firsts, names)
        links: list[LinkReport] = []
        if not findings:
            links = _gathered(
                rendezvous,
                [
                    reach(LinkReport(source, target, firsts[target].address), firsts[target].port)
                    for source, target in permutations(range(len(firsts)), 2)
                    if firsts[source] == member
                ],
            )
        if findings or any(link.problem for link in links):  # the ranks would wait for each other until a time limit
            reduced = Finding(Status.SKIPPED, _ALL_REDUCE, "the ranks cannot reach each other")
        else:
            reduced, links = _measure(rendezvous, firsts, links, seconds)
    findings += [*(findings_of_links(links, names) if links else []), reduced]
    shown: list[dict[str, Any]] = []
    for host, of_host in zip(hosts, of_hosts, strict=True):
        for one in of_host:
            line = {**one, "host": names[host] if len(firsts) > 1 else ""}
            if line not in shown:  # all ranks of a host report the scheduler
                shown.append(line)
    joined = Finding(Status.OK, _RENDEZVOUS, f"{len(members)} ranks on {len(firsts)} host{'s' * (len(firsts) > 1)}")
    return {
        "findings": [*shown, asdict(joined), *map(asdict, findings)],
        "links": [{**asdict(link), "from": names[link.source], "to": names[link.target]} for link in links],
        "has_joined": True,
    }


def _shared(rendezvous: Rendezvous, value: object) -> list[Any]:
    """Return the value of each rank, in rank order, as JSON gives it. Collective: all ranks must call it."""
    return [json.loads(one) for one in rendezvous.exchange(json.dumps(value).encode())]


def _gathered(rendezvous: Rendezvous, links: Iterable[LinkReport]) -> list[LinkReport]:
    return [LinkReport(**fields) for one in _shared(rendezvous, list(map(asdict, links))) for fields in one]


def _listen(rendezvous: Rendezvous, stack: ExitStack) -> _Member:
    """Listen where other hosts try to connect, until the stack is closed; the kernel accepts them."""
    address, port, problem = "", 0, ""
    try:
        address = rendezvous.interface()
        required_key(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = stack.enter_context(socket.create_server((address, 0), family=family, backlog=_MOST_HOSTS))
        port = server.getsockname()[1]
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"cannot listen at {address or rendezvous.host}: {error}"
    return _Member(rendezvous.rank, socket.gethostname(), host_identity(), address, port, problem)


def _findings_of_addresses(firsts: Sequence[_Member], names: Sequence[str]) -> list[Finding]:
    """Return what is wrong with the addresses at which the hosts would reach each other."""
    findings = []
    for number, first in enumerate(firsts):
        before = [names[other] for other in range(number) if firsts[other].address == first.address]
        if first.problem:
            problem = first.problem
            remedy = "use an address or an interface of this host: `ip address`, --interface, GANGLINE_INTERFACE"
        elif before and not is_loopback(first.address):  # containers may share a network, and with it loopback
            problem = f"{first.address} is the address of {before[0]} too"
            remedy = "an address of a container's bridge or a cloned machine: name the interface, --interface eth0"
        else:
            continue
        findings.append(Finding(Status.BROKEN, "address", problem, remedy, names[number]))
    return findings


def _measure(
    rendezvous: Rendezvous, firsts: Sequence[_Member], links: Sequence[LinkReport], seconds: float
) -> tuple[Finding, list[LinkReport]]:
    """Reduce over all ranks, and measure the links between their hosts. Collective: all ranks must call it.

    A host sends to or receives from one other at a time: both directions at once would slow down each other, as a full
    queue also delays acknowledgements.
    """
    with open_communicator(
        rendezvous.rank, rendezvous.size, rendezvous.exchange, timeout=seconds, tcp_host=rendezvous.interface
    ) as comm:
        measured = measure_all_reduce(comm)
        ranks = [first.rank for first in firsts]
        own = {link.target: link for link in links if ranks[link.source] == comm.rank}
        for pairs in rounds_of_pairs(len(firsts)):
            comm.barrier()  # all begin the round together
            for source, target in pairs:
                if comm.rank == ranks[source]:
                    measure(comm, own[target], ranks[target])
                elif comm.rank == ranks[target]:
                    answer(comm, ranks[source])
    links = _gathered(rendezvous, own.values())
    every = _shared(rendezvous, measured)
    is_right = all(one["is_right"] for one in every)
    return finding_of_all_reduce(_ALL_REDUCE, {**every[0], "is_right": is_right}), links
