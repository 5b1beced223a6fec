"""Network addresses of this host, and the check that they are not open to other machines by accident."""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil


def check_address(host: str) -> None:
    """Check that only this machine can reach an address, unless the user allows others.

    Raises:
        RuntimeError: if it is not a loopback address and GANGLINE_INSECURE=1 is not set.
    """
    if not is_loopback(host) and os.environ.get("GANGLINE_INSECURE") != "1":
        raise RuntimeError(
            f"address {host} can be reached from other machines, and without a job key any program there could read "
            "and change what the ranks send; on a network that you trust, set GANGLINE_INSECURE=1 in every process"
        )


def is_loopback(host: str) -> bool:
    """Return whether a host name, address or interface name can be reached from this host only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def resolved(host: str) -> str:
    """Return the address of a host name, IPv4 if there is one, as ZeroMQ resolves names; addresses are unchanged.

    Raises:
        OSError: if the name is unknown.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


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
    family, kind, _, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # selects the route; sends nothing
        return str(probe.getsockname()[0])
