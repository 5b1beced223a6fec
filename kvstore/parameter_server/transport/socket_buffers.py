"""Kernel options of ZeroMQ connections: buffer sizes, and detection of cut links."""

from __future__ import annotations

import zmq

from gangline.collectives.transports.addresses import is_loopback

_NBYTES = 192 << 10
_CUT_SECONDS = 3.0
"""A connection is closed, and opened again, when the peer's kernel has acknowledged nothing for this long."""


def limit_loopback_buffers(socket: zmq.Socket[bytes], host: str) -> None:
    """Set small send and receive buffers for loopback addresses; call it before bind or connect.

    By default the kernel buffers megabytes on loopback, which the receiver then reads from main memory instead of the
    CPU caches: 16 MiB through a server took 20 % longer. Buffers for real networks are left to the kernel.
    """
    if is_loopback(host):
        socket.setsockopt(zmq.SNDBUF, _NBYTES)
        socket.setsockopt(zmq.RCVBUF, _NBYTES)


def cut_seconds(limit: float) -> float:
    """Return the seconds of silence after which the kernel closes a connection whose link is cut."""
    return min(_CUT_SECONDS, limit / 2)


def close_cut_connections(socket: zmq.Socket[bytes], limit: float) -> None:
    """Make the kernel close connections whose link is cut; call it before bind or connect.

    The kernel probes idle connections, so gangline sends no message for it, and a process that is busy or receives a
    large message on a slow link is not taken for a cut link, because its kernel acknowledges what arrives.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_MAXRT, int(1000 * cut_seconds(limit)))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 1000)  # the kernel's own attempts become rarer and rarer
