"""The launcher for this machine: runs a job's processes and kills them all, even if the launcher itself is killed.

It consists of two processes. The first, which the user started, waits and forwards signals. Its child, the supervisor,
starts the job's processes and relays their output. Both adopt orphans, so everything that a job starts, daemons
included, stays their descendant. If one of the two is killed, the other kills all descendants.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from gangline.collectives.environments.job_key import JobKey
from gangline.collectives.processes.parent_death import die_with_parent
from gangline.collectives.transports import unix_sockets
from gangline.launcher.job import Process
from gangline.launcher.process_tree import adopt_orphans, descendants, kill_descendants, send
from gangline.launcher.restarts import Outcome
from gangline.launcher.supervisor import ElasticWorkers, Reports, StopTimeouts, Supervisor


def run(
    processes: Sequence[Process],
    timeouts: StopTimeouts = StopTimeouts(),  # noqa: B008 - it is frozen
    key: JobKey | None = None,
    *,
    stop_signals: Collection[signal.Signals] = (),
    reports: Reports = Reports(),  # noqa: B008 - it is frozen
    restart_processes: int = 0,
    elastic: tuple[int, int] | None = None,
) -> Outcome:
    """Run the processes of a job until all have ended; call it from the main thread of a program without other threads.

    If a process fails, it is named and the others are stopped: by SIGTERM, then by SIGKILL after a timeout. SIGINT,
    SIGTERM and SIGHUP stop all processes; a second signal kills them at once. SIGINT and SIGHUP stay ignored if they
    were ignored before, as under nohup. Servers and the scheduler end by themselves after the last worker.

    Each process gets its own session, an empty standard input, and the job's key by an inherited descriptor. Up to
    ``restart_processes`` failed workers and servers are restarted alone instead of ending the job. ``elastic`` is the
    minimum and maximum number of workers, if their number may change (`control_socket`).

    Returns:
        The exit code, and whether a signal stopped the job. The code is 0 if all workers succeeded, else that of the
        first process that failed: 128 + N if signal N ended it or the launcher, but 75 if all workers wrote a
        checkpoint after the signal; 127 if a command was not found and 126 if it could not be run, as in shells.
    """
    ignorable = {number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN}
    stops = {signal.SIGTERM, *ignorable, *stop_signals}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = descendants()  # a shell that exec'ed this program may have left it children
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *stops})
    try:
        adopt_orphans()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            bounds = None if elastic is None else ElasticWorkers(*elastic, control_socket(parent))
            _supervise(
                parent,
                lambda: Supervisor(timeouts, stops, mask, reports).run(processes, key, restart_processes, bounds),
            )
        return _forward_signals(child, stops, timeouts)
    finally:
        kill_descendants(spared=before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def control_socket(launcher: int) -> str:
    """Return the name of the Unix socket on which the launcher with this process id receives a number of workers."""
    return unix_sockets.name_of("launcher", launcher)


def _forward_signals(supervisor: int, stops: Collection[int], timeouts: StopTimeouts) -> Outcome:
    """Forward signals until the supervisor has ended; return the job's outcome."""
    received: int | None = None
    deadline = 0.0
    while True:
        limit = 3600.0 if received is None else max(0.0, deadline - time.monotonic())
        info = signal.sigtimedwait({signal.SIGCHLD, *stops}, limit)
        if info is not None and info.si_signo != signal.SIGCHLD:
            if received is None:
                received, deadline = info.si_signo, time.monotonic() + 2 * timeouts.stop + 1
            send(supervisor, info.si_signo)
        elif info is None and received is not None:  # the supervisor may be blocked on unread output
            send(supervisor, signal.SIGKILL)
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Outcome(code, received is not None)
    if received is not None:
        return Outcome(128 + received, is_stopped=True)
    with suppress(OSError):  # the reader may be gone
        print(
            f"gangline: the launcher's supervisor was killed by signal {-code}: all processes are stopped",
            file=sys.stderr,
        )
    return Outcome(128 - code)


def _supervise(parent: int, supervise: Callable[[], int]) -> NoReturn:
    """Run the supervisor in this child process and exit with the code that it returns."""
    code = 1
    try:
        os.setsid()  # a Ctrl-C of the terminal reaches the parent only, which forwards it
        adopt_orphans()
        die_with_parent(parent, signal.SIGTERM)
        code = supervise()
    except BaseException:  # noqa: BLE001 - the child must never return into the caller's program
        traceback.print_exc()
    finally:
        try:
            kill_descendants()
        finally:
            os._exit(code)
