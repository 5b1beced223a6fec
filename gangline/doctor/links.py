"""Links between hosts: connect, measure latency, clock skew and bandwidth, and say which link is slow or closed."""

from __future__ import annotations

import errno
import hmac
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.doctor.finding import Finding, Status

TOKEN_BYTES = 16
CONNECT_SECONDS = 5.0
SEND_SECONDS = 0.5
_DRAIN_SECONDS = 20.0
_PINGS = 50
_BLOCK = 1 << 18
_SLOW_SHARE = 1 / 3
"""A link slower than this share of the median is slow."""
_LEAST_RATE = 50e6
"""Bytes per second below which a link is slow in any company; Gigabit Ethernet carries 117e6."""
_LATE_FACTOR, _LATE_SECONDS = 5.0, 0.5e-3
"""A link with more than this many times the median latency, and more than that many seconds, is slow."""
_MOST_LATENCY = 10e-3
_MOST_SKEW = 0.5

_CLOCK, _REPORT = struct.Struct("<d"), struct.Struct("<Qd")


@dataclass
class LinkReport:
    """Link from one host to another, as the first measured it; hosts are numbered from 0."""

    source: int
    target: int
    address: str
    problem: str = ""
    kind: str = ""
    """Kind of the problem, a key of `REMEDIES`."""
    latency: float = 0.0
    """Seconds of a round trip."""
    skew: float = 0.0
    """Seconds by which the target's clock is ahead."""
    bytes_per_s: float = 0.0


REMEDIES = {
    "timed out": "a firewall drops it, or the host is down: allow TCP between the hosts, all ports of "
    "net.ipv4.ip_local_port_range and MASTER_PORT (for example `ufw allow from ADDRESS`, security groups of a cloud), "
    "or name another network: --interface, DMLC_INTERFACE",
    "refused": "nothing listens there: the program has not started or has failed (its output says why), the port is "
    "another one, the address belongs to another machine (a container's bridge), or a firewall rejects it",
    "no route": "the hosts share no network at this address: name another interface (--interface, DMLC_INTERFACE), or "
    "check cable, VLAN and `ip route`",
    "unknown name": "add the name to DNS or to /etc/hosts of this host, or use the address",
    "other": "the text of the system says why",
}


def kind_of(error: OSError) -> str:
    """Return the kind of a failed connection: a key of `REMEDIES`."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, socket.gaierror):
        return "unknown name"
    return "no route" if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) else "other"


def problem_of(error: OSError, address: str, port: int) -> str:
    """Return the text for a failed connection: its kind and where it went."""
    kind, where = kind_of(error), f"{address}:{port}"
    return f"{where}: {error.strerror or error}" if kind == "other" else f"{kind}: {where}"


class ProbeServer:
    """Answers the measurements of other hosts until it is closed; it takes connections that send the token first.

    Args:
        address: address to listen at, on a port that the system chooses.
        token: bytes that only processes of this job know.

    Raises:
        OSError: if the address cannot be listened at.
    """

    def __init__(self, address: str, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port: int = self._socket.getsockname()[1]
        self._token = token
        threading.Thread(target=self._accept, name="gangline-check", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), name="gangline-check", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_DRAIN_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(_received(connection, TOKEN_BYTES), self._token):
                    return
                if _received(connection, 1) == b"p":
                    while connection.recv(1):
                        connection.sendall(_CLOCK.pack(time.time()))
                else:
                    connection.sendall(_REPORT.pack(*_drained(connection)))
        except OSError:  # the other end has gone; it reports that itself
            return


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


def measure(link: LinkReport, port: int, token: bytes) -> LinkReport:
    """Fill in latency, clock skew and bandwidth to a host's server, or the problem, and return the link."""
    try:
        with _connected(link.address, port, token, b"p") as connection:
            _measure_latency(link, connection)
        with _connected(link.address, port, token, b"b") as connection:
            _measure_bandwidth(link, connection)
    except OSError as error:
        link.kind, link.problem = kind_of(error), problem_of(error, link.address, port)
    return link


def _measure_latency(link: LinkReport, connection: socket.socket) -> None:
    trips = []
    for _ in range(_PINGS):
        begin, sent = time.perf_counter(), time.time()
        connection.sendall(b"p")
        (there,) = _CLOCK.unpack(_received(connection, _CLOCK.size))
        seconds = time.perf_counter() - begin
        trips.append((seconds, there - sent - seconds / 2))
    link.latency = statistics.median(seconds for seconds, _ in trips)
    link.skew = min(trips)[1]  # the fastest trip bounds it best


def _measure_bandwidth(link: LinkReport, connection: socket.socket) -> None:
    connection.settimeout(_DRAIN_SECONDS)
    block = memoryview(bytes(_BLOCK))
    end = time.perf_counter() + SEND_SECONDS
    while time.perf_counter() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    received, seconds = _REPORT.unpack(_received(connection, _REPORT.size))
    link.bytes_per_s = received / max(seconds, 1e-6)


def findings_of_links(links: Sequence[LinkReport], names: Sequence[str]) -> list[Finding]:
    """Return the findings for all links between hosts of these names: closed and slow ones, and the clocks."""
    findings = [
        Finding(Status.BROKEN, f"link {_name(link, names)}", link.problem, REMEDIES[link.kind])
        for link in links
        if link.problem
    ]
    usable = [link for link in links if not link.problem]
    if not usable:
        return findings
    rate = statistics.median_high(link.bytes_per_s for link in usable)
    latency = statistics.median_low(link.latency for link in usable)
    slow = 0
    for link in usable:
        problem = _slowness(link, rate, latency)
        if problem:
            slow += 1
            findings.append(Finding(Status.SLOW, f"link {_name(link, names)}", problem, _SLOW_REMEDY))
    if not slow and len(usable) == len(links):
        rates = sorted(link.bytes_per_s / 1e6 for link in usable)
        trips = sorted(link.latency * 1e6 for link in usable)
        measured = f"{rates[0]:.0f} to {rates[-1]:.0f} MB/s, round trips of {trips[0]:.0f} to {trips[-1]:.0f} us"
        findings.append(Finding(Status.OK, "links between hosts", measured))
    return [*findings, *_clocks(usable, names)]


_SLOW_REMEDY = (
    "check the port's speed (`ethtool INTERFACE`), cable, MTU and other traffic, or name a faster network: "
    "--interface, DMLC_INTERFACE; gradient compression sends less: set_gradient_compression"
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


def _clocks(links: Sequence[LinkReport], names: Sequence[str]) -> list[Finding]:
    skews = {link.target: link.skew for link in links if link.source == 0}
    if not skews:
        return []
    host, most = max(skews.items(), key=lambda item: abs(item[1]))
    if abs(most) <= _MOST_SKEW:
        return [Finding(Status.OK, "clocks", f"at most {abs(most) * 1e3:.1f} ms apart")]
    side = "ahead of" if most > 0 else "behind"
    remedy = "set all clocks by a time server (`timedatectl set-ntp true`, chrony): logs and file times are compared"
    return [Finding(Status.WARN, "clocks", f"{names[host]} is {abs(most):.1f} s {side} {names[0]}", remedy)]


def links_table(links: Sequence[LinkReport], names: Sequence[str]) -> str:
    """Return the links as text, a line for each host that sends and a column for each that receives."""
    cells = {(link.source, link.target): _cell(link) for link in links}
    hosts = range(len(names))
    lines = [["from \\ to", *names]]
    lines += [[names[source], *(cells.get((source, target), "") for target in hosts)] for source in hosts]
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    return "\n".join("".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(link: LinkReport) -> str:
    return link.kind if link.problem else f"{link.bytes_per_s / 1e6:.1f} MB/s, {link.latency * 1e6:.0f} us"


def _name(link: LinkReport, names: Sequence[str]) -> str:
    return f"{names[link.source]} to {names[link.target]}"


def _connected(address: str, port: int, token: bytes, mode: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token + mode)
    return connection


def _received(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        data += more
    return data


def _drained(connection: socket.socket) -> tuple[int, float]:
    """Receive to the end; return the bytes after the first block and the seconds they took."""
    buffer = bytearray(_BLOCK)
    connection.recv_into(buffer)
    begin = time.perf_counter()
    count = 0
    while nbytes := connection.recv_into(buffer):
        count += nbytes
    return count, time.perf_counter() - begin
