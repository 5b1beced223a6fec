"""Cases of `gangline bench faults`: which process or link suffers what, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PHASES = ("join", "init", "push", "update", "pull", "barrier", "end")

_WORKER = {
    "join": "join 1",
    "init": "meet 3",
    "push": "push-sent 6",
    "pull": "pull 4",
    "barrier": "barrier 1",
    "end": "leave 1",
}
_SERVER = {
    "join": "join 1",
    "init": "define 2",
    "push": "push-taken 6",
    "update": "update 5",
    "pull": "pull 4",
    "end": "leave 1",
}


class Case(NamedTuple):
    """A row of the table."""

    where: str
    """Process, or the two ends of a link."""
    what: str
    when: str
    watched: str
    """Process that stops at a point, so that the fault happens there; it then continues unless it suffers the fault."""
    point: str


def cases() -> Iterator[Case]:
    """Yield all cases that make sense."""
    for what in ("killed", "stopped"):
        yield from (Case("worker 1", what, when, "worker 1", point) for when, point in _WORKER.items())
        yield from (Case("server 0", what, when, "server 0", point) for when, point in _SERVER.items())
        yield from (_beside("scheduler", what, when) for when in PHASES)
    yield from (_beside("server 0", what, "barrier") for what in ("killed", "stopped"))
    for link in ("worker 1 - scheduler", "worker 1 - server 0"):
        for what in ("cut 5 s", "cut for good"):
            yield from (_beside(link, what, when) for when in PHASES)
    for when in ("update", "end"):
        yield Case("worker 0", "disk full", when, "", "")
    for where in ("server 0", "scheduler"):
        yield from (_beside(where, "junk", when) for when in PHASES)


def _beside(where: str, what: str, when: str) -> Case:
    """Return a case whose fault happens while worker 1, or for an update the server, has reached a point."""
    if when == "update":
        return Case(where, what, when, "server 0", _SERVER[when])
    return Case(where, what, when, "worker 1", _WORKER[when])
