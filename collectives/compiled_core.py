"""`gangline._core`, the optional part of gangline that is written in C."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import torch

from gangline.collectives.call_signature import DTYPES, OPS

ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, BARRIER = range(9)
"""Numbers of the collectives of the core: the first of `COLLECTIVES`."""
DONE, NOT_YET, MISMATCHED, DECLINED, HELD = range(0, -5, -1)
"""Results of the functions of `_core.caller`: done; a rank is late; a rank is in another call; unsupported call; call
that must take the lock."""
_DTYPES = DTYPES[: DTYPES.index(torch.bool)]  # supported by its functions, in the order of their numbers


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("GANGLINE_CORE") == "0":
        return None, "GANGLINE_CORE is 0"
    try:
        return import_module("gangline._core"), ""
    except ImportError as error:
        return None, f"{error}; it is built at installation if there is a C compiler"


core, problem = _load()
"""The module, or None; the reason for None."""
_NAMES = ("SEQUENCE", "BYTES", "RUNNING", "LOCKED", "QUEUED", "MUST_LOCK", "BEGUN", "LIMITS")
SEQUENCE, BYTES, RUNNING, LOCKED, QUEUED, MUST_LOCK, BEGUN, LIMITS = (
    getattr(core, name, index) for index, name in enumerate(_NAMES)
)
"""Indices of the integers that an engine shares with the core; core.c says what they are."""
SHARED: int = getattr(core, "SHARED", LIMITS + 9)
"""Number of these integers."""
CALLS_PER_POLL: int = getattr(core, "CALLS_PER_POLL", 256)
"""Number of calls after which a rank that never waits reads announcements, which would fill its memory."""

has_collectives: bool = (
    core is not None
    and hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    and core.use_tensors(
        torch.Tensor.__dlpack_c_exchange_api__,
        torch.Tensor,
        torch.nn.Parameter,
        torch.Tensor.is_neg,
        torch.Tensor.is_conj,
    )
)
"""True if the module runs collectives, because it can read torch's tensors."""


def reduction(dtype: torch.dtype, op: str) -> tuple[int, int, int] | None:
    """Return how the core reduces tensors: number of a dtype, number of an operation, and elements per element.

    None if it cannot: products of complex numbers.
    """
    if dtype.is_complex:
        if op not in ("sum", "mean"):
            return None
        return _DTYPES.index(dtype.to_real()), OPS.index(op), 2
    if dtype == torch.bool:  # a sum is a logical or, a product a logical and
        return _DTYPES.index(torch.uint8), OPS.index("max" if op in ("sum", "max") else "min"), 1
    return _DTYPES.index(dtype), OPS.index(op), 1
