"""Process end: what the balanced loaders that are open do when their process ends."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from gangline.models.balance.lockstep import Lockstep

open_locksteps: weakref.WeakSet[Lockstep] = weakref.WeakSet()
"""Those of loaders that are not closed."""
last_error_teller: list[Callable[[BaseException], None]] = []
"""Tells other ranks which error ends this process; of the loop that ended last, whose loader may be gone."""
loader_of_iteration: weakref.WeakKeyDictionary[Generator[Any, None, None], Any] = weakref.WeakKeyDictionary()
"""Iterations keep their loader, with its hooks: a loop may read the end before its last backward."""


@atexit.register
def _end_all() -> None:
    """Signal the other ranks that an error ends this process, and end iterations that a program has left open."""
    error = getattr(sys, "last_value", None)
    if error is not None and dist.is_initialized():
        for lockstep in list(open_locksteps):
            lockstep.fail(error)
        for tell in last_error_teller if not open_locksteps else ():
            tell(error)
    for iteration in list(loader_of_iteration):  # later, Python has taken away what they call
        with suppress(ValueError):  # it runs in another thread, or its process group was destroyed
            iteration.close()
