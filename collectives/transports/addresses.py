"""Network addresses of this host, and the check that none is open to other machines without a job key."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

from gangline.collectives.environments.job_key import HOW_TO, JobKey, job_key, take_descriptor

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback", "lo")


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
    if key is None and not _is_insecure():
        raise RuntimeError(
            f"address {host} can be reached from other machines, and without a job key any program there could read "
            f"and change what the ranks send: {HOW_TO}; on a network that you trust, GANGLINE_INSECURE=1 in every "
            "process does without"
        )
    return key


def is_loopback(host: str) -> bool:
    """Return whether a host name, address or interface name can be reached from this host only."""
    try:
        return is_always_loopback(host) or ipaddress.ip_address(resolved(host)).is_loopback
    except (OSError, ValueError):  # no known name, or a link-local address with its interface
        return False


def is_always_loopback(host: str) -> bool:
    """Return whether a host is localhost or has a loopback address itself, not through a name of its own."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_insecure() -> bool:
    return os.environ.get("GANGLINE_INSECURE") == "1"


def resolved(host: str) -> str:
    """Return the address of a host name, IPv4 if there is one, as ZeroMQ resolves names; addresses are unchanged.

    Raises:
        OSError: if the name is unknown.
    """
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(addresses, key=lambda address: address[0] != socket.AF_INET)[4][0])


def reachable_address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this host that other hosts most probably reach; loopback if it has no other.

    It is that of `chosen_interface`, else the one with the default route, else the first of an interface, IPv4 before
    IPv6.

    Raises:
        ValueError: if the interface that the environment names is not on this host.
    """
    if (chosen := chosen_interface(environment)) is not None:
        return chosen
    for outside in ("192.0.2.1", "2001:db8::1"):  # reserved for documentation (RFC 5737, RFC 3849); nothing is sent
        with suppress(OSError):
            return _source_address(outside)
    outward = [address for address, _ in _addresses_here() if not is_loopback(address)]
    return min(outward, key=lambda address: ":" in address, default="127.0.0.1")


def chosen_interface(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return this host's address at the interface that GANGLINE_INTERFACE, else DMLC_INTERFACE, names; None if neither.

    Raises:
        ValueError: as `interface_address`.
    """
    for name in ("GANGLINE_INTERFACE", "DMLC_INTERFACE"):
        if value := environment.get(name):
            return interface_address(value, name)[0]
    return None


def interface_address(wanted: str, option: str) -> tuple[str, str]:
    """Return an address of this host, IPv4 if there is one, and the name of its network interface.

    ``wanted`` is the name of an interface, an address of this host, or a network such as 10.1.0.0/16 that contains one.

    Raises:
        ValueError: if no interface fits; the message lists them, and names the ``option`` that the user has set.
    """
    addresses = _addresses_here()
    for address, name in addresses:
        if name == wanted or _is_within(address, wanted):
            return address, name
    there = ", ".join(f"{name} ({address})" for address, name in addresses)
    raise ValueError(f"{option} {wanted} is not on this host; there are {there}")


def _addresses_here() -> list[tuple[str, str]]:
    """Return the addresses of this host with the names of their interfaces, without those of one link only."""
    return [
        (entry.address, name)
        for name, entries in psutil.net_if_addrs().items()
        for entry in sorted(entries, key=lambda entry: entry.family != socket.AF_INET)
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    ]


def _is_within(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # the name of an interface
        return False


def meeting_address(host: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address at which this host finds rank 0 or the scheduler, given the name that all hosts know.

    A name that resolves to a loopback address, other than localhost, is that of this host, as with Debian's line
    "127.0.1.1 NAME" in /etc/hosts, and other hosts resolve it to another address. If the job may have other hosts,
    because there is a job key or GANGLINE_INSECURE=1, this is `reachable_address`.

    Raises:
        OSError, ValueError: if the job key cannot be read, or the interface that the environment names is unknown.
    """
    if not is_always_loopback(host) and is_loopback(host) and (job_key() is not None or _is_insecure()):
        return reachable_address(environment)
    return host


def local_address(peer: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of this host at which hosts that can reach ``peer``, a name or address, reach it.

    It is loopback if `meeting_address` of the peer is, else that of `chosen_interface`, else the one with the route.

    Raises:
        ValueError: if the interface that the environment names is not on this host.
        OSError: if there is no route to ``peer``, or its name is unknown.
    """
    peer = meeting_address(peer, environment)
    if is_loopback(peer):
        return resolved(peer)  # even if this host has no such address, as with IPv6 alone: Unix sockets replace TCP
    return chosen_interface(environment) or _source_address(peer)


def _source_address(peer: str) -> str:
    family, kind, _, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # selects the route; sends nothing
        return str(probe.getsockname()[0])
