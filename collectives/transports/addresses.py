"""Network addresses of this host, and the check that none is open to other machines without a job key."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

import psutil

from gangline.collectives.environments.job_key import HOW_TO, JobKey, job_key, take_descriptor


def required_key(host: str) -> JobKey | None:
    """Return the key for connections to an address: None if only this host can reach it, or if the user allows that.

    Call it before a socket binds or connects: without a key, nothing listens on or sends to other hosts.

    Raises:
        RuntimeError: if other hosts can reach the address, and this process has neither a job key nor
            GANGLINE_INSECURE=1.
        OSError, ValueError: if the job key cannot be read (`job_key`).
    """
    if is_loopback(host):
        take_descriptor()  # so that children of this process do not inherit it
        return None
    key = job_key()
    if key is None and os.environ.get("GANGLINE_INSECURE") != "1":
        raise RuntimeError(
            f"address {host} can be reached from other machines, and without a job key any program there could read "
            f"and change what the ranks send: {HOW_TO}; on a network that you trust, GANGLINE_INSECURE=1 in every "
            "process does without"
        )
    return key


def is_loopback(host: str) -> bool:
    """Return whether a host name, address or interface name can be reached from this host only."""
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        return ipaddress.ip_address(resolved(host)).is_loopback
    except (OSError, ValueError):  # no known name, or a link-local address with its interface
        return False


def resolved(host: str) -> str:
    """Return the address of a host name, IPv4 if there is one, as ZeroMQ resolves names; addresses are unchanged.

    Raises:
        OSError: if the name is unknown.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def reachable_address() -> str:
    """Return the address of this host that other hosts most probably reach; loopback if it has no other.

    It is the one with the default route, else the first of an interface, IPv4 before IPv6.
    """
    for outside in ("192.0.2.1", "2001:db8::1"):  # reserved for documentation (RFC 5737, RFC 3849); nothing is sent
        with suppress(OSError):
            return local_address(outside)
    entries = [entry for of_interface in psutil.net_if_addrs().values() for entry in of_interface]
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in entries:
            if entry.family == family and not is_loopback(entry.address) and "%" not in entry.address:
                return str(entry.address)
    return "127.0.0.1"


def local_address(peer: str, interface: str | None = None) -> str:
    """Return the address of this host at which hosts that can reach ``peer`` reach it.

    Args:
        peer: host name or address.
        interface: name of the network interface to use, such as "eth0"; None: the one with the route to ``peer``.

    Raises:
        ValueError: if the interface does not exist or has no IPv4 address.
        OSError: if there is no route to ``peer``, or its name is unknown.
    """
    if interface:
        interfaces = psutil.net_if_addrs()
        found = [entry.address for entry in interfaces.get(interface, ()) if entry.family == socket.AF_INET]
        if not found:
            raise ValueError(f"interface {interface!r} has no IPv4 address; there are {list(interfaces)}")
        return found[0]
    if is_loopback(peer):
        return resolved(peer)  # even if this host has no such address, as with IPv6 alone: Unix sockets replace TCP
    family, kind, _, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # selects the route; sends nothing
        return str(probe.getsockname()[0])
