"""Checks of results against values in closed form: every element of a collective, and every sum of a pushed key.

Inputs are such that an element from a wrong position or rank changes the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

STEP_OF_CODES = 0.5
"""Unit of the values pushed with compression: exact in 2bit with this threshold and in half precision."""
_BLOCK = 1 << 20  # elements written or read at once
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def wrong_elements(group: dict[str, Any], options: dict[str, Any], prepared: dict[str, Any]) -> int:
    """Run a collective once on known inputs and count the wrong elements of this rank's result.

    Args:
        group: what the peer's ``join()`` returned.
        options: ``collective``, ``dtype``, ``op``, ``root``, ``count`` (elements of a rank's tensor, or of one row
            where it has a row for each rank), ``inputs`` and ``outputs`` (elements of the whole tensors).
        prepared: what its ``prepare(options)`` returned.
    """
    rank, size = group["rank"], group["size"]
    for start, stop in _blocks(options["inputs"]):
        prepared["write"](start, collective_input(options, size, rank, np.arange(start, stop)))
    group["barrier"]()
    prepared["step"]()
    found = 0
    for start, stop in _blocks(options["outputs"]) if has_result(options, rank) else ():
        expected, tolerance = collective_result(options, size, rank, np.arange(start, stop))
        got = prepared["read"](start, stop)
        wrong = ~(np.abs(got - expected) <= tolerance) if tolerance.any() else got != expected
        found += int(np.count_nonzero(wrong))
    for start, stop in _blocks(options["inputs"]):  # sums in place stay finite, however often they are repeated
        prepared["write"](start, np.zeros(stop - start))
    return found


def largest_error(group: dict[str, Any], options: dict[str, Any], prepared: dict[str, Any]) -> float:
    """Push known values, pull once, and return the largest deviation of an element from the exact sum.

    Args:
        group: what the peer's ``join()`` returned.
        options: ``count`` (elements of the key), ``workers`` and ``compression`` (None: float32).
        prepared: what its ``prepare(options)`` returned.
    """
    rank, workers, blocks = group["rank"], options["workers"], _blocks(options["count"])
    for start, stop in blocks:
        prepared["write"](start, pushed_value(options, rank, np.arange(start, stop)))
    group["barrier"]()
    prepared["step"]()
    if prepared["settle"] is not None:
        group["barrier"]()
        prepared["settle"]()
    worst = 0.0
    for start, stop in blocks:
        expected = sum(pushed_value(options, other, np.arange(start, stop)) for other in range(workers))
        worst = max(worst, float(np.abs(prepared["read"](start, stop) - expected).max()))
        prepared["write"](start, np.zeros(stop - start))
    return worst


def pushed_value(options: dict[str, Any], rank: int, index: Array) -> Array:
    """Return the elements at ``index`` that a worker pushes; sums of them are exact in float32."""
    if options["compression"]:
        return np.asarray(((index + rank) % 3 - 1) * STEP_OF_CODES)
    return np.asarray(index % 4093 * options["workers"] + rank, np.float64)


def collective_input(options: dict[str, Any], size: int, rank: int, index: Array) -> Array:
    """Return the elements at ``index`` of a rank's input.

    Floats are whole numbers small enough for sums over the ranks to be exact (nearly so in 16 bits).
    """
    if options["dtype"] == "bool":
        return np.asarray((index >> rank % 8) & 1 == 1)
    if options["op"] == "product":
        return 1 + (index + rank) % 3
    if options["dtype"] in _EPSILON:
        index = index % (61 if "16" in options["dtype"] else 4093)
        return (index * size + rank).astype(np.float64)
    return index * size + rank


def collective_result(options: dict[str, Any], size: int, rank: int, index: Array) -> tuple[Array, Array]:
    """Return the expected elements at ``index`` of a rank's result, and their absolute tolerance."""
    collective, count = options["collective"], options["count"]
    exact = np.zeros(1)
    if collective == "broadcast":
        return _as_dtype(options, collective_input(options, size, options["root"], index)), exact
    if collective == "sendrecv":
        return _as_dtype(options, collective_input(options, size, (rank - 1) % size, index)), exact
    if collective == "scatter":
        return _as_dtype(options, collective_input(options, size, options["root"], rank * count + index)), exact
    if collective in ("all_gather", "gather", "all_to_all"):
        first = rank * count if collective == "all_to_all" else 0
        sources, values = index // count, np.empty(len(index), collective_input(options, size, 0, index[:1]).dtype)
        for source in np.unique(sources):
            own = sources == source
            values[own] = collective_input(options, size, int(source), first + index[own] % count)
        return _as_dtype(options, values), exact
    first = rank * count if collective == "reduce_scatter" else 0
    inputs = [_as_dtype(options, collective_input(options, size, source, first + index)) for source in range(size)]
    return _reduced(options, np.stack(inputs))


def has_result(options: dict[str, Any], rank: int) -> bool:
    """Return whether a rank gets a result."""
    return options["collective"] not in ("reduce", "gather") or rank == options["root"]


def _reduced(options: dict[str, Any], values: Array) -> tuple[Array, Array]:
    """Return the reduction of the ranks' values, and the error that rounding may leave."""
    op = options["op"]
    if values.dtype == bool:
        return np.asarray(values.all(0) if op in ("product", "min") else values.any(0)), np.zeros(1)
    functions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "product": np.prod, "min": np.min, "max": np.max}
    total = np.asarray(functions[op](values, axis=0))
    epsilon = _EPSILON.get(options["dtype"], 0.0) if op in ("sum", "mean", "product") else 0.0
    return _as_dtype(options, total), epsilon * len(values) * np.abs(total)


def _as_dtype(options: dict[str, Any], values: Array) -> Array:
    """Return values rounded to the dtype; integers wrap."""
    if options["dtype"] in (*_EPSILON, "bool"):
        return values
    return values.astype(options["dtype"]).astype(np.int64)


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]
