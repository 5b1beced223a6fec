"""Processes that a fork server makes for this program; it is started once, when the first ones are wanted, and kept."""

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
from types import TracebackType

from gangline.collectives.processes.fork_server import NOTICE

PRELOAD: tuple[str, ...] = (
    "torch",
    "gangline.collectives.communicator",
    "gangline.collectives.processes.rank_main",
)
"""What the server imports before it forks."""


class ProcessPool:
    """Processes that run the same entry function, until they end, are closed, or the calling program is gone."""

    def __init__(self, entry: Callable[[Connection], None], count: int) -> None:
        """Start ``count`` processes that call ``entry(connection)``, each with its end of a two-way pipe.

        They get this program's environment, working directory, standard output and error as they are now; standard
        input is empty; Ctrl-C is left to the caller.

        Args:
            entry: a function at the top level of a module that the server can import.
            count: how many processes.

        Raises:
            RuntimeError: the fork server did not start, or was killed.
        """
        self.connections: list[Connection] = []
        """This program's ends of the pipes."""
        self._ended: dict[int, int | None] = {}  # exit codes that nobody was told yet
        self._running = set(range(count))
        try:
            if not self._begin(count, may_be_dying=True):
                self._begin(count, may_be_dying=False)
        except OSError as error:
            self.close()
            raise RuntimeError(f"the fork server was killed or failed to start ({error}); see its output") from error
        except BaseException:
            self.close()
            raise
        start = (f"{entry.__module__}:{entry.__qualname__}", dict(os.environ), os.getcwd())
        for connection in self.connections:
            with suppress(OSError):  # killed already: its exit code says so
                connection.send(start)

    def _begin(self, count: int, *, may_be_dying: bool) -> bool:
        """Have the server fork; False where it was one that was killed before, and only now turns out to be dead."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            is_new = _send_to_server(theirs)
        try:
            self.pids = self._fork(count)
        except OSError:
            if is_new or not may_be_dying:
                raise
            self.close()
            self.connections.clear()
            self._ended.clear()
            stop()
            return False
        return True

    def _fork(self, count: int) -> tuple[int, ...]:
        for _ in range(count):
            ours, child = Pipe()
            self.connections.append(ours)
            with child:
                socket.send_fds(self._control, [b"fork"], [child.fileno(), 1, 2])
        pids: list[int] = []
        while len(pids) < count:
            ended, index, value = self._notice()
            if ended:
                self._ended[index] = value
            else:
                pids.append(value)
        return tuple(pids)

    def wait(self, timeout: float | None = None) -> tuple[list[int], dict[int, int | None]]:
        """Wait until processes have said something, or one has ended, or ``timeout`` seconds have passed.

        Returns:
            The indices of those whose connection can be read, or is at its end and not closed yet; and the exit codes
            of those that have ended since the last call: minus the signal's number, None where the server was killed.
        """
        still_open = {connection: index for index, connection in enumerate(self.connections) if not connection.closed}
        control = [self._control] if self._running else []
        ready = wait([*still_open, *control], 0.0 if self._ended else timeout)
        if self._control in ready:
            try:
                _, index, code = self._notice()
                self._ended[index] = code
            except OSError:  # the server was killed, and with it, by the kernel, its children
                self._ended |= dict.fromkeys(self._running)
        ended, self._ended = self._ended, {}
        self._running -= ended.keys()
        return [index for connection, index in still_open.items() if connection in ready], ended

    def close(self) -> None:
        """Kill those that still run, and return when none of them is left."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _notice(self) -> tuple[bool, int, int]:
        notice = self._control.recv(NOTICE.size)
        if not notice:
            raise ConnectionResetError("its socket is closed")
        ended, index, value = NOTICE.unpack(notice)
        return ended, index, value


_lock = threading.Lock()
_server: tuple[int, subprocess.Popen[bytes], socket.socket] | None = None  # who started it, the process, its socket


def start() -> bool:
    """Start the server unless it runs; the first family does so otherwise, and waits for its imports.

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
    """A fresh interpreter that becomes the server: it finds gangline, and what it imports, as this program does."""
    command = "import json, sys; fd, parent, sys.path, preload = json.loads(sys.argv[1])\n"
    command += "from gangline.collectives.processes.fork_server import serve; serve(fd, parent, preload)"
    places = [path or os.getcwd() for path in sys.path]
    what = json.dumps([requests.fileno(), os.getpid(), places, PRELOAD])
    return subprocess.Popen(  # noqa: S603 - this interpreter and our own words
        [os.fsdecode(get_executable()), "-c", command, what],
        pass_fds=[requests.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # else numpy's library starts threads when it is imported
    )


def stop() -> None:
    """End the server, and with it every family; the next family starts another."""
    global _server
    with _lock:
        if _server is not None and _server[0] == os.getpid():
            _server[2].close()
            _server[1].wait()
        _server = None


atexit.register(stop)


def _send_to_server(control: socket.socket) -> bool:
    """Give the server a family's socket; whether it was started for this."""
    for _ in range(2):
        is_new = start()
        assert _server is not None
        try:
            socket.send_fds(_server[2], [b"family"], [control.fileno()])
        except BrokenPipeError:  # killed since it last had work
            stop()
        else:
            return is_new
    raise BrokenPipeError("it ended as soon as it was started")
