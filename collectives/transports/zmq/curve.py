"""Encryption and admission of ZeroMQ connections by the job key: CURVE without ZAP.

The server key pair is derived from the job key, and its public half is as secret as the key: it is never sent. A client
that does not know it cannot write a first message that the server can open, so without the job key no handshake
completes (libzmq 4.3, curve_server.cpp). Client key pairs are random. Without ZAP (note 2 in context.py), libzmq admits
every client that completes the handshake.

Both ends decide by the address alone: loopback addresses and Unix sockets are not encrypted, because they do not leave
the host; all others use the job key if this process has one.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils import z85

from gangline.collectives.environments.job_key import FILE, JobKey
from gangline.collectives.transports.addresses import is_loopback

HANDSHAKE_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Monitor events for `Handshakes`."""
_FAILURES = 3
_SECONDS = 1.5
"""A connection is given up after this many lost handshakes and seconds since the first, if none has succeeded. A proxy,
for example, closes connections until the process behind it has started."""


def secure_binding(socket: zmq.Socket[bytes], key: JobKey | None) -> None:
    """Admit only connections with the key that the address requires; None: all. Call it before bind."""
    if key is not None:
        socket.curve_server = True
        socket.curve_secretkey = _server_pair(key)[1]


def secure_connecting(socket: zmq.Socket[bytes], key: JobKey | None) -> None:
    """Encrypt connections, and admit only a server with this key; call it before connect."""
    if key is not None:
        socket.curve_serverkey = _server_pair(key)[0]
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def _server_pair(key: JobKey) -> tuple[bytes, bytes]:
    """Return the server's public and secret key as Z85."""
    secret = z85.encode(key.mac("gangline curve server 1"))
    return zmq.curve_public(secret), secret


class Handshakes:
    """Outcome of the handshakes of a socket that connects to "tcp://HOST:PORT" with a key."""

    def __init__(self, endpoint: str, key: JobKey | None) -> None:
        self._endpoint = endpoint.removeprefix("tcp://")
        self._has_key = key is not None
        self._may_fail = not leaves_host(endpoint)
        self._is_over = False
        self._failures = 0
        self._first_at = 0.0

    def count(self, event: int) -> None:
        """Count a monitor event."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._may_fail = True  # keys match, so later failures have other causes
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # the peer has closed the connection; libzmq tries again
            self._first_at = self._first_at or time.monotonic()
            self._failures += 1
        elif event & HANDSHAKE_EVENTS:  # the peer uses CURVE and this process not, or the reverse; libzmq gives up
            self._is_over = True

    @property
    def problem(self) -> str:
        """Why the connection cannot succeed; "" if it can."""
        lasts = self._failures >= _FAILURES and time.monotonic() > self._first_at + _SECONDS
        if self._may_fail or not (lasts or self._is_over):
            return ""
        own = "this process's key" if self._has_key else "this process, which has no job key"
        return (
            f"the process at {self._endpoint} does not admit {own}: {FILE} must name a file with the same key in every "
            "process of the job, or none in all of them"
        )


def leaves_host(endpoint: str) -> bool:
    """Return whether an endpoint's address reaches other hosts."""
    return endpoint.startswith("tcp://") and not is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0])
