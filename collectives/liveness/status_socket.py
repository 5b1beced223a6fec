"""Status on request: a Unix socket that reports the state of this process's communicators, stores and servers.

It answers processes of the same user on this host only, and costs nothing until it is asked.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, NotRequired, Protocol, TypedDict

from gangline.collectives.environments.job_name import job_name
from gangline.collectives.environments.variables import check_variables
from gangline.collectives.transports import unix_sockets

_log = logging.getLogger("gangline")
_SEND_SECONDS = 1.0
_MOST_FRAMES = 24


class Wait(TypedDict):
    """Pending wait of an object."""

    what: str
    """Name of the call, or of the round."""
    seconds: float
    """Time waited so far in seconds."""
    missing: list[str]
    """Names of the missing processes, such as "worker 1"."""
    waiting: list[str]
    """Names of the waiting processes."""


class Part(TypedDict):
    """Status of one object."""

    part: str
    """"communicator", "requests" of a worker to servers, "server" or "scheduler"."""
    group: NotRequired[str]
    """Name of a group of ranks; "" for all of them."""
    counters: dict[str, int]
    """Counters since the start, by name."""
    waits: list[Wait]
    members: NotRequired[dict[str, str]]
    """State of each process of the job, by name."""


class Source(Protocol):
    """Object with a status."""

    def status(self) -> Part:
        """Return the object's state. Called in another thread; must not block."""


class _StatusSocket:
    """Socket and thread of this process."""

    def __init__(self) -> None:
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()  # a finalizer in the thread that holds it may call `withdraw`
        self._server: unix_sockets.Server | None = None
        self._name = ""
        self._since = time.time()

    def publish(self, source: Source, name: str) -> None:
        check_variables(warns=name in ("rank 0", "worker 0"))
        with self._lock:
            self._sources.add(source)
            self._name = name or self._name
            if self._server is None:
                try:
                    self._server = unix_sockets.Server(_socket_name(self._name), self._serve, "gangline-status")
                except OSError as error:
                    _log.info("gangline status cannot ask this process: %s", error)

    def withdraw(self, source: Source) -> None:
        with self._lock:
            self._sources.discard(source)
            server = None if self._sources else self._server
            if server is not None:
                self._server = None
        if server is not None:  # without the lock, which a finalizer in the server's thread may need
            server.close()

    def leave_to_parent(self) -> None:
        """Forget the parent's socket and objects in a forked process."""
        self._lock, self._server = threading.RLock(), None  # the parent's lock may be held
        self._name = ""
        self._sources = weakref.WeakSet()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_SEND_SECONDS)
                connection.sendall(json.dumps(self._status()).encode())
        except Exception as error:  # noqa: BLE001  the next request is answered all the same
            _log.info("a request of gangline status failed: %s", error)

    def _status(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "host": os.uname().nodename,
            "process": os.getpid(),
            "job": job_name(),
            "since": self._since,
            "parts": [part for source in list(self._sources) if (part := _part_of(source)) is not None],
            "stack": stack_of(threading.main_thread().ident or 0),
        }


def _part_of(source: Source) -> Part | None:
    for _ in range(3):  # other threads may change a dict during its iteration
        with suppress(RuntimeError):
            return source.status()
    return None


def stack_of(thread: int) -> list[str]:
    """Return a thread's stack, the outermost frame first, as "file:line in function".

    Python 3.11 sometimes crashes if frames of a running thread become objects, as by `sys._current_frames`
    (python/cpython issue 111363); faulthandler creates none.
    """
    descriptor = os.memfd_create("gangline")
    try:
        faulthandler.dump_traceback(descriptor)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
    finally:
        os.close(descriptor)
    of_thread = re.search(rf"^(?:Current t|T)hread 0x0*{thread:x} .*\n((?:  File .*\n?)*)", text, re.MULTILINE)
    frames = re.findall(r'  File "(.*)", line (.*) in (.*)', "" if of_thread is None else of_thread[1])
    return [f"{file}:{line} in {name}" for file, line, name in reversed(frames[:_MOST_FRAMES])]


PREFIX = f"gangline-status-{os.getuid()}-"
"""Beginning of the names of the sockets of this user's processes; pid, name of the process and a token follow."""


def _socket_name(name: str) -> str:
    return f"{PREFIX}{os.getpid()}-{name.replace(' ', '_')}-{secrets.token_hex(4)}"


_socket = _StatusSocket()
publish = _socket.publish
"""Register an object whose status this process reports, and name the process unless the name is ""."""
withdraw = _socket.withdraw
"""Unregister an object; the last one closes the socket."""

os.register_at_fork(after_in_child=_socket.leave_to_parent)
