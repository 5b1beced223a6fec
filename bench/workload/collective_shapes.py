"""Shapes of the tensors of each collective, and bus bandwidth as nccl-tests defines it."""

from __future__ import annotations

from typing import Any

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv")
"""Collectives with a bench; in sendrecv each rank sends to the next rank and receives from the previous rank."""
IN_PLACE = {"all_reduce": (False, True), "reduce": (False, True), "broadcast": (True,)}
"""Collectives that can be in place; the others are out of place."""
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROWS_IN = ("reduce_scatter", "all_to_all", "scatter")
"""Collectives whose input has a row for each rank."""
ROWS_OUT = ("all_gather", "all_to_all", "gather")
"""Collectives whose result has a row for each rank."""


def rows(collective: str, ranks: int) -> int:
    """Return the rows of the larger of a rank's tensors."""
    return ranks if collective in (*ROWS_IN, *ROWS_OUT) else 1


def tensor_options(collective: str, ranks: int, count: int, **options: Any) -> dict[str, Any]:
    """Return the options by which a rank prepares a collective.

    Args:
        collective: its name.
        ranks: number of ranks.
        count: elements of a rank's tensor, or of one row if it has a row per rank.
        options: changes of the defaults: a float32 sum to rank 0, in place if possible, by the usual algorithm.
    """
    return {
        "dtype": "float32",
        "op": "sum",
        "root": 0,
        "in_place": collective in IN_PLACE,
        "algorithm": None,
        "collective": collective,
        "count": count,
        "inputs": count * (ranks if collective in ROWS_IN else 1),
        "outputs": count * (ranks if collective in ROWS_OUT else 1),
        **options,
    }


def bus_factor(collective: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines it."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in (*ROWS_IN, *ROWS_OUT) else 1.0
