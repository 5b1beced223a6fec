"""The launcher for this machine: it runs a job's processes and leaves nothing of them, however it ends itself.

Two processes share the work. The one the user sees waits and hands signals on; its child, the supervisor, starts the
job's processes and hears them. Both adopt orphans, so all that a job starts stays within their family, daemons too:
when the supervisor is killed the first process ends the family, when the first is killed the supervisor does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from gangline.kvstore.launch.job import Process
from gangline.kvstore.launch.process_tree import adopt_orphans, descendants, die_with, kill_descendants, send
from gangline.kvstore.launch.supervisor import Patience, Supervisor


def run(processes: Sequence[Process], patience: Patience = Patience()) -> int:  # noqa: B008 - it is frozen
    """Run the processes of a job until all have ended; called from the main thread of a program without others.

    The first that fails is named, and the others are stopped: SIGTERM, and SIGKILL for what is left when the patience
    is over. SIGINT, SIGTERM and SIGHUP stop all of them; a second one kills them at once. SIGINT and SIGHUP are
    ignored where they were, as under nohup. Servers and the scheduler end by themselves after the last worker.

    Args:
        processes: as of `process_table`; each leads a session of its own, and its standard input is empty.
        patience: how long to wait for those that should end.

    Returns:
        0 if all workers ended well, else the exit code of the first process that failed; 128 + N if signal N ended it,
        or the launcher; 127 and 126 where a command cannot be found or run, as shells have it.
    """
    ignorable = {number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN}
    stops = {signal.SIGTERM, *ignorable}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    elders = descendants()  # a shell that became this program may have left it children, who are not the job's
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *stops})
    try:
        adopt_orphans()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _supervise(parent, processes, patience, stops, mask)
        return _attend(child, stops, patience)
    finally:
        kill_descendants(spared=elders)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _attend(supervisor: int, stops: Collection[int], patience: Patience) -> int:
    """Hand signals on until the supervisor has ended; what it should have stopped is stopped if it cannot."""
    asked: int | None = None
    until = 0.0
    while True:
        limit = 3600.0 if asked is None else max(0.0, until - time.monotonic())
        heard = signal.sigtimedwait({signal.SIGCHLD, *stops}, limit)
        if heard is not None and heard.si_signo != signal.SIGCHLD:
            if asked is None:
                asked, until = heard.si_signo, time.monotonic() + 2 * patience.stop + 1
            send(supervisor, heard.si_signo)
        elif heard is None and asked is not None:  # it may wait for a reader of its output that does not read
            send(supervisor, signal.SIGKILL)
        ended, status = os.waitpid(supervisor, os.WNOHANG)
        if ended:
            break
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    if asked is not None:
        return 128 + asked
    with suppress(OSError):  # nobody may read it any more
        print(f"gangline: the launcher's supervisor was killed by signal {-code}: all is stopped", file=sys.stderr)
    return 128 - code


def _supervise(
    parent: int, processes: Sequence[Process], patience: Patience, stops: Collection[int], mask: Collection[int]
) -> NoReturn:
    """Be the supervisor, with the signal mask ``mask`` as soon as it can hear signals."""
    code = 1
    try:
        os.setsid()  # Ctrl-C is for the parent alone, who hands it on
        adopt_orphans()
        die_with(parent, signal.SIGTERM)
        supervisor = Supervisor(patience, stops, mask)
        code = supervisor.run(processes)
    except BaseException:  # noqa: BLE001 - nothing may get past this into the caller's program
        traceback.print_exc()
    finally:
        try:
            kill_descendants()
        finally:
            os._exit(code)
