"""Fork server: a process that has imported torch, which takes seconds, and forks ranks in milliseconds.

It has no threads of its own, because the child of a process whose threads have computed may hang in its computations.
By a child's status pipe the server sends the process id and then the exit code; a message to the server, or the end of
the pipe, kills the child. When the server's program is gone for any reason, the server kills all children and ends;
when the server itself is killed, the kernel kills them. All sockets are inherited and unnamed, so none can stay behind.

multiprocessing's fork server listens at a file in the temporary folder, whose name may be too long for a socket. When
its program is killed, that file stays, and so does a child that is stopped.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait

from gangline.collectives.limits import PARENT_CHECK_SECONDS
from gangline.collectives.processes.parent_death import die_with_parent


def serve(fd: int, parent: int, preload: list[str]) -> None:
    """Run the fork server of process ``parent``, which imports modules before the first fork; does not return.

    A message at ``fd``, a SOCK_SEQPACKET socket, requests a child, with the descriptors of the child's status pipe, its
    pipe to the parent, and its standard output and error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in preload:
        import_module(module)
    gc.collect()
    gc.freeze()  # collections in ranks would read all objects of these modules, and so copy their memory
    requests, server = socket.socket(fileno=fd), os.getpid()
    deaths, wakeup = socket.socketpair()
    for end in (deaths, wakeup):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, nothing is written to the wakeup socket
    signal.set_wakeup_fd(wakeup.fileno())
    children: dict[Connection, int] = {}  # status pipe -> process id of a running child
    killed: set[Connection] = set()
    try:
        # Checking the socket is not enough: a fork of the parent may hold its other end open.
        while os.getppid() == parent:
            for source in wait([requests, deaths, *(children.keys() - killed)], PARENT_CHECK_SECONDS):
                if source is deaths:
                    deaths.recv(4096)
                    for status, pid in list(children.items()):
                        ended, code = os.waitpid(pid, os.WNOHANG)
                        if ended:
                            del children[status]
                            killed.discard(status)
                            with status:
                                _send(status, os.waitstatus_to_exitcode(code))
                elif source is requests:
                    message, fds, _, _ = socket.recv_fds(requests, 1, 4)
                    if not message:
                        return
                    status = Connection(fds[0])
                    pid = os.fork()
                    if pid == 0:
                        _run_child(server, [requests, deaths, wakeup, status, *children], *fds[1:])
                    for child_fd in fds[1:]:
                        os.close(child_fd)
                    children[status] = pid
                    _send(status, pid)
                elif isinstance(source, Connection) and source in children:
                    killed.add(source)
                    os.kill(children[source], signal.SIGKILL)
    finally:
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)


def _send(status: Connection, number: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # closed: the child is killed
        status.send_bytes(str(number).encode())


def _run_child(server: int, ends: Iterable[Connection | socket.socket], pipe: int, output: int, errors: int) -> None:
    """Run a pool's entry function in a forked child, which closes the server's ``ends``; does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in ends:
            end.close()
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
