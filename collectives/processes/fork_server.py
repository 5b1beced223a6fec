"""Fork server: a process that has imported torch, which takes seconds, and forks ranks in milliseconds.

It has no threads of its own, because the child of a process whose threads have computed may hang in its computations.
Each `ProcessPool` has a control socket, by which it requests forks and receives notices. When that socket is closed, or
the pool's program is gone for any reason, the server kills the pool's processes; when the server itself is killed, the
kernel kills them. All sockets are inherited and unnamed, so nothing of them can stay behind.
"""

from __future__ import annotations

import atexit
import gc
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

from gangline.collectives.limits import PARENT_CHECK_SECONDS
from gangline.collectives.processes.parent_death import die_with_parent

NOTICE = struct.Struct("<?ii")
"""Notice to the pool: True if a process ended, False if it started; its index in the pool; exit code or pid."""


def serve(fd: int, parent: int, preload: list[str]) -> None:
    """Run the fork server of process ``parent``; does not return.

    Args:
        fd: socket whose other end the parent holds.
        parent: process id.
        preload: names of modules to import before the first fork.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in preload:
        import_module(module)
    gc.collect()
    gc.freeze()  # collections in ranks would read all objects of these modules, and so copy their memory
    server = _Server(socket.socket(fileno=fd), parent)
    try:
        server.run()
    finally:
        server.kill()
        os._exit(0)


class _Server:
    """Forks processes on request, reports their ends, and kills those of closed pools."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._deaths, wakeup = socket.socketpair()
        for end in (self._deaths, wakeup):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for source in (requests, self._deaths):
            self._selector.register(source, selectors.EVENT_READ)
        self._pools: dict[socket.socket, dict[int, int]] = {}  # control socket -> {pid: index} of running processes
        self._sockets = [requests, self._deaths, wakeup]
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the wakeup socket
        signal.set_wakeup_fd(wakeup.fileno())

    def run(self) -> None:
        # Checking the socket is not enough: a fork of the parent may hold its other end open.
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(PARENT_CHECK_SECONDS):
                if key.fileobj is self._deaths:
                    self._deaths.recv(4096)
                    self._reap()
                elif key.fileobj is self._requests:
                    message, fds, _, _ = socket.recv_fds(self._requests, 16, 1)
                    if not message:
                        return
                    control = socket.socket(fileno=fds[0])
                    self._pools[control] = {}
                    self._selector.register(control, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._handle(key.fileobj)

    def kill(self) -> None:
        for pool in self._pools.values():
            for pid in pool:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _handle(self, control: socket.socket) -> None:
        """Fork on a pool's request; kill its processes if the pool is closed."""
        try:
            message, fds, _, _ = socket.recv_fds(control, 16, 3)
        except ConnectionResetError:
            message, fds = b"", []
        if message:
            self._fork(control, int(message), fds)
            return
        self._selector.unregister(control)
        for pid in self._pools[control]:
            os.kill(pid, signal.SIGKILL)
        self._close_if_empty(control)

    def _fork(self, control: socket.socket, index: int, fds: list[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_child(server, self._close_in_child, *fds)
        for fd in fds:
            os.close(fd)
        self._pools[control][pid] = index
        _notify(control, False, index, pid)

    def _close_in_child(self) -> None:
        """Release the server's resources in a forked child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for one in [*self._sockets, *self._pools]:
            one.close()

    def _reap(self) -> None:
        for control, pool in list(self._pools.items()):
            for pid, index in list(pool.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del pool[pid]
                    _notify(control, True, index, os.waitstatus_to_exitcode(status))
            self._close_if_empty(control)

    def _close_if_empty(self, control: socket.socket) -> None:
        """Close a closed pool's socket once none of its processes is left; `ProcessPool.close` waits for that."""
        if control not in self._selector.get_map() and not self._pools[control]:
            del self._pools[control]
            control.close()


def _notify(control: socket.socket, ended: bool, index: int, value: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the pool's program is gone; `_handle` kills the processes
        control.send(NOTICE.pack(ended, index, value))


def _run_child(server: int, close_server: Callable[[], None], pipe: int, output: int, errors: int) -> None:
    """Run a pool's entry function in a forked child; does not return."""
    code = 1
    try:
        close_server()
        die_with_parent(server)
        for fd, standard in ((output, 1), (errors, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        connection = Connection(pipe)
        entry, environment, folder = connection.recv()
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # modules imported by the server may have cached its directory
        os.chdir(folder)
        if "numpy.random" in sys.modules:  # else all children share numpy's state; Python reseeds after a fork
            sys.modules["numpy.random"].seed()
        module, _, name = entry.partition(":")
        getattr(import_module(module), name)(connection)
        atexit._run_exitfuncs()  # but no library destructors, which may crash while threads are still running
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001  no exception may reach the server's loop
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
