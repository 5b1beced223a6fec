"""Launcher environments: rank, size and address of a process, read from the variables of its launcher.

`register`, or an entry point of the group ``gangline.environments``, adds the environment of another launcher.
"""

from __future__ import annotations

from gangline.collectives.environments.environment import LOOPBACK, LauncherEnvironment
from gangline.collectives.environments.registry import all_found, find, local_rank, local_size, register

__all__ = [
    "LOOPBACK",
    "LauncherEnvironment",
    "all_found",
    "find",
    "local_rank",
    "local_size",
    "register",
]
