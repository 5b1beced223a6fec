"""Identity and state of processes on this host.

/proc is read directly because psutil offers no start time in kernel ticks: `psutil.Process.create_time` follows the
system clock, so two processes may disagree on it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_LINE_LIMIT = 300  # characters of an error's class and text


def this_process() -> tuple[str, int, int]:
    """Return this process's identity (`identity_of`)."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> tuple[str, int, int]:
    """Return a process's identity: (boot id and namespaces of pids and times, pid, start time in ticks since boot).

    A process sees the start time of another one shifted by the difference of their time namespaces. That of a dead one
    is -1.
    """
    try:
        start = _state_and_start(pid)[1]
    except (FileNotFoundError, ProcessLookupError):
        start = -1
    return _host(), pid, start


def state_of(process: Sequence[str | int]) -> str:
    """Return the kernel's letter for the state of a process ("T": stopped), "" if it is dead, "?" if it is unknown.

    It is unknown on another host, or if this process has no file descriptor left.
    """
    host, pid, start = process
    if host != _host():
        return "?"
    try:
        state, started = _state_and_start(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return "?"
    return state if started == start and state not in "ZX" else ""


def ending_error() -> str:
    """Return type and first line of the error that ends this process or the caller's block; "" if there is none.

    An exit with code 0 is none.
    """
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a prompt goes on after an error
    error = sys.exception() or uncaught
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    line = ""
    with suppress(Exception):  # of a class whose text cannot be made
        line = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text[:_LINE_LIMIT].encode("utf-8", "replace").decode()


@cache
def _host() -> str:
    return kernel_identity("pid", "time")


def kernel_identity(*namespaces: str) -> str:
    """Return a text that is equal for processes that share a running kernel and these namespaces."""
    words = [boot_id()]
    for kind in namespaces:
        with suppress(OSError):  # a kernel without them has one for all processes; those of times came with Linux 5.6
            words.append(os.readlink(f"/proc/self/ns/{kind}"))
    return " ".join(words)


def boot_id() -> str:
    """Return the kernel's id of the running boot, which differs between hosts, or the host name if it has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def _state_and_start(pid: int) -> tuple[str, int]:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # bytes: a name may end inside a letter
    return fields[0].decode(), int(fields[19])
