"""SIGTERM of an elastic worker: leave the job after the step, instead of ending at once."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType

from gangline.collectives.environments.restart import LEAVING
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient


def leave_on_sigterm(scheduler: SchedulerClient) -> None:
    """Ask to leave the job at SIGTERM; a second one ends this process, as does the first if the worker cannot leave.

    A worker that was started again after it had been asked to leave asks at once. Nothing changes outside the main
    thread, or if the program handles SIGTERM itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    member = weakref.ref(scheduler)

    def handle(number: int, _: FrameType | None) -> None:
        found = member()
        if found is None or found.has_left or found.is_joining or found.wants_to_leave:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:  # the thread of the client does the rest: this one may hold its locks
            found.wants_to_leave = True

    signal.signal(signal.SIGTERM, handle)
    if os.environ.get(LEAVING):
        os.kill(os.getpid(), signal.SIGTERM)
