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

from gangline.collectives.processes.fork_server import NOTICE

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
        self._ended: dict[int, int | None] = {}  # index -> exit code, not yet returned by `wait`
        self._running = set(range(count))
        try:
            self._start(count)
        except OSError as error:
            self.close()
            raise RuntimeError(f"the fork server was killed or failed to start ({error}); see its output") from error
        except BaseException:
            self.close()
            raise
        task = (f"{entry.__module__}:{entry.__qualname__}", dict(os.environ), os.getcwd())
        for connection in self.connections:
            with suppress(OSError):  # the process was killed; `wait` returns its exit code
                connection.send(task)

    def _start(self, count: int) -> None:
        while True:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            is_new_server = False
            try:
                with theirs:
                    is_new_server = start()
                    assert _server is not None
                    socket.send_fds(_server[2], [b"pool"], [theirs.fileno()])
                self.pids = self._fork(count)
            except ConnectionError:  # the server is dead; if it was killed while idle, this is the first sign of it
                if is_new_server:
                    raise
                self.close()
                self.connections.clear()
                self._ended.clear()
                stop()
            else:
                return

    def _fork(self, count: int) -> tuple[int, ...]:
        for index in range(count):
            ours, child = Pipe()
            self.connections.append(ours)
            with child:
                socket.send_fds(self._control, [str(index).encode()], [child.fileno(), 1, 2])
        pids: list[int] = []
        while len(pids) < count:
            ended, index, value = self._read_notice()
            if ended:
                self._ended[index] = value
            else:
                pids.append(value)
        return tuple(pids)

    def wait(self, timeout: float | None = None) -> tuple[list[int], dict[int, int | None]]:
        """Wait until a process has sent a message or ended, or ``timeout`` seconds have passed.

        Returns:
            The indices of open connections that can be read or are at their end; and index -> exit code of processes
            that have ended since the last call (minus the signal's number; None if the server was killed).
        """
        still_open = {connection: index for index, connection in enumerate(self.connections) if not connection.closed}
        control = [self._control] if self._running else []
        ready = wait([*still_open, *control], 0.0 if self._ended else timeout)
        if self._control in ready:
            try:
                _, index, code = self._read_notice()
                self._ended[index] = code
            except OSError:  # the server was killed, and its children by the kernel
                self._ended |= dict.fromkeys(self._running)
        ended, self._ended = self._ended, {}
        self._running -= ended.keys()
        return [index for connection, index in still_open.items() if connection in ready], ended

    def close(self) -> None:
        """Kill all running processes and wait for their exit."""
        try:
            with suppress(OSError):  # the server was killed
                self._control.shutdown(socket.SHUT_WR)
                while self._control.recv(NOTICE.size):
                    pass
        finally:
            self._control.close()
            for connection in self.connections:
                connection.close()

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_notice(self) -> tuple[bool, int, int]:
        notice = self._control.recv(NOTICE.size)
        if not notice:
            raise ConnectionResetError("its socket is closed")
        ended, index, value = NOTICE.unpack(notice)
        return ended, index, value


_lock = threading.Lock()
_server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None  # pid of its parent, process, its socket


def start() -> bool:
    """Start the fork server unless it runs. Optional: otherwise the first pool starts it and waits for its imports.

    Returns:
        Whether it was started.
    """
    global _server
    with _lock:
        if _server is not None and _server[0] == os.getpid() and _server[1].poll() is None:
            return False
        if _server is not None:
            _server[2].close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                _server = os.getpid(), _start_process(theirs), ours
        except BaseException:
            ours.close()
            raise
        return True


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
        if _server is not None and _server[0] == os.getpid():
            _server[2].close()
            _server[1].wait()
        _server = None


atexit.register(stop)
