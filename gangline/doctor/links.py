"""Links between hosts: connect, measure by send and recv, and say which link is slow or closed."""

from __future__ import annotations

import errno
import math
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gangline.collectives.communicator import Communicator
from gangline.doctor.finding import Finding, Status

CONNECT_SECONDS = 5.0
SEND_SECONDS = 0.5
_PINGS = 50
_BLOCK = 1 << 20
_SLOW_SHARE = 1 / 3
"""A link slower than this share of the median is slow."""
_LEAST_RATE = 50e6
"""Bytes per second below which a link is slow in any company; Gigabit Ethernet carries 117e6."""
_LATE_FACTOR, _LATE_SECONDS = 5.0, 0.5e-3
"""A link with more than this many times the median latency, and more than that many seconds, is slow."""
_MOST_LATENCY = 10e-3
_MOST_SKEW = 0.5


@dataclass
class LinkReport:
    """Link from one host to another, as the first measured it; hosts are numbered from 0."""

    source: int
    target: int
    address: str
    problem: str = ""
    kind: str = ""
    """Key of `REMEDIES` for the problem."""
    latency: float = 0.0
    """Seconds of a round trip."""
    skew: float = 0.0
    """Seconds by which the target's clock is ahead."""
    bytes_per_s: float = 0.0


REMEDIES = {
    "timed out": "a firewall drops it, or the host is down: allow TCP between the hosts, all ports of "
    "net.ipv4.ip_local_port_range and MASTER_PORT (for example `ufw allow from ADDRESS`, security groups of a cloud), "
    "or name another network: --interface, GANGLINE_INTERFACE",
    "refused": "nothing listens there: the program has not started or has failed (its output says why), the port is "
    "another one, the address belongs to another machine (a container's bridge), or a firewall rejects it",
    "no route": "the hosts share no network at this address: name another interface (--interface, GANGLINE_INTERFACE), "
    "or check cable, VLAN and `ip route`",
    "unknown name": "add the name to DNS or to /etc/hosts of this host, or use the address",
    "other": "the text of the system says why",
}


def problem_of(error: OSError, address: str, port: int) -> tuple[str, str]:
    """Return the kind of a failed connection, a key of `REMEDIES`, and its text, which says where it went."""
    where = f"{address}:{port}"
    for kind, is_it in (
        ("refused", isinstance(error, ConnectionRefusedError)),
        ("timed out", isinstance(error, TimeoutError)),
        ("unknown name", isinstance(error, socket.gaierror)),
        ("no route", error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH)),
    ):
        if is_it:
            return kind, f"{kind}: {where}"
    return "other", f"{where}: {error.strerror or error}"


def rounds_of_pairs(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of (sender, receiver) in which each of ``count`` hosts is at most once, and all pairs over all."""
    seats = [*range(count), *([-1] if count % 2 else [])]  # -1: the other one pauses
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = [pair for pair in zip(seats[:half], reversed(seats[half:]), strict=True) if -1 not in pair]
        rounds += [pairs, [(receiver, sender) for sender, receiver in pairs]]
        seats.insert(1, seats.pop())
    return rounds


def reach(link: LinkReport, port: int) -> LinkReport:
    """Connect to a port of a host; fill in the problem if that fails, and return the link."""
    try:
        socket.create_connection((link.address, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        link.kind, link.problem = problem_of(error, link.address, port)
    return link


def measure(comm: Communicator, link: LinkReport, other: int) -> None:
    """Fill in latency, clock skew and bandwidth to a rank that calls `answer` at the same time."""
    number, block = _buffers()
    trips = []
    for _ in range(_PINGS):
        begin, sent = time.perf_counter(), time.time()
        comm.send(number, other)
        comm.recv(number, other)
        seconds = time.perf_counter() - begin
        trips.append((seconds, number.item() - sent - seconds / 2))
    link.latency = statistics.median(seconds for seconds, _ in trips)
    link.skew = min(trips)[1]  # the fastest trip bounds it best
    begin = time.perf_counter()
    comm.send(block, other)
    comm.recv(number, other)
    count = 1 + math.ceil(SEND_SECONDS / (time.perf_counter() - begin))
    comm.send(number.fill_(count), other)
    for _ in range(count):
        comm.send(block, other)
    comm.recv(number, other)
    link.bytes_per_s = number.item()


def answer(comm: Communicator, other: int) -> None:
    """Answer the measurement of another rank."""
    number, block = _buffers()
    for _ in range(_PINGS):
        comm.recv(number, other)
        comm.send(number.fill_(time.time()), other)
    comm.recv(block, other)
    comm.send(number, other)
    comm.recv(number, other)
    count = int(number.item())
    comm.recv(block, other)
    begin = time.perf_counter()
    for _ in range(count - 1):
        comm.recv(block, other)
    comm.send(number.fill_((count - 1) * _BLOCK / max(time.perf_counter() - begin, 1e-6)), other)


def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, dtype=torch.float64, device="cpu"), torch.zeros(_BLOCK, dtype=torch.uint8, device="cpu")


def findings_of_links(links: Sequence[LinkReport], names: Sequence[str]) -> list[Finding]:
    """Return the findings for all links between hosts of these names: closed and slow ones, and the clocks."""
    between = [f"link {names[link.source]} to {names[link.target]}" for link in links]
    findings = [
        Finding(Status.BROKEN, name, link.problem, REMEDIES[link.kind])
        for name, link in zip(between, links, strict=True)
        if link.problem
    ]
    if findings:  # the other links are not measured
        return findings
    rates, trips = sorted(link.bytes_per_s for link in links), sorted(link.latency for link in links)
    findings = [
        Finding(Status.SLOW, name, problem, _SLOW_REMEDY)
        for name, link in zip(between, links, strict=True)
        if (problem := _slowness(link, statistics.median_high(rates), statistics.median_low(trips)))
    ]
    if not findings:
        measured = f"{rates[0] / 1e6:.0f} to {rates[-1] / 1e6:.0f} MB/s, "
        measured += f"round trips of {trips[0] * 1e6:.0f} to {trips[-1] * 1e6:.0f} us"
        findings = [Finding(Status.OK, "links between hosts", measured)]
    return [*findings, _clocks(links, names)]


_SLOW_REMEDY = (
    "check the port's speed (`ethtool INTERFACE`), cable, MTU and other traffic, or name a faster network: "
    "--interface, GANGLINE_INTERFACE; gradient compression sends less: set_gradient_compression"
)


def _slowness(link: LinkReport, rate: float, latency: float) -> str:
    own = f"{link.bytes_per_s / 1e6:.1f} MB/s"
    if link.bytes_per_s < _SLOW_SHARE * rate:
        return f"{own}, where other links carry {rate / 1e6:.0f} MB/s"
    if link.bytes_per_s < _LEAST_RATE:
        return f"{own}, less than Gigabit Ethernet carries: gradients of 100 MB take {1e8 / link.bytes_per_s:.0f} s"
    trip = f"a round trip takes {link.latency * 1e3:.1f} ms"
    if link.latency > max(_LATE_FACTOR * latency, _LATE_SECONDS):
        return f"{trip}, on other links {latency * 1e3:.1f} ms"
    return trip if link.latency > _MOST_LATENCY else ""


def _clocks(links: Sequence[LinkReport], names: Sequence[str]) -> Finding:
    farthest = max((link for link in links if link.source == 0), key=lambda link: abs(link.skew))
    most = farthest.skew
    if abs(most) <= _MOST_SKEW:
        return Finding(Status.OK, "clocks", f"at most {abs(most) * 1e3:.1f} ms apart")
    side = "ahead of" if most > 0 else "behind"
    remedy = "set all clocks by a time server (`timedatectl set-ntp true`, chrony): logs and file times are compared"
    return Finding(Status.WARN, "clocks", f"{names[farthest.target]} is {abs(most):.1f} s {side} {names[0]}", remedy)
