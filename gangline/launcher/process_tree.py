"""Descendants of this process: listing, signalling and killing all of them, on Linux."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping
from contextlib import suppress

import psutil

from gangline.collectives.processes.parent_death import prctl

_PR_SET_CHILD_SUBREAPER = 36
_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, including descendants in other sessions."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(spared: Collection[int] = ()) -> set[int]:
    """Return the process ids of all running descendants, without ``spared`` processes and their descendants."""
    found = {process.pid for process in psutil.Process().children(recursive=True) if _is_running(process)}
    for pid in found.intersection(spared):
        found.discard(pid)
        with suppress(psutil.NoSuchProcess):
            found.difference_update(process.pid for process in psutil.Process(pid).children(recursive=True))
    return found


def send(pid: int, number: int) -> None:
    """Send a signal to a process; ignore it if the process has ended or belongs to another user."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_programs(numbers: Mapping[int, int]) -> None:
    """Send process groups, by their leaders, a signal each, except to processes that Python's multiprocessing started.

    A program itself ends its workers, such as those of a DataLoader, which it needs until it has written a checkpoint.
    A program may stop because another one was told to, and a signal that comes when it has taken away its handler would
    kill it; so all are held until all have their signals. The leaders must not have been waited for.
    """
    sent = [(pid, number) for leader, number in numbers.items() for pid in (leader, *_members_of(leader))]
    for hold in (signal.SIGSTOP, None, signal.SIGCONT):
        for pid, number in sent:
            send(pid, hold or number)


def _members_of(leader: int) -> list[int]:
    members = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getpgid(process.pid) == leader and not _is_worker(process):
                    members.append(process.pid)
    return members


def _is_worker(process: psutil.Process) -> bool:
    """Return True if multiprocessing started a process: by a fork that runs no other program, or by its own command."""
    words, parent = process.cmdline(), process.parent()
    is_python = bool(words) and os.path.basename(words[0]).startswith("python")
    is_fork = parent is not None and parent.cmdline() == words
    return is_python and (is_fork or any(word.startswith("from multiprocessing.") for word in words))


def send_group(leader: int, number: int) -> None:
    """Send a signal to a process group; ignore it if the group has ended. Its leader must not have been waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_descendants(spared: Collection[int] = ()) -> None:
    """Kill all descendants and wait until none is left; the caller must have called `adopt_orphans`."""
    while left := descendants(spared):
        for pid in left:
            send(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() not in _DEAD
    except psutil.NoSuchProcess:
        return False
