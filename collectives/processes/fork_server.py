"""The process that ranks are forked from, milliseconds each: it has imported torch already, which takes seconds.

It has no threads of its own, because the child of a process whose threads have computed may hang in its computations.
Each `Family` of processes has a control socket, by which its caller asks for forks and is told of ends. When that is
closed, or the caller is gone, however it went, the server kills the family; and when the server itself is killed, the
kernel does. All sockets are inherited and have no names: nothing of them can stay behind.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

NOTICE = struct.Struct("<?ii")
"""To the caller: whether a process ended, or else began; its index in the family; its exit code, or else its id."""

_PR_SET_PDEATHSIG = 1


def serve(fd: int, parent: int, preload: list[str]) -> None:
    """Be the fork server of the process ``parent``, which holds the other end of the socket ``fd``; does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in preload:
        import_module(module)
    server = _Server(socket.socket(fileno=fd), parent)
    try:
        server.run()
    finally:
        server.kill()
        os._exit(0)


class _Server:
    """Forks on request, tells families of their ends, kills what a closed family leaves."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._deaths, wakeup = socket.socketpair()
        for end in (self._deaths, wakeup):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source in (requests, self._deaths):
            self._selector.register(source, selectors.EVENT_READ)
        self._families: dict[socket.socket, dict[int, int]] = {}  # index by process id, of those that run
        self._started: dict[socket.socket, int] = {}
        self._sockets = [requests, self._deaths, wakeup]
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wakeup socket hears nothing
        signal.set_wakeup_fd(wakeup.fileno())

    def run(self) -> None:
        while os.getppid() == self._parent:  # a fork of the parent may hold the other end open, so look at it too
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._deaths:
                    self._deaths.recv(4096)
                    self._reap()
                elif key.fileobj is self._requests:
                    message, fds, _, _ = socket.recv_fds(self._requests, 16, 1)
                    if not message:
                        return
                    control = socket.socket(fileno=fds[0])
                    self._families[control] = {}
                    self._started[control] = 0
                    self._selector.register(control, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._answer(key.fileobj)

    def kill(self) -> None:
        for pool in self._families.values():
            for pid in pool:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _answer(self, control: socket.socket) -> None:
        try:
            message, fds, _, _ = socket.recv_fds(control, 16, 3)
        except ConnectionResetError:
            message, fds = b"", []
        if message:
            self._fork(control, fds)
            return
        self._selector.unregister(control)
        for pid in self._families[control]:
            os.kill(pid, signal.SIGKILL)
        self._close_if_over(control)

    def _fork(self, control: socket.socket, fds: list[int]) -> None:
        index, server = self._started[control], os.getpid()
        pid = os.fork()
        if pid == 0:
            _live(server, self._forget, *fds)
        for fd in fds:
            os.close(fd)
        self._families[control][pid] = index
        self._started[control] += 1
        _tell(control, False, index, pid)

    def _forget(self) -> None:
        """Give back, in a child, what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in [*self._sockets, *self._families]:
            one.close()

    def _reap(self) -> None:
        for control, pool in list(self._families.items()):
            for pid, index in list(pool.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del pool[pid]
                    _tell(control, True, index, os.waitstatus_to_exitcode(status))
            self._close_if_over(control)

    def _close_if_over(self, control: socket.socket) -> None:
        """Close a family's socket, which tells the caller that it is over, if it was asked for and none is left."""
        if control not in self._selector.get_map() and not self._families[control]:
            del self._families[control], self._started[control]
            control.close()


def _tell(control: socket.socket, ended: bool, index: int, value: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # its caller is gone; the kill follows
        control.send(NOTICE.pack(ended, index, value))


def _live(server: int, forget: Callable[[], None], pipe: int, output: int, errors: int) -> None:
    """Be a child of the server: never returns."""
    code = 1
    try:
        forget()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # it was killed before the kernel knew what to do then
            os._exit(code)
        for fd, standard in ((output, 1), (errors, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        connection = Connection(pipe)
        entry, environment, folder = connection.recv()
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # what the server's imports have remembered is of its own environment
        os.chdir(folder)
        if "numpy.random" in sys.modules:  # its generator would be the same in every child; Python's own sees to itself
            sys.modules["numpy.random"].seed()
        module, _, name = entry.partition(":")
        getattr(import_module(module), name)(connection)
        atexit._run_exitfuncs()  # and not the destructors of libraries, which may meet threads that still run
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may get past this into the server's loop
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
