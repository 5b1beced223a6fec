"""End a child process when its parent ends: Linux's parent-death signal."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Request a signal to this process when its parent ends; call it in the child, before it starts threads.

    The kernel counts the *thread* that started this process as the parent: the signal also comes when that thread ends.
    If the parent, whose id was taken before the fork, has ended already, this process exits with code 1.

    Raises:
        OSError: if the kernel refuses the request.
    """
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """Set an option of this process by the system call of that name.

    Raises:
        OSError: if the kernel refuses the call.
    """
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
