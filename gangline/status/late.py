"""Find the processes of a job that others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gangline.collectives.liveness.status_socket import Wait
from gangline.status.query import ProcessStatus


@dataclass
class Late:
    """A process that others wait for, while it does not wait itself."""

    name: str
    seconds: float
    """For how long they have waited."""
    what: str
    """The call or round that they wait in."""
    waiting: list[str] = field(default_factory=list)
    """Names of the processes that wait for it."""


def late_processes(processes: Sequence[ProcessStatus], least: float = 0.0) -> list[Late]:
    """Return the processes of one job that others wait for while they wait for nobody, the longest awaited first.

    Waits of less than ``least`` seconds do not count.
    """
    waits = [wait for process in processes for part in process.parts for wait in part["waits"]]
    waits = [wait for wait in waits if wait["seconds"] >= least]
    waiting = {name for wait in waits for name in wait["waiting"] if wait["missing"]}
    waiting |= {process.name for process in processes if any(part["waits"] for part in process.parts)}
    late: dict[str, Late] = {}
    for wait in sorted(waits, key=lambda one: -one["seconds"]):
        for name in wait["missing"]:
            if name not in waiting:
                one = late.setdefault(name, Late(name, wait["seconds"], wait["what"]))
                one.waiting += [each for each in wait["waiting"] if each not in one.waiting]
    return list(late.values())


def waits_of(process: ProcessStatus, processes: Sequence[ProcessStatus]) -> list[Wait]:
    """Return what a process waits for, the longest first: by its own account, or that of another process."""
    waits = [wait for one in processes for part in one.parts for wait in part["waits"]]
    return sorted((wait for wait in waits if process.name in wait["waiting"]), key=lambda one: -one["seconds"])
