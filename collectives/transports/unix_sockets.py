"""Unix sockets in place of TCP between processes of one user on one host.

Their names are abstract: they vanish with their sockets, and leave no file behind. Every user of the host can see such
names and connect to them, so both ends of a connection ask the kernel which user the other belongs to.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from gangline.collectives.transports.addresses import is_loopback
from gangline.collectives.transports.refusal_log import RefusalLog

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_BACKLOG = 128
_PORTS = range(1024, 1 << 16)
_ATTEMPTS = 1000
"""Random ports that are tried; another user can take many of the names."""
_RETRY_SECONDS = 0.1


def replaces_tcp(host: str) -> bool:
    """Return whether processes that know a host by this address connect by Unix sockets: it is a loopback address.

    GANGLINE_TRANSPORT=tcp keeps TCP for the processes of a parameter server, which must all have the same value.
    """
    return os.environ.get("GANGLINE_TRANSPORT") != "tcp" and is_loopback(host)


def name_of(purpose: str, port: int) -> str:
    """Return the name of the socket that stands for a TCP port of loopback; each user has ports of his own."""
    return f"gangline-{purpose}-{os.getuid()}-{port}"


def listen(name: str) -> socket.socket:
    """Return a socket that listens at a name, without a leading zero byte, and does not block.

    Raises:
        OSError: if the name is in use.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        error.filename = name
        raise
    listener.setblocking(False)
    return listener


class Server:
    """Thread that accepts connections of this user's processes at a name, until it is closed or the process forks.

    ``serve`` is called in the thread, which has the name ``thread``, with each connection, which it must close.

    Raises:
        OSError: if the name is in use.
    """

    def __init__(self, name: str, serve: Callable[[socket.socket], None], thread: str) -> None:
        self._name, self._serve = name, serve
        self._is_closed = False
        self._refusals = RefusalLog()
        self._listener = listen(name)
        self._listener.setblocking(True)
        self._thread = threading.Thread(target=self._accept, name=thread, daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Accept no more connections; the name is free again."""
        self._is_closed = True
        with suppress(OSError):  # closed at a fork
            self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which would keep the name
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # descriptors have run out
                if not self._is_closed:
                    self._refusals.warn("no process can connect to @%s at present: %s", self._name, error.strerror)
                    time.sleep(_RETRY_SECONDS)
                continue
            try:
                check_user(connection)
                self._serve(connection)
            except (OSError, RuntimeError) as error:  # another user's process, or no more threads
                connection.close()
                self._refusals.warn("@%s refuses a connection: %s", self._name, error)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the listeners in a forked process, where they would keep the names in use after the parent's end."""
    for server in list(_servers):
        server._listener.close()


os.register_at_fork(after_in_child=_close_in_child)


def free_port(purpose: str) -> int:
    """Return a port at whose name (`name_of`) nothing listens now.

    Raises:
        OSError: if something listens at the names of all ports that were tried.
    """
    for port in (secrets.choice(_PORTS) for _ in range(_ATTEMPTS)):
        if is_free(purpose, port):
            return port
    raise OSError(errno.EADDRINUSE, f"{_ATTEMPTS} random names such as @{name_of(purpose, port)} are in use")


def is_free(purpose: str, port: int) -> bool:
    """Return whether nothing listens at the name of a port now."""
    try:
        listen(name_of(purpose, port)).close()
    except OSError:
        return False
    return True


def connect(name: str, timeout: float | None = None) -> socket.socket:
    """Connect to the socket at a name; never wait for a listener that does not accept connections.

    ``timeout`` limits later calls of the socket, in seconds; None: no limit.

    Raises:
        BlockingIOError: if so many processes connect there that it takes no more now.
        PermissionError: if a process of another user listens there.
        OSError: if nothing listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")
        check_user(connection)
        connection.settimeout(timeout)
    except OSError:
        connection.close()
        raise
    return connection


def check_user(connection: socket.socket) -> None:
    """Check that the process at the other end had this process's user when it connected or began to listen.

    Raises:
        PermissionError: if it had another one.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(packed)
    if user != os.getuid():
        raise PermissionError(f"the peer of a Unix socket, process {process}, belongs to another user, {user}")
