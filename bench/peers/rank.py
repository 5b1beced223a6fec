"""What each rank of a gang runs: `python rank.py MODULE SOCKET` joins the others and then answers requests for runs.

It needs no more than Python's own library and numpy, so that any interpreter can run it. Requests come through the unix
socket at the path SOCKET, and answers go back, a line of JSON each; all ranks of a gang get the same requests:

    (unasked, once)                            -> {"who": "Open MPI 4.1.4", "rank": 0, "transport": null}
    {"prepare": options, "as": name}           -> {"seconds": of one step}
    {"measure": name, "steps": n, "before": w} -> {"seconds": of a step}, n steps after w that are not measured
    {"spread": name, "steps": n}               -> {"seconds": [of each step]}
    {"check": name}                            -> {"wrong": elements of this rank's result that are not as they must be}
    {"release": true}                          -> {}, when the memory of all that was prepared is given back

and {"failed": text} in place of any of them. Between requests a rank sleeps in a read, so that it takes nothing from
the side whose turn it is. It ends when the socket does, even in the midst of a collective.

The file MODULE lies beside this one and has ``join()``, which gives a dict: ``who``, ``rank``, ``size``, ``transport``
(if known), ``barrier``, ``leave``, and ``prepare(options)``, which gives another: ``step`` (does the collective once),
``write(start, values)`` (puts a float64, int64 or bool array into the input), ``read(start, stop)`` (such an array of
the result). Options: ``collective``, ``dtype``, ``op``, ``root``, ``in_place``, ``count`` (elements of a rank's
tensor; where it has a row for each rank, of one row), ``inputs`` and ``outputs`` (elements of the whole tensors), and
what only a module of its own knows.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 20  # elements that are written or looked at at once
_EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}


def main() -> None:
    """Answer requests until there are no more."""
    group = importlib.import_module(sys.argv[1]).join()
    with socket.socket(socket.AF_UNIX) as driver:
        driver.connect(sys.argv[2])
        threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
        requests, answers = driver.makefile(), driver.makefile("w")
        rank = Rank(group)
        print(json.dumps({name: group.get(name) for name in ("who", "rank", "transport")}), file=answers, flush=True)
        for line in requests:
            try:
                answer = rank.answer(json.loads(line))
            except Exception as error:  # noqa: BLE001  whatever went wrong is told to the driver
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
        group["leave"]()


class Rank:
    """A rank's part, and its clock: the same for all sides."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._prepared: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks."""
        if "prepare" in request:
            return {"seconds": self._prepare(request["as"], request["prepare"])}
        if "measure" in request:
            _, side = self._prepared[request["measure"]]
            self._seconds(side, request["before"])
            return {"seconds": self._seconds(side, request["steps"])}
        if "spread" in request:
            _, side = self._prepared[request["spread"]]
            return {"seconds": self._each(side, request["steps"])}
        if "check" in request:
            return {"wrong": self._wrong(*self._prepared[request["check"]])}
        self._prepared.clear()
        return {}

    def _prepare(self, name: str, options: dict[str, Any]) -> float:
        side = self._group["prepare"](options)
        _fill(side, options, lambda start, stop: np.zeros(stop - start))  # sums in place, over and over, stay finite
        self._prepared[name] = options, side
        self._seconds(side, 2)  # the first steps allocate
        return self._seconds(side, 1)

    def _seconds(self, side: dict[str, Any], steps: int) -> float:
        """Seconds of a step from the moment when all ranks are there."""
        step = side["step"]
        self._group["barrier"]()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / max(steps, 1)

    def _each(self, side: dict[str, Any], steps: int) -> list[float]:
        step, clock = side["step"], time.perf_counter
        self._group["barrier"]()
        times = [clock()]
        for _ in range(steps):
            step()
            times.append(clock())
        return [after - before for before, after in pairwise(times)]

    def _wrong(self, options: dict[str, Any], side: dict[str, Any]) -> int:
        """Fill the input in closed form, do the collective once, and count the elements that are wrong."""
        rank, size = self._group["rank"], self._group["size"]
        _fill(side, options, lambda start, stop: value(options, size, rank, np.arange(start, stop)))
        self._group["barrier"]()
        side["step"]()
        found = 0
        for start, stop in _blocks(options["outputs"]) if result_lies_with(options, rank) else ():
            expected, tolerance = result(options, size, rank, np.arange(start, stop))
            got = side["read"](start, stop)
            found += int(
                np.count_nonzero(~(np.abs(got - expected) <= tolerance) if tolerance.any() else got != expected)
            )
        _fill(side, options, lambda start, stop: np.zeros(stop - start))
        return found


def value(options: dict[str, Any], size: int, rank: int, index: Array) -> Array:
    """Elements of a rank's input, in closed form, so that an element of a wrong place or rank shows.

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


def result(options: dict[str, Any], size: int, rank: int, index: Array) -> tuple[Array, Array]:
    """Elements of a rank's result, as they must be, and how far off each may be."""
    collective, count = options["collective"], options["count"]
    exact = np.zeros(1)
    if collective == "broadcast":
        return _cast(options, value(options, size, options["root"], index)), exact
    if collective == "sendrecv":
        return _cast(options, value(options, size, (rank - 1) % size, index)), exact
    if collective == "scatter":
        return _cast(options, value(options, size, options["root"], rank * count + index)), exact
    if collective in ("all_gather", "gather", "all_to_all"):
        first = rank * count if collective == "all_to_all" else 0
        places, values = index // count, np.empty(len(index), value(options, size, 0, index[:1]).dtype)
        for source in np.unique(places):
            values[places == source] = value(options, size, int(source), first + index[places == source] % count)
        return _cast(options, values), exact
    first = rank * count if collective == "reduce_scatter" else 0
    given = [_cast(options, value(options, size, source, first + index)) for source in range(size)]
    return _combined(options, np.stack(given))


def result_lies_with(options: dict[str, Any], rank: int) -> bool:
    """Whether a rank has a result."""
    return options["collective"] not in ("reduce", "gather") or rank == options["root"]


def _combined(options: dict[str, Any], values: Array) -> tuple[Array, Array]:
    """What an op makes of the ranks' values, and the error that its rounding may leave."""
    op = options["op"]
    if values.dtype == bool:
        return np.asarray(values.all(0) if op in ("product", "min") else values.any(0)), np.zeros(1)
    ways: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "product": np.prod, "min": np.min, "max": np.max}
    total = np.asarray(ways[op](values, axis=0))
    epsilon = _EPSILON.get(options["dtype"], 0.0) if op in ("sum", "mean", "product") else 0.0
    return _cast(options, total), epsilon * len(values) * np.abs(total)


def _cast(options: dict[str, Any], values: Array) -> Array:
    """What of the values the dtype holds: integers wrap."""
    if options["dtype"] in (*_EPSILON, "bool"):
        return values
    return values.astype(options["dtype"]).astype(np.int64)


def _fill(side: dict[str, Any], options: dict[str, Any], values: Any) -> None:
    for start, stop in _blocks(options["inputs"]):
        side["write"](start, values(start, stop))


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


def _end_with(driver: socket.socket) -> None:
    """Sleep until the other end of the socket is closed, and end this process if it has not ended by itself."""
    watch = select.poll()
    watch.register(driver, select.POLLRDHUP | select.POLLHUP)
    watch.poll()
    time.sleep(_GRACE)
    os._exit(1)


_GRACE = 2.0  # seconds for a rank to leave its group in an orderly way


if __name__ == "__main__":
    main()
