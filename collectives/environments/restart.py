"""Restarts of a whole job: which start of it this process belongs to."""

from __future__ import annotations

import os

RESTART = "GANGLINE_RESTART"
"""Variable with the number of times that the job was started again."""
RUN_ID = "GANGLINE_RUN_ID"
"""Variable with a name of the job that is the same in all its starts."""


def restart_number() -> int:
    """Return how often the job was started again, by `gangline launch` or by torchrun; 0 in its first start.

    Raises:
        ValueError: if a variable is not a number.
    """
    found = 0
    for name in (RESTART, "TORCHELASTIC_RESTART_COUNT"):
        words = os.environ.get(name) or "0"
        if not words.isdecimal():
            raise ValueError(f"{name} is {words!r}; expected a number, 0 or more")
        found = max(found, int(words))
    return found


def run_id() -> str | None:
    """Return a name of the job that is the same in all its starts; None if its launcher gives none.

    torchrun's own ids may be equal in different jobs ("none"), so this is the folder that its agent made for the
    workers' error files.
    """
    attempt, found, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("/attempt_")
    return attempt if found else os.environ.get(RUN_ID) or None
