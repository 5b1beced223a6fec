"""Addresses of this host: by which others reach it, and which of them strangers may reach too."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915


def check_address(host: str) -> None:
    """See that nobody but this machine can reach an address, or that the user said it may be so.

    Raises:
        RuntimeError: it is not a loopback address, and GANGLINE_INSECURE=1 is not set.
    """
    if not is_loopback(host) and os.environ.get("GANGLINE_INSECURE") != "1":
        raise RuntimeError(
            f"address {host} can be reached from other machines, and without a job key anybody there could read and "
            "change what the ranks send; on a network that you trust, set GANGLINE_INSECURE=1 in every process"
        )


def is_loopback(host: str) -> bool:
    """Whether a host's name or address, or an interface's name, is reached from this host alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def resolved(host: str) -> str:
    """The address of a host's name, of IPv4 if it has one, as ZeroMQ takes names; an address is its own.

    Raises:
        OSError: the name is unknown.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def local_address(peer: str, interface: str | None = None) -> str:
    """The address of this host by which those who meet at ``peer`` reach it.

    Args:
        peer: a host's name or address.
        interface: the network interface to take, such as "eth0"; None: the one that leads to ``peer``.

    Raises:
        ValueError: there is no such interface, or it has no address.
        OSError: nothing leads to ``peer``, or its name is unknown.
    """
    if interface:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            except OSError as error:
                names = [name for _, name in socket.if_nameindex()]
                raise ValueError(
                    f"interface {interface!r} has no IPv4 address ({error.strerror}); there are {names}"
                ) from None
        return socket.inet_ntoa(answer[20:24])
    family, kind, _, _, target = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing, only chooses the way
        return str(probe.getsockname()[0])
