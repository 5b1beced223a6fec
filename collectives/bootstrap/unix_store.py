"""Key-value store for ranks of one host, served by rank 0 on a Unix socket, instead of torch's TCPStore."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgpack
from torch.distributed import DistNetworkError

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports import unix_sockets

_log = logging.getLogger("gangline")
_MAX_MESSAGE = 64 << 20  # bytes
_LONGEST_WAIT = 1e6  # seconds; poll(2) takes an int of milliseconds


class LocalStore:
    """Store of this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        with self._lock:
            self._values[key] = value if isinstance(value, bytes) else value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        with self._lock:
            return all(key in self._values for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys; all keys must exist."""
        with self._lock:
            return [self._values[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        """Delete a value; return whether there was one."""
        with self._lock:
            return self._values.pop(key, None) is not None

    def answer(self, request: Any) -> Any:
        """Return the answer to a request of a `RemoteStore`."""
        match request:
            case ["set", str(key), bytes(value) | str(value)]:
                return self.set(key, value)
            case ["check", [*keys]]:
                return self.check(keys)
            case ["multi_get", [*keys]]:
                return self.multi_get(keys)
            case ["delete_key", str(key)]:
                return self.delete_key(key)
        raise ProtocolError("received an unknown request")


class ServedStore(LocalStore):
    """Store of this process, open to the processes of its user at a Unix socket until it ends.

    Raises:
        OSError: if the name of the socket is in use.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._server = unix_sockets.Server(name, self._accept, "gangline-store")

    def close(self) -> None:
        """Accept no more connections; the name is free again."""
        self._server.close()

    def _accept(self, connection: socket.socket) -> None:
        served = Connection(connection.detach())
        threading.Thread(target=self._serve, args=(served,), name="gangline-store", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                while True:
                    connection.send_bytes(msgpack.packb(self.answer(_receive(connection))))
            except (EOFError, ConnectionError):
                pass  # the rank has left
            except (ProtocolError, OSError, ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
                _log.warning("the store drops a connection: %s", error)


class RemoteStore:
    """Store with `LocalStore`'s methods: ``ask``, called with a method's name and arguments, returns the answer."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.set: Callable[[str, bytes | str], None] = partial(ask, "set")
        self.check: Callable[[Sequence[str]], bool] = partial(ask, "check")
        self.multi_get: Callable[[Sequence[str]], list[bytes]] = partial(ask, "multi_get")
        self.delete_key: Callable[[str], bool] = partial(ask, "delete_key")


class UnixStore(RemoteStore):
    """The `ServedStore` of another process of this host, which must answer within ``timeout`` seconds.

    Raises:
        OSError: if nothing is served there, or by another user.
    """

    def __init__(self, name: str, timeout: float) -> None:
        super().__init__(self._request)
        self._lock = threading.Lock()
        self._timeout = min(timeout, _LONGEST_WAIT)
        self._connection = Connection(unix_sockets.connect(name).detach())

    def _request(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._connection.send_bytes(msgpack.packb(request))
                if not self._connection.poll(self._timeout):
                    raise TimeoutError(f"no answer within {self._timeout:g} s")
                return _receive(self._connection)
            except (EOFError, OSError) as error:
                raise DistNetworkError(str(error) or "the connection was closed") from error


def _receive(connection: Connection) -> Any:
    return msgpack.unpackb(connection.recv_bytes(_MAX_MESSAGE), max_map_len=0, max_ext_len=0)
