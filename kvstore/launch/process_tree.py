"""Who descends from a process, so that all of it can be ended: Linux keeps orphans within their launcher's family."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, of those too that left their session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when its parent's thread ends that started it.

    Args:
        parent: the parent's process id; if it has ended already, this process does at once.
        number: the signal.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def descendants(spared: Collection[int] = ()) -> set[int]:
    """The process ids of children, their children and so on that run now, without ``spared`` ones and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended meanwhile
            # "pid (name) state parent ...", and the name may hold anything
            state, parent = (entry / "stat").read_bytes().rpartition(b") ")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    unseen = [os.getpid()]
    while unseen:
        new = [pid for pid in children.get(unseen.pop(), []) if pid not in spared]
        found.update(new)
        unseen += new
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended, or belong to another user by now."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_group(leader: int, number: int) -> None:
    """Send a signal to a process group whose leader nobody has waited for yet."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_descendants(spared: Collection[int] = ()) -> None:
    """Kill all descendants and wait until none is left; the caller must be one that adopts orphans."""
    while left := descendants(spared):
        for pid in left:
            send(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
