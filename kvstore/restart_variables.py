"""Restarts of a whole job, and of one of its processes: which start this process belongs to."""

from __future__ import annotations

import os

from gangline.collectives.environments.job_name import RUN_ID

RESTART = "GANGLINE_RESTART"
"""Variable with the number of restarts of the job."""

INCARNATION = "GANGLINE_INCARNATION"
"""Variable with the number of restarts of this process alone."""
PROCESS_RESTARTS = "GANGLINE_RESTART_PROCESSES"
"""Variable with the number of processes that the launcher may restart while the job runs."""

ELASTIC = "GANGLINE_ELASTIC"
"""Variable with the minimum and maximum number of workers of an elastic job, such as 1:4."""

LEAVING = "GANGLINE_LEAVING"
"""Variable of a worker that was started again: 1 if it had been asked to leave, `IF_POSSIBLE` if it has the place of a
worker of another host, and stays if the job needs it."""
IF_POSSIBLE = "if possible"

LAUNCHER_FD = "GANGLINE_LAUNCHER_FD"
"""Variable of the scheduler: a pipe to which it writes a line for each process that has left, such as "worker 1",
`ENTERED` and the name of each worker that takes part from now on in an elastic job, `CAME` or `DIED` and the name of a
worker of another host, `ASKED` and the identity of a process that asks for the rank of one, and `LOST` when no process
can take its place again any more."""
LOST, ENTERED, CAME, DIED, ASKED = b"!", b"+", b"@", b"-", b"?"

ANSWERS_FD = "GANGLINE_ANSWERS_FD"
"""Variable of the scheduler of an elastic job: a pipe from which it reads the answer to each `ASKED`, a line of JSON:
identity, rank and variables of the worker, "NAME=VALUE" each."""

KEPT_MEMORY = "GANGLINE_KEPT_MEMORY"
"""Variable of a process that may be restarted: descriptor of memory in which its state outlives it."""


def incarnation() -> int:
    """Return the number of restarts of this process alone; 0 in its first start. ValueError if it is not a number."""
    return _number(INCARNATION)


def elastic_bounds() -> tuple[int, int] | None:
    """Return the bounds of the number of workers of an elastic job, as `parse_bounds`; None if it is not elastic."""
    words = os.environ.get(ELASTIC)
    return parse_bounds(words, ELASTIC) if words else None


def parse_bounds(words: str, what: str) -> tuple[int, int]:
    """Parse the minimum and maximum number of workers from words such as 1:4; ValueError, which names ``what``."""
    least, _, most = words.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ValueError(f"{what} is {words!r}; expected the least and the most workers, such as 1:4")
    return int(least), int(most)


def restart_number() -> int:
    """Return how often `gangline launch` or torchrun has restarted the job. ValueError if that is not a number."""
    return max(_number(RESTART), _number("TORCHELASTIC_RESTART_COUNT"))


def _number(name: str) -> int:
    words = os.environ.get(name) or "0"
    if not words.isdecimal():
        raise ValueError(f"{name} is {words!r}; expected a number, 0 or more")
    return int(words)


def run_id() -> str | None:
    """Return a name of the job that restarts do not change; None if its launcher gives none.

    torchrun's own ids may be equal in different jobs ("none"), so this is the folder that its agent made for the
    workers' error files.
    """
    attempt, found, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")
    return attempt if found else os.environ.get(RUN_ID) or None
