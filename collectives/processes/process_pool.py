"""Pools of processes forked by this program's fork server, which starts with the first pool and is kept."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.spawn import get_executable
from typing import NamedTuple

PRELOAD: tuple[str, ...] = (
    "torch",
    "gangline.collectives.communicator",
    "gangline.collectives.processes.rank_main",
)
"""Modules that the server imports before it forks."""


class ProcessPool:
    """Processes that run one entry function until it returns, the pool is closed, or this program is gone.

    They have this program's environment, working directory, standard output and error as of the start; standard input
    is empty. SIGINT from the terminal (Ctrl-C) is ignored by them: handling it is left to this program.

    Args:
        entry: called as ``entry(connection)`` in each process with its end of a two-way pipe; a function at the top
            level of a module that the server can import.
        count: number of processes.

    Raises:
        RuntimeError: if the fork server did not start, or was killed.
    """

    def __init__(self, entry: Callable[[Connection], None], count: int) -> None:
        self.connections: list[Connection] = []
        """This program's ends of the pipes."""
        self._statuses: dict[int, Connection] = {}  # index -> status pipe; not of processes that `wait` has returned
        try:
            self._server = start()
            for index in range(count):
                self._request_child(index)
            self.pids = tuple(int(status.recv_bytes()) for status in self._statuses.values())
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError(f"the fork server was killed or failed to start ({error}); see its output") from error
        except BaseException:
            self.close()
            raise
        task = (f"{entry.__module__}:{entry.__qualname__}", dict(os.environ), os.getcwd())
        for connection in self.connections:
            with suppress(OSError):  # the process was killed; `wait` returns its exit code
                connection.send(task)

    def _request_child(self, index: int) -> None:
        (connection, pipe), (self._statuses[index], status) = Pipe(), Pipe()
        self.connections.append(connection)
        with pipe, status:
            socket.send_fds(self._server.requests, [b"fork"], [status.fileno(), pipe.fileno(), 1, 2])

    def wait(self, timeout: float | None = None) -> tuple[list[int], dict[int, int | None]]:
        """Wait until a process has sent a message or ended, or ``timeout`` seconds have passed.

        Returns:
            The indices of open connections that can be read or are at their end; and index -> exit code of processes
            that have ended since the last call (minus the signal's number; None if the server was killed).
        """
        still_open = {connection: index for index, connection in enumerate(self.connections) if not connection.closed}
        ready = wait([*still_open, *self._statuses.values()], timeout)
        ended: dict[int, int | None] = {}
        for index in [index for index, status in self._statuses.items() if status in ready]:
            with self._statuses.pop(index) as status:
                try:
                    ended[index] = int(status.recv_bytes())
                except (EOFError, OSError):  # the server was killed, and its children by the kernel
                    ended[index] = None
                    self._server.process.wait()  # so that the next pool starts another server
        return [index for connection, index in still_open.items() if connection in ready], ended

    def close(self) -> None:
        """Kill all running processes and wait for their exit."""
        try:
            for status in self._statuses.values():
                with suppress(OSError):  # it has ended already
                    status.send_bytes(b"kill")
            for status in self._statuses.values():
                with suppress(EOFError, OSError):
                    while True:
                        status.recv_bytes()
        finally:
            for connection in (*self._statuses.values(), *self.connections):
                connection.close()
            self._statuses.clear()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(NamedTuple):
    parent: int
    process: subprocess.Popen[bytes]
    requests: socket.socket


_lock = threading.Lock()
_server: _Server | None = None


def start() -> _Server:
    """Start the fork server unless it runs. Optional: otherwise the first pool starts it and waits for its imports."""
    global _server
    with _lock:
        if _server is None or _server.parent != os.getpid() or _server.process.poll() is not None:
            if _server is not None:
                _server.requests.close()
            requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with theirs:
                    _server = _Server(os.getpid(), _start_process(theirs), requests)
            except BaseException:
                requests.close()
                raise
        return _server


def _start_process(requests: socket.socket) -> subprocess.Popen[bytes]:
    """Start the server in a fresh interpreter with this program's module search path."""
    command = "import json, sys; fd, parent, sys.path, preload = json.loads(sys.argv[1])\n"
    command += "from gangline.collectives.processes.fork_server import serve; serve(fd, parent, preload)"
    search_path = [path or os.getcwd() for path in sys.path]
    arguments = json.dumps([requests.fileno(), os.getpid(), search_path, PRELOAD])
    return subprocess.Popen(  # noqa: S603  this interpreter, and no outside input
        [os.fsdecode(get_executable()), "-c", command, arguments],
        pass_fds=[requests.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else importing numpy starts threads
    )


def stop() -> None:
    """Stop the fork server and kill the processes of all pools; the next pool starts another server."""
    global _server
    with _lock:
        if _server is not None and _server.parent == os.getpid():
            _server.requests.close()
            _server.process.wait()
        _server = None


atexit.register(stop)
