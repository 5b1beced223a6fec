"""Checks of gradients before they are summed over ranks, where a NaN could not be traced to its rank any more."""

from __future__ import annotations

import os


def checks_finite() -> bool:
    """Return True if GANGLINE_NAN_CHECK=1 asks for checks."""
    return os.environ.get("GANGLINE_NAN_CHECK", "0") == "1"


def not_finite(name: object, rank: int, where: str = "") -> RuntimeError:
    """Return the error that names the rank and parameter of a gradient that is not finite."""
    return RuntimeError(
        f"the gradient of parameter {name!r} is not finite on rank {rank}{where}: it holds NaN or infinity "
        "(GANGLINE_NAN_CHECK=1)"
    )
