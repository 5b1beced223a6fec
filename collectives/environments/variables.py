"""Names of gangline's environment variables, and a warning of misspelt ones."""

from __future__ import annotations

import logging
import os
from difflib import get_close_matches

_log = logging.getLogger("gangline")
_PREFIX = "GANGLINE_"
_NAMES = """
ALGO ALLOW_PICKLE ANNOUNCE_FD ANSWERS_FD CORE DEVICE_GROUP ELASTIC HEARTBEAT HEARTBEAT_LIMIT INCARNATION INSECURE
INTERFACE JOB_ID JOB_KEY_FD JOB_KEY_FILE KEPT_MEMORY LAUNCHER_FD LEAVING LOG NAN_CHECK NCCL_BINDING PARENT REPLACE_GLOO
REPLICA_CHECK RESTART RESTART_LIMIT RESTART_PROCESSES RUN_ID SERVER_MEMORY SERVICE SIZE STALL_WARN STOP_SIGNALS
SUPERVISED TIMELINE TIMELINE_JOB TIMEOUT TRANSPORT TUNING WORK_LOAD_LIST
"""
VARIABLES = frozenset(_PREFIX + name for name in _NAMES.split())
"""All that docs/reference/environment.md describes with this prefix."""
_checked = False


def unknown_variables() -> dict[str, str]:
    """Return the variables of the environment that gangline does not read, each with what is wrong."""
    found = {}
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            near = get_close_matches(name, VARIABLES, n=1, cutoff=0.85)
            found[name] = f"unknown; did you mean {near[0]}?" if near else "unknown; gangline does not read it"
    return found


def check_variables(*, warns: bool = True) -> None:
    """Warn of `unknown_variables`, at the first call in a process; only one process of a job ``warns``."""
    global _checked
    if warns and not _checked:
        for name, problem in unknown_variables().items():
            _log.warning("the environment variable %s is %s", name, problem)
    _checked = True
