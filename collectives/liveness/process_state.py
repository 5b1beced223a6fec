"""Processes of this host and others: what tells one from all others, and whether it still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> list[str | int]:
    """What tells this process from all others: its host's boot, its namespace of process ids, its id, its start."""
    return [f"{boot_id()} {os.readlink('/proc/self/ns/pid')}", os.getpid(), _state_and_start(os.getpid())[1]]


def state_of(process: list[str | int]) -> str:
    """The letter that the kernel has for a process's state ("T": stopped), "" if it is dead, "?" if unknown here."""
    place, pid, start = process
    if place != this_process()[0]:
        return "?"
    try:
        state, started = _state_and_start(int(pid))
    except OSError:
        return ""
    return state if started == start and state not in "ZX" else ""


def boot_id() -> str:
    """Return the kernel's id of the running boot, which differs between hosts, or the host name if it has none."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text().strip() if file.exists() else socket.gethostname()


def _state_and_start(pid: int) -> tuple[str, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
