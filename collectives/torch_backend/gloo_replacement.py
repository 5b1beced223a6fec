"""Backend "gangline" in place of gloo, for code that names gloo itself."""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.distributed as dist

from gangline.collectives.torch_backend.c10d import rename_backends

REPLACE_GLOO = "GANGLINE_REPLACE_GLOO"
"""Environment variable: 1 calls `replace_gloo` in every process that imports torch."""

_log = logging.getLogger("gangline")


def replace_gloo() -> None:
    """Create process groups of backend "gangline" wherever this process asks for gloo from now on; idempotent.

    ``init_process_group`` and ``new_group`` replace "gloo" by "gangline" and "cpu:gloo" by "cpu:gangline", also where
    torch itself chooses gloo for the CPU. GPU tensors keep their backend. Rank 0 logs one line. The groups report
    "gangline" as their backend. A `ProcessGroupGloo` that a program constructs directly stays gloo.
    """
    rename_backends(_replaced)


def _replaced(backend: str, rank: int) -> str:
    """Return the backend to create in place of ``backend``, a string in the form of ``init_process_group``."""
    words = backend
    if backend == "undefined":  # torch's word for its default of each device
        words = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    elif backend == "gloo" and torch.cuda.is_available():
        words = "cpu:gloo,cuda:gloo"
    replaced = ",".join({"gloo": "gangline", "cpu:gloo": "cpu:gangline"}.get(word, word) for word in words.split(","))
    if replaced == words:
        return backend
    if rank == 0:
        _say(backend, replaced)
    return replaced


@cache
def _say(backend: str, replaced: str) -> None:
    _log.warning("process groups of backend %r are created as %r (%s=1)", backend, replaced, REPLACE_GLOO)
